"""`zendelta compress`: the change of a fine-tune, as one file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import RenderableType

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
from zendelta.cli.report import codec_table, error_words, names, plan_table
from zendelta.cli.text import facts, percent, size

EXAMPLES = [
    "zendelta compress base/ ft/ -o coder.bd",
    "zendelta compress meta-llama/Llama-3.2-1B ./coder -o coder.bd --keep 'lm_head.*=dense'",
    "zendelta compress base/ ft/ -o coder.bd --dry-run",
]


def compress(
    base: Base,
    finetuned: Finetuned,
    output: OutputPath,
    alpha: Annotated[
        Literal["row", "matrix"],
        typer.Option("--alpha", help="One scale for each row, or for each matrix.", rich_help_panel=METHOD),
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
    from zendelta.pipeline.report import by_codec

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
    views: list[RenderableType] = [codec_table(by_codec(report.tensors))]
    if dry_run:
        views = [plan_table(report.tensors), *views]
    kept = f", {size(report.file_bytes)} of it config and tokenizer" if report.file_bytes else ""
    most = "at most " if dry_run else ""
    views.append(
        facts(
            [
                ("file", f"{most}{size(report.output_bytes)}{kept}"),
                (
                    "ratio",
                    f"{report.ratio:.2f} times smaller than the fine-tune's {size(report.finetuned_bytes)}, "
                    f"{report.bits_per_weight:.2f} bits per weight",
                ),
                ("error", error_words(report.error)),
                ("worst", ", ".join(f"{t.name} {t.error:.3f}" for t in report.worst(3))),
                ("new", names([t.name for t in report.tensors if "new" in t.codec])),
                ("aliases", names([f"{t.name} = {t.source}" for t in report.tensors if t.codec == "alias"])),
                ("dropped", names(report.dropped)),
                ("memory", f"buffers of {size(report.peak_memory)}" if dry_run else None),
                ("disk", f"{size(report.free_bytes)} free" if dry_run else None),
                ("unchanged", percent(report.zeros) + " of the weights" if report.zeros else None),
            ]
        )
    )
    out.result(report.to_json(), *views)
    if not dry_run:
        out.note(f"next: zendelta validate {base} {finetuned} {output}")
