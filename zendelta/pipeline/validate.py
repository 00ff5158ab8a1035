"""validate: how good a ``.bd`` file is, measured on the actual files, and whether they agree with its header."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zendelta.bdfile import BdFile, Entry
from zendelta.checkpoint.fingerprint import Fingerprint, of_model
from zendelta.checkpoint.reader import Checkpoint, Where
from zendelta.codec.dense import difference
from zendelta.codec.kernels import Kernels, kernels_for
from zendelta.codec.kernels.protocol import Array, Floats
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Values
from zendelta.codec.sign import SignEncoder, row_alphas
from zendelta.codec.stats import DeltaStats, relative_error, running_sums
from zendelta.dtypes import FLOATING
from zendelta.errors import InputError, UsageError, ZendeltaError, listed
from zendelta.pipeline.report import Progress, no_progress, overall_error
from zendelta.walk.order import default_threads
from zendelta.walk.pair import Part, walk_pair
from zendelta.walk.plan import Aligned, PairPlan, Term, refuse_quantised
from zendelta.walk.restore import Payload, read_parts, refuse_unfit, wrong_base

_STATISTICS = 1e-9  # relative; what may differ between two ways to add up float64
_ULPS = 2  # units in the last place by which a recomputed alpha may differ


@dataclass
class TensorCheck:
    """One tensor, measured from the files. A delta is fine-tuned minus base; restored is base + delta file.

    Attributes:
        error: ||delta - restored delta|| / ||delta||, before rounding.
        error_rounded: the same after rounding to the fine-tune's dtype: what `apply` writes.
        cosine: of the delta and the restored delta.
        worst: largest absolute difference of a restored weight.
        signs: share of signs that agree with the fine-tune's; None without signs.
        alpha_ulps: largest difference of an alpha, recomputed against stored, in units in the last place.
        unmoved: share of weights that rounding leaves at the base's value.
        zeros: share of weights that the fine-tune left at the base's value.
        faults: where the files and the header disagree.
    """

    name: str
    codec: str
    error: float | None
    error_rounded: float | None
    cosine: float | None
    worst: float | None
    signs: float | None
    alpha_ulps: int | None
    unmoved: float | None
    zeros: float | None
    square_sum: float
    weights: int
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


@dataclass
class ValidateReport:
    """What `validate` found.

    Attributes:
        error, error_rounded, unmoved, zeros, signs: as for a tensor, over all tensors that have a delta.
        alpha_ulps: the largest of all tensors.
        faults: every disagreement of the files with the header, with the tensor's name.
        passed: no fault, and the error within `max_error`.
        processes: how many processes shared the work.
    """

    file: str
    base: str
    finetuned: str
    device: str
    processes: int
    error: float | None
    error_rounded: float | None
    unmoved: float | None
    zeros: float | None
    signs: float | None
    alpha_ulps: int | None
    max_error: float | None
    tensors: list[TensorCheck]
    faults: list[str]
    notes: list[str]
    passed: bool

    def worst(self, count: int = 8) -> list[TensorCheck]:
        """Return the tensors with the largest relative errors; those with faults first."""
        return sorted(self.tensors, key=lambda tensor: (not tensor.faults, -(tensor.error or 0)))[:count]

    @property
    def failure(self) -> tuple[str, str] | None:
        """What failed, and the way out; None where it passed."""
        if self.faults:
            return (
                f"{self.file} does not agree with the models: {listed(self.faults, 3)}",
                "is it the fine-tune that the file was made from? Else make the file again: zendelta compress",
            )
        if not self.passed:
            return (
                f"the relative error is {self.error:.6g}, over the threshold of {self.max_error:g}",
                "store the worst tensors exactly: zendelta compress --keep 'PATTERN=dense'",
            )
        return None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {**self.__dict__, "tensors": [tensor.to_json() for tensor in self.tensors]}


def validate(
    base: Where,
    finetuned: Where,
    delta: str | os.PathLike[str],
    *,
    max_error: float | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: Progress = no_progress,
) -> ValidateReport:
    """Measure a ``.bd`` file against its base and its fine-tune, tensor by tensor.

    Everything is recomputed from the files. Under ``accelerate launch`` each process measures its share of the tensors
    on its own GPU, and the first process gets the whole report.

    Args:
        base: the base checkpoint; `finetuned` the fine-tuned one; `delta` the ``.bd`` file.
        max_error: the largest relative error, before rounding, that passes.
        device: auto, cpu, cuda or cuda:N.
        threads: worker threads; all cores (at most 16) by default.
        progress: called with the bytes read so far and in all.

    Raises:
        InputError: the wrong base, or a damaged file.
    """
    if max_error is not None and not max_error >= 0:
        raise UsageError(f"the threshold {max_error} is not a number of at least 0", "for instance --max-error 0.7")
    file, base_checkpoint, ft_checkpoint = BdFile.open(delta), Checkpoint.open(base), Checkpoint.open(finetuned)
    refuse_quantised(base_checkpoint, ft_checkpoint)
    refuse_unfit(base_checkpoint, file)
    for path, entry in file.content.files.items():
        if entry["from"] == "file":
            file.side_file(path)  # raises where it is damaged
    rank, processes, device, gather = _process(device)
    kernels, device = kernels_for(device)
    plan, faults = _plan(file, base_checkpoint, ft_checkpoint)
    job = _Validation(file, plan, kernels)
    failure: ZendeltaError | None = None
    try:
        job.run(threads or default_threads(), lambda index: index % processes == rank, progress)
    except ZendeltaError as caught:
        failure = caught  # told to the other processes, which would wait for this one's results
    for checks, prints, wrong, failed in gather((job.checks, job.ft_prints, job.wrong, failure)):
        if failed is not None:
            raise failed
        job.checks.update(checks)
        job.ft_prints.update(prints)
        job.wrong.update(wrong)
    if job.wrong:
        names = sorted(job.wrong)
        raise wrong_base(base_checkpoint, file, f"its values differ, first in {', '.join(names[:5])}")
    tensors = [job.checks[name] for name in sorted(job.checks)]
    if not faults and of_model(job.ft_prints) != file.content.finetuned["fingerprint"]:
        faults.append("the fine-tune is not the one that the file was made from")
    faults += [f"{tensor.name}: {fault}" for tensor in tensors for fault in tensor.faults]
    error = overall_error((tensor.error, tensor.square_sum) for tensor in tensors)
    return ValidateReport(
        file=str(delta),
        base=base_checkpoint.name,
        finetuned=ft_checkpoint.name,
        device=device,
        processes=processes,
        error=error,
        error_rounded=overall_error((tensor.error_rounded, tensor.square_sum) for tensor in tensors),
        unmoved=_share(tensors, lambda tensor: tensor.unmoved),
        zeros=_share(tensors, lambda tensor: tensor.zeros),
        signs=_share(tensors, lambda tensor: tensor.signs),
        alpha_ulps=max((tensor.alpha_ulps for tensor in tensors if tensor.alpha_ulps is not None), default=None),
        max_error=max_error,
        tensors=tensors,
        faults=faults,
        notes=[*base_checkpoint.warnings, *ft_checkpoint.warnings],
        passed=not faults and (max_error is None or (error or 0.0) <= max_error),
    )


def _share(tensors: list[TensorCheck], value: Callable[[TensorCheck], float | None]) -> float | None:
    known = [(share, tensor.weights) for tensor in tensors if (share := value(tensor)) is not None]
    total = sum(weights for _, weights in known)
    return sum(share * weights for share, weights in known) / total if total else None


def _process(device: str) -> tuple[int, int, str, Callable[[Any], list[Any]]]:
    """Return rank, number of processes, this process's device, and a gather: accelerate's where it launched us."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return 0, 1, device, lambda found: [found]
    import torch.distributed
    from accelerate import PartialState
    from accelerate.utils import gather_object

    if not torch.distributed.is_initialized():
        atexit.register(_leave)
    state = PartialState(cpu=device == "cpu")
    if device in ("auto", "cuda"):
        device = str(state.device) if state.device.type == "cuda" else "cpu"
    return state.process_index, state.num_processes, device, lambda found: list(gather_object([found]))


def _leave() -> None:
    """Take leave of the other processes. An exit without it now and then aborts: gloo's threads are still running."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _plan(file: BdFile, base: Checkpoint, ft: Checkpoint) -> tuple[PairPlan, list[str]]:
    """Pair the tensors as the file says; names, dtypes and shapes that the fine-tune has otherwise are faults."""
    content = file.content
    faults = [f"{name}: not in the fine-tune" for name in (*content.tensors, *content.aliases) if not _has(ft, name)]
    known = {*content.tensors, *content.aliases}
    faults += [f"{name}: not in the file" for name in (*ft.tensors, *ft.aliases) if name not in known]
    pairs = []
    for name, entry in sorted(content.tensors.items()):
        tensor = ft.tensors.get(name)
        if tensor is None:
            continue
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            faults.append(f"{name}: {tensor.dtype} {list(tensor.shape)}, in the file {entry.dtype} {list(entry.shape)}")
            continue
        source = None if entry.source is None else base.tensors.get(base.aliases.get(entry.source, entry.source))
        terms = tuple(Term(term.codec, term.rows, term.parameters) for term in entry.terms)
        same = (Term("dense", (0, as_matrix(entry.shape).all_rows), {}),)
        pairs.append(Aligned(tensor, source, terms or same, ""))
    return PairPlan(base, ft, pairs, [], []), faults


def _has(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint.tensors or name in checkpoint.aliases


@dataclass
class _Measured:
    """What a worker found in a block: the recomputed bits and sums, the file's parts, and the residual's sums with
    the alphas multiplied in."""

    bits: Array | None
    sums: Floats | None
    residual: Floats | None
    parts: dict[str, Array]
    unequal: bool


def _print_of(checkpoint: Checkpoint, name: str) -> str:
    """Read one tensor for its fingerprint alone."""
    tensor, running = checkpoint.tensors[name], Fingerprint()
    running.array(tensor.dtype, tensor.shape)
    for offset in range(0, tensor.nbytes, 1 << 20):
        data = memoryview(bytearray(min(1 << 20, tensor.nbytes - offset)))
        checkpoint.read_into(name, offset, data)
        running.update(data)
    return running.hex()


class _Validation:
    """One process's share: what workers measure is folded here, in order."""

    def __init__(self, file: BdFile, plan: PairPlan, kernels: Kernels) -> None:
        self.file, self.plan, self.kernels = file, plan, kernels
        self.checks: dict[str, TensorCheck] = {}
        self.ft_prints: dict[str, str] = {}
        self.wrong: set[str] = set()
        self._tensor: _Tensor | None = None

    def run(self, threads: int, only: Callable[[int], bool], progress: Progress) -> None:
        mine = [pair for index, pair in enumerate(self.plan.tensors) if only(index)]
        total = sum(pair.ft.nbytes + (pair.base.nbytes if pair.base else 0) for pair in mine)
        read = 0

        def tell(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            progress(read, total)

        prints = walk_pair(
            self.plan, self.kernels, self._work, self._fold, self._done,
            threads=threads, progress=tell, only=only, unused=False,
        )  # fmt: skip
        self.ft_prints = prints.ft
        for alias, target in self.file.content.aliases.items():
            if alias not in self.plan.ft.tensors or target not in self.checks:
                continue
            if _print_of(self.plan.ft, alias) != self.ft_prints[target]:
                self.checks[target].faults.append(f"{alias} has other values, the file says they are one")

    def _entry(self, aligned: Aligned) -> Entry:
        return self.file.content.tensors[aligned.ft.name]

    def _work(self, part: Part, base: Values | None, ft: Values) -> _Measured:
        assert part.aligned is not None and part.term is not None
        entry, block = self._entry(part.aligned), part.block
        if not entry.terms:
            return _Measured(None, difference(self.kernels, base, ft, block.size), None, {}, False)
        term = entry.terms[part.term]
        parts = read_parts(self.file, entry, term, block)
        if term.codec != "sign":
            comparable = base if part.aligned.comparable else None
            sums = difference(self.kernels, comparable, ft, block.size) if comparable is not None else None
            unequal = not np.array_equal(parts["values"][:-1], ft.data[: len(parts["values"]) - 1])
            return _Measured(None, sums, None, parts, unequal)
        assert base is not None
        alphas = row_alphas(parts["alpha"].view(np.float32), entry.matrix, term.parameters["scale"], block)
        bits, sums = SignEncoder(entry.matrix, 0, "row").encode(self.kernels, base, ft, block)
        residual = self.kernels.residual(
            base.data, base.dtype, ft.data, ft.dtype, parts["sign"], alphas, block.rows, block.cols, entry.dtype
        )
        wide = alphas.astype(np.float64)
        residual = np.column_stack((residual, wide * residual[:, 0], block.cols * wide * wide))
        return _Measured(bits, sums, residual, parts, False)

    def _fold(self, part: Part, found: _Measured) -> None:
        assert part.aligned is not None and part.term is not None
        tensor = self._at(part.aligned)
        tensor.add(part, found)

    def _at(self, aligned: Aligned) -> _Tensor:
        if self._tensor is None:
            self._tensor = _Tensor(self.file, aligned, self._entry(aligned))
        return self._tensor

    def _done(self, aligned: Aligned, base_print: str | None, ft_print: str) -> None:
        tensor, self._tensor = self._at(aligned), None
        entry = self._entry(aligned)
        if entry.base is not None and base_print != entry.base:
            self.wrong.add(aligned.ft.name)
        if tensor.payload.hex() != entry.payload:
            raise InputError(f"{self.file.path}: the arrays of {aligned.ft.name} are damaged", "get the .bd file again")
        self.checks[aligned.ft.name] = tensor.check(equal_bytes=base_print == ft_print)


class _Tensor:
    """The tensor that the walk is at."""

    def __init__(self, file: BdFile, aligned: Aligned, entry: Entry) -> None:
        self.file, self.aligned, self.entry = file, aligned, entry
        self.payload = Payload(file, entry)
        self.encoders = [
            SignEncoder(entry.matrix, term.rows[1], term.parameters["scale"]) if term.codec == "sign" else None
            for term in entry.terms
        ]
        self.exact = DeltaStats()  # of terms that hold the values themselves, and of unchanged tensors
        self.residual: Floats = np.zeros(6)  # see Kernels.residual, then sum alpha d s and sum alpha^2
        self.unequal = False
        self.flipped = 0
        self.ulps = 0

    def add(self, part: Part, found: _Measured) -> None:
        """Take a block's measurements, in order."""
        assert part.term is not None
        encoder = self.encoders[part.term] if self.encoders else None
        self.unequal |= found.unequal
        if encoder is None:
            if found.sums is not None:
                self.exact.add(found.sums, found.sums[:, 1], part.block.size)
        else:
            assert found.bits is not None and found.sums is not None and found.residual is not None
            stored = found.parts["sign"]
            if not np.array_equal(stored[:-1], found.bits[:-1]):
                self.flipped += int(np.unpackbits(np.bitwise_xor(stored[:-1], found.bits[:-1])).sum())
            for piece in encoder.fold(part.block, (found.bits, found.sums)):  # make the alphas again
                if piece.role == "alpha":
                    self._compare(part.term, piece.offset, piece.data)
            worst = max(self.residual[1], found.residual[:, 1].max())
            self.residual = running_sums(self.residual, found.residual)
            self.residual[1] = worst
        if self.entry.terms:
            term = self.entry.terms[part.term]
            role = "sign" if term.codec == "sign" else "values"
            self.payload.feed(part.term, memoryview(found.parts[role])[:-1])

    def _compare(self, index: int, offset: int, made: memoryview) -> None:
        stored = np.empty(len(made), np.uint8)
        self.file.read_into(self.entry.terms[index].parts["alpha"], offset, memoryview(stored))
        ours = np.frombuffer(made, np.int32).astype(np.int64)  # floats of one sign are ordered like their bits
        theirs = stored.view(np.int32).astype(np.int64)
        self.ulps = max(self.ulps, int(np.abs(ours - theirs).max(initial=0)))

    def check(self, *, equal_bytes: bool) -> TensorCheck:
        """Sum up."""
        for index, encoder in enumerate(self.encoders):
            for piece in encoder.finish() if encoder is not None else ():
                self._compare(index, piece.offset, piece.data)
        sign = next((encoder for encoder in self.encoders if encoder is not None), None)
        stats = sign.stats if sign is not None else self.exact
        entry, weights = self.entry, as_matrix(self.entry.shape).size
        comparable = self.aligned.comparable
        faults = self._faults(stats, equal_bytes)
        square = stats.square_sum if comparable and math.isfinite(stats.square_sum) else 0.0
        zeros = stats.zeros / stats.count if comparable and stats.count else None
        if sign is None:
            exact = comparable and not self.unequal
            return TensorCheck(
                name=self.aligned.ft.name, codec=entry.codec,
                error=0.0 if exact else None, error_rounded=0.0 if exact else None,
                cosine=1.0 if exact and square else None, worst=0.0 if exact else None,
                signs=None, alpha_ulps=None, unmoved=zeros, zeros=zeros, square_sum=square, weights=weights,
                faults=faults,
            )  # fmt: skip
        _, worst, left, after2, dot, restored = self.residual.tolist()
        return TensorCheck(
            name=self.aligned.ft.name, codec=entry.codec,
            error=relative_error(square, square - 2 * dot + restored), error_rounded=relative_error(square, after2),
            cosine=dot / math.sqrt(square) / math.sqrt(restored) if square > 0 and restored > 0 else None,
            worst=worst, signs=1 - self.flipped / max(stats.count, 1), alpha_ulps=self.ulps,
            unmoved=left / max(stats.count, 1), zeros=zeros, square_sum=square, weights=weights, faults=faults,
        )  # fmt: skip

    def _faults(self, stats: DeltaStats, equal_bytes: bool) -> list[str]:
        faults = []
        if not self.entry.terms and not (equal_bytes or stats.unchanged):
            faults.append("differs from the base, the file says it is the same")
        if self.unequal:
            faults.append("the stored values are not the fine-tune's")
        if self.flipped:
            faults.append(f"{self.flipped} signs differ")
        if self.ulps > _ULPS:
            faults.append(f"an alpha differs by {self.ulps} units in the last place")
        if self.entry.stats and self.entry.terms and {self.aligned.ft.dtype} <= FLOATING:
            measured = stats.to_json()
            for key, stored in self.entry.stats.items():
                if not _agree(key, measured.get(key, math.nan), stored):
                    faults.append(f"the statistic {key} is {measured.get(key)}, the header says {stored}")
        return faults


def _agree(key: str, measured: float, stored: float) -> bool:
    """Whether two statistics are one; of a small error, the difference of large sums, its square is compared."""
    if math.isclose(measured, stored, rel_tol=_STATISTICS):
        return True
    return key == "error" and abs(measured * measured - stored * stored) < 1e-13
