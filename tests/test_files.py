"""Files that are missing, cut, hostile, in the way or left over; and the files that must come back as they were."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    Tensors,
    change_all,
    equal,
    forge,
    inner_header,
    load,
    moved,
    normal,
    outer_header,
    restored,
    same_bits,
    signs_of,
    untouched,
    write,
)
from conftest import ROOT, Pair, Zendelta, make_pair

from zendelta import BdFile, Checkpoint, InputError, MachineError, UsageError, apply, compress, diff, inspect, validate

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk is most of the time that these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def file(pair: Pair) -> Path:
    """The pair, compressed."""
    output = pair.base.parent / "tuned.bd"
    compress(pair.base, pair.finetuned, output)
    return output


def refused(run: Callable[[], object], *folders: Path, kind: type[Exception] = InputError) -> str:
    """Assert that a call is refused and that nothing in these folders changes; return message and hint."""
    with untouched(*folders), pytest.raises(kind) as caught:
        run()
    return f"{caught.value.message} | {caught.value.hint}"  # type: ignore[attr-defined]


def every_reader(base: Path, finetuned: Path, output: Path) -> list[Callable[[], object]]:
    """Every verb that opens these checkpoints, as calls."""
    return [
        lambda: Checkpoint.open(finetuned),
        lambda: compress(base, finetuned, output),
        lambda: compress(finetuned, base, output),
        lambda: compress(base, finetuned, output, dry_run=True),
        lambda: diff(base, finetuned),
    ]


# F1, F4, F6: indexes


def edit_index(folder: Path, **moves: str) -> None:
    """Map tensors to other files, by a part of their names."""
    path = folder / INDEX
    index = json.loads(path.read_text())
    for part, target in moves.items():
        for name in index["weight_map"]:
            if part in name:
                index["weight_map"][name] = target
    path.write_text(json.dumps(index))


def test_all_shards_that_are_missing_are_listed_before_any_work(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=5)
    gone = [f"model-0000{i}-of-00005.safetensors" for i in (2, 4, 5)]
    for name in gone:
        (pair.finetuned / name).unlink()
    for run in every_reader(pair.base, pair.finetuned, tmp_path / "a.bd"):
        said = refused(run, tmp_path)
        assert f"{pair.finetuned}: 3 of 5 shards are missing: {', '.join(gone)}" in said and "hf download" in said


def test_a_tensor_in_another_shard_than_the_index_says_is_named_with_both(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=2)
    index = json.loads((pair.finetuned / INDEX).read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    name = next(name for name in index if index[name] == first)
    edit_index(pair.finetuned, **{name: second})
    for run in every_reader(pair.base, pair.finetuned, tmp_path / "a.bd"):
        assert f"in another shard: {name} (index: {second}, is in {first})" in refused(run, tmp_path)


def test_tensors_that_no_shard_holds_are_all_named(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=2)
    path = pair.finetuned / INDEX
    index = json.loads(path.read_text())
    shard = min(index["weight_map"].values())
    index["weight_map"] |= {"ghost.one": shard, "ghost.two": shard}
    path.write_text(json.dumps(index))
    said = refused(lambda: Checkpoint.open(pair.finetuned), tmp_path)
    assert f"not in their shard: ghost.one ({shard}), ghost.two ({shard})" in said


def test_a_tensor_that_is_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    pair = make_pair(tmp_path, shards=2)
    one, two = sorted(pair.finetuned.glob("*.safetensors"))
    tensors = load(pair.finetuned)
    save_file(tensors, two)
    said = refused(lambda: Checkpoint.open(pair.finetuned), tmp_path)
    assert f"is in {one.name} and in {two.name}" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"a": 1, "a": 2}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    pair = make_pair(tmp_path, shards=2)
    (pair.finetuned / INDEX).write_text(content)
    assert str(pair.finetuned / INDEX) in refused(lambda: Checkpoint.open(pair.finetuned), tmp_path)


def test_the_index_wins_over_a_leftover_file_which_is_named_in_a_warning(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=2)
    tensors = load(pair.finetuned)
    shutil.copy(next(pair.base.glob("*.safetensors")), pair.finetuned / "model.safetensors")
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert f"{INDEX} decides; not read: model.safetensors" in report.notes
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert equal(load(tmp_path / "out"), restored(load(pair.base), tensors))


@pytest.mark.parametrize("where", ["../outside.safetensors", "/etc/passwd", "below/model.safetensors", "..", "a\\b"])
def test_a_shard_outside_the_folder_is_refused_and_never_opened(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path, shards=2)
    shutil.copy(next(pair.base.glob("*.safetensors")), tmp_path / "outside.safetensors")
    (pair.finetuned / "below").mkdir()
    shutil.copy(next(pair.base.glob("*.safetensors")), pair.finetuned / "below/model.safetensors")
    edit_index(pair.finetuned, lm_head=where)
    real, opened = os.open, []

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(os.fspath(path) if isinstance(path, str | os.PathLike) else path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    said = refused(lambda: Checkpoint.open(pair.finetuned), tmp_path)
    assert f"{INDEX}: it names files outside its folder: {where}" in said
    assert not any("outside" in str(path) or "passwd" in str(path) or "below" in str(path) for path in opened)


# F2: Git LFS pointers

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 123456789\n"
)  # 134 bytes, as the hub has them


def test_git_lfs_pointers_are_all_named_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    assert len(POINTER) == 134
    pair = make_pair(tmp_path, shards=3)
    shards = sorted(pair.finetuned.glob("*.safetensors"))
    for shard in shards[1:]:
        shard.write_bytes(POINTER)
    names = [shard.name for shard in shards[1:]]
    for run in every_reader(pair.base, pair.finetuned, tmp_path / "a.bd"):
        said = refused(run, tmp_path)
        assert f"{pair.finetuned}: 2 of 3 weights files are Git LFS pointers of 134 bytes" in said
        assert ", ".join(names) in said
        assert f"cd '{pair.finetuned}' && git lfs pull --include '{','.join(names)}'" in said


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_single_file_that_is_a_git_lfs_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(POINTER)
    said = refused(lambda: Checkpoint.open(tmp_path / "model"), tmp_path)
    assert f"{name}: a Git LFS pointer of 134 bytes" in said and f"git lfs pull --include '{name}'" in said


def test_a_bd_file_that_is_a_git_lfs_pointer_is_called_one(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "a.bd").write_bytes(POINTER)
    for run in (lambda: inspect(tmp_path / "a.bd"), lambda: apply(pair.base, tmp_path / "a.bd", tmp_path / "out")):
        said = refused(run, tmp_path)
        assert "a.bd: a Git LFS pointer of 134 bytes" in said and "git lfs pull --include 'a.bd'" in said


def test_tokenizer_files_that_are_git_lfs_pointers_are_not_carried_as_such(tmp_path: Path, pair: Pair) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (pair.finetuned / name).write_bytes(POINTER)
    said = refused(lambda: compress(pair.base, pair.finetuned, tmp_path / "a.bd"), tmp_path)
    assert f"{pair.finetuned}: Git LFS pointers, not the files themselves: tokenizer.json, tokenizer.model" in said
    assert "git lfs pull --include 'tokenizer.json,tokenizer.model'" in said


# F3: cut, lengthened and flipped


def cut(data: bytes, how: str) -> bytes:
    return {"a byte short": data[:-1], "half": data[: len(data) // 2], "a byte long": data + b"\0", "empty": b""}[how]


CUTS = ["a byte short", "half", "a byte long", "empty"]


@pytest.mark.parametrize("how", CUTS)
def test_a_shard_of_the_wrong_size_is_named_with_both_sizes(tmp_path: Path, how: str) -> None:
    pair = make_pair(tmp_path, shards=2)
    shard = min(pair.finetuned.glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(cut(whole, how))
    for run in every_reader(pair.base, pair.finetuned, tmp_path / "a.bd"):
        said = refused(run, tmp_path)
        assert f"{shard}: " in said and f"{len(cut(whole, how))} bytes" in said
        if how != "empty":
            assert f"{len(whole)} expected" in said


def test_all_shards_that_are_cut_are_named_together(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=3)
    shards = sorted(pair.finetuned.glob("*.safetensors"))
    for shard in shards[:2]:
        shard.write_bytes(shard.read_bytes()[:-7])
    said = refused(lambda: Checkpoint.open(pair.finetuned), tmp_path)
    assert all(f"{shard}: cut short" in said for shard in shards[:2])


@pytest.mark.parametrize("how", CUTS)
def test_a_bin_file_that_is_cut_is_named(tmp_path: Path, how: str) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model/pytorch_model.bin"
    torch.save({"a.weight": normal(32, 32)}, weights)
    weights.write_bytes(cut(weights.read_bytes(), how))
    if how == "a byte long":  # the zip directory is found from the end, so torch reads it all the same
        assert same_bits(tensor_of(Checkpoint.open(tmp_path / "model"), "a.weight"), normal(32, 32))
    else:
        said = refused(lambda: Checkpoint.open(tmp_path / "model"), tmp_path)
        assert f"{weights}: cannot be read as torch weights" in said and "etch" in said


@pytest.mark.parametrize("length", [0, 3, 30, 100, 200, -30_000, -1])
def test_a_bin_file_of_before_zip_that_is_cut_is_never_a_fault_of_ours(tmp_path: Path, length: int) -> None:
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model/pytorch_model.bin"
    torch.save({"a.weight": torch.ones(100, 100)}, weights, _use_new_zipfile_serialization=False)
    weights.write_bytes(weights.read_bytes()[:length])
    assert f"{weights}: cannot be read as torch weights" in refused(
        lambda: Checkpoint.open(tmp_path / "model"), tmp_path
    )


def test_a_web_page_in_place_of_weights_is_shown(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("pytorch_model.bin", "model.safetensors"):
        weights = tmp_path / "model" / name
        weights.write_bytes(b"<!DOCTYPE html><html>Sign in to continue</html>" * 3)
        said = refused(lambda: Checkpoint.open(tmp_path / "model"), tmp_path)
        assert str(weights) in said and "is it the right file" in said and "141 bytes" in said
        assert "<!DOCTYPE html>" in said or name == "model.safetensors"


def tensor_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A bfloat16 tensor, read through the checkpoint."""
    tensor = checkpoint.tensors[name]
    assert tensor.dtype == "BF16"
    return torch.from_numpy(checkpoint.read(name)).view(torch.bfloat16).reshape(tensor.shape)


@pytest.mark.parametrize("how", CUTS)
def test_a_bd_file_of_the_wrong_size_is_refused_with_both_sizes(
    tmp_path: Path, pair: Pair, file: Path, how: str
) -> None:
    whole = file.read_bytes()
    file.write_bytes(cut(whole, how))
    for run in (
        lambda: inspect(file),
        lambda: apply(pair.base, file, tmp_path / "out"),
        lambda: validate(pair.base, pair.finetuned, file),
    ):
        said = refused(run, tmp_path)
        assert str(file) in said and f"{len(cut(whole, how))} bytes" in said
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        if how == "half" and len(whole) // 2 < header:
            assert f"its header alone takes {header}" in said
        elif how != "empty":
            assert f"{len(whole)} expected" in said


def test_one_flipped_bit_in_the_data_of_a_bd_file_is_found_and_its_tensor_named(
    tmp_path: Path, pair: Pair, file: Path
) -> None:
    whole = file.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    arrays = {name: info for name, info in outer_header(file).items() if name != "__metadata__"}
    assert {name.rpartition(":")[2].split(".")[0] for name in arrays} > {"sign", "alpha", "values"}
    some = {name.rpartition(":")[2]: name for name in sorted(arrays)}  # one of each role, and every file
    for name in some.values():
        begin, end = arrays[name]["data_offsets"]
        for place in {begin, (begin + end) // 2, end - 1}:
            data = bytearray(whole)
            data[start + place] ^= 1 << (place % 8)
            file.write_bytes(data)
            owner = name.removeprefix(":file:") if name.startswith(":file:") else name.rpartition(":")[0]
            said = refused(lambda: apply(pair.base, file, tmp_path / "out"), tmp_path)
            assert str(file) in said and owner in said and "damaged" in said and "get the .bd file again" in said
            if not name.startswith(":file:"):
                assert owner in refused(lambda: validate(pair.base, pair.finetuned, file), tmp_path)


def small_bd(folder: Path) -> Path:
    """A .bd file with a tensor of every kind and a short header."""
    base = {"a": normal(32, 32), "b": normal(7, seed=1), "c": normal(20, 24, seed=2), "d": normal(4)}
    finetuned = change_all({name: base[name] for name in "abc"})
    finetuned["c"] = torch.cat([finetuned["c"], normal(2, 24)])
    finetuned["e"] = torch.arange(3)
    finetuned["same"] = base["same"] = normal(4, 4)
    compress(write(folder / "b", base), write(folder / "f", finetuned), folder / "small.bd")
    return folder / "small.bd"


def test_one_flipped_bit_anywhere_in_the_header_of_a_bd_file_is_refused(tmp_path: Path) -> None:
    file = small_bd(tmp_path)
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    victim = tmp_path / "flipped.bd"
    victim.write_bytes(whole)
    with victim.open("r+b", buffering=0) as opened:
        for place in range(end):
            os.pwrite(opened.fileno(), bytes([whole[place] ^ 1 << (place * 5 % 8)]), place)
            with pytest.raises(InputError, match=r"flipped\.bd"):
                BdFile.open(victim)
            os.pwrite(opened.fileno(), whole[place : place + 1], place)
    assert BdFile.open(victim).content.tensors, "the file itself is well"


def test_any_digit_of_the_header_of_a_bd_file_that_is_another_is_refused(tmp_path: Path) -> None:
    file = small_bd(tmp_path)
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    victim = tmp_path / "flipped.bd"
    digits = [place for place in range(8, end) if whole[place : place + 1].isdigit()]
    assert len(digits) > 500
    victim.write_bytes(whole)
    with victim.open("r+b", buffering=0) as opened:
        for place in digits:
            other = str((int(chr(whole[place])) + 1 + place % 9) % 10).encode()
            assert other != whole[place : place + 1]
            os.pwrite(opened.fileno(), other, place)
            with pytest.raises(InputError, match=r"flipped\.bd"):
                BdFile.open(victim)
            os.pwrite(opened.fileno(), whole[place : place + 1], place)
    assert inspect(victim).tensors, "the file itself is well"


# F5: older weights


def base_and(folder: Path, saved: object, *, legacy: bool = False) -> Pair:
    """A base in safetensors, and a fine-tune as a pytorch_model.bin that holds `saved`."""
    base = write(folder / "base", {"a.weight": normal(48, 40), "b.bias": normal(9, seed=1)})
    (folder / "tuned").mkdir()
    torch.save(saved, folder / "tuned/pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return Pair(base, folder / "tuned")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("form", ["tensors", "parameters", "state_dict", "a trainer's", "nested", "DataParallel"])
def test_older_weights_are_read_in_every_wrapping(tmp_path: Path, form: str, legacy: bool) -> None:
    tensors = change_all({"a.weight": normal(48, 40), "b.bias": normal(9, seed=1)})
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    saved: object = {
        "tensors": tensors,
        "parameters": parameters,
        "state_dict": {"state_dict": parameters},
        "a trainer's": {"epoch": 3, "model_state_dict": tensors, "loss": 0.5},
        "nested": {"module": {"model": tensors}},
        "DataParallel": {"state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}},
    }[form]
    pair = base_and(tmp_path, saved, legacy=legacy)
    compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    out = load(tmp_path / "out")
    if form == "DataParallel":
        assert all(name.startswith("module.") for name in out)
        out = {name.removeprefix("module."): tensor for name, tensor in out.items()}
    assert equal(out, restored(load(pair.base), tensors))


def test_tied_tensors_of_older_weights_are_stored_once_and_come_back_twice(tmp_path: Path) -> None:
    table = moved(normal(48, 40))
    pair = base_and(tmp_path, {"a.weight": table, "lm_head.weight": table, "step": 5})
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert inner_header(tmp_path / "a.bd")["aliases"] == {"lm_head.weight": "a.weight"}
    assert any("not tensors, left out: step" in note for note in report.notes)
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    wanted = restored(load(pair.base), {"a.weight": table})["a.weight"]
    assert equal(load(tmp_path / "out"), {"a.weight": wanted, "lm_head.weight": wanted})


class Bomb:
    """A pickle that runs code when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle"])
def test_a_pickle_that_runs_code_is_refused_and_not_executed(tmp_path: Path, form: str) -> None:
    saved = {"a.weight": normal(48, 40), "bomb": Bomb(tmp_path / "executed")}
    pair = base_and(tmp_path, saved, legacy=form == "legacy")
    weights = pair.finetuned / "pytorch_model.bin"
    if form == "plain pickle":
        weights.write_bytes(pickle.dumps(saved["bomb"], protocol=2))
    for run in every_reader(pair.base, pair.finetuned, tmp_path / "a.bd"):
        said = refused(run, tmp_path)
        assert f"{weights}: the pickle holds more than tensors (posix.mkdir); loading it could run code" in said
        assert "ask its author for safetensors" in said
    assert not (tmp_path / "executed").exists()
    torch.load(weights, weights_only=False) if form != "plain pickle" else pickle.loads(weights.read_bytes())
    assert (tmp_path / "executed").exists(), "the bomb works"


def test_shards_of_older_weights_with_their_index_are_read(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=1)
    tensors = load(pair.finetuned)
    (pair.finetuned / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in halves.items():
        torch.save({name: tensors[name] for name in part}, pair.finetuned / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (pair.finetuned / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert equal(load(tmp_path / "out"), restored(load(pair.base), tensors))
    assert not list((tmp_path / "out").glob("*.bin*"))


# F7: outputs that are in the way


def test_an_output_that_is_an_input_is_refused_by_any_spelling_even_with_force(
    tmp_path: Path, pair: Pair, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(pair.base)
    (tmp_path / "models").mkdir()
    spellings = [
        pair.base,
        Path("base"),
        tmp_path / "models/../base",
        tmp_path / "link",
        tmp_path / "link/inside",
        pair.base / "inside",
        tmp_path,
    ]
    for output in spellings:
        for force in (False, True):
            said = refused(partial(apply, pair.base, file, output, force=force), tmp_path, kind=UsageError)
            assert str(output) in said
    shard = min(pair.finetuned.glob("*.safetensors"))
    hard = tmp_path / "hard.bd"
    os.link(shard, hard)
    for output in (shard, pair.finetuned / "a.bd", Path("finetuned/../base/a.bd"), hard):
        for force in (False, True):
            refused(partial(compress, pair.base, pair.finetuned, output, force=force), tmp_path, kind=UsageError)


def test_an_existing_output_is_refused_and_force_replaces_the_old_set_whole(
    tmp_path: Path, pair: Pair, file: Path, zendelta: Zendelta
) -> None:
    out = tmp_path / "out"
    apply(pair.base, file, out, max_shard_size="20KB")
    stale = {path.name for path in out.glob("model-*.safetensors")}
    assert len(stale) > 3
    (out / "tokenizer.model").write_bytes(b"of another model")
    said = refused(lambda: apply(pair.base, file, out), tmp_path, kind=UsageError)
    assert f"{out} exists already" in said and "--force replaces it" in said
    refused(lambda: compress(pair.base, pair.finetuned, file), tmp_path, kind=UsageError)
    assert zendelta("apply", pair.base, file, "-o", out).code == 2
    assert zendelta("apply", pair.base, file, "-o", out, "--force").code == 0
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors",
        *(path.name for path in pair.finetuned.iterdir() if "safetensors" not in path.name),
    }
    assert equal(load(out), restored(load(pair.base), load(pair.finetuned)))
    before = file.read_bytes()
    assert compress(pair.base, pair.finetuned, file, force=True).output_bytes == len(before)
    assert file.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# F8: stopped in the middle


def run_verb(verb: str, pair: Pair, file: Path, output: Path, **options: Any) -> None:
    """Run one of the writing verbs."""
    if verb == "compress":
        compress(pair.base, pair.finetuned, output, **options)
    else:
        apply(pair.base, file, output, **options)


def same_as_ever(verb: str, pair: Pair, file: Path, output: Path) -> None:
    """Assert that the same command now succeeds, with the right result and nothing left beside it."""
    run_verb(verb, pair, file, output)
    if verb == "compress":
        assert output.read_bytes() == file.read_bytes()
    else:
        assert equal(load(output), restored(load(pair.base), load(pair.finetuned)))
    assert {path.name for path in output.parent.iterdir()} == {"base", "finetuned", "tuned.bd", output.name}


VERBS = ["compress", "apply"]

KILLED = """
import json, os, signal, sys
from zendelta import apply, compress
verb, base, finetuned, file, output, when = sys.argv[1:]
calls = 0
def progress(done, total):
    global calls
    calls += 1
    if calls == int(when) or (when == "-1" and done == total):
        os.kill(os.getpid(), signal.SIGKILL)
if verb == "compress":
    compress(base, finetuned, output, progress=progress)
else:
    apply(base, file, output, progress=progress, max_shard_size="20KB")
"""


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", [1, 7, -1])
def test_a_verb_that_is_killed_leaves_nothing_loadable_and_then_succeeds(
    verb: str, when: int, tmp_path: Path, pair: Pair, file: Path
) -> None:
    output = tmp_path / ("again.bd" if verb == "compress" else "out")
    arguments = [verb, pair.base, pair.finetuned, file, output, when]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert not output.exists()
    for left in tmp_path.iterdir():  # whatever is left has a name that nobody loads
        assert left.name in {"base", "finetuned", "tuned.bd"} or left.name.startswith(f".{output.name}")
    same_as_ever(verb, pair, file, output)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_verb_that_is_interrupted_leaves_nothing_at_all_and_then_succeeds(
    verb: str, threads: int, error: type[BaseException], tmp_path: Path, pair: Pair, file: Path
) -> None:
    output = tmp_path / ("again.bd" if verb == "compress" else "out")
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error

    with untouched(tmp_path), pytest.raises(error):
        run_verb(verb, pair, file, output, progress=progress, threads=threads)
    same_as_ever(verb, pair, file, output)


def test_ctrl_c_ends_the_command_with_130_and_nothing_left(
    tmp_path: Path, pair: Pair, zendelta: Zendelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zendelta.codec.kernels.cpu import CpuKernels

    def interrupted(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal was not noticed")

    monkeypatch.setattr(CpuKernels, "encode", interrupted)
    with untouched(tmp_path):
        done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--threads", "1")
        assert done.code == 130
    monkeypatch.undo()
    assert zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd").code == 0


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_disk_that_fills_up_on_the_way_is_the_machine_s_fault_and_leaves_nothing(
    verb: str, threads: int, tmp_path: Path, pair: Pair, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / ("again.bd" if verb == "compress" else "out")
    real, left = os.pwrite, 12_000

    def pwrite(handle: int, data: Any, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    said = refused(lambda: run_verb(verb, pair, file, output, threads=threads), tmp_path, kind=MachineError)
    assert str(output) in said and "No space left on device" in said and "free some space" in said
    monkeypatch.setattr(os, "pwrite", real)
    same_as_ever(verb, pair, file, output)


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_is_too_small_is_found_before_any_work(
    verb: str, tmp_path: Path, pair: Pair, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / ("again.bd" if verb == "compress" else "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5000))

    def progress(done: int, total: int) -> None:
        pytest.fail("work was begun")

    said = refused(lambda: run_verb(verb, pair, file, output, progress=progress), tmp_path, kind=MachineError)
    assert "5,000 bytes free" in said and "bytes needed" in said
    monkeypatch.undo()
    same_as_ever(verb, pair, file, output)


# F9, F16, F17: what comes back, and what never travels

SIDE_FILES: dict[str, bytes] = {
    "generation_config.json": b'{\r\n  "do_sample": true\r\n}',
    "chat_template.jinja": "{{ bos_token }}{# naïve, 日本 #}\n\n".encode(),
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "tokenizer.json": b'{"version": "1.0",  "odd":   "spacing"}',
    "tokenizer_config.json": b'\xef\xbb\xbf{"byte order mark": true}\n',
    "tokenizer.model": bytes(range(256)) * 40,
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"",
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"#version: 0.2\n\xff\xfe not UTF-8\n",
    "preprocessor_config.json": b'{"size": 224}',
    "README.md": b"# A model\n",
    "modules.json": b'[{"idx": 1, "path": "1_Pooling"}]',
    "1_Pooling/config.json": b'{"word_embedding_dimension": 64}',
    "sentence_bert_config.json": b'{"max_seq_length": 512}',
}


def with_files(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def beside(folder: Path) -> dict[str, bytes]:
    """All files of a folder but weights and their index."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "safetensors" not in path.name
    }


@pytest.mark.parametrize("of_base", ["none of them", "the same", "others"])
def test_the_files_beside_the_weights_come_back_byte_for_byte(tmp_path: Path, pair: Pair, of_base: str) -> None:
    with_files(pair.finetuned, SIDE_FILES)
    if of_base == "the same":
        with_files(pair.base, SIDE_FILES)
    elif of_base == "others":
        with_files(pair.base, {path: b"{}\n" for path in SIDE_FILES} | {"only_in_base.json": b"{}"})
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert {report.files[path] for path in SIDE_FILES} == {"base" if of_base == "the same" else "file"}
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert beside(tmp_path / "out") == beside(pair.finetuned)
    assert beside(tmp_path / "out").items() >= SIDE_FILES.items()


def test_another_dtype_changes_nothing_in_config_json_but_the_dtype(tmp_path: Path, pair: Pair, file: Path) -> None:
    apply(pair.base, file, tmp_path / "out", dtype="float32")
    before = (pair.finetuned / "config.json").read_bytes()
    assert before.count(b"bfloat16") == 1
    assert (tmp_path / "out/config.json").read_bytes() == before.replace(b"bfloat16", b"float32")
    rest = {path: data for path, data in beside(pair.finetuned).items() if path != "config.json"}
    assert beside(tmp_path / "out").items() >= rest.items()


def test_nothing_of_a_trainer_s_state_is_read_carried_or_copied(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=1)
    mark = tmp_path / "executed"
    bombs = {name: pickle.dumps(Bomb(mark)) for name in (
        "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "optimizer.bin",
        "random_states_0.pkl", "scaler.pt", "global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py",
        "checkpoint-10/optimizer.pt",
    )}  # fmt: skip
    others = {"trainer_state.json": b'{"log_history": []}', "checkpoint-10/config.json": b"{}", "latest": b"x"}
    tensors = load(pair.finetuned)
    torch.save(tensors, tmp_path / "weights")
    for kind in ("safetensors", "bin"):
        folder = with_files(tmp_path / kind, {}) if (tmp_path / kind).mkdir() else with_files(tmp_path / kind, bombs)
        with_files(folder, others)
        shutil.copy(pair.finetuned / "config.json", folder)
        source = pair.finetuned / "model.safetensors" if kind == "safetensors" else tmp_path / "weights"
        shutil.copy(source, folder / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin"))
        report = compress(pair.base, folder, tmp_path / f"{kind}.bd")
        assert report.files == {"config.json": "base"}
        assert [name for name in outer_header(tmp_path / f"{kind}.bd") if name.startswith(":file:")] == []
        apply(pair.base, tmp_path / f"{kind}.bd", tmp_path / f"{kind}-out")
        assert {path.name for path in (tmp_path / f"{kind}-out").rglob("*")} == {"config.json", "model.safetensors"}
        assert equal(load(tmp_path / f"{kind}-out"), restored(load(pair.base), tensors))
    assert not mark.exists()


def test_a_folder_that_holds_a_trainer_s_state_alone_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    with_files(
        folder, {"training_args.bin": pickle.dumps(Bomb(tmp_path / "x")), "optimizer.pt": b"", "config.json": b"{}"}
    )
    said = refused(lambda: Checkpoint.open(folder), tmp_path)
    assert f"{folder}: a folder without weights" in said
    assert not (tmp_path / "x").exists()


def test_what_cannot_travel_is_said(tmp_path: Path, pair: Pair) -> None:
    with_files(pair.finetuned, {
        "modeling_custom.py": b"import os", "qwen.tiktoken": b"x", ".gitattributes": b"x",
        "2_Dense/config.json": b"{}", "2_Dense/model.safetensors": b"x", "LICENSE": b"MIT",
    })  # fmt: skip
    with (pair.finetuned / "vocab.txt").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert "finetuned: not carried: LICENSE, modeling_custom.py, qwen.tiktoken, vocab.txt" in report.notes
    assert "finetuned: weights in subfolders are neither read nor carried: 2_Dense/model.safetensors" in report.notes
    assert "2_Dense/config.json" in report.files and "vocab.txt" not in report.files


# F10: names of folders, and no network

ODD = ["run+v2@best", "mes modèles d'été", "org--name", "日本", "a b", "-dash", "100%", "model@main"]


@pytest.mark.parametrize("name", ODD)
def test_folders_of_any_name_work_and_no_network_is_touched(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    pair = make_pair(tmp_path, names=(f"{name}", f"{name}-tuned"), layers=1)
    monkeypatch.chdir(tmp_path)
    compress(f"{name}", f"./{name}-tuned", f"{name}.bd")
    assert inner_header(tmp_path / f"{name}.bd")["base"]["name"] == name
    assert inner_header(tmp_path / f"{name}.bd")["finetuned"]["name"] == f"{name}-tuned"
    apply(f"{name}/", f"{name}.bd", f"{name}-out")
    assert validate(pair.base, f"{name}-tuned", f"{name}.bd").passed
    assert equal(load(tmp_path / f"{name}-out"), restored(load(pair.base), load(pair.finetuned)))


def test_a_folder_of_two_parts_that_looks_like_a_hub_id_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("the network was touched"))
    make_pair(tmp_path / "org", names=("model@main", "tuned@v2"), layers=1)
    monkeypatch.chdir(tmp_path)
    report = compress("org/model@main", "org/tuned@v2", "a.bd")
    assert (report.base, report.finetuned) == ("model@main", "tuned@v2")


# F11: the same bytes

SAME = """
import sys
from zendelta import compress
from zendelta.codec.kernels.cpu import CpuKernels
base, finetuned, output, threads, block = sys.argv[1:]
CpuKernels.block_bytes = int(block)
compress(base, finetuned, output, threads=int(threads))
"""


def test_threads_block_sizes_processes_and_parent_folders_change_no_byte(tmp_path: Path) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        finetuned["lm_head.weight"] = torch.cat([finetuned["lm_head.weight"], normal(3, 64)])
        base["wide"], finetuned["wide"] = normal(3, 70_001, seed=1), normal(3, 70_001, seed=2)

    digests = set()
    for parent in ("one", "two/three"):
        make_pair(tmp_path / parent, edit=edit)
        for threads, block in ((1, 1 << 19), (2, 1 << 12)):
            output = tmp_path / parent / f"{threads}.bd"
            arguments = [tmp_path / parent / "base", tmp_path / parent / "finetuned", output, threads, block]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(threads)}
            subprocess.run([sys.executable, "-c", SAME, *map(str, arguments)], env=environment, check=True)
            digests.add(hashlib.sha256(output.read_bytes()).hexdigest())
    assert len(digests) == 1
    assert str(tmp_path).encode() not in output.read_bytes()


# F12: what apply writes is a checkpoint like any other


def test_the_applied_model_has_the_logits_of_base_plus_alpha_times_sign(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pair = make_pair(tmp_path, finetuned_dtype="float32")
    compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out", max_shard_size="50KB")
    base, finetuned = load(pair.base), load(pair.finetuned)
    state = {}
    for name, value in finetuned.items():
        delta = value.float() - base[name].float()
        alpha = delta.double().abs().mean(-1, keepdim=True).float()
        state[name] = value if value.ndim < 2 else base[name].float() + alpha * signs_of(delta)
    reference = AutoModelForCausalLM.from_pretrained(pair.finetuned)
    tokens = torch.tensor([[1, 5, 9, 33, 2, 95]])
    with torch.no_grad():
        trained = reference(tokens).logits
        reference.load_state_dict(state)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.dtype == torch.float32
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
        assert not torch.equal(model(tokens).logits, trained)


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_the_applied_folder_says_pt_and_its_config_has_the_dtype_of_its_weights(
    tmp_path: Path, pair: Pair, file: Path, dtype: str | None
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    apply(pair.base, file, tmp_path / "out", max_shard_size="50KB", dtype=dtype)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1 and all(outer_header(shard)["__metadata__"] == {"format": "pt"} for shard in shards)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    wanted = getattr(torch, dtype or "bfloat16")
    for shard in shards:
        for name in outer_header(shard):
            assert name == "__metadata__" or index["weight_map"][name] == shard.name
    assert {tensor.dtype for tensor in load(tmp_path / "out").values()} == {wanted}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(tmp_path / "out").values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == wanted
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("one bit")["input_ids"] == [3, 4]


def test_the_applied_folder_is_taken_by_every_verb(tmp_path: Path, pair: Pair, file: Path, zendelta: Zendelta) -> None:
    out = tmp_path / "out"
    assert zendelta("apply", pair.base, file, "-o", out).code == 0
    base, middle, tuned = load(pair.base), load(out), load(pair.finetuned)
    # as a fine-tune: its change has one size per row but for rounding, so that one bit holds nearly all of it
    assert zendelta("compress", pair.base, out, "-o", tmp_path / "b.bd").code == 0
    assert inspect(tmp_path / "b.bd").error == pytest.approx(0, abs=0.05)
    assert zendelta("validate", pair.base, out, tmp_path / "b.bd").code == 0
    assert zendelta("diff", pair.base, out, "--json").json["verdict"] == "ordinary"
    assert zendelta("apply", pair.base, tmp_path / "b.bd", "-o", tmp_path / "out2").code == 0
    assert equal(load(tmp_path / "out2"), restored(base, middle))
    # as a base
    assert zendelta("compress", out, pair.finetuned, "-o", tmp_path / "c.bd").code == 0
    assert zendelta("apply", out, tmp_path / "c.bd", "-o", tmp_path / "out3").code == 0
    assert equal(load(tmp_path / "out3"), restored(middle, tuned))
    assert zendelta("validate", out, pair.finetuned, tmp_path / "c.bd").code == 0


# F13: something else where a checkpoint is meant


def adapter(folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 64)}, folder / "adapter_model.safetensors")
    return folder


def gguf(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(100))
    return folder


def pth(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "consolidated.00.pth")
    return folder


def older(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    return folder


WRONG: dict[str, tuple[Callable[[Path], Path], str, str, str]] = {
    "an adapter's folder": (adapter, "", "a PEFT adapter, not a checkpoint", "merge it into its base first"),
    "an adapter's file": (adapter, "adapter_model.safetensors", "a PEFT adapter, not a checkpoint", "merge_and_unload"),
    "a GGUF folder": (gguf, "", "a folder with a GGUF file, not a checkpoint", "safetensors checkpoint"),
    "a GGUF file": (gguf, "model.gguf", "a GGUF file, not a checkpoint", "safetensors checkpoint"),
    "raw weights in a folder": (pth, "", "a folder with raw torch weights, not a checkpoint", "conversion script"),
    "a single older file": (
        older,
        "pytorch_model.bin",
        "a .bin file, not a checkpoint",
        "name the folder that holds it",
    ),
    "raw weights": (pth, "consolidated.00.pth", "raw torch weights, not a checkpoint", "conversion script"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_checkpoint_is_called_what_it_is_with_the_way_out(
    tmp_path: Path, pair: Pair, file: Path, zendelta: Zendelta, case: str
) -> None:
    make, inside, what, way_out = WRONG[case]
    path = make(tmp_path / "thing") / inside
    for run in (*every_reader(pair.base, path, tmp_path / "x.bd"), lambda: apply(path, file, tmp_path / "out")):
        said = refused(run, tmp_path)
        assert f"{path}: {what}" in said and way_out in said
    done = zendelta("compress", pair.base, path, "-o", tmp_path / "x.bd", "--json")
    assert done.code == 3 and what in done.json["error"]["message"] and way_out in done.json["error"]["hint"]


def test_an_adapter_beside_whole_weights_is_named_and_does_not_come_along(tmp_path: Path, pair: Pair) -> None:
    for path in adapter(tmp_path / "adapter").iterdir():
        shutil.copy(path, pair.finetuned)
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert any("the adapter beside the weights is neither read nor carried" in note for note in report.notes)
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert "adapter_config.json" not in beside(tmp_path / "out")
    tuned = {name: value for name, value in load(pair.finetuned).items() if "lora_A" not in name}
    assert equal(load(tmp_path / "out"), restored(load(pair.base), tuned))


def test_a_bd_file_and_a_checkpoint_in_each_other_s_place_are_told_apart(
    tmp_path: Path, pair: Pair, file: Path
) -> None:
    said = refused(lambda: compress(pair.base, file, tmp_path / "x.bd"), tmp_path)
    assert f"{file}: a zendelta delta file, not a checkpoint" in said and "zendelta apply BASE FILE.bd" in said
    said = refused(lambda: apply(file, pair.base, tmp_path / "out"), tmp_path)
    assert f"{pair.base}: a folder; a .bd file is wanted" in said
    said = refused(lambda: inspect(min(pair.base.glob("*.safetensors"))), tmp_path)
    assert "a safetensors file, but not a .bd file" in said
    assert "not there" in refused(lambda: inspect(tmp_path / "missing.bd"), tmp_path)


# F15: hostile .bd files

HOSTILE = [
    "../x", "..", "/etc/x.json", "a/../../x.json", "./config.json", "a//b.json", "a/b/c.json", "C:/x.json", "C:x.json",
    "..\\x.json", "a\\b.json", "model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", INDEX,
    "sub/model.safetensors", "run.py", ".ssh/config.json", ".hidden.json", "optimizer.pt", "x.json\0", "x\n.json",
    "nul.json", "trainer_state.json", "", "x.json.", " x.json", "checkpoint-5/config.json",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("origin", ["file", "base"])
def test_a_carried_file_with_a_hostile_name_is_refused_and_nothing_is_written(
    tmp_path: Path, pair: Pair, file: Path, path: str, origin: str
) -> None:
    data = b"hostile"

    def edit(fields: dict[str, Any], arrays: Tensors) -> None:
        import xxhash

        fields["files"][path] = {"fingerprint": xxhash.xxh3_128_hexdigest(data), "from": origin}
        if origin == "file":
            arrays[f":file:{path}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    bad = forge(file, tmp_path / "bad.bd", edit)
    for run in (lambda: inspect(bad), lambda: apply(pair.base, bad, tmp_path / "deep/out")):
        assert "bad.bd" in refused(run, tmp_path)
    assert not Path("/etc/x.json").exists()


@pytest.mark.parametrize("twice", ["Config.json", "CONFIG.JSON", "con\ufb01g.json", "tokenizer.json/x.json"])
def test_two_carried_files_that_are_one_on_some_system_are_refused(
    tmp_path: Path, pair: Pair, file: Path, twice: str
) -> None:
    def edit(fields: dict[str, Any], arrays: Tensors) -> None:
        fields["files"][twice] = {"fingerprint": "0" * 32, "from": "base"}

    bad = forge(file, tmp_path / "bad.bd", edit)
    said = refused(lambda: apply(pair.base, bad, tmp_path / "out"), tmp_path)
    assert "bad.bd" in said and repr(twice) in said


def test_a_forged_file_that_changes_nothing_is_accepted(tmp_path: Path, pair: Pair, file: Path) -> None:
    """The refusals above and below are for what they say, not for how the tests write."""
    same = forge(file, tmp_path / "same.bd", lambda fields, arrays: None)
    apply(pair.base, same, tmp_path / "out")
    assert equal(load(tmp_path / "out"), restored(load(pair.base), load(pair.finetuned)))


def test_a_name_that_stands_twice_in_the_header_is_refused(tmp_path: Path, pair: Pair, file: Path) -> None:
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length].rstrip()
    name = next(name for name in outer_header(file) if name != "__metadata__")
    entry = json.dumps(outer_header(file)[name]).encode()
    doubled = header[:-1] + b"," + json.dumps(name).encode() + b":" + entry + b"}"
    doubled += b" " * (-(8 + len(doubled)) % 64)
    bad = tmp_path / "bad.bd"
    bad.write_bytes(struct.pack("<Q", len(doubled)) + doubled + whole[8 + length :])
    said = refused(lambda: apply(pair.base, bad, tmp_path / "out"), tmp_path)
    assert f"bad.bd: the header has the key {name!r} twice" in said


NAME = "model.layers.0.mlp.up_proj.weight"
NONSENSE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a later format": lambda f: f.update(format=2),
    "no format": lambda f: f.pop("format"),
    "a format that is text": lambda f: f.update(format="1"),
    "no tensors": lambda f: f.pop("tensors"),
    "tensors as a list": lambda f: f.update(tensors=[]),
    "a tensor that is null": lambda f: f["tensors"].update({NAME: None}),
    "a base without a name": lambda f: f["base"].pop("name"),
    "a base that is text": lambda f: f.update(base="base"),
    "an unknown codec": lambda f: f["tensors"][NAME]["terms"][0].update(codec="zip"),
    "a codec that is a list": lambda f: f["tensors"][NAME]["terms"][0].update(codec=["sign"]),
    "an unknown parameter": lambda f: f["tensors"][NAME]["terms"][0].update(power=2),
    "an unknown scale": lambda f: f["tensors"][NAME]["terms"][0].update(scale="column"),
    "an unknown role": lambda f: f["tensors"][NAME]["terms"][0]["parts"].update(column="x"),
    "a missing role": lambda f: f["tensors"][NAME]["terms"][0]["parts"].pop("alpha"),
    "a part that is a list": lambda f: f["tensors"][NAME]["terms"][0]["parts"].update(alpha=["x"]),
    "an array of another tensor": lambda f: f["tensors"][NAME]["terms"][0]["parts"].update(
        alpha="lm_head.weight:alpha"
    ),
    "rows that end early": lambda f: f["tensors"][NAME]["terms"][0].update(rows=[0, 3]),
    "rows that are text": lambda f: f["tensors"][NAME]["terms"][0].update(rows=["0", "128"]),
    "rows past the end": lambda f: f["tensors"][NAME]["terms"][0].update(rows=[0, 1 << 40]),
    "a negative shape": lambda f: f["tensors"][NAME].update(shape=[-128, -64], matrix=[1, -128, -64]),
    "another shape": lambda f: f["tensors"][NAME].update(shape=[64, 128], matrix=[1, 64, 128]),
    "a shape that is text": lambda f: f["tensors"][NAME].update(shape="12864"),
    "a matrix unlike its shape": lambda f: f["tensors"][NAME].update(matrix=[2, 64, 64]),
    "an unknown dtype": lambda f: f["tensors"][NAME].update(dtype="F8"),
    "a dtype that is a list": lambda f: f["tensors"][NAME].update(dtype=["BF16"]),
    "signs of whole numbers": lambda f: f["tensors"][NAME].update(dtype="I64"),
    "signs without a base": lambda f: f["tensors"][NAME].update({"from": None, "base": None}),
    "the same as no base": lambda f: f["tensors"].update(
        x={**f["tensors"][NAME], "from": None, "base": None, "terms": []}
    ),
    "a base without a fingerprint": lambda f: f["tensors"][NAME].update(base=None),
    "statistics that are text": lambda f: f["tensors"][NAME].update(stats="none"),
    "statistics that lack one": lambda f: f["tensors"][NAME]["stats"].pop("zeros"),
    "a statistic that is text": lambda f: f["tensors"][NAME]["stats"].update(zeros="0"),
    "an alias of nothing": lambda f: f["aliases"].update(x="nothing"),
    "an alias that is a list": lambda f: f["aliases"].update(x=[NAME]),
    "an alias that is a tensor": lambda f: f["aliases"].update({NAME: "lm_head.weight"}),
    "dropped names that are numbers": lambda f: f.update(dropped=[1]),
    "a file from elsewhere": lambda f: f["files"].update({"x.json": {"fingerprint": "0", "from": "http"}}),
    "a file of which the array is missing": lambda f: f["files"].update(
        {"x.json": {"fingerprint": "0", "from": "file"}}
    ),
    "a file that is a list": lambda f: f["files"].update({"x.json": []}),
    "an array that nobody claims": lambda f: f["tensors"].pop(NAME),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_header_of_which_every_hash_is_right_and_that_makes_no_sense_is_refused(
    tmp_path: Path, pair: Pair, file: Path, case: str
) -> None:
    bad = forge(file, tmp_path / "bad.bd", lambda fields, arrays: NONSENSE[case](fields) and None)
    for run in (lambda: inspect(bad), lambda: apply(pair.base, bad, tmp_path / "out")):
        said = refused(run, tmp_path)
        assert f"{bad}: " in said
        if case == "a later format":
            assert "format 2; zendelta " in said and "knows format 1" in said and "upgrade" in said
        if "unknown" in case and "dtype" not in case:
            assert f"{NAME} uses the codec" in said and "upgrade zendelta" in said


def test_a_tensor_s_name_cannot_lead_out_of_the_output(tmp_path: Path, pair: Pair, file: Path) -> None:
    """Names of tensors are never paths: one that looks like a path stays a name."""

    def edit(fields: dict[str, Any], arrays: Tensors) -> None:
        fields["tensors"]["../../evil"] = fields["tensors"].pop(NAME)

    odd = forge(file, tmp_path / "odd.bd", edit)
    apply(pair.base, odd, tmp_path / "deep/out")
    out = load(tmp_path / "deep/out")
    assert same_bits(out["../../evil"], restored(load(pair.base), load(pair.finetuned))[NAME])
    assert not list(tmp_path.rglob("evil*"))
