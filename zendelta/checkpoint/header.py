"""The header of a safetensors file, read and checked without loading anything else.

A file is eight bytes (little-endian header length), a JSON header, and the arrays' bytes without holes. Reading it
here, rather than through the safetensors library, gives byte offsets (the walk reads row blocks with ``pread``) and
errors that say which file is short by how much.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zendelta.dtypes import DTYPE_BYTES
from zendelta.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""The largest header that safetensors readers accept."""

_DIMENSIONS = 64  # the most that numpy has
_LARGEST = 2**63  # what no size, offset or count of bytes reaches
_SURROGATE = re.compile(r"\\u[dD][89abcdefABCDEF]")

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched yet."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Where one array lies in a file.

    Attributes:
        dtype: its safetensors name, such as ``BF16``.
        shape: its dimensions; ``()`` for a scalar.
        offset: its first byte, counted from the start of the file.
        nbytes: how many bytes it takes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: the metadata, and every array in file order."""

    metadata: dict[str, str]
    arrays: dict[str, ArrayInfo]


def parse_json(text: str | bytes, where: Path, what: str) -> Any:
    """Parse JSON that must not hold one key twice, nor half of a character. Raises InputError naming `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{where}: {what} has the key {twice!r} twice", "the file is damaged: get it again")
        return found

    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique)
        if _SURROGATE.search(text):  # allowed in pairs only; a lone one could be neither written nor printed
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: {what} is not valid JSON ({error})", "the file is damaged: get it again") from None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file that holds an object. Raises InputError where it is unreadable, damaged or too large."""
    try:
        size = path.stat().st_size
        if size > MAX_HEADER_BYTES:
            raise InputError(f"{path}: {size} bytes, more than a file of its kind takes", "get the file again")
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    value = parse_json(text, path, "it")
    if not isinstance(value, dict):
        raise InputError(f"{path}: it is not a JSON object", "get the file again")
    return value


def is_shape(value: Any) -> bool:
    """Whether a value from JSON is a list of dimensions that some array could have."""
    if not isinstance(value, list) or len(value) > _DIMENSIONS:
        return False
    if not all(type(size) is int and 0 <= size < _LARGEST for size in value):
        return False
    return math.prod(size or 1 for size in value) < _LARGEST


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`.

    Raises:
        InputError: a Git LFS pointer, not a safetensors file, or one whose arrays and size do not agree.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for whoever writes into it
            raise InputError(f"{path}: not a regular file", "is it the right path?")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(64)
            if start.startswith(LFS_POINTER):
                raise InputError(
                    f"{path}: a Git LFS pointer of {size} bytes, not the weights themselves",
                    f"fetch the file: cd '{path.parent}' && git lfs pull --include '{path.name}'",
                )
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > MAX_HEADER_BYTES or start[8:9] != b"{":
                raise InputError(
                    f"{path}: not a safetensors file ({size} bytes)", "is it the right file, and fetched whole?"
                )
            if size < 8 + length:
                raise InputError(
                    f"{path}: cut short: {size} bytes, its header alone takes {8 + length}", "fetch the file again"
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    entries = parse_json(text, path, "the header")
    if not isinstance(entries, dict):
        raise InputError(f"{path}: the header is not a JSON object", "the file is damaged: get it again")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise InputError(f"{path}: the header's __metadata__ is not an object", "the file is damaged: get it again")
    return Header(metadata, _arrays(path, entries, 8 + length, size))


def _arrays(path: Path, entries: dict[str, Any], data_start: int, size: int) -> dict[str, ArrayInfo]:
    """Check every entry alone, then that together they fill the file without holes."""
    arrays = {name: _array(path, name, entry, data_start) for name, entry in entries.items()}
    arrays = dict(sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = data_start
    for name, info in arrays.items():
        if info.offset != end:
            raise InputError(
                f"{path}: {name} begins at byte {info.offset}, where {end} was expected",
                "the header is damaged: get the file again",
            )
        end += info.nbytes
    if size != end:
        verb = "cut short" if size < end else "too long"
        raise InputError(f"{path}: {verb}: {size} bytes, {end} expected", "fetch the file again")
    return arrays


def _array(path: Path, name: str, entry: Any, data_start: int) -> ArrayInfo:
    damaged = "the header is damaged: get the file again"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = is_shape(shape) and all(type(place) is int and 0 <= place < _LARGEST for place in (begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str):
        raise InputError(f"{path}: the header's entry of {name} is malformed", damaged)
    if dtype not in DTYPE_BYTES:
        raise InputError(
            f"{path}: {name} has the dtype {dtype}, which zendelta cannot read",
            "packed quantised weights are not supported: use the unquantised checkpoint",
        )
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != need:
        raise InputError(f"{path}: {name} is {dtype} {list(shape)}, {need} bytes, but {end - begin} are given", damaged)
    return ArrayInfo(dtype, tuple(shape), data_start + begin, need)
