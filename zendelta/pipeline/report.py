"""What the verbs report about tensors, and the sums over a whole model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
"""Finds the number of a layer in a tensor's name."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and in all."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a ``.bd`` file or of a plan.

    Attributes:
        codec: its codecs joined with ``+``; ``same`` where it equals the base's; ``alias`` where another one's.
        raw_bytes: its size in the fine-tune.
        stored_bytes: its size in the ``.bd`` file; in a plan the most it can be.
        error: relative error of the restored delta; None where there is no delta (or none yet, in a plan).
        zeros: share of entries that did not change; None likewise.
        source: the base's tensor, or the tensor that an alias repeats, or None.
        reason: why this codec; empty where only the file is known.
    """

    name: str
    codec: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    error: float | None
    zeros: float | None
    source: str | None
    reason: str = ""
    square_sum: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {**asdict(self), "shape": list(self.shape)}


def overall_error(tensors: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the relative error over several deltas, from each one's (relative error, sum of squares)."""
    pairs = [(error, square) for error, square in tensors if error is not None]
    total = sum(square for _, square in pairs)
    if not pairs:
        return None
    return math.sqrt(sum(error * error * square for error, square in pairs) / total) if total > 0 else 0.0


def by_codec(tensors: Iterable[TensorReport]) -> dict[str, dict[str, int]]:
    """Return {codec: {tensors, raw_bytes, stored_bytes}}, most bytes first."""
    groups: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        group = groups.setdefault(tensor.codec, {"tensors": 0, "raw_bytes": 0, "stored_bytes": 0})
        group["tensors"] += 1
        group["raw_bytes"] += tensor.raw_bytes
        group["stored_bytes"] += tensor.stored_bytes
    return dict(sorted(groups.items(), key=lambda item: -item[1]["stored_bytes"]))


def zero_share(tensors: Iterable[TensorReport]) -> float | None:
    """Return the share of unchanged entries over several tensors, weighted by size; None without any."""
    known = [(tensor.zeros, math.prod(tensor.shape)) for tensor in tensors if tensor.zeros is not None]
    total = sum(size for _, size in known)
    return sum(zeros * size for zeros, size in known) / total if total else None


def kind_of(name: str) -> str:
    """Return a tensor's name with every number that counts layers or experts left out.

    >>> kind_of("model.layers.12.mlp.experts.3.up_proj.weight")
    'mlp.experts.up_proj.weight'
    """
    match = LAYER.search(name)
    return re.sub(r"\.\d+(?=\.|$)", "", name[match.end() :] if match else name)


_SHORT, _EXCEPTIONS = 40, 8


@dataclass(frozen=True)
class Alike:
    """Tensors of one kind that are stored in one way; `name` is the tensor's own where there is only one.

    The bytes are those of all of them together.
    """

    name: str
    tensors: int
    dtype: str
    shape: tuple[int, ...]
    codec: str
    reason: str
    raw_bytes: int
    stored_bytes: int


def alike(tensors: Sequence[TensorReport]) -> list[Alike]:
    """Take together the tensors of a plan that are of one kind, size and dtype and are stored in one way.

    Exceptions within a kind, up to eight alike, keep a line each, and so does every tensor of a short plan. What is
    stored in one way for one reason stands together, most bytes first.
    """
    groups: dict[tuple[str, str, tuple[int, ...], str, str], list[TensorReport]] = {}
    largest: Counter[str] = Counter()
    weight: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        kind = kind_of(tensor.name)
        members = groups.setdefault((kind, tensor.dtype, tensor.shape, tensor.codec, tensor.reason), [])
        members.append(tensor)
        largest[kind] = max(largest[kind], len(members))
        weight[tensor.codec, tensor.reason] += tensor.raw_bytes
    lines = []
    for (kind, dtype, shape, codec, reason), members in groups.items():
        apart = len(tensors) <= _SHORT or (len(members) <= _EXCEPTIONS and len(members) < largest[kind])
        for found in [[member] for member in members] if apart else [members]:
            name = kind if len(found) > 1 else found[0].name
            raw, stored = sum(tensor.raw_bytes for tensor in found), sum(tensor.stored_bytes for tensor in found)
            lines.append(Alike(name, len(found), dtype, shape, codec, reason, raw, stored))
    return sorted(lines, key=lambda line: (-weight[line.codec, line.reason], line.codec, line.reason))
