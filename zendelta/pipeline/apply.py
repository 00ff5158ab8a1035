"""apply: a base and a ``.bd`` file become an ordinary checkpoint again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zendelta.bdfile import BdFile, Entry
from zendelta.checkpoint.disk import check_space, free_bytes
from zendelta.checkpoint.fingerprint import of_bytes
from zendelta.checkpoint.publish import check_output, refuse_overlap, staged_folder
from zendelta.checkpoint.reader import Checkpoint, Where
from zendelta.checkpoint.sidecar import set_config_dtype, write_side_file
from zendelta.checkpoint.writer import CheckpointWriter, TensorSpec, parse_size
from zendelta.codec.kernels import kernels_for
from zendelta.dtypes import CONFIG_NAMES, FLOATING
from zendelta.errors import InputError, UsageError, listed
from zendelta.pipeline.report import Progress, no_progress
from zendelta.walk.order import default_threads
from zendelta.walk.pair import buffer_bytes
from zendelta.walk.restore import Restored, reads_base, refuse_unfit, restore, wrong_base

_NOTICEABLE = 0.05  # share of unmoved weights above which a note says so
_BY_NAME = {name: dtype for dtype, name in CONFIG_NAMES.items()}


@dataclass
class ApplyReport:
    """What `apply` wrote, or with `dry_run` what it would write.

    Attributes:
        files: bytes of each file of the output.
        clamped: how many entries of a tensor overflowed the output's dtype and were set to its largest value.
        unmoved: share of the weights with a delta that kept the base's value when they were rounded; None where the
            output's dtype is not the base's.
    """

    output: str
    dry_run: bool
    base: str
    finetuned: str
    device: str
    tensors: int
    dtype: str | None
    files: dict[str, int]
    output_bytes: int
    clamped: dict[str, int]
    unmoved: float | None
    notes: list[str]
    peak_memory: int
    free_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return dict(self.__dict__)


def apply(
    base: Where,
    delta: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    device: str = "auto",
    threads: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ApplyReport:
    """Restore the fine-tune that a ``.bd`` file holds, as a sharded safetensors checkpoint.

    Every weight is the base's plus its delta, added in float32 and rounded once to the dtype that the fine-tune had.

    Args:
        base: the checkpoint that the file was made from; its content is checked while it is read.
        delta: the ``.bd`` file.
        output: the folder to make; it appears whole or not at all.
        dtype: float64, float32, bfloat16 or float16 for all floating tensors, instead of the fine-tune's own.
        max_shard_size: the most bytes of tensors in one file, such as ``5GB`` (1 GB = 1e9 bytes).
        device: auto, cpu, cuda or cuda:N.
        threads: worker threads; all cores (at most 16) by default.
        force: replace an existing model folder as a whole.
        dry_run: plan only, from headers; write nothing.
        progress: called with the bytes of the base read so far and in all.

    Raises:
        InputError: the wrong base (the first differing tensors are named), or a damaged file.
        UsageError: the output exists or is an input; a bad option.
        MachineError: no space, no such device.
    """
    if dtype is not None and dtype not in _BY_NAME:
        raise UsageError(f"unknown dtype {dtype!r}", f"use one of {', '.join(_BY_NAME)}")
    output, shard_bytes = Path(output), parse_size(str(max_shard_size))
    file, base_checkpoint = BdFile.open(delta), Checkpoint.open(base)
    refuse_overlap(output, [base_checkpoint.path, file.path])
    check_output(output, folder=True, force=force)
    refuse_unfit(base_checkpoint, file)
    sides = _side_files(base_checkpoint, file, dtype)
    kernels, device = kernels_for(device)
    threads = threads or default_threads()

    def dtype_of(entry: Entry) -> str:
        return _BY_NAME[dtype] if dtype is not None and entry.dtype in FLOATING else entry.dtype

    content = file.content
    entries = {**content.tensors, **{alias: content.tensors[name] for alias, name in content.aliases.items()}}
    specs = [TensorSpec(name, dtype_of(entry), entry.shape) for name, entry in sorted(entries.items())]
    writer = CheckpointWriter(output, specs, max_shard_bytes=shard_bytes)
    files = {**writer.sizes, **{path: len(data) for path, data in sides.items()}}
    need = sum(files.values())
    restored = Restored()
    if not dry_run:
        check_space(output.parent, need)
        total = sum(base_checkpoint.tensors[name].nbytes for name in _sources(base_checkpoint, file))
        read = 0

        def tell(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            progress(read, total)

        with staged_folder(output, force=force) as folder:
            with CheckpointWriter(folder, specs, max_shard_bytes=shard_bytes) as writer:
                restored = restore(
                    base_checkpoint, file, kernels, dtype_of, writer.write, threads=threads, progress=tell
                )
            for path, data in sides.items():
                write_side_file(folder, path, data)
    return ApplyReport(
        output=str(output),
        dry_run=dry_run,
        base=base_checkpoint.name,
        finetuned=content.finetuned["name"],
        device=device,
        tensors=len(specs),
        dtype=dtype,
        files=files,
        output_bytes=need,
        clamped=restored.clamped,
        unmoved=restored.unmoved / restored.added if restored.added else None,
        notes=[*base_checkpoint.warnings, *_notes(restored, dtype)],
        peak_memory=threads * 2 * buffer_bytes(kernels.block_bytes),
        free_bytes=free_bytes(output.parent),
    )


def _sources(base: Checkpoint, file: BdFile) -> list[str]:
    """Return the base tensors that restoring reads, once for each time it does."""
    sources = [entry.source for entry in file.content.tensors.values() if reads_base(entry)]
    return [base.aliases.get(source, source) for source in sources if source is not None]


def _side_files(base: Checkpoint, file: BdFile, dtype: str | None) -> dict[str, bytes]:
    """Collect the files beside the weights, from the ``.bd`` file or from the base, each checked."""
    sides: dict[str, bytes] = {}
    unfit: list[str] = []
    for path, entry in sorted(file.content.files.items()):
        if entry["from"] == "file":
            data = file.side_file(path)
        else:
            own = base.side_files.get(path)
            data = own.read_bytes() if own is not None else b""
            if own is None or of_bytes(data) != entry["fingerprint"]:
                unfit.append(f"{path} ({'missing' if own is None else 'another one'})")
                continue
        if dtype is not None and path == "config.json":
            data = set_config_dtype(data, dtype)
        sides[path] = data
    if unfit:
        error = wrong_base(base, file, f"it lacks files that the fine-tune shares with its base: {listed(unfit)}")
        raise InputError(error.message, f"{error.hint}; put that base's files beside these weights")
    return sides


def _notes(restored: Restored, dtype: str | None) -> list[str]:
    notes, clamped = [], restored.clamped
    if clamped:
        total, worst = sum(clamped.values()), max(clamped, key=lambda name: clamped[name])
        notes.append(
            f"{total} weights overflowed {dtype or 'their dtype'} and were set to its largest value, most in {worst}; "
            "--dtype float32 keeps them"
        )
    if restored.unmoved > _NOTICEABLE * restored.added:
        notes.append(
            f"{restored.unmoved / restored.added:.0%} of the weights with a delta kept the base's value when they were "
            "rounded: the step of the dtype swallows that part of the change; --dtype float32 keeps it"
        )
    return notes
