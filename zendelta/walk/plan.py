"""Which tensor of a fine-tune belongs to which of its base, and how each will be stored: from headers alone.

Every reason to refuse a pair that headers can tell is found here, before any work, and reported together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zendelta.checkpoint.reader import Checkpoint, Tensor
from zendelta.codec import CODECS
from zendelta.codec.matrix import as_matrix
from zendelta.dtypes import DTYPE_BYTES, FLOATING, QUANTISED
from zendelta.errors import InputError, UsageError, listed
from zendelta.walk.names import fits, sources_of

_PACKED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv", ".weight_shape", ".absmax", ".quant_map")
_SMALL = 256  # entries below which a tensor's scales and header entry cost more than they save


@dataclass(frozen=True)
class Term:
    """How rows [from, to) of a tensor are to be stored."""

    codec: str
    rows: tuple[int, int]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Aligned:
    """One tensor of the fine-tune beside the base's that it is a change of.

    Attributes:
        ft: the fine-tune's tensor.
        base: the base's tensor, or None where the base has none.
        terms: how its rows are stored, in order; together they cover them all.
        reason: why it is stored like this, in a few words.
        asked: whether the user asked for the values as they are.
    """

    ft: Tensor
    base: Tensor | None
    terms: tuple[Term, ...]
    reason: str
    asked: bool = False

    @property
    def codec(self) -> str:
        """The codecs of its terms, joined."""
        return "+".join(term.codec for term in self.terms)

    @property
    def shared_rows(self) -> int:
        """Rows that both have, of the stack's rows below each other."""
        return 0 if self.base is None else min(as_matrix(t.shape).all_rows for t in (self.ft, self.base))

    @property
    def may_be_same(self) -> bool:
        """Whether equal values would make it the same tensor: equal shape, and comparable numbers."""
        if self.base is None or self.base.shape != self.ft.shape:
            return False
        return self.base.dtype == self.ft.dtype or self.comparable

    @property
    def comparable(self) -> bool:
        """Whether a difference has a meaning: both are floating."""
        return self.base is not None and {self.base.dtype, self.ft.dtype} <= FLOATING

    @property
    def stored_bytes(self) -> int:
        """Bytes of its arrays, should it turn out not to be the base's unchanged."""
        arrays = (
            array
            for term in self.terms
            for array in CODECS[term.codec].arrays(self.ft.dtype, self.ft.shape, term.rows, term.parameters).values()
        )
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in arrays)


@dataclass
class PairPlan:
    """A base and a fine-tune, tensor by tensor in sorted order.

    Attributes:
        unused: base tensors that no tensor of the fine-tune is a change of; read only for the base's fingerprint.
        dropped: base names that the fine-tune does not have.
        notes: what the user should know: a prefix mapping, a tied head, warnings of the readers.
    """

    base: Checkpoint
    ft: Checkpoint
    tensors: list[Aligned]
    unused: list[Tensor]
    dropped: list[str]
    notes: list[str] = field(default_factory=list)


def plan_pair(base: Checkpoint, ft: Checkpoint, *, scale: str = "row", keep: Iterable[str] = ()) -> PairPlan:
    """Align a fine-tune with its base and choose a codec for every tensor.

    Args:
        scale: ``row`` or ``matrix``: what one alpha of the sign codec belongs to.
        keep: ``PATTERN=CODEC`` overrides (shell patterns on the fine-tune's names; sign or dense), first match wins.

    Raises:
        InputError: quantised weights, no tensor in common, shapes or expert layouts that do not fit: all at once.
        UsageError: a malformed or unused `keep`.
    """
    rules = [_rule(text, ft) for text in keep]
    refuse_quantised(base, ft)
    notes = [*base.warnings, *ft.warnings]
    sources = sources_of(base, ft, notes)
    misfits: list[str] = []
    tensors: list[Aligned] = []
    for name, tensor in ft.tensors.items():
        wanted = next((codec for pattern, codec in rules if fnmatchcase(name, pattern)), None)
        source = base.tensors.get(sources.get(name, ""))
        if source is not None and not fits(tensor, source):
            # a buffer of another length, such as position_ids, says nothing against the pair
            if wanted != "dense" and {tensor.dtype, source.dtype} <= FLOATING:
                misfits.append(f"{name} {list(source.shape)} against {list(tensor.shape)}")
            tensors.append(_aligned(tensor, None, wanted, scale, f"{list(source.shape)} in the base"))
            continue
        tensors.append(_aligned(tensor, source, wanted, scale, "not in the base"))
    _refuse_misfits(base, ft, misfits, sources)
    used = {aligned.base.name for aligned in tensors if aligned.base is not None}
    unused = [tensor for name, tensor in base.tensors.items() if name not in used]
    present = set(ft.tensors) | set(ft.aliases) | set(sources.values())
    dropped = sorted(name for name in (*base.tensors, *base.aliases) if name not in present)
    return PairPlan(base, ft, tensors, unused, dropped, notes)


def choose(ft: Tensor, base: Tensor | None, scale: str, without: str) -> tuple[str, str]:
    """Choose how a tensor is stored: the codec of the rows it shares with the base, and why (`without` a base).

    Signs where the tensor is floating, has two or more dimensions, and signs and scales take at most half of its raw
    bytes; else its own values.
    """
    if base is None:
        return "new", without
    if not {ft.dtype, base.dtype} <= FLOATING:
        return "dense", f"{ft.dtype} is not subtracted"
    matrix = as_matrix(ft.shape)
    if len(ft.shape) < 2:
        return "dense", "one-dimensional"
    if matrix.size < _SMALL:
        return "dense", "very small"
    scales = matrix.all_rows if scale == "row" else matrix.stack
    cost = matrix.all_rows * ((matrix.cols + 7) // 8) + 4 * scales
    if 2 * cost > ft.nbytes:
        return "dense", "signs and scales would take more than half of its bytes"
    return "sign", "one bit per weight"


def _aligned(tensor: Tensor, base: Tensor | None, wanted: str | None, scale: str, without: str) -> Aligned:
    codec, reason = choose(tensor, base, scale, without)
    asked = wanted == "dense"
    if wanted is not None and codec != "new" and wanted != codec:
        if wanted == "sign" and not {tensor.dtype, base.dtype if base else ""} <= FLOATING:
            raise UsageError(f"--keep asks for signs of {tensor.name}, which is {tensor.dtype}", "leave it out")
        if tensor.nbytes:  # what has no entries has no signs
            codec, reason = wanted, "asked for with --keep"
    rows = as_matrix(tensor.shape).all_rows
    if codec == "new":
        return Aligned(tensor, base, (Term("new", (0, rows), {}),), reason, asked)
    shared = Aligned(tensor, base, (), reason).shared_rows
    parameters = {"scale": scale} if codec == "sign" else {}
    terms = [Term(codec, (0, shared), parameters)] if shared or not rows else []
    if rows > shared:
        terms.append(Term("new", (shared, rows), {}))
        reason = f"{rows - shared} new rows" if codec == "sign" else f"{reason}; {rows - shared} new rows"
    elif codec == "sign" and base is not None and as_matrix(base.shape).all_rows > rows:
        reason = f"{as_matrix(base.shape).all_rows - rows} rows fewer than the base"
    return Aligned(tensor, base, tuple(terms), reason, asked)


def _rule(text: str, ft: Checkpoint) -> tuple[str, str]:
    pattern, separator, codec = text.rpartition("=")
    if not separator or not pattern or codec not in ("sign", "dense"):
        raise UsageError(
            f"--keep {text!r} is not PATTERN=CODEC", "for instance --keep 'lm_head.*=dense'; sign or dense"
        )
    if not any(fnmatchcase(name, pattern) for name in ft.tensors):
        raise UsageError(f"--keep {text!r} matches no tensor", f"names look like {next(iter(ft.tensors))}")
    return pattern, codec


def refuse_quantised(*checkpoints: Checkpoint) -> None:
    """Raise InputError where weights are packed integers or 8-bit floats: their difference means nothing."""
    found, plain = [], ""
    for checkpoint in checkpoints:
        packed = {name for name in checkpoint.tensors if name.endswith(_PACKED)}
        packed |= {name for name, tensor in checkpoint.tensors.items() if tensor.dtype in QUANTISED}
        settings = checkpoint.config.get("quantization_config")
        if packed:
            found.append(f"{checkpoint.path}: quantised weights: {listed(sorted(packed), 3)}")
        elif isinstance(settings, dict):
            method = settings.get("quant_method") or settings.get("fmt") or "no method named"
            file = checkpoint.folder / "config.json"
            found.append(f"{file}: has a quantization_config ({method}); its weights are not plain")
            plain = "; if the weights are plain all the same, remove that key from config.json"
    if found:
        raise InputError("; ".join(found), f"use the unquantised checkpoint, or dequantise it first{plain}")


def _refuse_misfits(base: Checkpoint, ft: Checkpoint, misfits: list[str], sources: Mapping[str, str]) -> None:
    if misfits:
        many = f"{len(misfits)} of {len(sources)} tensors have other shapes"
        raise InputError(
            f"{base.path} and {ft.path}: {many}: {listed(misfits, 8)}",
            "is it the right base? Where they belong so, store them raw: --keep 'PATTERN=dense'",
        )
