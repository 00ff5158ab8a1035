"""`zendelta demo`: everything on a tiny model that is trained on the spot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from zendelta.cli import report as show
from zendelta.cli.options import OUTPUT, Force, Json, Quiet
from zendelta.cli.output import Output
from zendelta.cli.text import Number, duration, facts, size, table

REPORT = "zendelta.demo.run.DemoReport"  # what --json prints
EXAMPLES = ["zendelta demo", "zendelta demo -o try --force", "zendelta demo --json --quiet"]


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
        out.note(f"{duration(time.monotonic() - start):>11}  {line}")

    report = run_demo(output, force=force, report=say)
    folder = Path(report.folder)

    def row(name: str, model: str, bytes_: int) -> tuple[str, Number, Number, Number]:
        known = report.perplexities[model]
        return name, size(bytes_), Number(f"{known['base_text']:.1f}"), Number(f"{known['finetuned_text']:.1f}")

    out.result(
        report.to_json(),
        table(
            ["perplexity on unseen text (lower is better)", "size", "novel", "treatise"],
            [
                row("base, trained on the novel", "base", report.base_bytes),
                row("fine-tune, trained on the treatise", "finetuned", report.finetuned_bytes),
                row("base + .bd file", "restored", report.delta_bytes),
            ],
        ),
        facts(
            [
                ("ratio", show.ratio_words(report.ratio, report.ratio_without_files, report.finetuned_bytes)),
                ("size", f"{report.bits_per_weight:.2f} bits for each of {report.parameters:,} weights"),
                ("carried files", size(report.carried_bytes) if report.carried_bytes else "none: all equal the base's"),
                ("error", show.error_words(report.error)),
                ("validated", "the file says the truth about the weights" if report.validated else "no"),
            ]
        ),
        f"Everything is in {folder}. Go on with it:",
        f"  {show.command('diff', folder / 'base', folder / 'finetuned')}",
        f"  {show.command('inspect', folder / 'finetuned.bd')}",
        f"  {show.command('validate', folder / 'base', folder / 'finetuned', folder / 'finetuned.bd')}",
        f"  {show.command('apply', folder / 'base', folder / 'finetuned.bd', '-o', f'{folder}-restored')}",
    )
