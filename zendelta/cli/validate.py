"""`zendelta validate`: how good a .bd file is, measured on the weights."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import RenderableType

from zendelta.cli.options import METHOD, OUTPUT, Base, Delta, Device, Finetuned, Json, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.report import error_words
from zendelta.cli.text import facts, percent, table
from zendelta.errors import CheckFailed

EXAMPLES = [
    "zendelta validate base/ ft/ coder.bd",
    "zendelta validate base/ ft/ coder.bd --max-error 0.7 --json",
    "accelerate launch -m zendelta validate base/ ft/ coder.bd",
]

_NOTICEABLE = 0.05  # of all weights: what rounding may leave unmoved beyond the fine-tune's own before it is said


def validate(
    base: Base,
    finetuned: Finetuned,
    delta: Delta,
    max_error: Annotated[
        float | None,
        typer.Option("--max-error", metavar="X", help="Fail above this relative error.", rich_help_panel=METHOD),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only the worst.", rich_help_panel=OUTPUT)
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a .bd file against its base and fine-tune, and check that it says the truth about itself.

    Exit code 1 where the error is above --max-error, or the files and the file's header disagree.
    """
    from zendelta.checkpoint.reader import Checkpoint
    from zendelta.pipeline.validate import validate as run

    first = int(os.environ.get("RANK", "0")) == 0  # under accelerate launch only the first process speaks
    out = Output(json=json and first, quiet=quiet or not first)
    old, new = (Checkpoint.open(side, quiet=json or quiet or not first) for side in (base, finetuned))
    with out.progress("validating") as bar:
        report = run(old, new, delta, max_error=max_error, device=device, threads=threads, progress=bar)
    failure = CheckFailed(*report.failure) if report.failure else None
    if not first:
        raise typer.Exit(1 if failure else 0)
    for note in report.notes:
        out.warn(note)
    shown = report.tensors if tensors else report.worst(8)
    signs = [tensor.signs for tensor in report.tensors if tensor.signs is not None]
    ulps = [tensor.alpha_ulps for tensor in report.tensors if tensor.alpha_ulps is not None]
    views: list[RenderableType] = [
        table(
            [
                "tensor" if tensors else "worst tensors",
                "codec",
                "error",
                "rounded",
                "cosine",
                "worst weight",
                "unmoved",
            ],
            [(t.name, t.codec, t.error, t.error_rounded, t.cosine, t.worst, _share(t.unmoved)) for t in shown],
        ),
        facts(
            [
                ("error", error_words(report.error)),
                ("rounded", f"{report.error_rounded:.4f} in the fine-tune's dtype" if report.error_rounded else None),
                (
                    "unmoved",
                    f"{percent(report.unmoved)} of the weights stay at the base's value after rounding, "
                    f"{percent(report.zeros or 0)} did in the fine-tune"
                    if report.unmoved is not None
                    else None,
                ),
                ("signs", f"{percent(min(signs))} agree or better, in every tensor" if signs else None),
                ("alphas", f"within {max(ulps)} units in the last place" if ulps else None),
                ("verdict", "passed" if report.passed else "failed"),
            ]
        ),
        *[f"fault: {fault}" for fault in report.faults[:20]],
    ]
    if (report.unmoved or 0) > (report.zeros or 0) + _NOTICEABLE:
        out.warn("the step of the dtype swallows part of the change; `zendelta apply --dtype float32` keeps it")
    out.result(report.to_json(), *views, failure=failure)


def _share(share: float | None) -> str | None:
    return percent(share) if share is not None else None
