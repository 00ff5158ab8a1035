"""The one walk over a base and a fine-tune: blocks of both, read once, fingerprinted on the way.

A verb gives what is to be done with a block (in any thread) and with its result (in order); the walk reads, feeds the
fingerprints, and tells when a tensor is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zendelta.checkpoint import fingerprint
from zendelta.checkpoint.reader import Checkpoint, Tensor
from zendelta.codec.block import Block, cut, cut_flat
from zendelta.codec.kernels import Kernels
from zendelta.codec.kernels.protocol import SEGMENT, Array
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Values
from zendelta.dtypes import DTYPE_BYTES
from zendelta.walk.order import run_in_order
from zendelta.walk.plan import Aligned, PairPlan, Term

SPARE = 64  # bytes behind every buffer, so that kernels may read whole words at the end


def buffer_bytes(block_bytes: int) -> int:
    """Return the size of a buffer for any block: one of `block_bytes`, or a segment of the widest dtype."""
    return max(block_bytes, 8 * SEGMENT) + SPARE


class Part(NamedTuple):
    """A contiguous part of one tensor pair.

    Attributes:
        aligned: the pair, or None for a base tensor that is read for its fingerprint only.
        tensor: the base's tensor, or None.
        term: which term the block belongs to, as an index; None where only a fingerprint is wanted.
        block: its place in the fine-tune's matrix (or in the flat tensor, for terms that replace).
        base: byte range in the base's tensor; empty where there is none.
        ft: byte range in the fine-tune's tensor; empty where there is none.
        last: whether the tensor is complete with it.
    """

    aligned: Aligned | None
    tensor: Tensor | None
    term: int | None
    block: Block
    base: tuple[int, int]
    ft: tuple[int, int]
    last: bool


@dataclass
class Scratch:
    """What one thread reads into."""

    base: Array
    ft: Array


@dataclass
class Prints:
    """Fingerprints of every tensor that the walk has completed, by name."""

    base: dict[str, str] = field(default_factory=dict)
    ft: dict[str, str] = field(default_factory=dict)


Work = Callable[[Part, Values | None, Values], Any]
Fold = Callable[[Part, Any], None]
Done = Callable[[Aligned, str | None, str], None]


def walk_pair(
    plan: PairPlan,
    kernels: Kernels,
    work: Work,
    fold: Fold,
    done: Done,
    *,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    only: Callable[[int], bool] = lambda index: True,
    unused: bool = True,
) -> Prints:
    """Walk over all blocks of a plan.

    Args:
        work: called as ``work(part, base, ft)`` for every part that belongs to a term, in any thread.
        fold: called as ``fold(part, result)`` for the same parts, in order.
        done: called as ``done(aligned, base fingerprint, fine-tune fingerprint)`` after a tensor's last part.
        progress: told the bytes that were read, part by part.
        only: which tensors, by their index in the plan; for several processes.
        unused: whether to read the base's other tensors too, for the fingerprint of the whole base.
    """
    prints = Prints()
    running: dict[str, fingerprint.Fingerprint] = {}
    room = buffer_bytes(kernels.block_bytes)

    def fetch(checkpoint: Checkpoint, tensor: Tensor | None, span: tuple[int, int], spare: Array) -> Values | None:
        if tensor is None or span[0] == span[1]:
            return None
        return Values(checkpoint.fetch(tensor.name, *span, spare, mapped=kernels.maps), tensor.dtype)

    def compute(part: Part, memory: Scratch) -> tuple[Values | None, Values | None, Any]:
        base = fetch(plan.base, part.tensor, part.base, memory.base)
        ft = fetch(plan.ft, part.aligned.ft if part.aligned else None, part.ft, memory.ft)
        result = work(part, base, ft) if part.term is not None and ft is not None else None
        return base, ft, result

    def settle(part: Part, found: tuple[Values | None, Values | None, Any]) -> None:
        base, ft, result = found
        read = 0
        for side, tensor, values in (
            ("base", part.tensor, base),
            ("ft", part.aligned.ft if part.aligned else None, ft),
        ):
            if tensor is None:
                continue
            if side not in running:
                running[side] = fingerprint.Fingerprint()
                running[side].array(tensor.dtype, tensor.shape)
            if values is not None:
                running[side].update(values.data)
                read += len(values.data)
        if result is not None:
            fold(part, result)
        if part.last:
            base_print = running.pop("base").hex() if "base" in running else None
            ft_print = running.pop("ft").hex() if "ft" in running else None
            if part.tensor is not None and base_print is not None:
                prints.base[part.tensor.name] = base_print
            if part.aligned is not None and ft_print is not None:
                prints.ft[part.aligned.ft.name] = ft_print
                done(part.aligned, base_print, ft_print)
        progress(read)

    run_in_order(
        _parts(plan, kernels.block_bytes, only, unused),
        compute,
        settle,
        threads=threads,
        scratch=lambda: Scratch(kernels.buffer(room), kernels.buffer(room)),
    )
    return prints


def _parts(plan: PairPlan, block_bytes: int, only: Callable[[int], bool], unused: bool) -> Iterator[Part]:
    for index, aligned in enumerate(plan.tensors):
        if only(index):
            yield from _of_pair(aligned, block_bytes)
    if unused:
        for tensor in plan.unused:
            yield from _mark_last(_hash_only(None, tensor, 0, block_bytes), None, tensor)


def _of_pair(aligned: Aligned, block_bytes: int) -> Iterator[Part]:
    """The terms' blocks in order, then whatever rows only the base has."""

    def parts() -> Iterator[Part]:
        reached = 0
        for index, term in enumerate(aligned.terms):
            for part in _of_term(aligned, index, term, block_bytes):
                reached = max(reached, part.base[1])
                yield part
        if aligned.base is not None:
            yield from _hash_only(aligned, aligned.base, reached, block_bytes)

    yield from _mark_last(parts(), aligned, aligned.base)


def _of_term(aligned: Aligned, index: int, term: Term, block_bytes: int) -> Iterator[Part]:
    ft, base = aligned.ft, aligned.base
    cols = as_matrix(ft.shape).cols
    size = DTYPE_BYTES[ft.dtype]
    base_size = DTYPE_BYTES[base.dtype] if base is not None else 0
    if term.codec == "sign":
        blocks = cut(*term.rows, cols, max(size, base_size), block_bytes)
    else:
        blocks = cut_flat(
            term.rows[0] * cols, term.rows[1] * cols, SEGMENT if base is not None else block_bytes // size
        )
    base_entries = as_matrix(base.shape).size if base is not None and term.codec != "new" else 0
    for block in blocks:
        start = block.start(cols)
        end = start + block.size
        # rows of a replacing term that the base lacks are read from the fine-tune alone
        base_end = min(end, base_entries)
        base_range = (start * base_size, base_end * base_size) if base_end > start else (0, 0)
        if term.codec != "sign" and start < base_end < end:
            yield from _split(aligned, index, block, base_end - start, base_size, size)
            continue
        yield Part(aligned, base, index, block, base_range, (start * size, end * size), False)


def _split(aligned: Aligned, index: int, block: Block, shared: int, base_size: int, size: int) -> Iterator[Part]:
    """Cut a flat block at the entry where the base ends."""
    start, middle, end = block.col, block.col + shared, block.col + block.cols
    first, second = Block(0, 1, start, shared, True), Block(0, 1, middle, end - middle, True)
    base, shared_bytes = aligned.base, (start * base_size, middle * base_size)
    yield Part(aligned, base, index, first, shared_bytes, (start * size, middle * size), False)
    yield Part(aligned, base, index, second, (0, 0), (middle * size, end * size), False)


def _hash_only(aligned: Aligned | None, tensor: Tensor, start: int, block_bytes: int) -> Iterator[Part]:
    for first in range(start, tensor.nbytes, block_bytes):
        last = min(first + block_bytes, tensor.nbytes)
        yield Part(aligned, tensor, None, Block(0, 0, 0, 0, True), (first, last), (0, 0), False)


def _mark_last(parts: Iterator[Part], aligned: Aligned | None, tensor: Tensor | None) -> Iterator[Part]:
    """Mark the last part; a tensor of no bytes at all gets an empty one."""
    previous = None
    for part in parts:
        if previous is not None:
            yield previous
        previous = part
    if previous is None:
        previous = Part(aligned, tensor, None, Block(0, 0, 0, 0, True), (0, 0), (0, 0), False)
    yield previous._replace(last=True)


def find_not_finite(values: Values, count: int) -> int | None:
    """Return the index of the first NaN or infinity among `count` values, or None."""
    data = values.data[: count * DTYPE_BYTES[values.dtype]]
    if values.dtype == "BF16":
        numbers: Any = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = data.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[values.dtype])
    found = np.flatnonzero(~np.isfinite(numbers))
    return int(found[0]) if len(found) else None


__all__ = ["Checkpoint", "Part", "Prints", "Scratch", "find_not_finite", "walk_pair"]
