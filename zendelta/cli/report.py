"""What several verbs show alike."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from zendelta.cli.app import PROGRAM
from zendelta.cli.text import Name, Number, fixed, percent, size, table
from zendelta.errors import MachineError
from zendelta.pipeline.report import TensorReport, alike

_USUAL = "(about 0.6 is usual at one bit)"


def codec_table(codecs: Mapping[str, Mapping[str, int]], file_bytes: int, header_bytes: int) -> Table:
    """What takes the bytes of a file: a line for each codec, for the carried files and for the header."""
    rows: list[tuple[str, int | None, Number | None, Number]] = [
        (codec, group["tensors"], size(group["raw_bytes"]), size(group["stored_bytes"]))
        for codec, group in codecs.items()
    ]
    if file_bytes:
        rows.append(("carried files", None, None, size(file_bytes)))
    rows.append(("header", None, None, size(header_bytes)))
    return table(["stored as", "tensors", "in the fine-tune", "in the file"], rows)


def plan_table(tensors: Sequence[TensorReport]) -> Table:
    """How tensors would be stored, and why: in sections, with a line for each tensor or for all that are alike."""
    lines = alike(tensors)
    counted = any(line.tensors > 1 for line in lines)
    sections: dict[str, list[list[object]]] = {}
    for line in lines:
        count = [line.tensors] if counted else []
        row = [Name(f"  {line.name}"), *count, shape(line.shape), line.dtype, size(line.raw_bytes)]
        sections.setdefault(f"{line.codec}: {line.reason}", []).append([*row, size(line.stored_bytes)])
    headers = ["tensor", *(["count"] if counted else []), "shape", "dtype", "fine-tune", "at most"]
    rows: list[list[object]] = []
    for title, members in sections.items():
        rows += [[Text(title, style="bold"), *[""] * (len(headers) - 1)], *members]
    return table(headers, rows)


def worst_table(tensors: Sequence[TensorReport]) -> Table:
    """The tensors that are restored worst."""
    rows = [(Name(tensor.name), tensor.codec, error_number(tensor.error), share(tensor.zeros)) for tensor in tensors]
    return table(["worst tensors", "stored as", "error", "unchanged"], rows)


def shape(dimensions: Sequence[int]) -> str:
    """A tensor's dimensions in one word."""
    return "x".join(map(str, dimensions)) or "scalar"


def share(part: float | None) -> Number | None:
    """A share in percent, where there is one."""
    return None if part is None else percent(part)


def error_number(error: float | None) -> Number | None:
    """A relative error as a table shows it, where there is one."""
    return None if error is None else fixed(error)


def error_words(error: float | None) -> str | None:
    """A relative error in plain words; None without any."""
    if error is None:
        return None
    if error == 0:
        return "none: every change is restored exactly"
    if error > 0.7:
        return f"{error:.3f} of the change's size: coarse {_USUAL}"
    return f"{error:.3f} of the change's size {_USUAL}"


def ratio_words(ratio: float, without_files: float, finetuned_bytes: int) -> str:
    """How much smaller a file is, also without the files that it carries where that makes a difference."""
    words = f"{ratio:.2f} times smaller than the fine-tune's {size(finetuned_bytes)}"
    return words if f"{ratio:.2g}" == f"{without_files:.2g}" else f"{words}, {without_files:.2f} without carried files"


def names(items: Sequence[str], limit: int = 6) -> str | None:
    """Names in a line, the first few of them; None without any."""
    if not items:
        return None
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{len(items)}: {', '.join(items[:limit])}{more}"


def memory_words(peak: int) -> str:
    """What a run takes of the machine's memory."""
    return f"{size(peak)} of buffers at most"


def disk_words(need: int, free: int) -> str:
    """What an output takes of its disk."""
    return f"{size(free)} free" + ("" if need <= free else f", too little for {size(need)}")


def too_full(output: str, need: int, free: int) -> MachineError | None:
    """The failure of a plan whose output does not fit on its disk."""
    if need <= free:
        return None
    return MachineError(
        f"{output}: {need:,} bytes needed, {free:,} bytes free on its disk",
        "free some space, or write to another disk with -o/--output",
    )


def command(verb: str, *words: str | os.PathLike[str], device: str = "auto", threads: int | None = None) -> str:
    """A command line to go on with, of the user's own words; a device and a number of threads are kept."""
    line = [PROGRAM, verb, *(os.fspath(word) for word in words)]
    line += ["--device", device] if device != "auto" else []
    line += ["--threads", str(threads)] if threads is not None else []
    return shlex.join(line)
