"""`zendelta compress`: the change of a fine-tune, as one file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import RenderableType

from zendelta.cli import report as show
from zendelta.cli.options import (
    METHOD,
    Base,
    Device,
    DryRun,
    Finetuned,
    Force,
    Json,
    OutputPath,
    Quiet,
    Threads,
)
from zendelta.cli.output import Output
from zendelta.cli.text import facts, percent, size

REPORT = "zendelta.pipeline.compress.CompressReport"  # what --json prints
EXAMPLES = [
    "zendelta compress base/ ft/ -o coder.bd",
    "zendelta compress base/ ft/ -o coder.bd --dry-run",
    "zendelta compress org/base org/coder@main -o coder.bd --keep 'lm_head.*=dense'",
]


def compress(
    base: Base,
    finetuned: Finetuned,
    *,
    alpha: Annotated[
        Literal["row", "matrix"],
        typer.Option(
            "--alpha", metavar="row|matrix", help="One scale for each row, or for each matrix.", rich_help_panel=METHOD
        ),
    ] = "row",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="PATTERN=CODEC",
            help="Store tensors whose names match otherwise: =dense exactly, =sign as signs. May be repeated.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    output: OutputPath,
    force: Force = False,
    dry_run: DryRun = False,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store what a fine-tune changed, at about one bit per weight, as one .bd file."""
    from zendelta.checkpoint.reader import Checkpoint
    from zendelta.pipeline.compress import compress as run

    out = Output(json=json, quiet=quiet)
    old, new = (Checkpoint.open(side, quiet=json or quiet) for side in (base, finetuned))
    with out.progress("compressing") as bar:
        report = run(
            old,
            new,
            output,
            alpha=alpha,
            keep=keep or (),
            device=device,
            threads=threads,
            force=force,
            dry_run=dry_run,
            progress=bar,
        )
    for note in report.notes:
        out.warn(note)
    views: list[RenderableType] = [
        show.codec_table(report.codecs, report.file_bytes, report.header_bytes),
        facts(
            [
                ("file", f"{'at most ' if dry_run else ''}{size(report.output_bytes)}, {report.output}"),
                ("ratio", show.ratio_words(report.ratio, report.ratio_without_files, report.finetuned_bytes)),
                ("size", f"{report.bits_per_weight:.2f} bits per weight"),
                ("error", show.error_words(report.error)),
                ("unchanged", f"{percent(report.zeros)} of the weights" if report.zeros is not None else None),
                ("new", show.names([tensor.name for tensor in report.tensors if "new" in tensor.codec])),
                ("aliases", show.names([f"{name} = {target}" for name, target in report.aliases.items()])),
                ("dropped", show.names(report.dropped)),
                ("memory", show.memory_words(report.peak_memory) if dry_run else None),
                ("disk", show.disk_words(report.output_bytes, report.free_bytes) if dry_run else None),
            ]
        ),
    ]
    if dry_run:
        failure = show.too_full(report.output, report.output_bytes, report.free_bytes)
        out.result(report.to_json(), show.plan_table(report.tensors), *views, failure=failure)
        return
    if worst := report.worst():
        views.insert(1, show.worst_table(worst))
    out.result(report.to_json(), *views)
    out.note(f"next: {show.command('validate', base, finetuned, output, device=device, threads=threads)}")
    out.note(f"      {show.command('apply', base, output, '-o', 'FOLDER', device=device, threads=threads)}")
