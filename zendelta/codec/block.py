"""A part of a tensor's matrix that is handled at once, and how a matrix is cut into such parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zendelta.codec.kernels.protocol import SEGMENT


class Block(NamedTuple):
    """Whole rows [row, row + rows), or, of a single row wider than a segment, its columns [col, col + cols).

    Either way its entries follow each other in the tensor's bytes.
    """

    row: int
    rows: int
    col: int
    cols: int
    ends_row: bool

    def start(self, width: int) -> int:
        """Return the index of its first entry in a matrix of `width` columns."""
        return self.row * width + self.col

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.rows * self.cols


def cut(first: int, last: int, cols: int, itemsize: int, block_bytes: int) -> Iterator[Block]:
    """Cut rows [first, last) of a matrix into blocks of about `block_bytes` bytes, in order.

    A row over `SEGMENT` columns is cut at multiples of that, whatever the block size: sums are defined over segments.
    """
    if cols == 0:
        return
    if cols > SEGMENT:
        for row in range(first, last):
            for col in range(0, cols, SEGMENT):
                width = min(SEGMENT, cols - col)
                yield Block(row, 1, col, width, col + width == cols)
        return
    height = max(1, block_bytes // (cols * itemsize))
    for row in range(first, last, height):
        yield Block(row, min(height, last - row), 0, cols, True)


def cut_flat(first: int, last: int, step: int) -> Iterator[Block]:
    """Cut entries [first, last) of a tensor, taken as one long row, into blocks of `step` entries."""
    for start in range(first, last, step):
        yield Block(0, 1, start, min(step, last - start), True)
