"""What several verbs show alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from zendelta.cli.text import size, table
from zendelta.pipeline.report import TensorReport, kind_of


def codec_table(codecs: Mapping[str, Mapping[str, int]]) -> Table:
    """A line for each codec: tensors, their bytes in the fine-tune and in the file."""
    return table(
        ["codec", "tensors", "in the fine-tune", "in the file"],
        [
            (codec, group["tensors"], size(group["raw_bytes"]), size(group["stored_bytes"]))
            for codec, group in codecs.items()
        ],
    )


def error_words(error: float | None) -> str | None:
    """A relative error in plain words."""
    if error is None:
        return None
    if error == 0:
        return "0: the change is stored exactly"
    return f"{error:.4f} of the change's size (root of the summed squares)"


def names(items: Sequence[str], limit: int = 6) -> str | None:
    """Names in a line, the first few of them; None without any."""
    if not items:
        return None
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{len(items)}: {', '.join(items[:limit])}{more}"


def shape(tensor: TensorReport) -> str:
    """A tensor's dimensions in one word."""
    return "x".join(map(str, tensor.shape)) or "scalar"


def plan_table(tensors: Sequence[TensorReport]) -> Table:
    """A line for each kind of tensor that is stored in the same way, with how many there are."""
    groups: dict[tuple[str, ...], list[TensorReport]] = {}
    for tensor in tensors:
        key = (kind_of(tensor.name), shape(tensor), tensor.dtype, tensor.codec, tensor.reason)
        groups.setdefault(key, []).append(tensor)
    rows = []
    for (kind, form, dtype, codec, reason), members in groups.items():
        name = members[0].name if len(members) == 1 else kind
        rows.append((name, len(members), form, dtype, codec, size(sum(m.stored_bytes for m in members)), reason))
    return table(["tensor", "count", "shape", "dtype", "codec", "at most", "why"], rows)
