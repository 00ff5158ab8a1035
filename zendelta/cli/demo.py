"""`zendelta demo`: everything on a tiny model that is trained on the spot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from zendelta.cli.options import OUTPUT, Force, Json, Quiet
from zendelta.cli.output import Output
from zendelta.cli.text import Number, duration, facts, size, table

EXAMPLES = ["zendelta demo", "zendelta demo -o /tmp/demo --force"]


def demo(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FOLDER", help="Where the models are kept.", rich_help_panel=OUTPUT),
    ] = Path("zendelta-demo"),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a tiny model and a fine-tune of it (about a minute), then compress, inspect, validate and apply.

    Nothing is downloaded. The models stay in the folder, to go on with.
    """
    from zendelta.demo.run import run_demo

    out, start = Output(json=json, quiet=quiet), time.monotonic()

    def say(line: str) -> None:
        out.note(f"{duration(time.monotonic() - start):>8}  {line}")

    report = run_demo(output, force=force, report=say)
    carried = f"{size(report.carried_bytes)} of it config and tokenizer"
    if not report.carried_bytes:
        carried = "config and tokenizer equal the base's and take nothing"

    def row(name: str, model: str, bytes_: int) -> tuple[str, Number, Number, Number]:
        known = report.perplexities[model]
        return name, size(bytes_), Number(f"{known['base_text']:.1f}"), Number(f"{known['finetuned_text']:.1f}")

    out.result(
        report.to_json(),
        table(
            ["model", "size", "perplexity, novel", "perplexity, treatise"],
            [
                row("base, trained on a novel", "base", report.base_bytes),
                row("fine-tune, trained on a treatise", "finetuned", report.finetuned_bytes),
                row("base + .bd file", "restored", report.delta_bytes),
            ],
        ),
        facts(
            [
                ("file", f"{size(report.delta_bytes)}, {carried}"),
                (
                    "ratio",
                    f"{report.ratio_without_files:.1f} times smaller than the fine-tune's weights "
                    f"({report.ratio:.1f} with the files it carries), {report.bits_per_weight:.2f} bits per weight",
                ),
                ("error", f"{report.error:.3f} of the change, {report.error_rounded:.3f} after rounding to bf16"),
                ("validated", "the file and the weights agree" if report.validated else "no"),
            ]
        ),
        f"The models are in {report.folder}. Go on with them:",
        f"  zendelta diff {report.folder}/base {report.folder}/finetuned",
        f"  zendelta inspect {report.folder}/finetuned.bd",
        f"  zendelta apply {report.folder}/base {report.folder}/finetuned.bd -o {report.folder}-restored",
    )
