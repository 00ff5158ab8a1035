"""What the command line prints, and where: the one object through which every verb speaks.

The result goes to stdout, as tables or as one JSON object; notes, progress and errors go to stderr. Nothing is coloured
into a pipe or under NO_COLOR.

    out = Output(json=json, quiet=quiet)
    with out.progress("compressing") as bar:
        report = compress(base, finetuned, output, progress=bar)  # calls bar(done, total) now and then
    out.result(report, table(["tensor", "bytes"], report.rows))
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from zendelta.cli.text import clean
from zendelta.errors import ZendeltaError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION = 1
"""Of every JSON object printed; rises when a documented key changes its meaning or goes."""

PIPE_WIDTH = 1000
"""Columns of what is not a terminal: names are not cut short for a reader that has no edge."""


class StdoutClosed(Exception):
    """The reader of stdout went away (`| head`): there is nobody left to tell."""


class Reported(Exception):
    """A failure whose result, and the failure within it, has been printed to stdout already."""

    def __init__(self, failure: ZendeltaError) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Progress(Protocol):
    """How long work tells how far it is: called from any thread, as often as it likes."""

    def __call__(self, done: int, total: int) -> None: ...


class Output:
    """Where a verb's result, notes and progress go.

    Args:
        json: print results and failures as one JSON object each.
        quiet: no progress and no notes.
        stdout: taken instead of this process's, for tests.
        stderr: taken instead of this process's, for tests.
    """

    def __init__(
        self, *, json: bool = False, quiet: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.json = json
        self.quiet = quiet
        self._out = _console(sys.stdout if stdout is None else stdout)
        self._err = _console(sys.stderr if stderr is None else stderr)

    def result(
        self,
        data: Mapping[str, Any] | DataclassInstance,
        *views: RenderableType,
        failure: ZendeltaError | None = None,
    ) -> None:
        """Print what a verb found, once, at its end.

        Args:
            data: the JSON object, without its schema_version: a mapping or a dataclass.
            views: the same for people: tables, bars, lines of text (in a `str` markup means nothing). A blank line
                stands between two views, unless both are text.
            failure: a check that said no (validate over its threshold); raised once the result stands, and part of
                the JSON object as `error`.
        """
        if self.json:
            plain = {"schema_version": SCHEMA_VERSION, **_plain(data)}
            self._print_json(plain if failure is None else plain | _error_object(failure))
        else:
            for before, view in zip((None, *views), views, strict=False):
                if before is not None and not (isinstance(before, str) and isinstance(view, str)):
                    self._print("")
                self._print("\n".join(map(clean, view.split("\n"))) if isinstance(view, str) else view)
        if failure is not None:
            raise Reported(failure)

    def note(self, message: str) -> None:
        """Say something that is good to know while the work goes on; nothing with --quiet."""
        if not self.quiet:
            self._say(message, style="dim")

    def warn(self, message: str) -> None:
        """Say something that the reader must know; also with --quiet."""
        self._say(message, label="warning:", style="yellow")

    def error(self, failure: ZendeltaError, *, reported: bool = False) -> None:
        """Print a failure: one line that says what is wrong and one that says what to do.

        Args:
            failure: its kind, message and hint are printed.
            reported: the JSON object has been printed already.
        """
        self._say(failure.message, label="error:", style="bold red")
        if failure.hint:
            self._say(failure.hint, label="hint:", style="bold")
        if self.json and not reported:
            self._print_json({"schema_version": SCHEMA_VERSION, **_error_object(failure)})

    @contextmanager
    def progress(self, title: str, unit: Literal["bytes", "steps"] = "bytes") -> Iterator[Progress]:
        """Show how far the work is, on stderr and only while a person can see it.

        Args:
            title: what is being done, in one word or two.
            unit: what the numbers handed to the bar count; bytes are shown with bytes per second.
        """
        if self.json or self.quiet or not self._err.is_terminal or self._err.is_dumb_terminal:
            yield lambda done, total: None
            return
        from rich import progress as rich_progress

        counted: list[rich_progress.ProgressColumn] = (
            [rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn()]
            if unit == "bytes"
            else [rich_progress.MofNCompleteColumn()]
        )
        with rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            *counted,
            rich_progress.TimeRemainingColumn(compact=True),
            console=self._err,
            transient=True,
        ) as bar:
            task = bar.add_task(clean(title), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def _say(self, message: str, *, label: str = "", style: str) -> None:
        """One line on stderr. A stderr that nobody reads does not stop the work."""
        line = Text(label, style=style) if label else Text()
        line.append(" " if label else "").append(clean(message), style="" if label else style)
        with suppress(BrokenPipeError):
            self._err.print(line, soft_wrap=True)

    def _print(self, view: RenderableType) -> None:
        try:
            self._out.print(view, markup=False, highlight=False, soft_wrap=isinstance(view, str))
        except BrokenPipeError as error:
            raise StdoutClosed from error

    def _print_json(self, data: Mapping[str, Any]) -> None:
        try:
            self._out.file.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
            self._out.file.flush()
        except BrokenPipeError as error:
            raise StdoutClosed from error


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError that rich is handling; its own way is to end the process


def _console(stream: TextIO) -> Console:
    """A console that colours only a terminal, and never under NO_COLOR (https://no-color.org)."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return _Console(file=stream, color_system="auto" if coloured else None, width=width, highlight=False, emoji=False)


def _error_object(failure: ZendeltaError) -> dict[str, Any]:
    return {"error": {"kind": failure.kind, "message": failure.message, "hint": failure.hint}}


def _plain(value: Any) -> Any:
    """A value as JSON knows it. JSON has no infinity and no NaN: both become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
