"""`zendelta validate`: how good a .bd file is, measured on the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import RenderableType

from zendelta.cli import report as show
from zendelta.cli.options import METHOD, OUTPUT, Base, Delta, Device, Finetuned, Json, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.text import Name, facts, fixed, percent, table
from zendelta.errors import CheckFailed, ZendeltaError

REPORT = "zendelta.pipeline.validate.ValidateReport"  # what --json prints
EXAMPLES = [
    "zendelta validate base/ ft/ coder.bd",
    "zendelta validate base/ ft/ coder.bd --max-error 0.7 --json",
    "accelerate launch -m zendelta validate base/ ft/ coder.bd  # on several GPUs",
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
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure a .bd file against its base and fine-tune, and check that it says the truth about itself.

    Exit code 1 where the error is above --max-error, or the files and the file's header disagree.
    """
    from zendelta.checkpoint.reader import Checkpoint
    from zendelta.pipeline.validate import validate as run

    with _one_voice() as first:
        out = Output(json=json and first, quiet=quiet or not first)
        old, new = (Checkpoint.open(side, quiet=json or quiet or not first) for side in (base, finetuned))
        with out.progress("validating") as bar:
            report = run(old, new, delta, max_error=max_error, device=device, threads=threads, progress=bar)
        failure = CheckFailed(*report.failure) if report.failure else None
        if failure is not None and not first:
            raise failure
    if not first:
        return
    for note in report.notes:
        out.warn(note)
    shown = report.tensors if tensors else report.worst()
    views: list[RenderableType] = [
        table(
            ["tensor" if tensors else "worst tensors", "error", "rounded", "cosine", "unmoved"],
            [
                (
                    Name(tensor.name),
                    show.error_number(tensor.error),
                    show.error_number(tensor.error_rounded),
                    None if tensor.cosine is None else fixed(tensor.cosine),
                    show.share(tensor.unmoved),
                )
                for tensor in shown
            ],
        ),
        facts(
            [
                ("error", show.error_words(report.error)),
                ("rounded", f"{report.error_rounded:.3f} in the fine-tune's dtype" if report.error_rounded else None),
                ("unmoved", _unmoved(report.unmoved, report.zeros)),
                ("signs", f"{percent(report.signs)} as in the fine-tune" if report.signs is not None else None),
                ("alphas", _ulps(report.alpha_ulps)),
                ("faults", f"{len(report.faults)}" if report.faults else "none"),
                ("verdict", "passed" if report.passed else "failed"),
            ]
        ),
    ]
    if report.faults:
        more = [f"  and {len(report.faults) - 20} more"] if len(report.faults) > 20 else []
        views.insert(1, "\n".join(["faults", *(f"  {fault}" for fault in report.faults[:20]), *more]))
    out.result(report.to_json(), *views, failure=failure)
    if (report.unmoved or 0) > (report.zeros or 0) + _NOTICEABLE:
        again = show.command("apply", base, delta, "-o", "FOLDER", "--dtype", "float32", device=device)
        out.warn(f"the step of the dtype swallows a part of the change; float32 keeps it: {again}")


@contextmanager
def _one_voice() -> Iterator[bool]:
    """Whether this process speaks: under `accelerate launch` only the first one does.

    All of them find the same failures, so the others end with the same exit code and without a word.
    """
    first = int(os.environ.get("WORLD_SIZE", "1")) <= 1 or int(os.environ.get("RANK", "0")) == 0
    try:
        yield first
    except ZendeltaError as error:
        if first:
            raise
        raise typer.Exit(error.exit_code) from error


def _unmoved(unmoved: float | None, zeros: float | None) -> str | None:
    if unmoved is None or zeros is None:
        return None
    return (
        f"{percent(unmoved)} of the weights stay at the base's value after rounding; "
        f"{percent(zeros)} did in the fine-tune"
    )


def _ulps(most: int | None) -> str | None:
    if most is None:
        return None
    return "as recomputed" if most == 0 else f"within {most} units in the last place of the recomputed ones"
