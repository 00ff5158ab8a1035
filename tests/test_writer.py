"""Checkpoints written as a stream, against safetensors' and transformers' own readers and splitting."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from zendelta.checkpoint import writer as module
from zendelta.checkpoint.publish import staged_folder
from zendelta.checkpoint.writer import INDEX, CheckpointWriter, Shard, TensorSpec, parse_size, plan_shards
from zendelta.dtypes import DTYPE_BYTES, FLOATING, QUANTISED, SUB_BYTE
from zendelta.errors import InputError, MachineError, UsageError, ZendeltaError

ROOT = Path(__file__).resolve().parent.parent
TORCH = {name: dtype for name, dtype in safetensors.torch._TYPES.items() if dtype is not None}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def spec(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,))


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write_all(folder: Path, tensors: dict[str, torch.Tensor], limit: int = 10**9) -> CheckpointWriter:
    with CheckpointWriter(folder, specs_of(tensors), max_shard_bytes=limit) as writer:
        for name, tensor in tensors.items():
            writer.write(name, 0, raw(tensor))
    return writer


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tables = st.lists(st.tuples(st.sampled_from(sorted(TORCH)), shapes), min_size=1, max_size=8)


# What is written


@settings(max_examples=40, deadline=None)
@given(table=tables, limit=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_any_tensors_in_any_blocks_in_any_order_read_back_as_they_were(
    table: list[tuple[str, tuple[int, ...]]], limit: int, seed: int
) -> None:
    chance = random.Random(seed)
    tensors = {}
    for number, (dtype, shape) in enumerate(table):
        values = bytes(
            chance.randrange(2 if dtype == "BOOL" else 256) for _ in range(math.prod(shape) * DTYPE_BYTES[dtype])
        )
        flat = torch.frombuffer(bytearray(values), dtype=TORCH[dtype]) if values else torch.empty(0, dtype=TORCH[dtype])
        tensors[f'layer.{number}.é"{number % 3}'] = flat.reshape(shape)
    blocks = []
    for name, tensor in tensors.items():
        data = raw(tensor)
        cuts = sorted({0, len(data), *(chance.randint(0, len(data)) for _ in range(3))})
        blocks += [(name, start, data[start:stop]) for start, stop in itertools.pairwise(cuts)]
    chance.shuffle(blocks)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with CheckpointWriter(folder, specs_of(tensors), max_shard_bytes=limit) as writer:
            for block in blocks:
                writer.write(*block)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert sizes == writer.sizes
        assert sum(sizes.values()) == writer.total_bytes
        found = {}
        for shard in writer.shards:
            loaded = safetensors.torch.load_file(folder / shard.file)
            assert loaded.keys() == {tensor.name for tensor in shard.tensors}
            found |= loaded
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw(found[name]) == raw(tensor)


def test_each_shard_says_pt_and_every_tensor_lies_at_a_multiple_of_its_elements(tmp_path: Path) -> None:
    tensors = {
        "b": torch.tensor([True, False, True]),
        "x": torch.arange(3, dtype=torch.float64),
        "h": torch.arange(5, dtype=torch.bfloat16),
        "a": torch.arange(5, dtype=torch.float32),
        "c": torch.arange(2, dtype=torch.float32),
    }
    write_all(tmp_path, tensors)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert list(header) == ["x", "a", "c", "h", "b"]  # wider first, then as given
    for entry in header.values():
        assert (8 + length + entry["data_offsets"][0]) % DTYPE_BYTES[entry["dtype"]] == 0
    assert not (tmp_path / INDEX).exists()


def test_the_bytes_are_those_of_safetensors_when_the_order_is_its_own(tmp_path: Path) -> None:
    tensors = {f"w.{number}": torch.randn(3, number + 1) for number in range(4)}
    write_all(tmp_path, tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_transformers_loads_what_is_written_and_saves_the_same_shards(tmp_path: Path, limit: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    tensors = model.state_dict()
    with staged_folder(tmp_path / "ours") as folder:
        write_all(folder, tensors, limit)
        (folder / "config.json").write_bytes((tmp_path / "theirs/config.json").read_bytes())
    if limit < 10**9:
        index, wanted = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("ours", "theirs"))
        assert len(set(index["weight_map"].values())) > 2
        assert index["weight_map"] == wanted["weight_map"]
        assert index["metadata"]["total_size"] == wanted["metadata"]["total_size"]
        assert list(index["weight_map"]) == sorted(index["weight_map"])
        assert (tmp_path / "ours" / INDEX).read_text() == json.dumps(index, indent=2, sort_keys=True) + "\n"
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded = again.state_dict()
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name].dtype == torch.bfloat16 for name in tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_arrays_of_every_kind_are_taken_and_a_transposed_one_is_refused(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "F32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "F16": np.arange(3, dtype=np.float16),
        "BOOL": np.array([True, False]),
        "C64": np.array([1 + 2j], dtype=np.complex64),
        "F64": np.array(0.5),
        "I64": np.zeros((0, 3), dtype=np.int64),
        "U8": memoryview(b"abc"),
        "I8": bytearray(b"abc"),
    }
    specs = [TensorSpec(dtype, dtype, np.asarray(array).shape) for dtype, array in arrays.items()]
    with CheckpointWriter(tmp_path, specs, max_shard_bytes=10**6) as writer:
        with pytest.raises(ValueError, match="contiguous"):
            writer.write("F32", 0, np.zeros((3, 2), dtype=np.float32).T)
        for name, array in arrays.items():
            writer.write(name, 0, array)
    found = load_all(tmp_path)
    for name, array in arrays.items():
        wanted = np.asarray(array)
        assert raw(found[name]) == (wanted.tobytes() if wanted.size else b"")
        assert tuple(found[name].shape) == wanted.shape


def test_many_threads_write_one_checkpoint(tmp_path: Path) -> None:
    tensors = {f"w.{number}": torch.randn(50, 40) for number in range(12)}
    blocks = [(name, at, raw(tensor)[at : at + 800]) for name, tensor in tensors.items() for at in range(0, 8000, 800)]
    random.Random(0).shuffle(blocks)
    failed: list[BaseException] = []

    def work(mine: list[tuple[str, int, bytes]]) -> None:
        try:
            for block in mine:
                writer.write(*block)
        except BaseException as error:
            failed.append(error)

    with CheckpointWriter(tmp_path, specs_of(tensors), max_shard_bytes=20_000) as writer:
        threads = [threading.Thread(target=work, args=(blocks[number::8],)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    found = load_all(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_system_that_writes_a_few_bytes_at_a_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: real(handle, data[:7], offset))
    tensors = {"a": torch.randn(5, 5), "b": torch.randn(3)}
    write_all(tmp_path, tensors)
    assert all(torch.equal(load_all(tmp_path)[name], tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_few_files_are_open_at_a_time_and_none_afterwards(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    specs = [spec(f"t{number}", 100) for number in range(50)]
    with CheckpointWriter(tmp_path, specs, max_shard_bytes=100) as writer:
        for number in range(50):
            assert open_files() == before
            writer.write(f"t{number}", 0, bytes(50))
            assert open_files() == before + 1
            writer.write(f"t{number}", 50, bytes(50))
    assert open_files() == before
    (tmp_path / "second").mkdir()
    with pytest.raises(KeyError), CheckpointWriter(tmp_path / "second", specs, max_shard_bytes=100) as writer:
        writer.write("t0", 0, b"x")
        writer.write("t7", 0, b"x")
        raise KeyError
    assert open_files() == before
    assert not (tmp_path / "second" / INDEX).exists()


# Shards and sizes


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=20), limit=st.integers(1, 20))
def test_shards_are_those_that_transformers_would_make(sizes: list[int], limit: int) -> None:
    table = {f"t{number:02d}": size for number, size in enumerate(sizes)}
    wanted = split_state_dict_into_shards_factory(
        table,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    shards = plan_shards([spec(name, size) for name, size in table.items()], limit)
    assert {shard.file: [tensor.name for tensor in shard.tensors] for shard in shards} == wanted.filename_to_tensors
    assert sum(shard.nbytes for shard in shards) == wanted.metadata["total_size"]


def test_a_tensor_over_the_limit_gets_its_own_shard_and_the_others_fill_up(tmp_path: Path) -> None:
    shards = plan_shards([spec("a", 2), spec("big", 10), spec("b", 3), spec("c", 2)], 6)
    assert shards == [
        Shard("model-00001-of-00003.safetensors", (spec("big", 10),)),
        Shard("model-00002-of-00003.safetensors", (spec("a", 2), spec("b", 3))),
        Shard("model-00003-of-00003.safetensors", (spec("c", 2),)),
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("12 kb", 12_000),
        ("2TB", 2 * 10**12),
        ("1KiB", 1024),
        ("3mib", 3 * 2**20),
        (" 2GiB ", 2**31),
        ("1TiB", 2**40),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("7B", 7),
        ("123456", 123456),
    ],
)
def test_sizes_are_read_as_transformers_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5G", "5XB", "-5GB", "1.5", "0", "0GB", "1e9", "5 G B", "\u0665GB", "nan", "1,5GB"]
)
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size") as refused:
        parse_size(text)
    assert "5GB" in refused.value.hint


def test_the_dtypes_are_those_that_safetensors_knows(tmp_path: Path) -> None:
    """Asked of the library itself: a header with any other dtype is not read."""
    for number, name in enumerate([*DTYPE_BYTES, "F128", "I4", *SUB_BYTE]):
        nbytes = DTYPE_BYTES.get(name, 1)
        header = json.dumps({"a": {"dtype": name, "shape": [1], "data_offsets": [0, nbytes]}}).encode()
        file = tmp_path / str(number)
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
        if name in DTYPE_BYTES:
            with safetensors.safe_open(file, framework="np") as opened:
                assert opened.get_slice("a").get_dtype() == name
        else:
            with pytest.raises(safetensors.SafetensorError):
                safetensors.safe_open(file, framework="np").__enter__()
    assert DTYPE_BYTES.keys() > FLOATING
    assert not FLOATING & QUANTISED
    assert TORCH.keys() <= DTYPE_BYTES.keys()
    assert all(TORCH[name].itemsize == DTYPE_BYTES[name] for name in TORCH)


# What is refused


def test_a_tensor_that_lacks_bytes_is_named_and_the_folder_never_appears(tmp_path: Path) -> None:
    specs = [spec("whole", 10), spec("half", 10), spec("none", 10)]
    with (
        pytest.raises(ZendeltaError, match=r"half \(5 of 10 bytes\), none \(0 of 10 bytes\)") as failed,
        staged_folder(tmp_path / "out") as folder,
        CheckpointWriter(folder, specs, max_shard_bytes=15) as writer,
    ):
        writer.write("whole", 0, bytes(10))
        writer.write("half", 5, bytes(5))
    assert failed.value.exit_code == 70
    assert os.listdir(tmp_path) == []


def test_bytes_outside_a_tensor_or_twice_or_of_no_tensor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ZendeltaError), CheckpointWriter(tmp_path, [spec("a", 10)], max_shard_bytes=100) as writer:
        writer.write("a", 4, bytes(2))
        for offset, count in ((4, 1), (5, 3), (3, 2), (0, 10), (0, 5), (-1, 1), (9, 2), (10, 1)):
            with pytest.raises(ValueError, match="a: bytes"):
                writer.write("a", offset, bytes(count))
        with pytest.raises(ValueError, match="b is not a tensor"):
            writer.write("b", 0, b"")
        writer.write("a", 6, bytes(4))
        writer.write("a", 0, bytes(3))
    with pytest.raises(ValueError, match="not open"):
        writer.write("a", 3, bytes(1))


def test_unfit_names_dtypes_and_shapes_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for specs, why in (
        ([spec("a", 1), spec("a", 2)], "a is there twice"),
        ([spec("__metadata__", 1)], "__metadata__"),
        ([spec("\udc80", 1)], "not valid Unicode"),
        ([], "no tensors"),
    ):
        with pytest.raises(InputError, match=why):
            CheckpointWriter(tmp_path, specs, max_shard_bytes=100)
    with pytest.raises(InputError, match=r"w: .*F4"):
        TensorSpec("w", "F4", (2,))
    with pytest.raises(InputError, match="not a shape"):
        TensorSpec("w", "F32", (-1,))
    with pytest.raises(UsageError, match="holds nothing"):
        plan_shards([spec("a", 1)], 0)
    assert os.listdir(tmp_path) == []


def test_a_header_that_no_reader_accepts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec(f"tensor{number}", 1) for number in range(50)]
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(UsageError, match="readers accept 1,000") as refused:
        CheckpointWriter(tmp_path, specs, max_shard_bytes=100)
    assert "smaller shards" in refused.value.hint
    CheckpointWriter(tmp_path, specs, max_shard_bytes=10)


def test_a_file_that_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("old")
    with (
        pytest.raises(UsageError, match="exists already"),
        CheckpointWriter(tmp_path, [spec("a", 1)], max_shard_bytes=9) as _,
    ):
        pass
    assert (tmp_path / "model.safetensors").read_text() == "old"


def test_a_file_that_safetensors_does_not_read_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._layout
    for name, old, new, error in (
        ("one", b'"U8"', b'"X8"', MachineError),
        ("two", b'"U8"', b'"I8"', ZendeltaError),
        ("three", b'"a"', b'"b"', ZendeltaError),
    ):

        def broken(shard: Shard, old: bytes = old, new: bytes = new) -> tuple[bytes, dict[str, int]]:
            head, begins = real(shard)
            return head.replace(old, new), begins

        monkeypatch.setattr(module, "_layout", broken)
        with (
            pytest.raises(error, match=r"model\.safetensors: the safetensors library"),
            staged_folder(tmp_path / name) as folder,
            CheckpointWriter(folder, [spec("a", 4)], max_shard_bytes=100) as writer,
        ):
            writer.write("a", 0, bytes(4))
    assert os.listdir(tmp_path) == []


# A full disk


def test_a_disk_that_is_too_small_is_found_before_a_file_is_made(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [spec("a", 10**17)], max_shard_bytes=10**9)
    assert writer.total_bytes > 10**17
    with pytest.raises(MachineError, match="bytes needed"), writer:
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_space_works(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([errno.EINTR, number, number])
    monkeypatch.setattr(module, "_fallocate", lambda: lambda handle, size: next(answers))
    tensors = {"a": torch.randn(5, 5), "b": torch.randn(10)}
    write_all(tmp_path, tensors, 100)
    assert list(answers) == []
    assert all(torch.equal(load_all(tmp_path)[name], tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux reserves space")
def test_space_is_reserved_and_a_disk_that_has_none_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZendeltaError), CheckpointWriter(tmp_path, [spec("a", 2**20)], max_shard_bytes=2**30):
        found = (tmp_path / "model.safetensors").stat()
        assert found.st_size > 2**20
        assert found.st_blocks * 512 >= 2**20
    monkeypatch.setattr(module, "_fallocate", lambda: lambda handle, size: errno.ENOSPC)
    with (
        pytest.raises(MachineError, match=r"out/model\.safetensors: No space left on device \(1,104 bytes needed"),
        staged_folder(tmp_path / "out") as folder,
        CheckpointWriter(folder, [spec("a", 1000)], max_shard_bytes=2**30),
    ):
        pass
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_failing_write_is_the_machines_fault_and_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        pytest.raises(ZendeltaError, match="not whole"),
        CheckpointWriter(tmp_path, [spec("a", 4)], max_shard_bytes=100) as writer,
    ):
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(MachineError, match=r"model\.safetensors: cannot be written \(Input/output error\)"):
            writer.write("a", 0, bytes(4))
        monkeypatch.undo()


@pytest.mark.skipif(os.name != "posix", reason="needs limits")
@pytest.mark.parametrize("reserve", [True, False])
def test_a_limit_on_file_sizes_leaves_nothing(tmp_path: Path, reserve: bool) -> None:
    code = """
import resource, sys
from pathlib import Path
from zendelta.checkpoint import writer as module
from zendelta.checkpoint.publish import staged_folder
from zendelta.errors import MachineError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
if sys.argv[2] == "False":
    module._allocate = lambda handle, size: None
specs = [module.TensorSpec(name, "U8", (40_000,)) for name in "ab"]
try:
    with staged_folder(Path(sys.argv[1], "out")) as folder:
        with module.CheckpointWriter(folder, specs, max_shard_bytes=10**9) as writer:
            print("open")
            writer.write("a", 0, bytes(40_000))
            writer.write("b", 0, bytes(40_000))
except MachineError as error:
    print(error.exit_code, error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(reserve)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"4 {tmp_path}/out/model.safetensors: File too large (80,"), done.stderr
    assert ("open" in lines) == (not reserve)
    assert os.listdir(tmp_path) == []
