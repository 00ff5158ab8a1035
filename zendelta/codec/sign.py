"""One bit per weight: the sign of its change, and one scale (alpha) per stored row or per matrix.

BitDelta (arXiv 2402.10193, section 3.1): for the signs of d, mean |d| is the scale with the least squared error. The
paper has one scale per matrix; a scale per row costs 32 bits per row more and fits rows of unequal change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zendelta.codec.block import Block
from zendelta.codec.kernels.protocol import Array, Counts, Floats, Kernels
from zendelta.codec.matrix import Matrix, as_matrix
from zendelta.codec.protocol import Piece, Rows, Values
from zendelta.codec.stats import DeltaStats

Alphas = np.ndarray[Any, np.dtype[np.float32]]


class _Sign:
    name = "sign"
    roles = ("sign", "alpha")
    adds = True

    def knows(self, parameters: Mapping[str, Any]) -> bool:
        return set(parameters) == {"scale"} and parameters["scale"] in ("row", "matrix")

    def arrays(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        matrix, count = as_matrix(shape), rows[1] - rows[0]
        whole = parameters["scale"] == "row" or matrix.stack == 1 or not count % matrix.rows
        if rows[0] or not (count and matrix.cols and whole):
            raise ValueError(f"signs of rows {rows[0]} to {rows[1]} of {list(shape)}")
        alphas = count if parameters["scale"] == "row" else _matrices(matrix, count)
        return {"sign": ("U8", (count, (matrix.cols + 7) // 8)), "alpha": ("F32", (alphas,))}

    def encoder(self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]) -> SignEncoder:
        return SignEncoder(as_matrix(shape), rows[1] - rows[0], parameters["scale"])

    def needs(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any], block: Block
    ) -> dict[str, tuple[int, int]]:
        matrix, row = as_matrix(shape), block.row - rows[0]
        first = row * ((matrix.cols + 7) // 8) + block.col // 8
        length = block.rows * ((block.cols + 7) // 8)
        if parameters["scale"] == "row":
            alpha = (4 * row, 4 * (row + block.rows))
        else:
            alpha = (4 * _matrix_of(matrix, row), 4 * (_matrix_of(matrix, row + block.rows - 1) + 1))
        return {"sign": (first, first + length), "alpha": alpha}

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
        assert base is not None
        alpha = row_alphas(parts["alpha"].view(np.float32), as_matrix(shape), parameters["scale"], block)
        return kernels.decode(base.data, base.dtype, parts["sign"], alpha, block.rows, block.cols, out.data, out.dtype)


SIGN = _Sign()


def row_alphas(alphas: Alphas, matrix: Matrix, scale: str, block: Block) -> Alphas:
    """Return one alpha for each row of `block` from the alphas that `needs` asked for."""
    if scale == "row":
        return alphas
    first = _matrix_of(matrix, block.row)
    return alphas[[_matrix_of(matrix, row) - first for row in range(block.row, block.row + block.rows)]]


def _matrices(matrix: Matrix, rows: int) -> int:
    """How many matrices the first `rows` rows of a stack touch; a grown single matrix stays one."""
    return min(rows, 1) if matrix.stack == 1 else rows // matrix.rows


def _matrix_of(matrix: Matrix, row: int) -> int:
    return 0 if matrix.stack == 1 else row // matrix.rows


class SignEncoder:
    """Encodes the first `rows` rows of a tensor; `stats` are complete after `finish`."""

    def __init__(self, matrix: Matrix, rows: int, scale: str) -> None:
        self.matrix, self.rows, self.scale = matrix, rows, scale
        self.stats = DeltaStats()
        self._row = np.zeros(3)  # sums of a row of which more segments are to come
        self._matrix_sums: list[float] = [0.0] * (_matrices(matrix, rows) if scale == "matrix" else 0)

    def encode(self, kernels: Kernels, base: Values | None, ft: Values, block: Block) -> tuple[Array, Floats]:
        """Return the block's sign bits with a spare byte, and its sums."""
        assert base is not None
        bits = np.empty(block.rows * ((block.cols + 7) // 8) + 1, np.uint8)
        sums = kernels.encode(base.data, base.dtype, ft.data, ft.dtype, block.rows, block.cols, block.row, bits)
        return bits, sums

    def fold(self, block: Block, done: tuple[Array, Floats]) -> Iterator[Piece]:
        """Give the block's signs and, where its rows are complete, their alphas."""
        bits, sums = done
        stride = (self.matrix.cols + 7) // 8
        yield Piece("sign", block.row * stride + block.col // 8, memoryview(bits)[:-1])
        if block.cols < self.matrix.cols:
            self._row += sums[0]
            if not block.ends_row:
                return
            sums, self._row = self._row[None, :], np.zeros(3)
        size = sums[:, 0]
        if self.scale == "row":
            alphas = (size / self.matrix.cols).astype(np.float32)
            self.stats.add(sums, _gain(alphas, size, self.matrix.cols), block.rows * self.matrix.cols)
            yield Piece("alpha", 4 * block.row, memoryview(alphas).cast("B"))
        else:
            self.stats.add(sums, np.zeros(block.rows), block.rows * self.matrix.cols)
            for row, value in enumerate(size.tolist(), block.row):
                self._matrix_sums[_matrix_of(self.matrix, row)] += value

    def finish(self) -> Iterator[Piece]:
        """Give the alphas of whole matrices."""
        if self.scale == "row" or not self.rows:
            return
        height = self.matrix.rows if self.matrix.stack > 1 else self.rows
        sizes = np.array(self._matrix_sums)
        alphas = (sizes / (height * self.matrix.cols)).astype(np.float32)
        self.stats.add(np.zeros((len(sizes), 3)), _gain(alphas, sizes, height * self.matrix.cols), 0)
        yield Piece("alpha", 0, memoryview(alphas).cast("B"))


def _gain(alphas: Alphas, sizes: Floats, count: int) -> Floats:
    """Return 2 a sum|d| - n a^2: by how much signs at scale a reduce the squared error of n entries."""
    wide = alphas.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # sums that are not finite: the caller refuses the tensor
        gain: Floats = wide * (2 * sizes - count * wide)
    return gain
