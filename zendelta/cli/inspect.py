"""`zendelta inspect`: what a .bd file holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType

from zendelta.cli import report as show
from zendelta.cli.options import OUTPUT, Delta, Json, Quiet
from zendelta.cli.output import Output
from zendelta.cli.text import Bar, Name, facts, percent, size, table

REPORT = "zendelta.pipeline.inspect.InspectReport"  # what --json prints
EXAMPLES = [
    "zendelta inspect coder.bd",
    "zendelta inspect coder.bd --tensors",
    "zendelta inspect coder.bd --json",
]


def inspect(
    delta: Delta,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.", rich_help_panel=OUTPUT)] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a .bd file holds: of which base, sizes, codecs, errors. Needs neither the base nor torch."""
    from zendelta.pipeline.inspect import inspect as run

    report = run(delta)
    carried = [f"{path} ({size(count)})" for path, count in report.files.items() if count]
    shared = [path for path, count in report.files.items() if not count]
    views: list[RenderableType] = [
        facts(
            [
                ("file", f"{size(report.bytes)}, {report.path}, by {report.writer}"),
                ("fine-tune", _model(report.finetuned)),
                ("base", _model(report.base)),
                ("options", ", ".join(f"{key} {_said(value)}" for key, value in report.options.items() if value)),
                ("ratio", show.ratio_words(report.ratio, report.ratio_without_files, report.finetuned_bytes)),
                ("size", f"{report.bits_per_weight:.2f} bits for each of {report.weights:,} weights"),
                ("error", show.error_words(report.error)),
                ("unchanged", f"{percent(report.zeros)} of the weights" if report.zeros is not None else None),
                ("aliases", show.names([f"{name} = {target}" for name, target in report.aliases.items()])),
                ("dropped", show.names(report.dropped)),
                ("carried files", show.names(carried, 8)),
                ("same as base's", show.names(shared, 8)),
            ]
        ),
        show.codec_table(report.codecs, report.file_bytes, report.header_bytes),
        table(
            ["kind of matrix", "tensors", "in the file", "error", "unchanged"],
            [
                (
                    Name(kind.name),
                    kind.tensors,
                    size(kind.stored_bytes),
                    show.error_number(kind.error),
                    show.share(kind.zeros),
                )
                for kind in report.kinds
            ],
        ),
        table(
            ["layer", "tensors", "in the file", "error", "", "unchanged"],
            [
                (
                    Name(layer.name),
                    layer.tensors,
                    size(layer.stored_bytes),
                    show.error_number(layer.error),
                    Bar(layer.error or 0.0, 16),
                    show.share(layer.zeros),
                )
                for layer in report.layers
            ],
        ),
    ]
    if tensors:
        views.append(
            table(
                ["tensor", "shape", "dtype", "stored as", "in the file", "error", "unchanged"],
                [
                    (
                        Name(tensor.name),
                        show.shape(tensor.shape),
                        tensor.dtype,
                        tensor.codec,
                        size(tensor.stored_bytes),
                        show.error_number(tensor.error),
                        show.share(tensor.zeros),
                    )
                    for tensor in report.tensors
                ],
            )
        )
    Output(json=json, quiet=quiet).result(report.to_json(), *views)


def _model(model: dict[str, object]) -> str:
    revision = f"@{model['revision']}" if model.get("revision") else ""
    return f"{model['name']}{revision}, fingerprint {model['fingerprint']}"


def _said(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
