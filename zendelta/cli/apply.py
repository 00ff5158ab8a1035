"""`zendelta apply`: a .bd file on its base, as an ordinary checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from zendelta.cli.options import OUTPUT, Base, Delta, Device, DryRun, Dtype, Force, Json, OutputPath, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.text import facts, size, table

EXAMPLES = [
    "zendelta apply base/ coder.bd -o restored/",
    "zendelta apply org/base@main coder.bd -o restored/ --dtype float32 --max-shard-size 2GB",
]


def apply(
    base: Base,
    delta: Delta,
    output: OutputPath,
    dtype: Dtype = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Most bytes of weights in one file.", rich_help_panel=OUTPUT
        ),
    ] = "5GB",
    force: Force = False,
    dry_run: DryRun = False,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Restore the fine-tune that a .bd file holds, as a folder that transformers, vLLM and mergekit load."""
    from zendelta.checkpoint.reader import Checkpoint
    from zendelta.pipeline.apply import apply as run

    out = Output(json=json, quiet=quiet)
    opened = Checkpoint.open(base, quiet=json or quiet)
    with out.progress("applying") as bar:
        report = run(
            opened,
            delta,
            output,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            threads=threads,
            force=force,
            dry_run=dry_run,
            progress=bar,
        )
    for note in report.notes:
        out.warn(note)
    out.result(
        report.to_json(),
        table(["file", "bytes"], [(name, size(count)) for name, count in report.files.items()]),
        facts(
            [
                ("restored" if not dry_run else "would restore", f"{report.finetuned} from {report.base}"),
                ("tensors", f"{report.tensors}, {size(report.output_bytes)} in {report.output}"),
                ("memory", f"buffers of {size(report.peak_memory)}" if dry_run else None),
                ("disk", f"{size(report.free_bytes)} free" if dry_run else None),
            ]
        ),
    )
