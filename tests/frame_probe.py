"""A verb that the tests of the command line's frame run: it does what its options say, and fails as they say."""

from __future__ import annotations

import errno
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zendelta.cli.options import INPUT, Device, Dtype, Json, Quiet, Threads
from zendelta.cli.output import Output
from zendelta.cli.text import bars, table
from zendelta.errors import CheckFailed, InputError, MachineError, UsageError

EXAMPLES = ["zendelta frame-probe model --fail input", "zendelta frame-probe model --json  # [one] object"]


class OutOfMemoryError(RuntimeError):
    """Stands in for torch's."""


FAILURES: dict[str, BaseException] = {
    "check": CheckFailed("the error is 0.5, over the threshold of 0.1", "try another codec"),
    "usage": UsageError("out.bd exists", "add --force to replace it"),
    "input": InputError("model: 'a.weight' differs", "hand in the base that it was made from"),
    "machine": MachineError("12 bytes are free", "free some"),
    "no space": OSError(errno.ENOSPC, "No space left on device", "out.bd"),
    "no permission": PermissionError(errno.EACCES, "Permission denied", "out.bd"),
    "vanished": FileNotFoundError(errno.ENOENT, "No such file or directory", "model"),
    "no memory": MemoryError("cannot allocate 9 GB"),
    "gpu memory": OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More words."),
    "no package": ModuleNotFoundError("No module named 'transformers'", name="transformers"),
    "interrupt": KeyboardInterrupt(),
    "broken pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "bug": ZeroDivisionError("division by zero"),
}


@dataclass
class Report:
    model: str
    path: Path
    error: float
    rows: list[tuple[str, int]]


def frame_probe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint.", rich_help_panel=INPUT)],
    fail: Annotated[str, typer.Option("--fail", metavar="HOW", help="What goes wrong.")] = "",
    after: Annotated[bool, typer.Option("--after", help="Fail with the result.")] = False,
    hang: Annotated[Path | None, typer.Option("--hang", metavar="FILE", help="Hang while FILE exists.")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Probe the frame.

    This is the [bold]second[/bold] paragraph.
    """
    out = Output(json=json, quiet=quiet)
    out.note("a note")
    out.warn("a warning")
    if hang is not None:
        try:
            hang.write_text("half-made")
            time.sleep(30)
        except Exception:
            out.note("swallowed")
        finally:
            hang.unlink()
    if fail and not after:
        raise FAILURES[fail]
    with out.progress("probing") as bar:
        for done in range(5):
            bar(done * 1000, 4000)
            time.sleep(0.01)
    report = Report(model, Path("some") / "file", math.nan, [("a.weight", 12345), ("evil\x1b[31m", 6)])
    failure = FAILURES[fail] if fail else None
    assert failure is None or isinstance(failure, CheckFailed)
    out.result(
        report,
        f"model {model}",
        table(["tensor", "bytes"], report.rows, title="[tensors]"),
        bars([("layer 0", 1.0, "1 GB"), ("layer 1", 0.51, "0.5 GB")], width=10),
        failure=failure,
    )


if __name__ == "__main__":
    from zendelta.cli.app import build
    from zendelta.cli.run import run

    sys.exit(run(sys.argv[1:], build([("frame_probe", "Test")])))
