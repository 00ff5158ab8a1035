"""inspect: what a ``.bd`` file holds, from its header alone. Needs neither the base nor torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from zendelta.bdfile import BdFile, Entry, side_array
from zendelta.codec.matrix import as_matrix
from zendelta.dtypes import DTYPE_BYTES
from zendelta.pipeline.report import LAYER, TensorReport, by_codec, kind_of, overall_error, zero_share


@dataclass
class Group:
    """The deltas of one layer, or of one kind of matrix, taken together.

    Attributes:
        error: relative error of their restored deltas; None without any.
        zeros: share of entries that did not change.
    """

    name: str
    tensors: int
    stored_bytes: int
    error: float | None
    zeros: float | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return dict(self.__dict__)


@dataclass
class InspectReport:
    """What a ``.bd`` file holds.

    Attributes:
        base, finetuned: name, revision and fingerprint of each, as recorded.
        bytes: size of the file; `file_bytes` of it are carried files, `header_bytes` its header.
        finetuned_bytes: size of the tensors that it restores.
        ratio: `finetuned_bytes` to `bytes`; `ratio_without_files` without the carried files.
        bits_per_weight: bits of the file per entry restored, carried files left out.
        layers: by layer, in order; tensors outside layers are one group.
        kinds: by kind of matrix: names without their layer's and expert's numbers.
        files: bytes of each carried file, 0 for those that the base has.
    """

    path: str
    writer: str
    base: dict[str, Any]
    finetuned: dict[str, Any]
    options: dict[str, Any]
    bytes: int
    file_bytes: int
    header_bytes: int
    finetuned_bytes: int
    weights: int
    ratio: float
    ratio_without_files: float
    bits_per_weight: float
    error: float | None
    zeros: float | None
    codecs: dict[str, dict[str, int]]
    layers: list[Group]
    kinds: list[Group]
    tensors: list[TensorReport]
    aliases: dict[str, str]
    dropped: list[str]
    files: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        plain = dict(self.__dict__)
        for key in ("layers", "kinds", "tensors"):
            plain[key] = [item.to_json() for item in plain[key]]
        return plain


def inspect(delta: str | os.PathLike[str]) -> InspectReport:
    """Read what a ``.bd`` file holds from its header: sizes, codecs and the errors that were measured when it was made.

    Raises:
        InputError: not a ``.bd`` file, or a damaged one.
    """
    file = BdFile.open(delta)
    content = file.content
    tensors = [_tensor(file, name, entry) for name, entry in sorted(content.tensors.items())]
    files = {
        path: file.arrays[side_array(path)].nbytes if entry["from"] == "file" else 0
        for path, entry in sorted(content.files.items())
    }
    file_bytes = sum(files.values())
    restored = [*content.tensors.values(), *(content.tensors[target] for target in content.aliases.values())]
    raw = sum(as_matrix(entry.shape).size * DTYPE_BYTES[entry.dtype] for entry in restored)
    weights = sum(as_matrix(entry.shape).size for entry in restored)
    return InspectReport(
        path=str(delta),
        writer=content.writer,
        base=content.base,
        finetuned=content.finetuned,
        options=content.options,
        bytes=file.nbytes,
        file_bytes=file_bytes,
        header_bytes=file.nbytes - file_bytes - sum(tensor.stored_bytes for tensor in tensors),
        finetuned_bytes=raw,
        weights=weights,
        ratio=raw / file.nbytes,
        ratio_without_files=raw / (file.nbytes - file_bytes),
        bits_per_weight=8 * (file.nbytes - file_bytes) / max(weights, 1),
        error=overall_error((tensor.error, tensor.square_sum) for tensor in tensors),
        zeros=zero_share(tensors),
        codecs=by_codec(tensors),
        layers=_groups(tensors, _layer_of),
        kinds=_groups(tensors, kind_of),
        tensors=tensors,
        aliases=content.aliases,
        dropped=content.dropped,
        files=files,
    )


def _layer_of(name: str) -> str:
    match = LAYER.search(name)
    return name[: match.end()].strip(".") if match else "outside layers"


def _tensor(file: BdFile, name: str, entry: Entry) -> TensorReport:
    size = as_matrix(entry.shape).size
    return TensorReport(
        name=name,
        codec=entry.codec,
        dtype=entry.dtype,
        shape=entry.shape,
        raw_bytes=size * DTYPE_BYTES[entry.dtype],
        stored_bytes=file.payload_size(name),
        error=entry.stats.get("error"),
        zeros=entry.stats["zeros"] / compared if entry.stats and (compared := _compared(entry)) else None,
        source=entry.source,
        square_sum=entry.stats.get("square_sum", 0.0),
    )


def _compared(entry: Entry) -> int:
    """Entries of the tensor that the base has too: all but new rows."""
    new = sum(term.rows[1] - term.rows[0] for term in entry.terms if term.codec == "new")
    return (as_matrix(entry.shape).all_rows - new) * as_matrix(entry.shape).cols


def _groups(tensors: list[TensorReport], key: Any) -> list[Group]:
    groups: dict[str, list[TensorReport]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor.name), []).append(tensor)

    def natural(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return [
        Group(
            name,
            len(members),
            sum(member.stored_bytes for member in members),
            overall_error((member.error, member.square_sum) for member in members),
            zero_share(members),
        )
        for name, members in sorted(groups.items(), key=lambda item: natural(item[0]))
    ]
