"""The arguments and options that mean the same in every verb, as annotated types for a verb's signature.

A verb takes them as `output: OutputPath, force: Force = False, device: Device = "auto", json: Json = False`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

INPUT, METHOD, OUTPUT, PERFORMANCE = "Input", "Method", "Output", "Performance"
"""The panels of a verb's help, in this order; a verb's own options go into one of them."""

DTYPES = ("float32", "bfloat16", "float16")


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
        raise typer.BadParameter(f"{value!r} is not one of auto, cpu, cuda, cuda:0, cuda:1, ...")
    return value


def _dtype(value: str | None) -> str | None:
    if value is not None and value not in DTYPES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(DTYPES)}")
    return value


_CHECKPOINT = "a folder, a .safetensors file, or a hub id such as org/name or org/name@revision"

# Texts, not paths: a hub id must arrive as it was typed.
Base = Annotated[str, typer.Argument(metavar="BASE", help=f"The base model: {_CHECKPOINT}.", rich_help_panel=INPUT)]
Finetuned = Annotated[
    str, typer.Argument(metavar="FT", help="The fine-tuned model, given in the same ways.", rich_help_panel=INPUT)
]
Delta = Annotated[
    str, typer.Argument(metavar="DELTA.bd", help="The file that `zendelta compress` wrote.", rich_help_panel=INPUT)
]
OutputPath = Annotated[
    Path, typer.Option("-o", "--output", metavar="PATH", help="Where the result is written.", rich_help_panel=OUTPUT)
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace an existing output, all at once.", rich_help_panel=OUTPUT)
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        help="Where to compute; auto takes the first GPU there is.",
        callback=_device,
        rich_help_panel=PERFORMANCE,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Number type of the result; without it, the input's own.",
        callback=_dtype,
        rich_help_panel=OUTPUT,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="CPU threads; without it, one for each core.",
        rich_help_panel=PERFORMANCE,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object, failures too.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.", rich_help_panel=OUTPUT)]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Only the plan, from headers: tensors, sizes, peak memory, free space. Writes nothing.",
        rich_help_panel=OUTPUT,
    ),
]
