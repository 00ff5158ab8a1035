"""`zendelta diff`: what a fine-tune changed, before compressing it."""

from __future__ import annotations

from typing import Annotated

import typer

from zendelta.cli.options import OUTPUT, Base, Device, Finetuned, Json, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.report import names
from zendelta.cli.text import facts, percent, table

EXAMPLES = ["zendelta diff base/ ft/", "zendelta diff base/ ft/ --tensors --json"]


def diff(
    base: Base,
    finetuned: Finetuned,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only each kind.", rich_help_panel=OUTPUT)
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what a fine-tune changed, and tell whether one bit per weight will hold it."""
    from zendelta.checkpoint.reader import Checkpoint
    from zendelta.pipeline.diff import diff as run

    out = Output(json=json, quiet=quiet)
    old, new = (Checkpoint.open(side, quiet=json or quiet) for side in (base, finetuned))
    with out.progress("comparing") as bar:
        report = run(old, new, device=device, threads=threads, progress=bar)
    for note in report.notes:
        out.warn(note)
    rows = report.tensors if tensors else report.kinds()
    out.result(
        report.to_json(),
        table(
            ["tensor" if tensors else "kind of matrix", "change", "cosine", "unchanged", "one-bit error"],
            [
                (
                    row.name,
                    percent(row.change) if row.change is not None else None,
                    f"{row.cosine:.6f}" if row.cosine is not None else None,
                    percent(row.zeros) if row.zeros is not None else None,
                    row.error,
                )
                for row in rows
            ],
        ),
        facts(
            [
                ("change", f"{percent(report.change)} of the base's norm" if report.change is not None else None),
                ("unchanged", f"{percent(report.zeros)} of the weights" if report.zeros is not None else None),
                ("new", names([t.name for t in report.tensors if "new" in t.codec])),
                ("dropped", names(report.dropped)),
                ("verdict", f"{report.verdict}: {report.advice}"),
            ]
        ),
    )
