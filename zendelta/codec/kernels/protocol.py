"""What every set of kernels offers: the CPU's, and plain torch's on any device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

ENCODE, DECODE, RESIDUAL, MOMENTS = 3, 2, 4, 3
"""Sums per row that the kernels return."""

SEGMENT = 1 << 16
"""Columns over which a kernel may add up; longer rows are handed over in such pieces, so that no sum depends on the
block size."""


class Counts(NamedTuple):
    """What a kernel noticed while it wrote values: how many it clamped, and how many equal what it read."""

    clamped: int
    left: int


class Kernels(Protocol):
    """Passes over a block of `rows` x `cols` entries, row after row without gaps.

    Values come as uint8 arrays of raw little-endian bytes with their safetensors dtype (F64, F32, F16 or BF16); sign
    bits as uint8 arrays of `rows` x ceil(cols / 8) bytes plus one spare byte at the end; alphas as float32 of `rows`.
    Neither rows nor cols is zero. Deltas are fine-tuned minus base, rounded once to float32.
    """

    block_bytes: int
    maps: bool
    """Whether the kernels read mapped files as fast as memory: else blocks are read into `buffer` first."""

    def buffer(self, nbytes: int) -> Array:
        """Return uint8 memory of `nbytes` to read into, from which copies to the device are fast."""
        ...

    def encode(
        self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int, first_row: int, bits: Array
    ) -> Floats:
        """Write the delta's sign bits; return float64 [rows, 3]: sum of its sizes, sum of squares, unchanged entries.

        A delta that is zero in float32 counts as +1 where (first_row + row) + column is even. A sum that is not finite
        tells of a NaN or an infinity in the row.
        """
        ...

    def decode(
        self, base: Array, base_dtype: str, bits: Array, alpha: Array, rows: int, cols: int, out: Array, out_dtype: str
    ) -> Counts:
        """Write base + alpha * sign, added in float32 (float64 where a side is F64) and rounded once to `out_dtype`.

        What would overflow is clamped to the largest finite value.
        """
        ...

    def residual(
        self,
        base: Array,
        base_dtype: str,
        ft: Array,
        ft_dtype: str,
        bits: Array,
        alpha: Array,
        rows: int,
        cols: int,
        out_dtype: str,
    ) -> Floats:
        """Return float64 [rows, 4] on the delta d, the signs s and the restored weights r, rounded as in decode:

        sum d s, max |fine-tuned - r|, count of r = base, sum (fine-tuned - r)^2.
        """
        ...

    def moments(self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int) -> Floats:
        """Return float64 [rows, 3]: sums of base^2, base * fine-tuned, fine-tuned^2."""
        ...

    def convert(self, values: Array, dtype: str, count: int, out: Array, out_dtype: str) -> Counts:
        """Write `count` values rounded once to `out_dtype`, clamped as in decode."""
        ...
