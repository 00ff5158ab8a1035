"""zendelta.checkpoint.locate: paths, hub ids, what is downloaded, and what is said when nothing is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import Files, Model, StandIn, commit
from hypothesis import given, settings
from hypothesis import strategies as st

from zendelta.checkpoint.locate import Located, is_hub_id, locate, wanted
from zendelta.errors import InputError

ROOT = Path(__file__).parents[1]
HASH = "0123456789abcdef0123456789abcdef01234567"

# ---------------------------------------------------------------- what is wanted of a repository, by name alone


def listing(text: str) -> list[str]:
    return text.split()


LLAMA_3 = listing("""
.gitattributes LICENSE README.md USE_POLICY.md config.json generation_config.json
model-00001-of-00004.safetensors model-00002-of-00004.safetensors model-00003-of-00004.safetensors
model-00004-of-00004.safetensors model.safetensors.index.json original/consolidated.00.pth original/params.json
original/tokenizer.model special_tokens_map.json tokenizer.json tokenizer_config.json
""")

SENTENCE_TRANSFORMER = listing("""
.gitattributes 1_Pooling/config.json 2_Dense/config.json 2_Dense/pytorch_model.bin README.md config.json
config_sentence_transformers.json data_config.json model.safetensors modules.json onnx/config.json onnx/model.onnx
onnx/model_O1.onnx openvino/openvino_model.bin openvino/openvino_model.xml pytorch_model.bin rust_model.ot
sentence_bert_config.json special_tokens_map.json tf_model.h5 tokenizer.json tokenizer_config.json train_script.py
vocab.txt
""")

GPT_2 = listing("""
.gitattributes 64-8bits.tflite 64-fp16.tflite 64.tflite README.md config.json flax_model.msgpack
generation_config.json merges.txt model.safetensors onnx/config.json onnx/decoder_model.onnx
onnx/decoder_model_merged.onnx onnx/generation_config.json onnx/merges.txt onnx/tokenizer.json onnx/vocab.json
pytorch_model.bin rust_model.ot tf_model.h5 tokenizer.json tokenizer_config.json vocab.json
""")

MISTRAL = listing("""
.gitattributes README.md config.json consolidated.safetensors generation_config.json
model-00001-of-00003.safetensors model-00002-of-00003.safetensors model-00003-of-00003.safetensors
model.safetensors.index.json params.json special_tokens_map.json tokenizer.json tokenizer.model tokenizer.model.v3
tokenizer_config.json
""")

ADAPTER = listing("""
.gitattributes README.md adapter_config.json adapter_model.safetensors added_tokens.json
additional_chat_templates/tool_use.jinja chat_template.jinja optimizer.pt rng_state.pth runs/events.out.tfevents.1
scheduler.pt special_tokens_map.json tokenizer.json tokenizer_config.json trainer_state.json training_args.bin
checkpoint-500/adapter_config.json checkpoint-500/adapter_model.safetensors checkpoint-500/trainer_state.json
""")


def left_out(files: list[str], **more: Any) -> list[str]:
    return sorted(set(files) - set(wanted(files, **more)))


def test_of_llama_3_the_shards_come_and_the_original_folder_does_not():
    assert left_out(LLAMA_3) == [
        *(".gitattributes", "LICENSE", "USE_POLICY.md", "original/consolidated.00.pth"),
        *("original/params.json", "original/tokenizer.model"),
    ]


def test_of_a_sentence_transformer_the_configs_of_its_modules_come_along():
    assert wanted(SENTENCE_TRANSFORMER) == [
        *("1_Pooling/config.json", "2_Dense/config.json", "README.md", "config.json"),
        *("config_sentence_transformers.json", "data_config.json", "model.safetensors", "modules.json"),
        *("sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
        "vocab.txt",
    ]


def test_of_gpt_2_in_many_formats_one_is_enough():
    assert wanted(GPT_2) == [
        *("README.md", "config.json", "generation_config.json", "merges.txt", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
    ]


def test_of_mistral_the_consolidated_copy_stays_behind():
    assert left_out(MISTRAL) == [".gitattributes", "consolidated.safetensors", "tokenizer.model.v3"]


def test_of_an_adapter_the_weights_and_templates_come_and_no_trainer_state():
    assert wanted(ADAPTER) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "added_tokens.json"),
        *("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "special_tokens_map.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ("pytorch_model.bin training_args.bin optimizer.bin", "pytorch_model.bin"),
        (
            "pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin pytorch_model.bin.index.json",
            "pytorch_model-00001-of-00002.bin pytorch_model-00002-of-00002.bin pytorch_model.bin.index.json",
        ),
        ("model.safetensors pytorch_model-00001-of-00001.bin pytorch_model.bin.index.json", "model.safetensors"),
        ("model.safetensors model.fp16.safetensors model.non_ema.safetensors", "model.safetensors"),
        ("model.fp16.safetensors", "model.fp16.safetensors"),
        (
            "model-00001-of-00001.safetensors model.fp16-00001-of-00001.safetensors "
            "model.safetensors.index.fp16.json model.safetensors.index.json model.safetensors",
            "model-00001-of-00001.safetensors model.safetensors.index.json",
        ),
        ("model.safetensors 2_Dense/model.safetensors", "model.safetensors"),
        ("pytorch_model.bin 2_Dense/model.safetensors", "pytorch_model.bin"),
        ("consolidated.safetensors", "consolidated.safetensors"),
        ("consolidated.safetensors model.fp16.safetensors", "model.fp16.safetensors"),
        (
            "consolidated.safetensors.index.json consolidated-00001-of-00001.safetensors",
            "consolidated-00001-of-00001.safetensors consolidated.safetensors.index.json",
        ),
        ("optimizer.safetensors pytorch_model.bin", "pytorch_model.bin"),
        ("model.safetensors adapter_model.safetensors", "model.safetensors"),
        ("adapter_model.bin", "adapter_model.bin"),
        ("q4.gguf consolidated.00.pth model.pt flax_model.msgpack", ""),
        ("unet/diffusion_pytorch_model.safetensors", ""),
    ],
)
def test_one_set_of_weights_is_chosen(files: str, weights: str):
    assert wanted(["config.json", *files.split()]) == sorted(["config.json", *weights.split()])


def test_who_wants_an_adapter_gets_it_even_beside_a_merged_model():
    files = ["adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"]
    assert left_out(files, what="adapter") == ["model.safetensors"]
    assert left_out(files, what="config") == ["adapter_model.safetensors", "model.safetensors"]


def test_side_files_lie_at_most_one_folder_deep():
    assert wanted(["a/config.json", "a/b/config.json", ".cache/x.json", "a/README.md"]) == [
        *("a/README.md", "a/config.json")
    ]


names = st.sampled_from([*LLAMA_3, *SENTENCE_TRANSFORMER, *GPT_2, *MISTRAL, *ADAPTER, "x.safetensors", "b/c/d.json"])


@settings(max_examples=200, deadline=None)
@given(st.lists(names, unique=True), st.sampled_from(["checkpoint", "adapter", "config"]))
def test_what_is_wanted_is_part_of_the_list_and_complete_in_itself(files: list[str], what: Any):
    chosen = wanted(files, what=what)
    assert set(chosen) <= set(files)
    assert chosen == sorted(set(chosen)) == wanted(chosen, what=what) == wanted(files[::-1], what=what)
    assert not any(re.search(r"\.(pt|pth|py|onnx|h5|msgpack|gguf)$|training_args|trainer_state", f) for f in chosen)


# ---------------------------------------------------------------- local paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["run+v2@best", "mit Leerzeichen und é", "org/name", "org/name@v1", "a", "-x", "models--org--name", "~odd"]
)
def test_an_existing_folder_wins_over_every_syntax(here: Path, name: str):
    (here / name).mkdir(parents=True)
    last = name.split("/")[-1]
    assert locate(name) == locate(f"./{name}") == Located(Path(name), last, None)
    assert locate(here / name) == locate(str(here / name)) == Located(here / name, last, None)
    assert not is_hub_id(name)


def test_the_name_is_the_last_part_of_the_real_folder_and_never_a_path(here: Path, monkeypatch: pytest.MonkeyPatch):
    model = here / "runs" / "llama"
    model.mkdir(parents=True)
    (here / "latest").symlink_to("runs/llama", target_is_directory=True)
    for spec in ("runs/llama/", "latest", "latest/", "runs/../runs/llama/."):
        assert locate(spec).name == "llama"
    monkeypatch.chdir(model)
    assert [locate(spec).name for spec in (".", "./", "..", "../..")] == ["llama", "llama", "runs", here.name]
    assert "/" not in locate("/").name


def test_a_file_is_named_by_itself(here: Path):
    (here / "m").mkdir()
    (here / "m/x.safetensors").write_bytes(b"")
    (here / "link.safetensors").symlink_to("m/x.safetensors")
    assert locate("m/x.safetensors") == Located(Path("m/x.safetensors"), "x.safetensors", None)
    assert locate("link.safetensors").name == "link.safetensors"


def test_a_tilde_is_expanded(here: Path):
    (here / "home/m").mkdir(parents=True)
    assert locate("~/m") == Located(here / "home/m", "m", None)


def test_a_folder_in_a_cache_layout_keeps_its_hub_id_and_commit(here: Path):
    snapshot = here / "hub" / "models--org--my--name" / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    blob = here / "hub" / "models--org--my--name" / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_bytes(b"{}")
    (snapshot / "model.safetensors").symlink_to(blob)
    (here / "link").symlink_to(snapshot, target_is_directory=True)
    for spec in (snapshot, snapshot / "model.safetensors", "link", "link/model.safetensors"):
        assert locate(spec) == Located(Path(spec), "org/my--name", HASH)
    assert locate("hub/models--org--my--name") == Located(
        Path("hub/models--org--my--name"), "models--org--my--name", None
    )


@pytest.mark.parametrize(
    "spec",
    ["org/name", "org/name@v1.0", "hf://org/name", "hf://org/name@main", f"a-b.c/d_e@{HASH}", "org/name@refs/pr/3"],
)
def test_these_are_hub_ids(here: Path, spec: str):
    assert is_hub_id(spec)
    assert not is_hub_id(Path("org/name"))


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "",
            "./org/name",
            "../org/name",
            "/org/name",
            "~/name",
            "~org/name",
            "org/name/",
            "org/name/x",
            "org//x",
        ),
        *("name", "name@v1", "org/", "/name", "org/name@", "org/name@a/b", "org/name@x@y", "org/na me", "örg/name"),
        *("org/.name", "-org/name", "org/na--me", "org/na..me", "org/name@..", "org/name@refs/../../x", "org/x.git"),
        *("C:/name", "org\\name", "hf://name", "hf://datasets/org/name", "hf://org/name/file", "org/name\n", "a/b\0"),
    ],
)
def test_these_are_paths_and_a_missing_one_is_an_error_of_one_line(here: Path, spec: str):
    assert not is_hub_id(spec)
    with pytest.raises(InputError) as caught:
        locate(spec)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert spec.strip().replace("\0", "\\x00") in caught.value.message.replace("\\\\", "\\")


def test_a_misspelt_path_is_answered_with_names_like_it(here: Path):
    for name in ("llama-3-chat", "llama-3-code", "other"):
        (here / "runs" / name).mkdir(parents=True)
    with pytest.raises(InputError) as caught:
        locate("./runs/Lama-3-chat")
    assert caught.value.message == "nothing at ./runs/Lama-3-chat: no such file or folder"
    assert caught.value.hint == "did you mean runs/llama-3-chat or runs/llama-3-code?"
    with pytest.raises(InputError) as caught:
        locate("./rnus/llama-3-chat/best")
    assert caught.value.hint == "did you mean runs?"
    with pytest.raises(InputError) as caught:
        locate("./runs/quite-something-else")
    assert "runs" in caught.value.hint and "did you mean" not in caught.value.hint


def test_a_link_to_nowhere_is_called_so(here: Path):
    (here / "latest").symlink_to("gone")
    with pytest.raises(InputError, match="latest is a link to gone, which does not exist"):
        locate("latest")


def test_local_paths_need_neither_the_network_nor_its_libraries(here: Path):
    (here / "org/name").mkdir(parents=True)
    code = """
        import socket, sys
        def refuse(*args, **kwargs): raise AssertionError("the network was touched")
        socket.socket.connect = socket.getaddrinfo = refuse
        from zendelta.checkpoint.locate import is_hub_id, locate
        from zendelta.errors import InputError
        assert locate("org/name").name == "name" and not is_hub_id("org/name")
        try: locate("./gone")
        except InputError: pass
        print([m for m in ("huggingface_hub", "torch", "numpy", "requests", "httpx") if m in sys.modules])
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(here)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# ---------------------------------------------------------------- the hub, by a stand-in

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
SMALL: Files = {
    **{name: name.encode() for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", "README.md")},
    "chat_template[v1].jinja": b"{{ x }}",  # brackets mean something in a pattern
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
}
SHARDS: Files = {name: name.encode() * 1000 for name in INDEX["weight_map"].values()}
JUNK = listing("""
pytorch_model.bin training_args.bin optimizer.pt original/consolidated.00.pth modeling_x.py model.fp16.safetensors
model-00003-of-00003.safetensors model.safetensors
""")
FULL: Files = {**SMALL, **SHARDS, **dict.fromkeys(JUNK, b"junk")}
V2: Files = {**FULL, "README.md": b"second version"}
NEEDED = sorted({**SMALL, **SHARDS})


@pytest.fixture
def hub() -> Iterator[StandIn]:
    models = {
        "org/name": Model({"main": FULL, "v2": V2, "refs/pr/1": V2}),
        "org/one": Model({"main": {"config.json": b"{}", "model.safetensors": b"weights"}}),
        "org/gated": Model({"main": FULL}, gated=True),
        "org/private": Model({"main": FULL}, private=True),
        "org/gguf": Model({"main": {"config.json": b"{}", "q4.gguf": b"x", "q8.gguf": b"x"}}),
        "org/holes": Model({"main": SMALL}),
        "org/outside": Model({"main": {"model.safetensors.index.json": b'{"weight_map": {"a": "../../x"}}'}}),
        "org/damaged": Model({"main": {"model.safetensors.index.json": b'{"weight_map": '}}),
        "org/breaks": Model({"main": FULL}, broken="model-00002-of-00002.safetensors"),
    }
    with StandIn(models) as hub:
        yield hub


def ask(hub: StandIn, home: Path, *specs: str, before: str = "", options: str = "", **env: str) -> list[dict[str, Any]]:
    """Locate each spec, one after the other, in a child process; stderr must stay empty."""
    code = f"""
import json, sys
{textwrap.dedent(before)}
from zendelta.checkpoint.locate import locate
from zendelta.errors import ZendeltaError
out = []
for spec in sys.argv[1:]:
    try:
        found = locate(spec{options})
        out.append({{"path": str(found.path), "name": found.name, "revision": found.revision}})
    except ZendeltaError as error:
        assert "\\n" not in error.message + error.hint and error.hint
        out.append({{"code": error.exit_code, "message": error.message, "hint": error.hint}})
print(json.dumps(out))
"""
    home.mkdir(exist_ok=True)
    environment = hub.environment(home, PYTHONPATH=str(ROOT), HOME=str(home), **env)
    done = subprocess.run(
        [sys.executable, "-c", code, *specs], env=environment, cwd=home, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def files_in(folder: str) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())


def test_only_what_is_needed_is_downloaded_and_only_once(hub: StandIn, tmp_path: Path):
    [found] = ask(hub, tmp_path, "org/name")
    assert (found["name"], found["revision"]) == ("org/name", commit(FULL))
    assert files_in(found["path"]) == hub.downloaded() == NEEDED
    for name, data in SHARDS.items():
        assert Path(found["path"], name).read_bytes() == data

    assert ask(hub, tmp_path, "org/name", "hf://org/name", "hf://org/name@main") == [found] * 3
    assert hub.downloaded() == []
    # What was located is a local path from now on, with the same name.
    assert ask(hub, tmp_path, found["path"]) == [found]
    assert hub.requests == []


def test_a_revision_is_resolved_to_its_commit_and_equal_files_are_not_fetched_again(hub: StandIn, tmp_path: Path):
    specs = ["org/name", "org/name@v2", "org/name@refs/pr/1", f"hf://org/name@{commit(V2)}"]
    found = ask(hub, tmp_path, *specs)
    assert [f["revision"] for f in found] == [commit(FULL), *[commit(V2)] * 3]
    assert {f["name"] for f in found} == {"org/name"}
    assert hub.downloaded() == sorted([*NEEDED, "README.md"])
    assert Path(found[1]["path"], "README.md").read_bytes() == b"second version"


def test_a_new_commit_of_a_branch_is_seen(hub: StandIn, tmp_path: Path):
    ask(hub, tmp_path, "org/name")
    hub.models["org/name"].branches["main"] = V2
    hub.downloaded()
    assert ask(hub, tmp_path, "org/name")[0]["revision"] == commit(V2)
    assert hub.downloaded() == ["README.md"]


def test_the_config_alone_can_be_had(hub: StandIn, tmp_path: Path):
    [found] = ask(hub, tmp_path, "org/name", options=", what='config'")
    assert files_in(found["path"]) == hub.downloaded() == sorted(SMALL.keys() - {"model.safetensors.index.json"})
    [found] = ask(hub, tmp_path, "org/name", options=", what='config'", HF_HUB_OFFLINE="1")
    # For the weights, the cache alone does not do.
    [error] = ask(hub, tmp_path, "org/name", HF_HUB_OFFLINE="1")
    assert error["code"] == 3 and "the cache lacks the weights" in error["message"]
    [found] = ask(hub, tmp_path, "org/name")
    assert files_in(found["path"]) == NEEDED


def test_a_filled_cache_serves_offline_and_with_the_hub_down(hub: StandIn, tmp_path: Path):
    specs = ["org/name", "org/name@main", f"org/name@{commit(FULL)}", "org/one"]
    found = ask(hub, tmp_path, *specs)
    hub.requests.clear()
    assert ask(hub, tmp_path, *specs, HF_HUB_OFFLINE="1") == found
    assert hub.requests == []
    hub.close()
    assert ask(hub, tmp_path, *specs) == ask(hub, tmp_path, *specs, HF_HUB_OFFLINE="1") == found

    missing = ["org/other", "org/name@v2"]
    for error in ask(hub, tmp_path, *missing, HF_HUB_OFFLINE="1"):
        assert error["code"] == 3 and "HF_HUB_OFFLINE" in error["message"] and "unset HF_HUB_OFFLINE" in error["hint"]
    for error in ask(hub, tmp_path, *missing):
        assert error["code"] == 3 and hub.endpoint in error["message"] and "refused" in error["message"]
        assert "--base path" in error["hint"]


def test_a_cache_made_by_hand_is_enough(hub: StandIn, tmp_path: Path):
    repo = tmp_path / "hub" / "models--org--hand"
    snapshot = repo / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(HASH)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(b"{}")
    specs = ("org/hand", f"org/hand@{HASH}")
    found = ask(hub, tmp_path, *specs, HF_HUB_OFFLINE="1")
    assert found == [{"path": str(snapshot), "name": "org/hand", "revision": HASH}] * 2
    assert hub.requests == []

    (snapshot / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"")
    [error] = ask(hub, tmp_path, "org/hand", HF_HUB_OFFLINE="1")
    assert "the cache lacks model-00002-of-00002.safetensors of it" in error["message"]


def test_the_token_opens_gated_and_private_models(hub: StandIn, tmp_path: Path):
    gated, private, wrong = ask(hub, tmp_path, "org/gated", "org/private", "org/nothing")
    assert gated["code"] == private["code"] == 3
    assert "org/gated is gated" in gated["message"] and "hf auth login" in gated["hint"]
    assert private["message"].startswith("nothing at org/private") and "hf auth login" in private["hint"]
    assert wrong["message"].startswith("nothing at org/nothing")
    assert hub.downloaded() == []
    found = ask(hub, tmp_path, "org/gated", "org/private", HF_TOKEN=hub.token)
    assert [f["name"] for f in found] == ["org/gated", "org/private"]


def test_a_misspelt_path_that_looks_like_a_hub_id_is_answered_with_names_like_it(hub: StandIn, tmp_path: Path):
    (tmp_path / "runs" / "llama-3").mkdir(parents=True)
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        [error] = ask(hub, tmp_path, "runs/lama-3", **env)
        assert error["hint"].startswith("did you mean runs/llama-3?")


def test_a_missing_revision_is_named(hub: StandIn, tmp_path: Path):
    branch, unknown = ask(hub, tmp_path, "org/name@v9", f"org/name@{HASH}")
    assert branch["code"] == unknown["code"] == 3
    assert branch["message"] == "org/name has no revision v9"
    assert unknown["message"] == f"org/name has no revision {HASH}"


def test_a_model_without_readable_weights_is_refused_before_anything_is_downloaded(hub: StandIn, tmp_path: Path):
    [error] = ask(hub, tmp_path, "org/gguf")
    assert error["code"] == 3
    assert error["message"] == "org/gguf has no weights that zendelta reads; it has q4.gguf, q8.gguf"
    assert hub.downloaded() == []


def test_an_index_that_names_what_is_not_there_is_refused_before_the_shards(hub: StandIn, tmp_path: Path):
    holes, outside, damaged = ask(hub, tmp_path, "org/holes", "org/outside", "org/damaged")
    assert "names 2 of 2 shards that the model does not have: model-00001-of-00002" in holes["message"]
    assert "model-00002-of-00002" in holes["message"]
    assert "../../x" in outside["message"]
    assert "model.safetensors.index.json is damaged" in damaged["message"]
    assert not any(name.endswith(".safetensors") for name in hub.downloaded())


def test_a_download_that_breaks_off_is_an_error_and_goes_on_when_run_again(hub: StandIn, tmp_path: Path):
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        [error] = ask(hub, tmp_path, "org/breaks", **env)
        assert error["code"] == 3
    assert "the cache lacks model-00002-of-00002.safetensors of it" in error["message"]
    hub.models["org/breaks"].broken = ""
    hub.downloaded()
    [found] = ask(hub, tmp_path, "org/breaks")
    assert hub.downloaded() == ["model-00002-of-00002.safetensors"]
    assert files_in(found["path"]) == NEEDED


def test_a_disk_without_space_is_found_before_the_download(hub: StandIn, tmp_path: Path):
    full = """
        import collections, shutil
        shutil.disk_usage = lambda path: collections.namedtuple("usage", "total used free")(10, 10, 0)
    """
    [error] = ask(hub, tmp_path, "org/name", before=full)
    assert error["code"] == 4 and "GB more in" in error["message"] and "HF_HOME" in error["hint"]
    assert hub.downloaded() == []
    [found] = ask(hub, tmp_path, "org/name")
    # What is in the cache needs no space.
    assert ask(hub, tmp_path, "org/name", before=full) == [found]


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("OSError(28, 'No space left on device')", "no space left"),
        ("RuntimeError('Data processing error: IO Error: No space left on device (os error 28)')", "no space left"),
        ("PermissionError(13, 'Permission denied', '/cache/x')", "could not be stored"),
    ],
)
def test_a_disk_that_cannot_be_written_is_the_machines_fault(
    hub: StandIn, tmp_path: Path, raised: str, message: str
) -> None:
    before = f"""
        import huggingface_hub
        def fail(self, *args, local_files_only=False, **kwargs):
            raise huggingface_hub.errors.LocalEntryNotFoundError("none") if local_files_only else {raised}
        huggingface_hub.HfApi.snapshot_download = fail
    """
    [error] = ask(hub, tmp_path, "org/name", before=before)
    assert error["code"] == 4 and message in error["message"] and "HF_HOME" in error["hint"]


def test_progress_bars_are_for_terminals_and_for_who_wants_them(hub: StandIn, tmp_path: Path):
    code = """
import sys
from zendelta.checkpoint.locate import locate
sys.stderr.isatty = lambda: sys.argv[1] == "terminal"
locate("org/name", quiet=sys.argv[2] == "quiet")
locate("org/name", quiet=True)
"""
    for number, args in enumerate((("terminal", "loud"), ("terminal", "quiet"), ("pipe", "loud"))):
        env = hub.environment(tmp_path / str(number), PYTHONPATH=str(ROOT))
        done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout == ""
        assert done.stderr.count("100%") > 0 if args == ("terminal", "loud") else done.stderr == ""
