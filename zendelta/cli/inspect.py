"""`zendelta inspect`: what a .bd file holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType

from zendelta.cli.options import OUTPUT, Delta, Json, Quiet
from zendelta.cli.output import Output
from zendelta.cli.report import codec_table, error_words, names
from zendelta.cli.text import bars, facts, percent, size, table

EXAMPLES = ["zendelta inspect coder.bd", "zendelta inspect coder.bd --tensors", "zendelta inspect coder.bd --json"]


def inspect(
    delta: Delta,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.", rich_help_panel=OUTPUT)] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a .bd file holds: of which base, sizes, codecs, errors. Needs neither the base nor torch."""
    from zendelta.pipeline.inspect import inspect as run

    report = run(delta)
    carried = {path: count for path, count in report.files.items() if count}
    views: list[RenderableType] = [
        facts(
            [
                ("file", f"{report.path}, {size(report.bytes)}, by {report.writer}"),
                ("fine-tune", _model(report.finetuned)),
                ("base", _model(report.base)),
                (
                    "ratio",
                    f"{report.ratio:.2f} times smaller than the fine-tune's {size(report.finetuned_bytes)}, "
                    f"{report.bits_per_weight:.2f} bits per weight",
                ),
                ("error", error_words(report.error)),
                ("unchanged", f"{percent(report.zeros)} of the weights" if report.zeros is not None else None),
                ("aliases", names([f"{name} = {target}" for name, target in report.aliases.items()])),
                ("dropped", names(report.dropped)),
                ("carried", names([f"{path} {size(count)}" for path, count in carried.items()], 8)),
                ("of the base", names([path for path, count in report.files.items() if not count], 8)),
            ]
        ),
        codec_table(report.codecs),
        table(
            ["kind of matrix", "tensors", "in the file", "error", "unchanged"],
            [(g.name, g.tensors, size(g.stored_bytes), g.error, _share(g.zeros)) for g in report.kinds],
        ),
        bars(
            [(g.name, g.error, f"{g.error:.3f}") for g in report.layers if g.error is not None],
            headers=("layer", "error"),
        ),
    ]
    if tensors:
        views.append(
            table(
                ["tensor", "shape", "dtype", "codec", "in the file", "error", "unchanged"],
                [
                    (
                        t.name,
                        "x".join(map(str, t.shape)),
                        t.dtype,
                        t.codec,
                        size(t.stored_bytes),
                        t.error,
                        _share(t.zeros),
                    )
                    for t in report.tensors
                ],
            )
        )
    Output(json=json, quiet=quiet).result(report.to_json(), *views)


def _model(model: dict[str, object]) -> str:
    revision = f"@{model['revision']}" if model.get("revision") else ""
    return f"{model['name']}{revision} (fingerprint {model['fingerprint']})"


def _share(share: float | None) -> str | None:
    return percent(share) if share is not None else None
