"""The one view of a tensor as matrices, for codecs, merges and decompositions: by shape alone."""

from __future__ import annotations

import math
from typing import NamedTuple

_NARROWEST_STACKED = 32


class Matrix(NamedTuple):
    """A stack of equal matrices, rows and columns as stored."""

    stack: int
    rows: int
    cols: int

    @property
    def all_rows(self) -> int:
        """Rows of the whole stack, one below the other."""
        return self.stack * self.rows

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.stack * self.rows * self.cols


def as_matrix(shape: tuple[int, ...]) -> Matrix:
    """View a shape as matrices.

    Two dimensions are a matrix. Three with both last ones of at least 32 are a stack (fused experts). Anything else
    has its first dimension as rows and the rest flattened into columns (convolutions; a vector has one column).

    >>> as_matrix((8, 64, 32))
    Matrix(stack=8, rows=64, cols=32)
    >>> as_matrix((1280, 80, 3))
    Matrix(stack=1, rows=1280, cols=240)
    """
    if len(shape) == 3 and min(shape[1:]) >= _NARROWEST_STACKED:
        return Matrix(*shape)
    if not shape:
        return Matrix(1, 1, 1)
    return Matrix(1, shape[0], math.prod(shape[1:]))
