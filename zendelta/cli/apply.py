"""`zendelta apply`: a .bd file on its base, as an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from zendelta.cli import report as show
from zendelta.cli.options import OUTPUT, Base, Delta, Device, DryRun, Dtype, Force, Json, OutputPath, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.text import Name, Number, facts, size, table

REPORT = "zendelta.pipeline.apply.ApplyReport"  # what --json prints
EXAMPLES = [
    "zendelta apply base/ coder.bd -o restored/",
    "zendelta apply base/ coder.bd -o restored/ --dtype float32 --dry-run",
    "zendelta apply org/base@main coder.bd -o restored/ --max-shard-size 2GB",
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
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    threads: Threads = None,
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
        table(["file", "bytes"], _files(report.files)),
        facts(
            [
                ("would restore" if dry_run else "restored", f"{report.finetuned} from {report.base}"),
                ("into", f"{report.output}, {size(report.output_bytes)}"),
                ("tensors", f"{report.tensors}, {report.dtype or 'each in the dtype it had in the fine-tune'}"),
                ("memory", show.memory_words(report.peak_memory) if dry_run else None),
                ("disk", show.disk_words(report.output_bytes, report.free_bytes) if dry_run else None),
            ]
        ),
        failure=show.too_full(report.output, report.output_bytes, report.free_bytes) if dry_run else None,
    )
    if not dry_run:
        out.note(f"next: load it like any model, transformers: AutoModelForCausalLM.from_pretrained({str(output)!r})")


def _files(files: Mapping[str, int]) -> list[tuple[Name, Number]]:
    """A row for each file; of many shards only the first and the last."""
    rows = [(Name(name), size(count)) for name, count in files.items()]
    shards = [index for index, (name, _) in enumerate(rows) if name.endswith(".safetensors")]
    if len(shards) > 8:
        rows[shards[1] : shards[-1]] = [(Name(f"and {len(shards) - 2} more shards"), Number("..."))]
    return rows
