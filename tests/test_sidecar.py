"""Which files travel with the weights, which names are refused, and the dtype in config.json."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zendelta.checkpoint import sidecar
from zendelta.checkpoint.sidecar import (
    check_side_path,
    check_side_paths,
    left_behind,
    set_config_dtype,
    side_files,
    weights_below,
    write_side_file,
)
from zendelta.errors import InputError, MachineError

TRAVEL = [
    "1_Pooling/config.json",
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "original/params.json",
    "original/tokenizer.model",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer é.json",
]

STAY = {
    "model.safetensors": "weights",
    "model-00001-of-00002.safetensors": "weights",
    "MODEL.SAFETENSORS": "weights",
    "model.safetensors.index.json": "weights",
    "model.safetensors.index.fp16.json": "weights",
    "pytorch_model.bin": "weights",
    "pytorch_model.bin.index.json": "weights",
    "original/consolidated.00.pth": "weights",
    "2_Dense/model.safetensors": "weights",
    "optimizer.pt": "weights",
    "scheduler.pt": "weights",
    "rng_state.pth": "weights",
    "training_args.bin": "weights",
    "model-q4.gguf": "weights",
    "flax_model.msgpack": "weights",
    "trainer_state.json": "trainer",
    "checkpoint-500/config.json": "trainer",
    "global_step10/x.json": "trainer",
    ".gitattributes": "hidden",
    ".cache/config.json": "hidden",
    "1_Pooling/.config.json": "hidden",
    ".json": "hidden",
    "modeling_custom.py": "kind",
    "qwen.tiktoken": "kind",
    "LICENSE": "kind",
    "notes.md": "kind",
    "figures/plot.png": "kind",
    "x.exe": "kind",
}


def fill(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


# What travels


def test_configuration_tokenizer_and_templates_travel_and_nothing_else_does(tmp_path: Path) -> None:
    fill(tmp_path, [*TRAVEL, *STAY, "a/b/config.json"])
    files, too_large = side_files(tmp_path)
    assert list(files) == sorted(TRAVEL)
    assert all(file.read_text() == name for name, file in files.items())
    assert too_large == []


def test_what_stays_behind_is_told_with_its_reason(tmp_path: Path) -> None:
    fill(tmp_path, [*TRAVEL, *STAY])
    told = left_behind(tmp_path)
    reasons = {"trainer": "belongs to a trainer's state", "hidden": "is hidden", "kind": "is of no kind"}
    for name, why in STAY.items():
        entry = name.split("/")[0] if re.match(r"\.cache|checkpoint-|global_step", name) else name
        assert (entry in told) == (why != "weights"), name
        assert why == "weights" or told[entry].startswith(reasons[why])
    assert not told.keys() & set(TRAVEL)
    assert weights_below(tmp_path) == ["2_Dense/model.safetensors", "original/consolidated.00.pth"]


def test_of_a_trainers_checkpoint_only_the_model_travels(tmp_path: Path) -> None:
    state = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "scaler.pt"]
    fill(tmp_path, [*state, "trainer_state.json", "config.json", "tokenizer.json", "model.safetensors"])
    assert list(side_files(tmp_path)[0]) == ["config.json", "tokenizer.json"]


def test_a_file_over_64_mib_is_reported_and_one_of_just_that_travels(tmp_path: Path) -> None:
    for name, size in (("just.json", 64 * 2**20), ("over.json", 64 * 2**20 + 1), ("over.bin", 2**30)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    files, too_large = side_files(tmp_path)
    assert list(files) == ["just.json"]
    assert too_large == ["over.json"]
    assert left_behind(tmp_path) == {"over.json": "is too large (67,108,865 bytes, 67,108,864 at most)"}


def test_links_to_files_are_followed_as_in_the_hub_cache_and_others_are_not(tmp_path: Path) -> None:
    blobs = fill(tmp_path / "blobs", ["abc", "folder/config.json"])
    snapshot = tmp_path / "snapshots/1"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "1_Pooling/config.json").symlink_to("../../../blobs/abc")
    (snapshot / "gone.json").symlink_to("../../blobs/gone")
    (snapshot / "elsewhere").symlink_to(blobs / "folder")
    (snapshot / "folder.json").mkdir()
    (snapshot / "1_Pooling/folder.json").mkdir()
    assert list(side_files(snapshot)[0]) == ["1_Pooling/config.json", "config.json"]
    told = left_behind(snapshot)
    assert told["gone.json"] == "is no file, or a link to nothing"
    assert told["1_Pooling/folder.json"] == "is a folder"
    assert "elsewhere" in told


@pytest.mark.skipif(os.name != "posix", reason="other systems refuse such names themselves")
def test_a_file_whose_name_no_other_system_takes_stays_behind_and_is_told(tmp_path: Path) -> None:
    names = ["a:b.json", "a\\b.json", "a\nb.json", "aux.json", "folder./x.json"]
    fill(tmp_path, ["config.json", *names])
    (tmp_path / os.fsdecode(b"\xff.json")).write_text("")
    assert list(side_files(tmp_path)[0]) == ["config.json"]
    assert left_behind(tmp_path).keys() == {*names, os.fsdecode(b"\xff.json")}


def test_a_folder_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    for look in (side_files, left_behind, weights_below):
        with pytest.raises(InputError, match="nowhere: cannot be read"):
            look(tmp_path / "nowhere")


# Names


@pytest.mark.parametrize("path", TRAVEL)
def test_the_name_of_a_file_that_travels_is_accepted(path: str) -> None:
    check_side_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *STAY,
        "",
        "/etc/x.json",
        "../x.json",
        "x",
        "a/../x.json",
        "./x.json",
        "a/./x.json",
        "a//x.json",
        "a/x.json/",
        "//x.json",
        "..",
        ".",
        "a\\x.json",
        "..\\x.json",
        "C:x.json",
        "C:/x.json",
        "x.json:stream",
        "x\0.json",
        "x\n.json",
        "x\x7f.json",
        "x\x85.json",
        "x\u202e.json",
        "x\udc80.json",
        "a/b/x.json",
        "a./x.json",
        "a /x.json",
        " x.json",
        "x.json ",
        "x.json.",
        "nul.json",
        "COM1.txt",
        "con/x.json",
        "x" * 300 + ".json",
        "x.JSON",
        "trainer_STATE.json",
        "Model.Safetensors.Index.Json",
    ],
)
def test_a_name_that_may_not_be_written_beside_weights_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        check_side_path(path)
    assert repr(path) in refused.value.message
    assert "\n" not in refused.value.message
    with pytest.raises(InputError):
        write_side_file(tmp_path / "out", path, b"")
    with pytest.raises(InputError):
        check_side_paths(["config.json", path])
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=300, deadline=None)
@given(path=st.text("abAB./\\:é \0\n-_json", max_size=12) | st.from_regex(r"[a-c./]{0,6}\.json", fullmatch=True))
def test_whatever_is_accepted_stays_in_its_folder_and_would_have_been_carried(
    path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        check_side_path(path)
    except InputError:
        return
    folder = tmp_path_factory.mktemp("side")
    written = write_side_file(folder / ".", path, b"x")
    assert folder.resolve() in written.resolve().parents
    assert list(side_files(folder)[0]) == [path]


@pytest.mark.parametrize(
    "pair",
    [
        ("config.json", "config.json"),
        ("config.json", "Config.json"),
        ("a/x.json", "A/X.json"),
        ("straße.json", "STRASSE.json"),
        (unicodedata.normalize("NFC", "é.json"), unicodedata.normalize("NFD", "é.json")),
        ("x.json", "x.json/y.json"),
        ("X.json/y.json", "x.json"),
    ],
)
def test_two_names_that_one_file_system_takes_for_one_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        check_side_paths(["README.md", *pair])
    assert repr(pair[0]) in refused.value.message
    assert repr(pair[1]) in refused.value.message
    check_side_paths([*TRAVEL])


# Writing


def test_a_side_file_is_written_byte_for_byte_in_its_folder(tmp_path: Path) -> None:
    for name in TRAVEL:
        assert write_side_file(tmp_path, name, name.encode() + b"\r\n\xff") == tmp_path / name
    files, _ = side_files(tmp_path)
    assert {name: file.read_bytes() for name, file in files.items()} == {
        name: name.encode() + b"\r\n\xff" for name in TRAVEL
    }
    with pytest.raises(InputError, match=r"'config\.json' is there already"):
        write_side_file(tmp_path, "config.json", b"")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = fill(tmp_path / "outside", ["dear.json"])
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a").symlink_to(outside)
    (folder / "x.json").symlink_to(outside / "dear.json")
    (folder / "y.json").symlink_to(outside / "new.json")
    (folder / "b").write_text("")
    for path in ("a/x.json", "x.json", "y.json", "b/x.json"):
        with pytest.raises(InputError):
            write_side_file(folder, path, b"evil")
    assert [file.name for file in outside.iterdir()] == ["dear.json"]
    assert (outside / "dear.json").read_text() == "dear.json"


def test_a_full_disk_names_the_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar.os, "open", full)
    with pytest.raises(MachineError, match=r"x\.json: No space left on device \(3 bytes needed"):
        write_side_file(tmp_path, "x.json", b"abc")


# The dtype in config.json


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_dtype_is_replaced_and_every_other_byte_stays(key: str, dtype: str) -> None:
    text = """{
  "eps": 1e-5, "zeta": 1.0E+6,\t"big": 12345678901234567890123,
    "architectures": ["X"], "escaped": "\\u00e9 \\"dtype\\": \\"float8\\"", "raw": "é",
  "%s" : "float8" ,
  "empty": {}, "list": [{"dtype": "float8"}],
  "model_type": "llama"}
\r\n"""
    found = set_config_dtype((text % key).encode(), dtype)
    assert found == (text % key).replace(f'"{key}" : "float8"', f'"{key}" : "{dtype}"').encode()


def test_nested_configurations_follow_and_other_dtypes_do_not() -> None:
    config = {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": {"hidden": 3, "dtype": "bfloat16", "rope": {"dtype": "keep"}},
        "vision_config": {"torch_dtype": None, "inner_config": {"torch_dtype": "float32"}},
        "encoder": {"model_type": "bert", "torch_dtype": "float32"},
        "vocabulary_map": {"dtype": "keep", "torch_dtype": 17},
        "quantization_config": {"dtype": "keep", "bnb_4bit_compute_dtype": "keep"},
        "audio_config": {"dtype": {"": "bfloat16", "tower": "float32", "n": 3}},
        "other_config": {"dtype": 17},
        "plain_config": {},
        "null_config": None,
    }
    found = json.loads(set_config_dtype(json.dumps(config, indent=2).encode(), "float16"))
    wanted = json.loads(json.dumps(config))
    wanted["dtype"] = wanted["torch_dtype"] = wanted["text_config"]["dtype"] = "float16"
    wanted["vision_config"] = {"torch_dtype": "float16", "inner_config": {"torch_dtype": "float16"}}
    wanted["encoder"]["torch_dtype"] = "float16"
    wanted["audio_config"]["dtype"] = {"": "float16", "tower": "float16", "n": 3}
    assert found == wanted
    assert list(found) == list(config)


def test_a_configuration_without_a_dtype_stays_as_it_is() -> None:
    for text in (b"{}", b' { "a" : [1, {"dtype": "x"}] } ', b'{"text_config": {}}'):
        assert set_config_dtype(text, "float32") == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "torch_dtype", "text_config", "model_type", "a"]), inner)
    ),
    max_leaves=12,
)


def replaced(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The same rule on parsed JSON."""

    def one(key: str, value: Any) -> Any:
        if key in ("dtype", "torch_dtype"):
            if isinstance(value, dict):
                return {part: dtype if isinstance(named, str) else named for part, named in value.items()}
            return dtype if value is None or isinstance(value, str) else value
        nested = isinstance(value, dict) and (key == "text_config" or "model_type" in value)
        return replaced(value, dtype) if nested else value

    return {key: one(key, value) for key, value in config.items()}


@settings(max_examples=200, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(["dtype", "torch_dtype", "text_config", "b"]), json_values), data=st.data()
)
def test_any_configuration_is_replaced_as_its_parsed_form_would_be(config: dict[str, Any], data: st.DataObject) -> None:
    style: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": "\t", "ensure_ascii": False}])
    )
    found = set_config_dtype(json.dumps(config, **style).encode("utf-8", "replace"), "float16")
    assert found.decode() == json.dumps(replaced(config, "float16"), **style)


def test_what_transformers_saves_is_read_back_with_the_new_dtype(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    transformers.LlamaConfig(dtype="bfloat16").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_bytes(set_config_dtype(file.read_bytes(), "float32"))
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.float32


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'"x"', b"{", b'{"a": \xff}', b"\xef\xbb\xbf{}", b"{} {}", b"[" * 100_000]
)
def test_a_damaged_configuration_is_an_input_error(text: bytes) -> None:
    with pytest.raises(InputError, match=r"config\.json is not"):
        set_config_dtype(text, "float32")


def test_a_dtype_that_no_checkpoint_is_written_in_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        set_config_dtype(b"{}", "BF16")


@pytest.mark.parametrize("depth", [10, 400, 900, 990, 100_000])
def test_a_configuration_nested_however_deep_is_read_or_refused(depth: int) -> None:
    text = b'{"x_config":' * depth + b"1" + b"}" * depth
    try:
        assert set_config_dtype(text, "float32") == text
    except InputError:
        assert depth > 100
