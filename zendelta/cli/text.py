"""Numbers, names, tables and bars as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉"


def clean(text: str) -> str:
    """Make a text from a file safe for a terminal: on one line, with control characters spelled out.

    >>> clean("layer\\x1b[31m\\nnext")
    'layer\\\\x1b[31m next'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in text)


class Number(str):
    """A number that is text already, such as `12.3 kB`: it stands on the right of its column like other numbers."""


def size(count: float) -> Number:
    """A number of bytes, to three digits, in units of a thousand.

    >>> [size(n) for n in (0, 999, 1000, 12345, 8.75e9, 140e9, 2.5e12)]
    ['0 B', '999 B', '1 kB', '12.3 kB', '8.75 GB', '140 GB', '2.5 TB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        digits = f"{count:.3g}"
        if abs(float(digits)) < 1000:
            return Number(f"{digits} {unit}")
        count /= 1000
    return Number(f"{count:,.3g} PB")


def percent(share: float) -> Number:
    """A share of a whole; neither nothing nor everything is said of what is only near it.

    >>> [percent(s) for s in (0, 0.00003, 0.0012, 0.0123, 0.5, 0.98765, 0.99999, 1)]
    ['0 %', '<0.01 %', '0.12 %', '1.2 %', '50.0 %', '98.8 %', '>99.9 %', '100 %']
    """
    if share in (0, 1):
        return Number(f"{share:.0%}".replace("%", " %"))
    if share < 0.0001:
        return Number("<0.01 %")
    if 0.9995 <= share < 1:
        return Number(">99.9 %")
    return Number(f"{100 * share:.{2 if share < 0.01 else 1}f} %")


def fixed(value: float, digits: int = 3) -> Number:
    """A number with so many digits behind the point; an exact zero is just that.

    >>> [fixed(v) for v in (0, 0.59781, 1)]
    ['0', '0.598', '1.000']
    """
    return Number("0" if value == 0 else f"{value:.{digits}f}")


class Name(str):
    """A tensor's name or a path: where a table's column is too narrow for it, it is broken after a dot or a slash."""


def duration(seconds: float) -> str:
    """A time span.

    >>> [duration(s) for s in (0.042, 7.25, 61, 3725)]
    ['42 ms', '7.2 s', '1 min 01 s', '1 h 02 min']
    """
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table of plain cells; columns of numbers stand on the right, whole numbers with thousands separators.

    A `None` is shown as a dash. Columns of numbers are never broken; names give way first.

    Args:
        headers: one for each column.
        rows: cells, whose texts may come from anywhere: they are cleaned, and markup in them means nothing. A cell
            that is a rich renderable (a `Bar`, a `Text`) is shown as such.
        title: stands above the table.
    """
    rows = [list(row) for row in rows]
    grid = Table(
        box=box.SIMPLE_HEAD,
        title=Text(clean(title)) if title else None,
        title_justify="left",
        title_style="bold",
        header_style="",
        border_style="dim",
        pad_edge=False,
        show_edge=False,
    )
    for index, header in enumerate(headers):
        said = [row[index] for row in rows if row[index] not in (None, "")]
        right = bool(said) and all(isinstance(cell, int | float | Number) for cell in said)
        grid.add_column(Text(header), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        grid.add_row(*(_cell(cell) for cell in row))
    return grid


def facts(rows: Iterable[tuple[str, str | None]]) -> Table:
    """Lines of a name and what is to be said of it, in two columns.

    Args:
        rows: those whose second part is None or empty are left out.
    """
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in rows:
        if said:
            grid.add_row(Text(name), Text(clean(said)))
    return grid


def _cell(value: object) -> Bar | Text | _Broken:
    if isinstance(value, Bar | Text):
        return value
    if isinstance(value, Name):
        return _Broken(clean(value))
    if value is None:
        return Text("-")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Text(clean(str(value)))
    return Text(f"{value:,}" if isinstance(value, int) else f"{value:.4g}")


class _Broken:
    """How a `Name` is drawn: each line but the first is indented."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, width = [""], max(options.max_width, 8)
        for part in re.findall(r"[^./]*[./]|[^./]+$", self.name):
            while len(lines[-1]) + len(part) > width:
                room = width - len(lines[-1]) if len(part) > width - 2 else 0
                lines[-1] += part[:room]
                part = part[room:]
                lines.append("  ")
            lines[-1] += part
        for line in lines:
            yield Segment(line)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.name), 16), len(self.name))


class Bar:
    """A horizontal bar, of `#` where the stream's encoding has no block characters.

    Args:
        share: its length, from 0 to 1 of the width.
        width: columns of a bar whose share is 1.
    """

    def __init__(self, share: float, width: int = 30) -> None:
        self.share = min(1.0, max(0.0, share))
        self.width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        if options.ascii_only:
            bar = "#" * round(self.share * width)
        else:
            full, eighths = divmod(round(self.share * width * 8), 8)
            bar = "█" * full + _EIGHTHS[eighths].strip()
        yield Segment(bar.ljust(width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, self.width)


def bars(rows: Sequence[tuple[str, float, str]], headers: tuple[str, str] = ("layer", ""), width: int = 30) -> Table:
    """A bar chart, one line a layer: its name, a bar against the largest, and the value in words.

    Args:
        rows: name, value from 0 up, and how the value reads ("12.3 %", "8.75 GB").
        headers: above the names and above the values.
        width: columns of the longest bar.
    """
    most = max((value for _, value, _ in rows), default=0.0)
    return table(
        [headers[0], "", headers[1]],
        [(name, Bar(value / most if most > 0 else 0.0, width), shown) for name, value, shown in rows],
    )
