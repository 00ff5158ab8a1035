"""`zendelta diff`: what a fine-tune changed, before compressing it."""

from __future__ import annotations

from typing import Annotated

import typer

from zendelta.cli import report as show
from zendelta.cli.options import OUTPUT, Base, Device, Finetuned, Json, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.text import Name, Number, facts, percent, table

REPORT = "zendelta.pipeline.diff.DiffReport"  # what --json prints
EXAMPLES = [
    "zendelta diff base/ ft/",
    "zendelta diff org/base org/coder@main --tensors",
    "zendelta diff base/ ft/ --json",
]


def diff(
    base: Base,
    finetuned: Finetuned,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only each kind.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    threads: Threads = None,
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
    out.result(
        report.to_json(),
        table(
            ["tensor" if tensors else "kind of matrix", "change", "cosine", "unchanged", "one-bit error"],
            [
                (
                    Name(row.name),
                    _change(row.change),
                    None if row.cosine is None else Number(f"{row.cosine:.6f}"),
                    show.share(row.zeros),
                    show.error_number(row.error),
                )
                for row in (report.tensors if tensors else report.kinds)
            ],
        ),
        facts(
            [
                ("change", f"{_change(report.change)} of the base's norm" if report.change is not None else None),
                ("unchanged", f"{percent(report.zeros)} of the weights" if report.zeros is not None else None),
                ("new", show.names([tensor.name for tensor in report.tensors if "new" in tensor.codec])),
                ("dropped", show.names(report.dropped)),
                ("verdict", f"{report.verdict}: {report.advice}"),
            ]
        ),
    )
    if report.verdict in ("ordinary", "tiny change"):
        out.note(f"next: {show.command('compress', base, finetuned, '-o', 'FILE.bd', device=device, threads=threads)}")


def _change(change: float | None) -> Number | None:
    """A relative change in percent, to two digits however small it is."""
    return None if change is None else Number(f"{100 * change:.2g} %")
