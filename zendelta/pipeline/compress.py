"""compress: a base and a fine-tune become one ``.bd`` file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zendelta import bdfile
from zendelta.bdfile import BdFile, BdWriter, Content, Entry, array_name, side_array
from zendelta.checkpoint.disk import check_space, free_bytes
from zendelta.checkpoint.fingerprint import Fingerprint, of_bytes, of_model
from zendelta.checkpoint.header import LFS_POINTER
from zendelta.checkpoint.publish import check_output, refuse_overlap, staged_file
from zendelta.checkpoint.reader import Checkpoint, Where
from zendelta.codec import CODECS
from zendelta.codec.kernels import Kernels, kernels_for
from zendelta.codec.matrix import as_matrix
from zendelta.codec.protocol import Encoder, Piece, Values
from zendelta.codec.stats import STATS, DeltaStats
from zendelta.dtypes import DTYPE_BYTES
from zendelta.errors import InputError, UsageError, listed
from zendelta.pipeline.report import Progress, TensorReport, by_codec, no_progress, overall_error, zero_share
from zendelta.walk.order import default_threads
from zendelta.walk.pair import Part, find_not_finite, walk_pair
from zendelta.walk.plan import Aligned, PairPlan, plan_pair

_READ_BACK = 1 << 20


@dataclass
class CompressReport:
    """What `compress` did, or with `dry_run` what it would do.

    Attributes:
        output_bytes: size of the ``.bd`` file (in a plan: the most it can be); `file_bytes` of it are carried files,
            `header_bytes` its header.
        ratio: size of the fine-tune's tensors to that of the file; `ratio_without_files` without the carried files.
        finetuned_bytes: size of the fine-tune's tensors.
        bits_per_weight: bits of the file per entry of the fine-tune, carried files left out.
        error: relative error of the restored delta over all tensors that have one.
        aliases: names that repeat another tensor, to that tensor's name.
        zeros: share of weights that the fine-tune did not change.
        files: the carried files, each ``base`` (equal to the base's, nothing stored) or ``file``.
        peak_memory: bytes of buffers that the walk holds at most.
        free_bytes: what is free on the output's disk.
    """

    output: str
    dry_run: bool
    base: str
    finetuned: str
    device: str
    threads: int
    codecs: dict[str, dict[str, int]]
    tensors: list[TensorReport]
    aliases: dict[str, str]
    dropped: list[str]
    files: dict[str, str]
    notes: list[str]
    finetuned_bytes: int
    output_bytes: int
    file_bytes: int
    header_bytes: int
    ratio: float
    ratio_without_files: float
    bits_per_weight: float
    error: float | None
    zeros: float | None
    peak_memory: int
    free_bytes: int

    def worst(self, count: int = 5) -> list[TensorReport]:
        """Return the tensors with the largest relative errors."""
        coded = [tensor for tensor in self.tensors if tensor.error]
        return sorted(coded, key=lambda tensor: -(tensor.error or 0))[:count]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {**self.__dict__, "tensors": [tensor.to_json() for tensor in self.tensors]}


def compress(
    base: Where,
    finetuned: Where,
    output: str | os.PathLike[str],
    *,
    alpha: str = "row",
    keep: Iterable[str] = (),
    device: str = "auto",
    threads: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> CompressReport:
    """Compress a fine-tune's change against its base into one ``.bd`` file, at about one bit per weight.

    Args:
        base: the checkpoint that the fine-tune was trained from: a folder, a ``.safetensors`` file or a hub id.
        finetuned: the fine-tuned checkpoint, likewise.
        output: the ``.bd`` file to write; it appears whole or not at all.
        alpha: one scale per stored ``row``, or per ``matrix`` as in the BitDelta paper.
        keep: overrides, ``PATTERN=CODEC`` with a shell pattern on tensor names and the codec sign or dense.
        device: auto, cpu, cuda or cuda:N.
        threads: worker threads; all cores (at most 16) by default. They change no byte.
        force: replace an existing output.
        dry_run: plan only: read headers, write nothing.
        progress: called with the bytes read so far and in all.

    Raises:
        InputError: a checkpoint is damaged, quantised or unfit; a NaN or an infinity in a tensor.
        UsageError: the output exists or is an input; a bad option.
        MachineError: no space, no such device.
    """
    if alpha not in ("row", "matrix"):
        raise UsageError(f"alpha {alpha!r} is neither row nor matrix", "use --alpha row or --alpha matrix")
    output, keep = Path(output), list(keep)
    base_checkpoint, ft_checkpoint = Checkpoint.open(base), Checkpoint.open(finetuned)
    refuse_overlap(output, [base_checkpoint.path, ft_checkpoint.path])
    check_output(output, folder=False, force=force)
    plan = plan_pair(base_checkpoint, ft_checkpoint, scale=alpha, keep=keep)
    kernels, device = kernels_for(device)
    threads = threads or default_threads()
    job = _Compression(plan, kernels, {"alpha": alpha, "keep": keep}, threads)
    need = job.upper_bound
    if dry_run:
        return job.report(output, device, need, [job.planned(aligned) for aligned in plan.tensors], dry_run=True)
    check_space(output.parent, need)
    with staged_file(output, force=force) as staged:
        size = job.run(staged.fileno(), output, progress)
        BdFile.open(staged.name)  # the reader is the judge of what may be published
    return job.report(output, device, size, job.reports, dry_run=False)


@dataclass
class _Current:
    """The tensor that the ordered side of the walk is at."""

    aligned: Aligned
    mark: int
    payload: Fingerprint = field(default_factory=Fingerprint)
    term: int = -1
    names: list[dict[str, str]] = field(default_factory=list)
    bad: str | None = None


class _Compression:
    """One run: what workers compute is folded here, in order, into the writer."""

    def __init__(self, plan: PairPlan, kernels: Kernels, options: dict[str, Any], threads: int) -> None:
        self.plan, self.kernels, self.options, self.threads = plan, kernels, options, threads
        self.reports: list[TensorReport] = []
        self.entries: dict[str, Entry] = {}
        self.aliases = dict(plan.ft.aliases)
        self.files = _side_files(plan)
        self._encoders: dict[tuple[str, int], Encoder] = {}
        self._seen: dict[tuple[str | None, str], str] = {}
        self._current: _Current | None = None
        self._read = 0
        self._writer: BdWriter
        arrays = dict(self._planned_arrays())
        self._room = bdfile.header_room(self._widest(), arrays) + self._alias_slack()
        payload = sum(aligned.stored_bytes for aligned in plan.tensors)
        self.upper_bound = 8 + self._room + payload + self.file_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the carried files that the base does not have."""
        return sum(path.stat().st_size for name, path in self.plan.ft.side_files.items() if self._stored(name))

    def _stored(self, side: str) -> bool:
        return self.files[side]["from"] == "file"

    def run(self, fd: int, output: Path, progress: Progress) -> int:
        """Walk, write, and return the file's size."""
        self._writer = BdWriter(fd, output, self._room)
        total = self.plan.base.nbytes + self.plan.ft.nbytes

        def tell(nbytes: int) -> None:
            self._read += nbytes
            progress(self._read, total)

        prints = walk_pair(
            self.plan, self.kernels, self._work, self._fold, self._done, threads=self.threads, progress=tell
        )
        for path, file in self.plan.ft.side_files.items():
            if self._stored(path):
                data = file.read_bytes()
                if of_bytes(data) != self.files[path]["fingerprint"]:
                    raise InputError(f"{file}: changed while it was read", "run the command again")
                self._writer.begin(side_array(path), "U8", (len(data),))
                self._writer.write(side_array(path), 0, memoryview(data))
        own = {name: print_ for name, print_ in prints.ft.items() if name not in self.aliases}
        content = self._content(self.entries, of_model(prints.base), of_model(own))
        return self._writer.finish(content)

    # the walk's three callbacks; _work runs in any thread, the others in order

    def _work(self, part: Part, base: Values | None, ft: Values) -> tuple[Any, str | None]:
        assert part.aligned is not None and part.term is not None
        result = self._encoder(part.aligned, part.term).encode(self.kernels, base, ft, part.block)
        sums = result[1]
        bad = None
        if sums is not None and not np.isfinite(sums[:, :2]).all():
            bad = _where_not_finite(part, base, ft)
        return result, bad

    def _encoder(self, aligned: Aligned, index: int) -> Encoder:
        key = (aligned.ft.name, index)
        found = self._encoders.get(key)
        if found is None:
            term = aligned.terms[index]
            made = CODECS[term.codec].encoder(aligned.ft.dtype, aligned.ft.shape, term.rows, term.parameters)
            found = self._encoders.setdefault(key, made)  # atomic: two threads get the same one
        return found

    def _fold(self, part: Part, result: tuple[Any, str | None]) -> None:
        assert part.aligned is not None and part.term is not None
        current = self._at(part.aligned)
        while current.term < part.term:
            self._next_term(current)
        encoded, bad = result
        current.bad = current.bad or bad
        self._put(current, self._encoder(part.aligned, part.term).fold(part.block, encoded))

    def _done(self, aligned: Aligned, base_print: str | None, ft_print: str) -> None:
        current = self._at(aligned)
        while current.term < len(aligned.terms):
            self._next_term(current)
        self._current = None
        stats = [self._stats(aligned, index) for index in range(len(aligned.terms))]
        name, source = aligned.ft.name, aligned.base.name if aligned.base else None
        equal = aligned.may_be_same and (base_print == ft_print or (stats[0].unchanged and not current.bad))
        if current.bad and not equal and not aligned.asked:
            raise InputError(
                current.bad,
                f"the weights are broken; if it belongs there, store the tensor as it is: --keep '{name}=dense'",
            )
        twin = self._seen.setdefault((source, ft_print), name)
        if equal or twin != name:
            self._writer.rewind(current.mark)
        if twin != name and not equal:
            self.aliases[name] = twin
            self.reports.append(self._report(aligned, "alias", 0, None, twin, "equals another tensor"))
            return
        entry = Entry(
            source=source,
            dtype=aligned.ft.dtype,
            shape=aligned.ft.shape,
            base=base_print,
            terms=() if equal else self._terms(current),
            payload=Fingerprint().hex() if equal else current.payload.hex(),
            stats=self._shown(aligned, stats[0], equal, current.bad is not None),
        )
        self.entries[name] = entry
        stored = 0 if equal else aligned.stored_bytes
        reason = _same_reason(aligned, base_print == ft_print) if equal else aligned.reason
        self.reports.append(self._report(aligned, entry.codec, stored, entry.stats, source, reason))

    # the ordered side's steps

    def _at(self, aligned: Aligned) -> _Current:
        if self._current is None:
            self._current = _Current(aligned, self._writer.mark())
        return self._current

    def _next_term(self, current: _Current) -> None:
        """End the term at hand, if any, and begin the next one's arrays, if any."""
        aligned, index = current.aligned, current.term
        if index >= 0:
            self._put(current, self._encoder(aligned, index).finish())
            # the first role was hashed as it was written; the others, which grow beside it, are read back
            for role in CODECS[aligned.terms[index].codec].roles[1:]:
                self._hash_array(current, current.names[index][role])
        current.term += 1
        if current.term == len(aligned.terms):
            return
        current.names.append(_array_names(aligned, current.term))
        arrays = _arrays(aligned, current.term)
        for role, (dtype, shape) in arrays.items():
            self._writer.begin(current.names[-1][role], dtype, shape)
        first = CODECS[aligned.terms[current.term].codec].roles[0]
        current.payload.array(*arrays[first])

    def _put(self, current: _Current, pieces: Iterator[Piece]) -> None:
        term = current.aligned.terms[current.term]
        for piece in pieces:
            self._writer.write(current.names[current.term][piece.role], piece.offset, piece.data)
            if piece.role == CODECS[term.codec].roles[0]:
                current.payload.update(piece.data)

    def _hash_array(self, current: _Current, array: str) -> None:
        info = self._writer.arrays[array]
        current.payload.array(info.dtype, info.shape)
        for offset in range(0, info.nbytes, _READ_BACK):
            data = memoryview(bytearray(min(_READ_BACK, info.nbytes - offset)))
            self._writer.read_into(array, offset, data)
            current.payload.update(data)

    def _stats(self, aligned: Aligned, index: int) -> DeltaStats:
        encoder = self._encoder(aligned, index)
        del self._encoders[(aligned.ft.name, index)]
        stats: DeltaStats = encoder.stats
        return stats

    def _shown(self, aligned: Aligned, stats: DeltaStats, equal: bool, bad: bool) -> dict[str, Any]:
        if not aligned.comparable or (bad and not equal):
            return {}
        if equal:  # stated, not summed: equal bytes may hold infinities
            return dict(zip(STATS, (0.0, 0.0, as_matrix(aligned.ft.shape).size, 0.0), strict=True))
        return stats.to_json()

    def _terms(self, current: _Current) -> tuple[bdfile.Term, ...]:
        return tuple(
            bdfile.Term(term.codec, term.rows, names, dict(term.parameters))
            for term, names in zip(current.aligned.terms, current.names, strict=True)
        )

    # the header, at its widest and as it became

    def _content(self, entries: dict[str, Entry], base_print: str, ft_print: str) -> Content:
        base, ft = self.plan.base, self.plan.ft
        return Content(
            base={"name": base.name, "revision": base.revision, "fingerprint": base_print},
            finetuned={"name": ft.name, "revision": ft.revision, "fingerprint": ft_print},
            options=self.options,
            tensors=entries,
            aliases=self.aliases,
            dropped=self.plan.dropped,
            files=self.files,
        )

    def _widest(self) -> Content:
        print_ = "f" * 32
        entries = {
            aligned.ft.name: Entry(
                source=aligned.base.name if aligned.base else None,
                dtype=aligned.ft.dtype,
                shape=aligned.ft.shape,
                base=print_,
                terms=tuple(
                    bdfile.Term(term.codec, term.rows, _array_names(aligned, index), dict(term.parameters))
                    for index, term in enumerate(aligned.terms)
                ),
                payload=print_,
                stats=bdfile.widest_stats(STATS),
            )
            for aligned in self.plan.tensors
        }
        return self._content(entries, print_, print_)

    def _alias_slack(self) -> int:
        """Room for aliases whose entry could be longer than the tensor's own: only where names are very long."""
        longest = max(len(name.encode()) for name in self.plan.ft.tensors)
        return 0 if longest < 60 else 64 * (len(self.plan.tensors) * 8 * longest // 64)

    def _planned_arrays(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        for aligned in self.plan.tensors:
            for index in range(len(aligned.terms)):
                names = _array_names(aligned, index)
                for role, array in _arrays(aligned, index).items():
                    yield names[role], array
        for path, file in self.plan.ft.side_files.items():
            if self._stored(path):
                yield side_array(path), ("U8", (file.stat().st_size,))

    # reports

    def planned(self, aligned: Aligned) -> TensorReport:
        """Report how a tensor would be stored."""
        source = aligned.base.name if aligned.base else None
        return self._report(aligned, aligned.codec, aligned.stored_bytes, None, source, aligned.reason)

    def _report(
        self, aligned: Aligned, codec: str, stored: int, stats: dict[str, Any] | None, source: str | None, reason: str
    ) -> TensorReport:
        ft, stats = aligned.ft, stats or {}
        compared = aligned.shared_rows * as_matrix(ft.shape).cols
        zeros = stats["zeros"] / compared if stats and compared else None
        return TensorReport(
            ft.name, codec, ft.dtype, ft.shape, ft.nbytes, stored, stats.get("error"), zeros, source, reason,
            stats.get("square_sum", 0.0),
        )  # fmt: skip

    def report(
        self, output: Path, device: str, size: int, tensors: list[TensorReport], *, dry_run: bool
    ) -> CompressReport:
        """Sum up."""
        plan, entries = self.plan, sum(as_matrix(aligned.ft.shape).size for aligned in self.plan.tensors)
        buffers = 2 * self.kernels.block_bytes + self.kernels.block_bytes // 8
        return CompressReport(
            output=str(output),
            dry_run=dry_run,
            base=plan.base.name,
            finetuned=plan.ft.name,
            device=device,
            threads=self.threads,
            codecs=by_codec(tensors),
            tensors=tensors,
            aliases=self.aliases,
            dropped=plan.dropped,
            files={path: entry["from"] for path, entry in self.files.items()},
            notes=[*plan.notes, *plan.ft.left_behind],
            finetuned_bytes=plan.ft.nbytes,
            output_bytes=size,
            file_bytes=self.file_bytes,
            header_bytes=size - self.file_bytes - sum(tensor.stored_bytes for tensor in tensors),
            ratio=plan.ft.nbytes / size,
            ratio_without_files=plan.ft.nbytes / (size - self.file_bytes),
            bits_per_weight=8 * (size - self.file_bytes) / max(entries, 1),
            error=overall_error((tensor.error, tensor.square_sum) for tensor in tensors),
            zeros=zero_share(tensors),
            peak_memory=self.threads * buffers + 4 * self._room,
            free_bytes=free_bytes(output.parent),
        )


def _array_names(aligned: Aligned, index: int) -> dict[str, str]:
    """Name the arrays of a term: a role that occurs again gets a number."""
    before = [role for term in aligned.terms[:index] for role in CODECS[term.codec].roles]
    roles = CODECS[aligned.terms[index].codec].roles
    return {role: array_name(aligned.ft.name, role, before.count(role)) for role in roles}


def _arrays(aligned: Aligned, index: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    term = aligned.terms[index]
    return CODECS[term.codec].arrays(aligned.ft.dtype, aligned.ft.shape, term.rows, term.parameters)


def _side_files(plan: PairPlan) -> dict[str, dict[str, str]]:
    """Fingerprint the fine-tune's side files; those that equal the base's are only referred to."""
    base, files, pointers = plan.base.side_files, {}, []
    for path, file in plan.ft.side_files.items():
        data = file.read_bytes()
        if data.startswith(LFS_POINTER):
            pointers.append(path)
        equal = path in base and base[path].read_bytes() == data
        files[path] = {"fingerprint": of_bytes(data), "from": "base" if equal else "file"}
    if pointers:
        raise InputError(
            f"{plan.ft.path}: Git LFS pointers, not the files themselves: {listed(pointers)}",
            f"fetch them: cd '{plan.ft.path}' && git lfs pull --include '{','.join(pointers)}'",
        )
    return files


def _same_reason(aligned: Aligned, equal_bytes: bool) -> str:
    if equal_bytes:
        return "equals the base's"
    if aligned.base is not None and aligned.base.dtype != aligned.ft.dtype:
        return f"equals the base's in value, as {aligned.ft.dtype} instead of {aligned.base.dtype}"
    return "equals the base's in value (0.0 against -0.0)"


def _where_not_finite(part: Part, base: Values | None, ft: Values) -> str:
    assert part.aligned is not None
    tensor = part.aligned.ft
    for owner, values, (first, _) in ((tensor, ft, part.ft), (part.tensor, base, part.base)):
        at = find_not_finite(values, part.block.size) if values is not None else None
        if owner is not None and at is not None:
            place = np.unravel_index(first // DTYPE_BYTES[owner.dtype] + at, owner.shape) if owner.shape else ()
            return f"{owner.file}: {owner.name} has a NaN or an infinity at {[int(i) for i in place]}"
    return f"{tensor.file}: {tensor.name} differs from the base by more than float32 can hold"
