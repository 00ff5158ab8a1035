"""The fine-tune's own values, bit for bit, in its own dtype: they replace the base's values instead of adding to them.

``dense`` stands where the base has the tensor too, ``new`` for tensors and rows that only the fine-tune has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zendelta.codec.block import Block
from zendelta.codec.kernels.protocol import Array, Counts, Floats, Kernels
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Piece, Rows, Values
from zendelta.codec.stats import DeltaStats
from zendelta.dtypes import DTYPE_BYTES, FLOATING


class _Dense:
    roles = ("values",)
    adds = False

    def __init__(self, name: str) -> None:
        self.name = name

    def knows(self, parameters: Mapping[str, Any]) -> bool:
        return not parameters

    def arrays(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        whole = rows == (0, as_matrix(shape).all_rows)
        return {"values": (dtype, shape if whole else (rows[1] - rows[0], as_matrix(shape).cols))}

    def encoder(self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]) -> DenseEncoder:
        return DenseEncoder(DTYPE_BYTES[dtype], as_matrix(shape).cols, rows[0])

    def needs(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any], block: Block
    ) -> dict[str, tuple[int, int]]:
        first = block.start(as_matrix(shape).cols) - rows[0] * as_matrix(shape).cols
        size = DTYPE_BYTES[dtype]
        return {"values": (first * size, (first + block.size) * size)}

    def decode(
        self,
        kernels: Kernels,
        base: Values | None,
        parts: Mapping[str, Array],
        shape: tuple[int, ...],
        parameters: Mapping[str, Any],
        block: Block,
        stored: str,
        out: Values,
    ) -> Counts:
        return copy_values(kernels, Values(parts["values"], stored), block.size, out)


DENSE, NEW = _Dense("dense"), _Dense("new")


def copy_values(kernels: Kernels, values: Values, count: int, out: Values) -> Counts:
    """Copy `count` values, rounded once where the dtypes differ."""
    if values.dtype == out.dtype:
        nbytes = count * DTYPE_BYTES[out.dtype]
        out.data[:nbytes] = values.data[:nbytes]
        return Counts(0, count)
    return kernels.convert(values.data, values.dtype, count, out.data, out.dtype)


class DenseEncoder:
    """Copies the fine-tune's values, and measures how they differ from the base where that has a meaning."""

    def __init__(self, itemsize: int, cols: int, first_row: int) -> None:
        self.stats = DeltaStats()
        self._itemsize, self._cols, self._first = itemsize, cols, first_row * cols

    def encode(
        self, kernels: Kernels, base: Values | None, ft: Values, block: Block
    ) -> tuple[Array, Floats | None, bool]:
        """Return the values themselves, the sums of `difference`, and whether there was a base to differ from."""
        return ft.data, difference(kernels, base, ft, block.size), base is not None

    def fold(self, block: Block, done: tuple[Array, Floats | None, bool]) -> Iterator[Piece]:
        """Give the block's values."""
        values, sums, compared = done
        if sums is not None and compared:
            self.stats.add(sums, sums[:, 1], block.size)
        offset = (block.start(self._cols) - self._first) * self._itemsize
        yield Piece("values", offset, memoryview(values)[: block.size * self._itemsize])

    def finish(self) -> Iterator[Piece]:
        """Nothing is left at the end."""
        return iter(())


def difference(kernels: Kernels, base: Values | None, ft: Values, count: int) -> Floats | None:
    """Return float64 [1, 3] sums of the difference of `count` values as `Kernels.encode` does; None without a base.

    Values that are not floating are never subtracted: they count as zeros where they are equal, else as nothing.
    Without a base only whether all are finite is told: the first sum is then not finite.
    """
    if ft.dtype not in FLOATING:
        if base is None:
            return None
        if base.dtype != ft.dtype:
            return np.zeros((1, 3))
        size = DTYPE_BYTES[ft.dtype]
        a, b = base.data[: count * size].reshape(count, size), ft.data[: count * size].reshape(count, size)
        return np.array([[0.0, 0.0, float((a == b).all(1).sum())]])
    if base is None or base.dtype not in FLOATING:
        base = Values(np.zeros(count * DTYPE_BYTES[ft.dtype], np.uint8), ft.dtype)
    bits = np.empty((count + 7) // 8 + 1, np.uint8)
    return kernels.encode(base.data, base.dtype, ft.data, ft.dtype, 1, count, 0, bits)
