"""A checkpoint in safetensors shards, written as a stream: any tensor, any part of it, in any order.

Names, dtypes and shapes are known before the first byte, so every shard's header is written first and its file gets
its final size at once: a disk that is too full says so before the work. Data then goes to its place with pwrite, from
any thread, and memory holds nothing but the caller's block. At the end each tensor must have received each of its
bytes exactly once, and the safetensors library must accept each file.

    specs = [TensorSpec("lm_head.weight", "BF16", (32000, 4096))]
    with CheckpointWriter(folder, specs, max_shard_bytes=parse_size("5GB")) as writer:
        writer.write("lm_head.weight", 0, rows)
"""

from __future__ import annotations

import bisect
import errno
import functools
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from zendelta.checkpoint.disk import check_space, disk_errors, sync
from zendelta.checkpoint.header import MAX_HEADER_BYTES
from zendelta.dtypes import DTYPE_BYTES
from zendelta.errors import InputError, MachineError, UsageError, ZendeltaError, listed

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX = "model.safetensors.index.json"
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_CHUNK = 1 << 30  # bytes in one write call: macOS refuses 2 GiB, Linux cuts it short
_NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)})
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``5GB``, ``500 MB``, ``1.5GiB`` or ``1000000`` stands for.

    As in transformers, 1 GB is 10**9 bytes; 1 GiB is 2**30. Units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, in any case.

    Raises:
        UsageError: not a size, or less than one byte.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    if found and found[2].upper() in _UNITS and ("." not in found[1] or found[2]):
        size = int(Decimal(found[1]) * _UNITS[found[2].upper()])
        if size > 0:
            return size
    raise UsageError(f"{text!r} is not a size", "write it like 5GB, 500MB, 2GiB, or as a number of bytes")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be written: its name, its safetensors dtype such as ``BF16``, and its shape (``()`` for one
    number). Raises InputError for a dtype that zendelta does not write, and for a shape that is none."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"{self.name}: zendelta cannot write the dtype {self.dtype}")
        if any(size < 0 for size in self.shape):
            raise InputError(f"{self.name}: {list(self.shape)} is not a shape")

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint: its name, and its tensors in the order given."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors' values; the file is larger by its header."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[Shard]:
    """Split tensors into shards, greedily in the order given, exactly as transformers splits them.

    A tensor larger than the limit gets a shard of its own. One shard is ``model.safetensors``, more are
    ``model-00001-of-00003.safetensors`` and so on.

    Args:
        specs: the tensors.
        max_shard_bytes: the most bytes of values in one shard, at least 1.

    Raises:
        InputError: no tensors, or a name twice.
        UsageError: a limit below 1.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"a shard of at most {max_shard_bytes} bytes holds nothing", "give a size such as 5GB")
    groups: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise InputError(f"the tensor {spec.name} is there twice", "every tensor of a checkpoint has its own name")
        names.add(spec.name)
        if spec.nbytes > max_shard_bytes:
            groups.append([spec])
            continue
        if filled + spec.nbytes > max_shard_bytes:
            groups.append(current)
            current, filled = [], 0
        current.append(spec)
        filled += spec.nbytes
    if current:
        groups.append(current)
    if not groups:
        raise InputError("there are no tensors to write", "is it the right model?")
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def _layout(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """The bytes before a shard's data (length and header), and where in the file each tensor begins.

    Wider types come first, and those of one width in the order given, as safetensors itself writes: then each tensor
    begins at a multiple of its element's size, which readers that map the file rely on.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    at = 0
    for spec in sorted(shard.tensors, key=lambda spec: -DTYPE_BYTES[spec.dtype]):
        if spec.name == "__metadata__":
            raise InputError("a tensor cannot be called __metadata__", "rename it: safetensors keeps that name")
        begins[spec.name] = at
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    try:
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"a tensor's name in {shard.file} is not valid Unicode ({error.reason})") from None
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the header of {shard.file} would take {len(header):,} bytes, readers accept {MAX_HEADER_BYTES:,}",
            "write smaller shards",
        )
    start = 8 + len(header)
    return len(header).to_bytes(8, "little") + header, {name: start + begin for name, begin in begins.items()}


@functools.cache
def _fallocate() -> Callable[[int, int], int] | None:
    """Linux's fallocate (descriptor, size -> error number, 0 when done).

    Not posix_fallocate: where the file system cannot reserve space, glibc fills the file block by block instead, which
    takes hours on a network disk.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        function = getattr(library, "fallocate64", None) or library.fallocate
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return lambda handle, size: 0 if function(handle, 0, 0, size) == 0 else ctypes.get_errno()


def _allocate(handle: int, size: int) -> None:
    """Give an open file its final size, and its space on the disk where the file system can reserve it."""
    reserve = _fallocate()
    while reserve is not None:
        number = reserve(handle, size)
        if number == 0:
            return
        if number in _NO_ROOM:
            raise OSError(number, os.strerror(number))
        if number != errno.EINTR:
            break
    os.ftruncate(handle, size)


_seeking = threading.Lock()


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at a place of an open file, from any thread."""
    while data:
        if sys.platform == "win32":
            with _seeking:
                os.lseek(handle, offset, os.SEEK_SET)
                written = os.write(handle, data[:_CHUNK])
        else:
            written = os.pwrite(handle, data[:_CHUNK], offset)
        data = data[written:]
        offset += written


def _as_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise ValueError("the data must be C-contiguous")
    try:
        return view.cast("B")
    except TypeError:  # a format that memoryview cannot cast, such as complex numbers
        return memoryview(view.tobytes())


class _Tensor:
    """Where a tensor lies, and which of its bytes were claimed: disjoint ranges, sorted, neighbours joined."""

    __slots__ = ("begin", "nbytes", "shard", "starts", "stops")

    def __init__(self, shard: _ShardFile, begin: int, nbytes: int) -> None:
        self.shard, self.begin, self.nbytes = shard, begin, nbytes
        self.starts: list[int] = []
        self.stops: list[int] = []

    def claim(self, start: int, stop: int) -> None:
        """Take a range of bytes. Raises ValueError if it leaves the tensor or a part of it is taken."""
        at = bisect.bisect_right(self.starts, start)
        if not 0 <= start < stop <= self.nbytes:
            raise ValueError(f"bytes {start} to {stop} are not within its {self.nbytes}")
        if (at > 0 and self.stops[at - 1] > start) or (at < len(self.starts) and self.starts[at] < stop):
            raise ValueError(f"bytes {start} to {stop} were written before, at least a part of them")
        left = at > 0 and self.stops[at - 1] == start
        right = at < len(self.starts) and self.starts[at] == stop
        if left and right:
            self.stops[at - 1] = self.stops.pop(at)
            del self.starts[at]
        elif left:
            self.stops[at - 1] = stop
        elif right:
            self.starts[at] = start
        else:
            self.starts.insert(at, start)
            self.stops.insert(at, stop)

    @property
    def claimed(self) -> int:
        return sum(self.stops) - sum(self.starts)


class _ShardFile:
    """A shard's file: open from its first to its last byte of data, so that few files are open at a time."""

    __slots__ = ("done", "handle", "head", "missing", "path", "shard", "size")

    def __init__(self, folder: Path, shard: Shard, head: bytes) -> None:
        self.path = folder / shard.file
        self.shard = shard
        self.head = head
        self.missing = shard.nbytes
        self.size = len(head) + shard.nbytes
        self.done = False  # all data is on the disk
        self.handle: int | None = None

    def create(self) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        try:
            _allocate(handle, self.size)
            _write_at(handle, memoryview(self.head), 0)
            if not self.missing:
                os.fsync(handle)
                self.done = True
        finally:
            os.close(handle)

    def open(self) -> int:
        if self.handle is None:
            self.handle = os.open(self.path, os.O_WRONLY | _BINARY)
        return self.handle

    def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            os.close(handle)


class CheckpointWriter:
    """Write a checkpoint of known tensors into a folder, any part of any tensor at any time, from any thread.

    Making one touches no file and gives `shards`, `sizes` and `total_bytes`. Entering it (``with``) creates the files
    at their full size. Leaving it without an exception calls `finish`; with one, it closes the files and leaves them
    to the folder's owner, `staged_folder`, to remove.

    Args:
        folder: an existing folder that holds none of the files yet.
        specs: the tensors; each shard holds them in this order, wider types first.
        max_shard_bytes: the most bytes of values in one shard.

    Raises:
        InputError: no tensors, a name twice, a name that safetensors cannot hold.
        UsageError: a shard's header over the 100 MB that readers accept.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], *, max_shard_bytes: int) -> None:
        self.folder = folder
        self.shards = plan_shards(specs, max_shard_bytes)
        self._files: list[_ShardFile] = []
        self._tensors: dict[str, _Tensor] = {}
        for shard in self.shards:
            head, begins = _layout(shard)
            file = _ShardFile(folder, shard, head)
            self._files.append(file)
            for spec in shard.tensors:
                self._tensors[spec.name] = _Tensor(file, begins[spec.name], spec.nbytes)
        self.index = self._index() if len(self.shards) > 1 else b""
        self._state = threading.Condition()
        self._writing = 0  # calls of write that are under way
        self._open = False
        self._finished = False

    def _index(self) -> bytes:
        names = {spec.name: shard.file for shard in self.shards for spec in shard.tensors}
        total = sum(shard.nbytes for shard in self.shards)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file that will be written, by name."""
        sizes = {file.shard.file: file.size for file in self._files}
        return sizes | ({INDEX: len(self.index)} if self.index else {})

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(self.sizes.values())

    def __enter__(self) -> CheckpointWriter:
        """Create every shard at its full size, its header written.

        Raises:
            MachineError: the disk is too full, or may not be written.
            UsageError: a file of that name is there already.
        """
        check_space(self.folder, self.total_bytes)
        for file in self._files:
            try:
                with disk_errors(file.path, file.size):
                    file.create()
            except FileExistsError:
                raise UsageError(f"{file.path} exists already", "write into a new folder") from None
        self._open = True
        return self

    def write(self, name: str, byte_offset: int, data: Buffer) -> None:
        """Write a part of a tensor. Safe to call from several threads at once.

        Args:
            name: the tensor.
            byte_offset: where in the tensor the part begins, in bytes.
            data: any C-contiguous buffer: bytes, a NumPy array. Little-endian, as safetensors has it.

        Raises:
            ValueError: an unknown name, bytes outside the tensor or written before, data that is not contiguous.
            MachineError: the disk is full or failing.
        """
        view = _as_bytes(data)
        with self._state:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise ValueError(f"{name} is not a tensor of this checkpoint")
            if not self._open:
                raise ValueError("the checkpoint is not open for writing")
            if not view:
                return
            try:
                tensor.claim(byte_offset, byte_offset + len(view))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            file = tensor.shard
            with disk_errors(file.path, file.size):
                handle = file.open()
            self._writing += 1
        try:
            with disk_errors(file.path, file.size):
                _write_at(handle, view, tensor.begin + byte_offset)
                with self._state:
                    file.missing -= len(view)
                    last = file.missing == 0
                if last:  # every byte is claimed, so nobody else writes here
                    os.fsync(handle)
                    file.close()
                    file.done = True
        finally:
            with self._state:
                self._writing -= 1
                self._state.notify_all()

    def finish(self) -> None:
        """Check that every tensor is whole, that safetensors reads every file, and write the index.

        Raises:
            ZendeltaError: a tensor lacks some of its bytes (a fault of ours).
            MachineError: the disk is full or failing; the safetensors library does not accept a file.
        """
        if self._finished:
            return
        with self._state:
            self._state.wait_for(lambda: self._writing == 0)
            short = [
                f"{name} ({tensor.claimed} of {tensor.nbytes} bytes)"
                for name, tensor in self._tensors.items()
                if tensor.claimed != tensor.nbytes
            ]
            unwritten = [str(file.path) for file in self._files if not file.done]
        if short or unwritten or not self._open:
            raise ZendeltaError(
                f"{self.folder}: the checkpoint is not whole: {listed(short or unwritten or ['never opened'])}",
                "nothing is published; this is a fault of zendelta: please report it",
            )
        for file in self._files:
            _self_check(file)
        with disk_errors(self.folder):
            if self.index:
                with (self.folder / INDEX).open("xb") as index:
                    index.write(self.index)
                sync(self.folder / INDEX)
            sync(self.folder)
        self._finished = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            with self._state:
                self._open = False
                # A descriptor that is closed under a writing thread could become another file's.
                self._state.wait_for(lambda: self._writing == 0)
                for file in self._files:
                    file.close()


def _self_check(file: _ShardFile) -> None:
    """Open a finished shard with the safetensors library, and compare what it sees with what was meant."""
    from safetensors import SafetensorError, __version__, safe_open

    wanted = {spec.name: (spec.dtype, list(spec.shape)) for spec in file.shard.tensors}
    try:
        with safe_open(str(file.path), framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            found = {name: (part.get_dtype(), list(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise MachineError(
            f"{file.path.name}: the safetensors library ({__version__}) does not read what was written: {error}",
            "upgrade it (pip install -U safetensors); if that does not help, check the disk",
        ) from error
    if found != wanted:
        names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise ZendeltaError(f"{file.path.name}: the safetensors library reads other tensors: {listed(names)}")
