"""The ``.bd`` container: one safetensors file that holds the delta of one fine-tuned model.

`docs/format.md` describes the bytes. Writing is a stream: room for the header is left from an upper bound, arrays are
appended while they are made, and the header is written last. Reading checks the header's own hash, that every array is
claimed by exactly one tensor or file and has the shape that its codec demands, and refuses what it does not know.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zendelta._version import __version__
from zendelta.checkpoint.fingerprint import Fingerprint, of_bytes
from zendelta.checkpoint.header import MAX_HEADER_BYTES, ArrayInfo, is_shape, parse_json, read_header
from zendelta.checkpoint.reader import OpenFile
from zendelta.checkpoint.sidecar import MAX_SIDE_BYTES, check_side_paths
from zendelta.codec import CODECS
from zendelta.codec.matrix import Matrix, as_matrix
from zendelta.codec.stats import STATS
from zendelta.dtypes import DTYPE_BYTES, FLOATING
from zendelta.errors import InputError, listed

FORMAT = 1
T = TypeVar("T")
_KEY = "zendelta"
_WIDEST_INT = 10**19
_WIDEST_FLOAT = -2.2250738585072014e-308


@dataclass(frozen=True)
class Term:
    """One codec's contribution to one tensor.

    Attributes:
        codec: its name in the registry of codecs.
        rows: the first row and the one after the last, of the stack's rows below each other.
        parts: the array that holds each role.
        parameters: whatever else the codec needs.
    """

    codec: str
    rows: tuple[int, int]
    parts: dict[str, str]
    parameters: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the term as it stands in the header."""
        return {"codec": self.codec, "rows": list(self.rows), "parts": self.parts, **self.parameters}


@dataclass(frozen=True)
class Entry:
    """One tensor of the fine-tuned model, as the header describes it; the names are those of `docs/format.md`."""

    source: str | None
    dtype: str
    shape: tuple[int, ...]
    base: str | None
    terms: tuple[Term, ...]
    payload: str
    stats: dict[str, Any]

    @property
    def matrix(self) -> Matrix:
        """The tensor viewed as matrices."""
        return as_matrix(self.shape)

    @property
    def codec(self) -> str:
        """The codecs of its terms, joined; ``same`` where there are none."""
        return "+".join(term.codec for term in self.terms) or "same"

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in the header."""
        return {
            "from": self.source,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "matrix": list(self.matrix),
            "base": self.base,
            "terms": [term.to_json() for term in self.terms],
            "payload": self.payload,
            "stats": self.stats,
        }


@dataclass
class Content:
    """Everything in the header but the arrays' places."""

    base: dict[str, Any]
    finetuned: dict[str, Any]
    options: dict[str, Any]
    tensors: dict[str, Entry]
    aliases: dict[str, str]
    dropped: list[str]
    files: dict[str, dict[str, str]]
    writer: str = f"zendelta {__version__}"

    def to_text(self) -> str:
        """Return the JSON text, sorted and without spaces, with its own hash in the key ``check``."""
        fields = {
            "format": FORMAT,
            "writer": self.writer,
            "base": self.base,
            "finetuned": self.finetuned,
            "options": self.options,
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
            "aliases": self.aliases,
            "dropped": self.dropped,
            "files": self.files,
        }
        check = of_bytes(_compact(fields).encode())
        return _compact({**fields, "check": check})


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def side_array(path: str) -> str:
    """Return the name of the array that carries the side file at `path`."""
    return f":file:{path}"


def array_name(tensor: str, role: str, index: int) -> str:
    """Return the name of the array of `tensor` for `role`, the `index`-th term that has this role."""
    return f"{tensor}:{role}" if index == 0 else f"{tensor}:{role}.{index}"


# --- writing ----------------------------------------------------------------------------------------------------


class BdWriter:
    """Writes a ``.bd`` file front to back into an open file; the caller stages and publishes it.

    Usage: `begin` an array, `write` its bytes (any order within it), `begin` the next; `rewind` forgets the arrays
    since a `mark`; `finish` writes the header.

    Args:
        fd: a file descriptor open for reading and writing.
        path: what the file will be called, for messages.
        room: an upper bound of the header's length in bytes, from `header_room`.
    """

    def __init__(self, fd: int, path: Path, room: int) -> None:
        self._fd, self._path, self._room = fd, path, room
        self._end = 8 + room
        self.arrays: dict[str, ArrayInfo] = {}

    def begin(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Append an array of zeros; its bytes follow through `write`."""
        nbytes = int(np.prod(shape, dtype=object)) * DTYPE_BYTES[dtype]
        self.arrays[name] = ArrayInfo(dtype, shape, self._end, nbytes)
        self._end += nbytes

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of array `name`."""
        write_fully(self._fd, self.arrays[name].offset + offset, data)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Read back what was written."""
        from zendelta.checkpoint.reader import read_fully

        read_fully(self._fd, self.arrays[name].offset + offset, out, self._path)

    def mark(self) -> int:
        """Return a point to which `rewind` can go back."""
        return len(self.arrays)

    def rewind(self, mark: int) -> None:
        """Forget every array begun since `mark`."""
        for name in list(self.arrays)[mark:]:
            self._end = min(self._end, self.arrays.pop(name).offset)

    def finish(self, content: Content) -> int:
        """Write the header and return the size of the file in bytes."""
        header = _header(content.to_text(), self.arrays, 8 + self._room)
        if len(header) > self._room:
            raise AssertionError(f"the header takes {len(header)} bytes, {self._room} were left for it")
        os.ftruncate(self._fd, self._end)
        write_fully(self._fd, 0, memoryview(self._room.to_bytes(8, "little") + header.ljust(self._room)))
        return self._end


def write_fully(fd: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at `offset`."""
    data = data.cast("B") if data.format != "B" or data.ndim != 1 else data
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:] if done else data, offset + done)


def _header(text: str, arrays: Mapping[str, ArrayInfo], start: int) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {_KEY: text}}
    for name, info in arrays.items():
        begin = info.offset - start
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, begin + info.nbytes]}
    return json.dumps(entries, separators=(",", ":")).encode()


def header_room(content: Content, arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Return the room to leave for a header, given its content and arrays at their widest.

    Raises:
        InputError: the header would be larger than safetensors readers accept.
    """
    widest = {name: ArrayInfo(dtype, shape, _WIDEST_INT, 0) for name, (dtype, shape) in arrays.items()}
    need = 8 + len(_header(content.to_text(), widest, 0))
    room = -(-need // 64) * 64 - 8
    if room > MAX_HEADER_BYTES:
        raise InputError(
            f"the header of {len(content.tensors)} tensors would take {room} bytes, over the {MAX_HEADER_BYTES} that "
            "safetensors files may have",
            "fuse the experts of the model into stacks, or compress it in parts",
        )
    return room


def widest_stats(names: tuple[str, ...]) -> dict[str, Any]:
    """Return statistics whose every number takes as much text as a number can."""
    return {name: _WIDEST_INT if name == "zeros" else _WIDEST_FLOAT for name in names}


# --- reading ----------------------------------------------------------------------------------------------------


class BdFile:
    """A ``.bd`` file that was opened: its header is read and checked, its arrays are read on demand."""

    def __init__(self, path: Path, content: Content, arrays: dict[str, ArrayInfo]) -> None:
        self.path, self.content, self.arrays = path, content, arrays

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BdFile:
        """Open the ``.bd`` file at `path`.

        Raises:
            InputError: not a ``.bd`` file, a damaged one, one of a later format, or one that uses unknown codecs.
        """
        path = Path(path)
        if not path.is_file():
            what = "a folder" if path.is_dir() else "not there"
            raise InputError(f"{path}: {what}; a .bd file is wanted", "name a file made by zendelta compress")
        header = read_header(path)
        text = header.metadata.get(_KEY)
        if not isinstance(text, str):
            raise InputError(f"{path}: a safetensors file, but not a .bd file", "name a file made by zendelta compress")
        try:
            file = cls(path, _parse(path, text), header.arrays)
            _check_arrays(file)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, f"the header lacks or misshapes a field ({error!r})") from None
        return file

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.path.stat().st_size

    def read_into(self, array: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of `array` from its byte `offset` on. Safe from any thread."""
        self._file.read_into(self.arrays[array].offset + offset, out)

    def read(self, array: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return all bytes of `array`. For small arrays: memory is not bounded."""
        data = np.empty(self.arrays[array].nbytes, np.uint8)
        self.read_into(array, 0, memoryview(data))
        return data

    def side_file(self, path: str) -> bytes:
        """Return the carried side file at `path`, checked. Raises InputError where it is damaged."""
        data = self.read(side_array(path)).tobytes()
        if of_bytes(data) != self.content.files[path]["fingerprint"]:
            raise InputError(f"{self.path}: the carried file {path} is damaged", "get the .bd file again")
        return data

    def payload_arrays(self, name: str) -> Iterator[str]:
        """Return the names of the arrays of tensor `name`, in the order of its payload fingerprint."""
        for term in self.content.tensors[name].terms:
            for role in CODECS[term.codec].roles:
                yield term.parts[role]

    def payload_size(self, name: str) -> int:
        """Return the bytes that the arrays of tensor `name` take."""
        return sum(self.arrays[array].nbytes for array in self.payload_arrays(name))

    @cached_property
    def _file(self) -> OpenFile:
        return OpenFile(self.path)


def payload_fingerprint(file: BdFile, name: str, chunk: int = 1 << 20) -> str:
    """Read the arrays of tensor `name` and return their fingerprint."""
    running, buffer = Fingerprint(), memoryview(bytearray(chunk))
    for array in file.payload_arrays(name):
        info = file.arrays[array]
        running.array(info.dtype, info.shape)
        for offset in range(0, info.nbytes, chunk):
            part = buffer[: min(chunk, info.nbytes - offset)]
            file.read_into(array, offset, part)
            running.update(part)
    return running.hex()


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: {what}", "the file is damaged: get it again, or run zendelta compress again")


def _parse(path: Path, text: str) -> Content:
    """Check the text's own hash first, then its version, then read it."""
    fields = parse_json(text, path, "the zendelta header")
    if not isinstance(fields, dict):
        raise _damaged(path, "the zendelta header is not an object")
    check = fields.get("check")
    if not isinstance(check, str) or of_bytes(text.replace(f'"check":"{check}",', "", 1).encode()) != check:
        raise _damaged(path, "the header does not fit its own hash")
    found = _typed(fields["format"], int)
    if found < FORMAT:
        raise _damaged(path, f"there is no format {found}")
    if found > FORMAT:
        raise InputError(
            f"{path}: format {found}; zendelta {__version__} knows format {FORMAT}", "upgrade zendelta to read it"
        )
    return Content(
        base=_model(fields["base"]),
        finetuned=_model(fields["finetuned"]),
        options=_typed(fields["options"], dict),
        tensors={name: _entry(value) for name, value in _typed(fields["tensors"], dict).items()},
        aliases={name: _typed(value, str) for name, value in _typed(fields["aliases"], dict).items()},
        dropped=[_typed(name, str) for name in _typed(fields["dropped"], list)],
        files={
            name: {key: _typed(_typed(value, dict)[key], str) for key in ("fingerprint", "from")}
            for name, value in _typed(fields["files"], dict).items()
        },
        writer=_typed(fields["writer"], str),
    )


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} where {kind.__name__} is wanted")
    return value


def _stats(value: Any, size: int) -> dict[str, Any]:
    """Statistics, or none of them: {}. Counts are whole, sums are finite, nothing is negative."""
    stats = _typed(value, dict)
    if stats and (
        stats.keys() != set(STATS)
        or not all(type(number) in (int, float) and 0 <= number < math.inf for number in stats.values())
        or not all(type(number) is float or number < 2**63 for number in stats.values())
        or _typed(stats["zeros"], int) > size
    ):
        raise ValueError(f"the statistics {stats!r:.200}")
    return stats


def _model(value: Any) -> dict[str, Any]:
    revision = _typed(value, dict)["revision"]
    return {
        "name": _typed(value["name"], str),
        "revision": None if revision is None else _typed(revision, str),
        "fingerprint": _typed(value["fingerprint"], str),
    }


def _entry(value: Any) -> Entry:
    source, base = _typed(value, dict)["from"], value["base"]
    if (source is None) != (base is None):
        raise ValueError(f"from {source!r:.80} with the fingerprint {base!r:.80}")
    if not is_shape(value["shape"]):
        raise ValueError(f"the shape {value['shape']!r:.80}")
    shape = tuple(value["shape"])
    if [_typed(size, int) for size in _typed(value["matrix"], list)] != list(as_matrix(shape)):
        raise ValueError(f"the matrix {value['matrix']!r:.80} for the shape {list(shape)}")
    return Entry(
        None if source is None else _typed(source, str),
        _typed(value["dtype"], str),
        shape,
        None if base is None else _typed(base, str),
        tuple(_term(term) for term in _typed(value["terms"], list)),
        _typed(value["payload"], str),
        _stats(value["stats"], as_matrix(shape).size),
    )


def _term(value: Any) -> Term:
    rest = {key: item for key, item in _typed(value, dict).items() if key not in ("codec", "rows", "parts")}
    first, last = _typed(value["rows"], list)
    parts = {role: _typed(array, str) for role, array in _typed(value["parts"], dict).items()}
    return Term(_typed(value["codec"], str), (_typed(first, int), _typed(last, int)), parts, rest)


def _check_arrays(file: BdFile) -> None:
    """Every array belongs to one term or file, with the dtype and shape that this demands; nothing is left over."""
    path, content = file.path, file.content
    unclaimed = dict(file.arrays)

    def claim(owner: str, array: str, dtype: str, shape: tuple[int, ...]) -> None:
        info = unclaimed.pop(array, None)
        if info is None or (info.dtype, info.shape) != (dtype, shape):
            have = "is missing or claimed twice" if info is None else f"is {info.dtype} {list(info.shape)}"
            raise _damaged(path, f"{owner}: its array {array} {have}, {dtype} {list(shape)} is wanted")

    for name, entry in content.tensors.items():
        if entry.dtype not in DTYPE_BYTES:
            raise _damaged(path, f"{name} has the unknown dtype {entry.dtype}")
        reached = 0
        for term in entry.terms:
            codec = CODECS.get(term.codec)
            if codec is None or set(term.parts) != set(codec.roles) or not codec.knows(term.parameters):
                raise InputError(
                    f"{path}: {name} uses the codec {term.codec} with {listed(sorted(term.parts))} "
                    f"{term.parameters or ''}, which zendelta {__version__} does not know",
                    "upgrade zendelta to read it",
                )
            first, last = term.rows
            if not reached == first <= last <= entry.matrix.all_rows:
                raise _damaged(path, f"{name}: the rows {first} to {last} of its {term.codec} term do not fit")
            reached = last
            for role, (dtype, shape) in codec.arrays(entry.dtype, entry.shape, term.rows, term.parameters).items():
                claim(name, term.parts[role], dtype, shape)
        if entry.terms and reached != entry.matrix.all_rows:
            raise _damaged(path, f"{name}: its terms end at row {reached} of {entry.matrix.all_rows}")
        if entry.source is None and entry.codec != "new":
            raise _damaged(path, f"{name}: has no base tensor, but a delta")
        if entry.dtype not in FLOATING and any(CODECS[term.codec].adds for term in entry.terms):
            raise _damaged(path, f"{name}: has a delta, though {entry.dtype} cannot have one")
    for alias, target in content.aliases.items():
        if target not in content.tensors or alias in content.tensors:
            raise _damaged(path, f"the alias {alias} of {target} does not fit the tensors")
    for side, entry_ in content.files.items():
        if entry_["from"] == "file":
            size = file.arrays[side_array(side)].nbytes
            if size > MAX_SIDE_BYTES:
                raise _damaged(path, f"the carried file {side} has {size} bytes, {MAX_SIDE_BYTES} at most")
            claim(side, side_array(side), "U8", (size,))
        elif entry_["from"] != "base":
            raise _damaged(path, f"the carried file {side} comes from {entry_['from']!r:.80}")
    try:
        check_side_paths(content.files)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from None
    if unclaimed:
        raise _damaged(path, f"arrays that no tensor claims: {listed(sorted(unclaimed))}")
