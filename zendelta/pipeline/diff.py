"""diff: what a fine-tune changed, before compressing it, and a verdict in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zendelta.checkpoint.reader import Checkpoint, Where
from zendelta.codec.dense import difference
from zendelta.codec.kernels import Kernels, kernels_for
from zendelta.codec.kernels.protocol import Floats
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Values
from zendelta.codec.sign import SignEncoder
from zendelta.codec.stats import DeltaStats, running_sums
from zendelta.errors import listed
from zendelta.pipeline.report import Progress, kind_of, no_progress, overall_error
from zendelta.walk.order import default_threads
from zendelta.walk.pair import Part, walk_pair
from zendelta.walk.plan import Aligned, plan_pair


@dataclass
class TensorDiff:
    """How one tensor changed.

    Attributes:
        change: norm of the change relative to the base's norm; None where there is no base to compare with.
        cosine: of the two tensors themselves.
        zeros: share of entries that did not change at all.
        error: the relative error that one bit per weight would have; 0 where the values would be stored exactly.
    """

    name: str
    codec: str
    change: float | None
    cosine: float | None
    zeros: float | None
    error: float | None
    square_sum: float
    base_square_sum: float
    weights: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


@dataclass
class DiffReport:
    """How a fine-tune differs from a base.

    Attributes:
        change, cosine, zeros, error: as for a tensor, over all tensors that both have.
        kinds: by kind of matrix: names without their layer's and expert's numbers.
        dropped: base tensors that the fine-tune does not have.
        verdict: ``nothing changed``, ``tiny change``, ``ordinary`` or ``unrelated``; `advice` says what follows.
    """

    base: str
    finetuned: str
    tensors: list[TensorDiff]
    kinds: list[TensorDiff]
    dropped: list[str]
    notes: list[str]
    change: float | None
    cosine: float | None
    zeros: float | None
    error: float | None
    verdict: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        plain = dict(self.__dict__)
        for key in ("tensors", "kinds"):
            plain[key] = [item.to_json() for item in plain[key]]
        return plain


def diff(
    base: Where,
    finetuned: Where,
    *,
    device: str = "auto",
    threads: int | None = None,
    progress: Progress = no_progress,
) -> DiffReport:
    """Measure how a fine-tune differs from a base, and predict how well one bit per weight will hold the change.

    Args:
        base: the base checkpoint; `finetuned` the fine-tuned one.
        device: auto, cpu, cuda or cuda:N.
        threads: worker threads; all cores (at most 16) by default.
        progress: called with the bytes read so far and in all.

    Raises:
        InputError: a checkpoint is damaged, quantised or unfit.
    """
    plan = plan_pair(Checkpoint.open(base), Checkpoint.open(finetuned))
    kernels, _ = kernels_for(device)
    job = _Comparison(kernels)
    total, read = plan.base.nbytes - sum(tensor.nbytes for tensor in plan.unused) + plan.ft.nbytes, 0

    def tell(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(read, total)

    walk_pair(
        plan, kernels, job.work, job.fold, job.done,
        threads=threads or default_threads(), progress=tell, unused=False,
    )  # fmt: skip
    tensors = job.tensors
    if job.not_finite:
        plan.notes.append(f"not compared, since they hold a NaN or an infinity: {listed(job.not_finite)}")
    whole = _together("model", tensors)
    kinds: dict[str, list[TensorDiff]] = {}
    for tensor in tensors:
        kinds.setdefault(kind_of(tensor.name), []).append(tensor)
    change, cosine, zeros, error = whole.change, whole.cosine, whole.zeros, whole.error
    verdict, advice = _verdict(change, cosine, zeros, error)
    return DiffReport(
        base=plan.base.name, finetuned=plan.ft.name, tensors=tensors,
        kinds=[_together(name, members) for name, members in sorted(kinds.items())],
        dropped=plan.dropped, notes=plan.notes,
        change=change, cosine=cosine, zeros=zeros, error=error, verdict=verdict, advice=advice,
    )  # fmt: skip


def _together(name: str, tensors: list[TensorDiff]) -> TensorDiff:
    """Take the changes of several tensors together; the cosine is their mean, weighted by size."""
    compared = [tensor for tensor in tensors if tensor.change is not None]
    square, base_square = sum(t.square_sum for t in compared), sum(t.base_square_sum for t in compared)
    weights = sum(tensor.weights for tensor in compared)
    angles = [tensor for tensor in compared if tensor.cosine is not None]
    angled = sum(tensor.weights for tensor in angles)
    return TensorDiff(
        name=name,
        codec="+".join(sorted({tensor.codec for tensor in tensors})),
        change=_ratio(square, base_square) if compared else None,
        cosine=sum((t.cosine or 0.0) * t.weights for t in angles) / angled if angled else None,
        zeros=sum((t.zeros or 0.0) * t.weights for t in compared) / weights if weights else None,
        error=overall_error((tensor.error, tensor.square_sum) for tensor in tensors),
        square_sum=square,
        base_square_sum=base_square,
        weights=weights,
    )


def _verdict(change: float | None, cosine: float | None, zeros: float | None, error: float | None) -> tuple[str, str]:
    """Put the totals into words.

    A fine-tune moves weights by up to some ten percent. Two models of one architecture that were trained apart have
    a cosine near zero and a change near sqrt(2). Where most entries are exact zeros the change is near the spacing of
    the dtype, and signs for entries that never moved are noise.
    """
    if change is None or change == 0:
        return "nothing changed", "every common tensor equals the base's; a .bd file will hold next to nothing"
    if change > 1 or (cosine is not None and cosine < 0.5):
        return "unrelated", "these do not look like base and fine-tune; compress would give a poor copy: check the base"
    if zeros is not None and zeros > 0.5:
        return (
            "tiny change",
            f"{zeros:.0%} of the weights did not move at all, the step of their dtype is near the change; "
            f"one bit per weight will be coarse (relative error about {error or 0:.2f})",
        )
    return "ordinary", f"one bit per weight will restore the change with a relative error of about {error or 0:.2f}"


class _Comparison:
    """Folds block measurements into a `TensorDiff` each."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.tensors: list[TensorDiff] = []
        self.not_finite: list[str] = []
        self._encoder: SignEncoder | None = None
        self._exact = DeltaStats()
        self._moments: Floats = np.zeros(3)

    def work(self, part: Part, base: Values | None, ft: Values) -> Any:
        """Measure a block, in any thread."""
        assert part.aligned is not None and part.term is not None
        if base is None or not part.aligned.comparable:
            return None, difference(self.kernels, base, ft, part.block.size), None
        block = part.block
        if part.aligned.terms[part.term].codec != "sign":
            moments = self.kernels.moments(base.data, base.dtype, ft.data, ft.dtype, 1, block.size)
            return None, difference(self.kernels, base, ft, block.size), moments
        encoder = SignEncoder(as_matrix(part.aligned.ft.shape), 0, "row")
        bits, sums = encoder.encode(self.kernels, base, ft, block)
        return bits, sums, self.kernels.moments(base.data, base.dtype, ft.data, ft.dtype, block.rows, block.cols)

    def fold(self, part: Part, found: Any) -> None:
        """Take a block's measurements, in order."""
        assert part.aligned is not None
        bits, sums, moments = found
        if bits is not None:
            if self._encoder is None:
                self._encoder = SignEncoder(as_matrix(part.aligned.ft.shape), part.aligned.shared_rows, "row")
            for _ in self._encoder.fold(part.block, (bits, sums)):
                pass
        elif sums is not None and moments is not None:
            self._exact.add(sums, sums[:, 1], part.block.size)
        if moments is not None:
            self._moments = running_sums(self._moments, moments)

    def done(self, aligned: Aligned, base_print: str | None, ft_print: str) -> None:
        """Close a tensor."""
        stats = self._encoder.stats if self._encoder is not None else self._exact
        (bb, bf, ff), comparable = self._moments.tolist(), aligned.comparable and stats.count > 0
        square, zeros, error, unchanged = stats.square_sum, stats.zeros, stats.error, stats.unchanged
        if comparable and base_print == ft_print:
            square, zeros, error, unchanged = 0.0, stats.count, 0.0, True  # even where they hold infinities
        if comparable and not all(map(math.isfinite, (square, bb, bf, ff))):
            bb = bf = ff = 0.0
            if not unchanged:
                comparable = False
                self.not_finite.append(aligned.ft.name)
        self.tensors.append(
            TensorDiff(
                name=aligned.ft.name,
                codec="same" if comparable and unchanged else aligned.codec,
                change=_ratio(square, bb) if comparable else None,
                cosine=bf / math.sqrt(bb) / math.sqrt(ff) if comparable and bb > 0 and ff > 0 else None,
                zeros=zeros / stats.count if comparable else None,
                error=error if comparable else None,
                square_sum=square if comparable else 0.0,
                base_square_sum=bb if comparable else 0.0,
                weights=stats.count,
            )
        )
        self._encoder, self._exact, self._moments = None, DeltaStats(), np.zeros(3)


def _ratio(square: float, base_square: float) -> float | None:
    """Return the norm of a change against the base's; None where the base is all zero and the tensor is not."""
    if square == 0:
        return 0.0
    return math.sqrt(square / base_square) if base_square > 0 else None
