"""The walk over a ``.bd`` file on its base: every tensor of the fine-tune, restored block by block.

The base's tensors and the file's arrays are fingerprinted on the way, so a wrong base or a damaged file is known by the
time a tensor is complete; whoever stages the output must publish nothing before `restore` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zendelta.bdfile import BdFile, Entry, Term
from zendelta.checkpoint.fingerprint import Fingerprint
from zendelta.checkpoint.reader import Checkpoint
from zendelta.codec import CODECS
from zendelta.codec.block import Block, cut, cut_flat
from zendelta.codec.dense import copy_values
from zendelta.codec.kernels import Kernels
from zendelta.codec.kernels.protocol import Array, Counts
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Values
from zendelta.dtypes import DTYPE_BYTES, FLOATING
from zendelta.errors import InputError, listed
from zendelta.walk.order import run_in_order
from zendelta.walk.pair import SPARE, buffer_bytes

_NAMED = 3  # how many differing tensors an error names before the work stops


def refuse_unfit(base: Checkpoint, file: BdFile) -> None:
    """Find what headers can tell: base tensors that are missing or of another shape. All are reported at once.

    Raises:
        InputError: `base` cannot be the base of `file`.
    """
    missing, misfits = [], []
    for name, entry in file.content.tensors.items():
        if entry.source is None or entry.base is None:
            continue
        tensor = base.tensors.get(base.aliases.get(entry.source, entry.source))
        if tensor is None:
            missing.append(entry.source)
        elif any(term.codec == "sign" for term in entry.terms) or not entry.terms:
            rows = max((term.rows[1] for term in entry.terms if CODECS[term.codec].adds), default=0)
            fits = tensor.shape[1:] == entry.shape[1:] and as_matrix(tensor.shape).all_rows >= rows
            if (
                not fits
                or not (tensor.dtype == entry.dtype or {tensor.dtype, entry.dtype} <= FLOATING)
                or (not entry.terms and tensor.shape != entry.shape)
            ):
                misfits.append(f"{name} {list(entry.shape)} on {tensor.dtype} {list(tensor.shape)}")
    if missing or misfits:
        parts = [f"{len(missing)} tensors are not in it: {listed(missing)}"] if missing else []
        parts += [f"{len(misfits)} have other shapes: {listed(misfits)}"] if misfits else []
        raise wrong_base(base, file, "; ".join(parts))


def wrong_base(base: Checkpoint, file: BdFile, why: str) -> InputError:
    """Return the error that `base` is not what `file` was made from."""
    wanted = file.content.base
    revision = f" at revision {wanted['revision']}" if wanted.get("revision") else ""
    return InputError(
        f"{base.path} is not the base of {file.path}: {why}", f"the file was made from {wanted['name']}{revision}"
    )


def array_blocks(term: Term, cols: int, size: int, block_bytes: int) -> Iterator[Block]:
    """Cut a term's rows as its codec wants them: whole rows where it adds, one long row where it replaces."""
    if CODECS[term.codec].adds:
        return cut(*term.rows, cols, size, block_bytes)
    return cut_flat(term.rows[0] * cols, term.rows[1] * cols, max(1, block_bytes // size))


def read_parts(file: BdFile, entry: Entry, term: Term, block: Block) -> dict[str, Array]:
    """Read the bytes of each role that restoring `block` takes, with a spare byte behind them."""
    parts: dict[str, Array] = {}
    needs = CODECS[term.codec].needs(entry.dtype, entry.shape, term.rows, term.parameters, block)
    for role, (first, last) in needs.items():
        data = np.empty(last - first + SPARE, np.uint8)
        file.read_into(term.parts[role], first, memoryview(data)[: last - first])
        parts[role] = data[: last - first + 1] if role == CODECS[term.codec].roles[0] else data[: last - first]
    return parts


class Payload:
    """The running fingerprint of one tensor's arrays, fed by the walk over its blocks."""

    def __init__(self, file: BdFile, entry: Entry) -> None:
        self._file, self._entry = file, entry
        self._print = Fingerprint()
        self._term = -1

    def feed(self, index: int, first_role: memoryview) -> None:
        """Take the next bytes of the first role of term `index`."""
        self._advance(index)
        self._print.update(first_role)

    def hex(self) -> str:
        """Return the fingerprint of all arrays."""
        self._advance(len(self._entry.terms))
        return self._print.hex()

    def _advance(self, index: int) -> None:
        while self._term < index:
            if self._term >= 0:
                term = self._entry.terms[self._term]
                for role in CODECS[term.codec].roles[1:]:
                    self._whole(term.parts[role])
            self._term += 1
            if self._term < len(self._entry.terms):
                term = self._entry.terms[self._term]
                info = self._file.arrays[term.parts[CODECS[term.codec].roles[0]]]
                self._print.array(info.dtype, info.shape)

    def _whole(self, array: str) -> None:
        info = self._file.arrays[array]
        self._print.array(info.dtype, info.shape)
        for offset in range(0, info.nbytes, 1 << 20):
            data = memoryview(bytearray(min(1 << 20, info.nbytes - offset)))
            self._file.read_into(array, offset, data)
            self._print.update(data)


class _Part(NamedTuple):
    name: str
    entry: Entry
    term: int | None  # None: the base's values as they are (same), or only its fingerprint where `block` is empty
    block: Block
    base: tuple[int, int]
    last: bool


@dataclass
class Restored:
    """What `restore` noticed.

    Attributes:
        clamped: how many entries of each tensor overflowed the wanted dtype; only where any did.
        added: entries to which a delta was added in the base's own dtype.
        unmoved: how many of them rounding left at the base's value.
    """

    clamped: dict[str, int] = field(default_factory=dict)
    added: int = 0
    unmoved: int = 0


class _Done(NamedTuple):
    values: Values | None
    parts: dict[str, Array]
    counts: Counts
    added: bool  # whether a delta was added in the base's own dtype


@dataclass
class _Scratch:
    base: Array
    out: Array


def restore(
    base: Checkpoint,
    file: BdFile,
    kernels: Kernels,
    dtype_of: Callable[[Entry], str],
    emit: Callable[[str, int, memoryview], None],
    *,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Restored:
    """Restore every tensor of `file` on `base`.

    Args:
        dtype_of: the dtype in which a tensor is wanted.
        emit: called as ``emit(name, offset, bytes)`` from any thread, in any order, for every byte of every tensor.
        progress: told the bytes of the base that were read.

    Raises:
        InputError: the wrong base (the first tensors that differ are named), or a damaged file.
    """
    refuse_unfit(base, file)
    restored = Restored()
    wrong: list[str] = []
    aliases: dict[str, list[str]] = {}
    for alias, target in file.content.aliases.items():
        aliases.setdefault(target, []).append(alias)
    prints: dict[str, Fingerprint] = {}
    payloads: dict[str, Payload] = {}

    def work(part: _Part, memory: _Scratch) -> _Done:
        values = None
        if part.base[1] > part.base[0] and part.entry.source is not None:
            name = base.aliases.get(part.entry.source, part.entry.source)
            values = Values(base.fetch(name, *part.base, memory.base, mapped=kernels.maps), base.tensors[name].dtype)
        parts: dict[str, Array] = {}
        counts, added = Counts(0, 0), False
        if part.block.size:
            entry, block = part.entry, part.block
            out = Values(memory.out, dtype_of(entry))
            if part.term is None:
                assert values is not None
                counts = copy_values(kernels, values, block.size, out)
            else:
                term = entry.terms[part.term]
                parts = read_parts(file, entry, term, block)
                counts = CODECS[term.codec].decode(
                    kernels, values, parts, entry.shape, term.parameters, block, entry.dtype, out
                )
                added = CODECS[term.codec].adds and values is not None and values.dtype == out.dtype
            size = DTYPE_BYTES[out.dtype]
            start = block.start(as_matrix(entry.shape).cols) * size
            data = memoryview(memory.out[: block.size * size])
            for target in (part.name, *aliases.get(part.name, ())):
                emit(target, start, data)
        return _Done(values, parts, counts, added)

    def fold(part: _Part, done: _Done) -> None:
        values, parts, counts, added = done
        entry = part.entry
        if counts.clamped:
            restored.clamped[part.name] = restored.clamped.get(part.name, 0) + counts.clamped
        if added:
            restored.added += part.block.size
            restored.unmoved += counts.left
        if entry.source is not None and values is not None:
            if part.name not in prints:
                prints[part.name] = _begin(base, entry.source)
            prints[part.name].update(values.data)
        if part.name not in payloads:
            payloads[part.name] = Payload(file, entry)
        if part.term is not None:
            term = entry.terms[part.term]
            first = CODECS[term.codec].roles[0]
            payloads[part.name].feed(part.term, memoryview(parts[first])[:-1])
        if part.last:
            if payloads.pop(part.name).hex() != entry.payload:
                raise InputError(f"{file.path}: the arrays of {part.name} are damaged", "get the .bd file again")
            found = prints.pop(part.name, None)
            if entry.source is not None and reads_base(entry):
                print_ = (found or _begin(base, entry.source)).hex()
                if print_ != entry.base:
                    wrong.append(part.name)
            if len(wrong) == _NAMED:
                raise _differs(base, file, wrong)
        progress(part.base[1] - part.base[0])

    room = buffer_bytes(kernels.block_bytes)
    run_in_order(
        _parts(base, file, dtype_of, kernels.block_bytes),
        work,
        fold,
        threads=threads,
        scratch=lambda: _Scratch(kernels.buffer(room), kernels.buffer(room)),
    )
    if wrong:
        raise _differs(base, file, wrong)
    return restored


def _differs(base: Checkpoint, file: BdFile, names: list[str]) -> InputError:
    return wrong_base(base, file, f"its values differ, first in {listed(names)}")


def _begin(base: Checkpoint, source: str) -> Fingerprint:
    tensor = base.tensors[base.aliases.get(source, source)]
    started = Fingerprint()
    started.array(tensor.dtype, tensor.shape)
    return started


def reads_base(entry: Entry) -> bool:
    """Whether restoring the tensor takes the base's values: it is the same, or a term adds to them."""
    return entry.source is not None and (not entry.terms or any(CODECS[term.codec].adds for term in entry.terms))


def _parts(base: Checkpoint, file: BdFile, dtype_of: Callable[[Entry], str], block_bytes: int) -> Iterator[_Part]:
    for name, entry in sorted(file.content.tensors.items()):
        previous = None
        for part in _of_entry(base, name, entry, dtype_of(entry), block_bytes):
            if previous is not None:
                yield previous
            previous = part
        yield (previous or _Part(name, entry, None, Block(0, 0, 0, 0, True), (0, 0), False))._replace(last=True)


def _of_entry(base: Checkpoint, name: str, entry: Entry, out_dtype: str, block_bytes: int) -> Iterator[_Part]:
    tensor = base.tensors.get(base.aliases.get(entry.source, entry.source)) if entry.source is not None else None
    base_size = DTYPE_BYTES[tensor.dtype] if tensor is not None else 0
    size = max(base_size, DTYPE_BYTES[entry.dtype], DTYPE_BYTES[out_dtype])
    matrix, reached = as_matrix(entry.shape), 0
    if not entry.terms:
        for block in cut_flat(0, matrix.size, max(1, block_bytes // size)):
            reached = (block.col + block.cols) * base_size
            yield _Part(name, entry, None, block, (block.col * base_size, reached), False)
    for index, term in enumerate(entry.terms):
        for block in array_blocks(term, matrix.cols, size, block_bytes):
            start, end = block.start(matrix.cols) * base_size, (block.start(matrix.cols) + block.size) * base_size
            if CODECS[term.codec].adds:
                reached = end
            yield _Part(name, entry, index, block, (start, end) if CODECS[term.codec].adds else (0, 0), False)
    if tensor is not None and reads_base(entry):
        for first in range(reached, tensor.nbytes, block_bytes):
            rest = (first, min(first + block_bytes, tensor.nbytes))
            yield _Part(name, entry, None, Block(0, 0, 0, 0, True), rest, False)
