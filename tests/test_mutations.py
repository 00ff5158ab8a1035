"""Random damage to the inputs of apply and validate: refused in words, or without any effect. Seeded, so it repeats."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Pair, make_pair, read_model

import zendelta
from zendelta.errors import ZendeltaError

MUTANTS = 150


def flip(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    data[chance.randrange(first, last)] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    del data[chance.randrange(len(data)) :]


def extend(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    data += chance.randbytes(chance.randrange(1, 100))


def remove(data: bytearray, chance: random.Random, first: int, last: int) -> None:
    at = chance.randrange(first, last)
    del data[at : at + chance.randrange(1, 20)]


def header_end(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def outcome(work: Callable[[], object]) -> str:
    """Return "refused" or "done"; anything but a ZendeltaError is a fault of the program."""
    try:
        work()
    except ZendeltaError as error:
        assert error.message and error.exit_code in (1, 3)
        return "refused"
    return "done"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Path, dict[str, torch.Tensor]]:
    """A pair, its .bd file, and the weights that apply restores."""
    folder = tmp_path_factory.mktemp("made")
    pair = make_pair(folder, layers=1)
    zendelta.compress(pair.base, pair.finetuned, folder / "a.bd")
    zendelta.apply(pair.base, folder / "a.bd", folder / "out")
    return pair, folder / "a.bd", read_model(folder / "out")


@pytest.mark.parametrize("part", ["header", "arrays"])
@pytest.mark.parametrize("damage", [flip, cut, extend, remove])
def test_a_damaged_bd_file_is_refused_or_restores_the_same(made, damage, part, tmp_path):
    pair, delta, expected = made
    first, last = (8, header_end(delta)) if part == "header" else (header_end(delta), delta.stat().st_size)
    refused = 0
    for seed in range(MUTANTS // 6):
        data = bytearray(delta.read_bytes())
        damage(data, random.Random(f"{damage.__name__} {part} {seed}"), first, last)
        (tmp_path / "bad.bd").write_bytes(data)
        out = tmp_path / f"out-{seed}"
        found = outcome(lambda out=out: zendelta.apply(pair.base, tmp_path / "bad.bd", out))
        refused += found == "refused"
        if found == "done":
            restored = read_model(out)
            assert all(torch.equal(restored[name], value) for name, value in expected.items())
            shutil.rmtree(out)
        assert not out.exists()
    assert refused > 0


@pytest.mark.parametrize("damage", [flip, cut, extend, remove])
def test_a_damaged_shard_of_the_base_is_refused_by_apply_and_validate(made, damage, tmp_path):
    pair, delta, expected = made
    base = shutil.copytree(pair.base, tmp_path / "base")
    shards = sorted(base.glob("*.safetensors"))
    originals = [shard.read_bytes() for shard in shards]
    for seed in range(MUTANTS // 4):
        chance = random.Random(f"{damage.__name__} {seed}")
        which = chance.randrange(len(shards))
        data = bytearray(originals[which])
        damage(data, chance, 0, len(data))
        shards[which].write_bytes(data)
        out = tmp_path / f"out-{seed}"
        if outcome(lambda out=out: zendelta.apply(base, delta, out)) == "done":
            restored = read_model(out)
            assert all(torch.equal(restored[name], value) for name, value in expected.items())
        else:
            assert not out.exists()
            assert outcome(lambda: zendelta.validate(base, pair.finetuned, delta)) == "refused"
        shards[which].write_bytes(originals[which])


@pytest.mark.parametrize("damage", [flip, cut, extend, remove])
def test_a_damaged_fine_tune_is_refused_or_fails_validation(made, damage, tmp_path):
    pair, delta, _ = made
    finetuned = shutil.copytree(pair.finetuned, tmp_path / "finetuned")
    shard = min(finetuned.glob("*.safetensors"))
    original = shard.read_bytes()
    for seed in range(MUTANTS // 4):
        data = bytearray(original)
        damage(data, random.Random(f"{damage.__name__} {seed}"), 0, len(data))
        shard.write_bytes(data)
        try:
            passed = zendelta.validate(pair.base, finetuned, delta).passed
        except ZendeltaError:
            continue
        assert not passed or read_model(finetuned).keys() == read_model(pair.finetuned).keys()
        if passed:
            kept = read_model(pair.finetuned)
            assert all(torch.equal(value, kept[name]) for name, value in read_model(finetuned).items())


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**62, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused_without_asking_for_that_much_memory(made, length, tmp_path):
    pair, delta, _ = made
    for file, use in (
        (tmp_path / "bad.bd", lambda: zendelta.inspect(tmp_path / "bad.bd")),
        (tmp_path / "bad.safetensors", lambda: zendelta.diff(tmp_path / "bad.safetensors", pair.finetuned)),
    ):
        file.write_bytes(length.to_bytes(8, "little") + delta.read_bytes()[8:])
        assert outcome(use) == "refused"
