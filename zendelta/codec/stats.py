"""The statistics of a tensor's delta, summed up in an order that no schedule changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zendelta.codec.kernels.protocol import Floats

STATS = ("abs_sum", "square_sum", "zeros", "error")
"""The keys of a tensor's statistics in a ``.bd`` file."""

_ROUNDING = 1e-12  # a squared relative error below this is what is left of float64 sums that cancel


def running_sums(start: Floats, values: Floats) -> Floats:
    """Add the rows of `values` [n, k] to `start` [k], one after the other: how they were cut has no effect."""
    total: Floats = np.add.accumulate(np.vstack((start, values)), axis=0)[-1]
    return total


def relative_error(square_sum: float, error_sum: float) -> float:
    """Return sqrt(error / square), 0 where nothing changed or where only rounding is left of the difference."""
    if square_sum <= 0 or error_sum <= _ROUNDING * square_sum:
        return 0.0
    return math.sqrt(error_sum / square_sum)


class DeltaStats:
    """Sums over the deltas of one tensor: `sums` holds those of |d|, of d^2, the exact zeros, and the gain.

    The gain is what the code explains of the squares: 2 sum(a |d|) - sum(a^2); all of them where values are exact.
    """

    __slots__ = ("count", "sums")

    def __init__(self) -> None:
        self.sums: Floats = np.zeros(4)
        self.count = 0

    def add(self, sums: Floats, gain: Floats, count: int) -> None:
        """Add what `Kernels.encode` returned for a block of `count` entries, [rows, 3], and gains [rows]."""
        self.sums = running_sums(self.sums, np.column_stack((sums, gain)))
        self.count += count

    @property
    def square_sum(self) -> float:
        """Sum of d^2."""
        return float(self.sums[1])

    @property
    def zeros(self) -> int:
        """Entries that did not change."""
        return int(self.sums[2])

    @property
    def unchanged(self) -> bool:
        """Whether every entry equals the base's."""
        return self.zeros == self.count

    @property
    def error(self) -> float:
        """Relative error of the restored delta, ||d - d_restored|| / ||d||."""
        return relative_error(self.square_sum, self.square_sum - float(self.sums[3]))

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as they stand in a ``.bd`` file."""
        return {"abs_sum": float(self.sums[0]), "square_sum": self.square_sum, "zeros": self.zeros, "error": self.error}
