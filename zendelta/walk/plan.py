"""Which tensor of a fine-tune belongs to which of its base, and how each will be stored: from headers alone.

Every reason to refuse a pair that headers can tell is found here, before any work, and reported together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zendelta.checkpoint.reader import Checkpoint, Tensor
from zendelta.codec import CODECS
from zendelta.codec.matrix import as_matrix
from zendelta.dtypes import DTYPE_BYTES, FLOATING, QUANTISED
from zendelta.errors import InputError, UsageError, listed

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
        asked: whether the user chose the codec.
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
    for checkpoint in (base, ft):
        refuse_quantised(checkpoint)
    notes = [*base.warnings, *ft.warnings]
    sources = _sources(base, ft, notes)
    misfits: list[str] = []
    tensors: list[Aligned] = []
    for name, tensor in ft.tensors.items():
        wanted = next((codec for pattern, codec in rules if fnmatchcase(name, pattern)), None)
        source = base.tensors.get(sources.get(name, ""))
        if source is not None and not _fits(tensor, source):
            if wanted != "dense":
                misfits.append(f"{name} {list(source.shape)} against {list(tensor.shape)}")
            source = None
        tensors.append(_aligned(tensor, source, wanted, scale))
    _refuse_misfits(base, ft, misfits, sources)
    used = {aligned.base.name for aligned in tensors if aligned.base is not None}
    unused = [tensor for name, tensor in base.tensors.items() if name not in used]
    present = set(ft.tensors) | set(ft.aliases) | set(sources.values())
    dropped = sorted(name for name in (*base.tensors, *base.aliases) if name not in present)
    return PairPlan(base, ft, tensors, unused, dropped, notes)


def choose(ft: Tensor, base: Tensor | None, scale: str) -> tuple[str, str]:
    """Choose how a tensor is stored: the codec of the rows it shares with the base, and why.

    Signs where the tensor is floating, has two or more dimensions, and signs and scales take at most half of its raw
    bytes; else its own values.
    """
    if base is None:
        return "new", "not in the base"
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


def _aligned(tensor: Tensor, base: Tensor | None, wanted: str | None, scale: str) -> Aligned:
    codec, reason = choose(tensor, base, scale)
    asked = wanted is not None
    if wanted is not None and codec != "new" and wanted != codec:
        if wanted == "sign" and not {tensor.dtype, base.dtype if base else ""} <= FLOATING:
            raise UsageError(f"--keep asks for signs of {tensor.name}, which is {tensor.dtype}", "leave it out")
        codec, reason = wanted, "asked for with --keep"
    rows = as_matrix(tensor.shape).all_rows
    aligned = Aligned(tensor, base, (), reason)
    if codec != "sign":
        return Aligned(tensor, base, (Term(codec, (0, rows), {}),), reason, asked)
    shared = aligned.shared_rows
    terms = [Term("sign", (0, shared), {"scale": scale})] if shared else []
    if rows > shared:
        terms.append(Term("new", (shared, rows), {}))
        reason = f"{rows - shared} new rows"
    elif base is not None and as_matrix(base.shape).all_rows > rows:
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


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Raise InputError where the weights are packed integers or 8-bit floats: their difference means nothing."""
    way_out = "use the unquantised checkpoint, or dequantise it first"
    quantisation = checkpoint.config.get("quantization_config")
    packed = [name for name in checkpoint.tensors if name.endswith(_PACKED)]
    packed += [name for name, tensor in checkpoint.tensors.items() if tensor.dtype in QUANTISED]
    if packed:
        raise InputError(f"{checkpoint.path}: quantised weights: {listed(sorted(set(packed)), 3)}", way_out)
    if isinstance(quantisation, dict):
        method = quantisation.get("quant_method") or quantisation.get("fmt") or "no method named"
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: has a quantization_config ({method}); its weights are not plain",
            f"{way_out}; if the weights are plain all the same, remove that key from config.json",
        )


def _sources(base: Checkpoint, ft: Checkpoint, notes: list[str]) -> dict[str, str]:
    """Map each fine-tuned name to the base's name that it is a change of, where there is one."""
    known = {**{name: name for name in base.tensors}, **base.aliases}
    sources = {name: known[name] for name in ft.tensors if name in known}
    _refuse_other_expert_layout(base, ft)
    direct = sum(_fits(ft.tensors[name], base.tensors[source]) for name, source in sources.items())
    if 2 * direct < min(len(base.tensors), len(ft.tensors)):
        mapping = _prefix_mapping(base, ft, set(sources))
        if mapping is not None:
            new, old = mapping
            mapped = {
                name: old + name.removeprefix(new)
                for name in ft.tensors
                if name not in sources and name.startswith(new) and old + name.removeprefix(new) in base.tensors
            }
            sources.update(mapped)
            notes.append(
                f"names mapped: {new or '(none)'} here is {old or '(none)'} in the base, {len(mapped)} tensors"
            )
    head = _tied_head(base, ft, sources)
    if head is not None:
        sources[head[0]] = head[1]
        notes.append(f"the base's head is tied: {head[0]} is stored as a change of {head[1]}")
    if not any(_fits(ft.tensors[name], base.tensors[source]) for name, source in sources.items()):
        shapes = [
            f"{name} {list(base.tensors[source].shape)} against {list(ft.tensors[name].shape)}"
            for name, source in sources.items()
        ]
        what = f"names agree but no shape does: {listed(shapes, 3)}" if shapes else "not one tensor name in common"
        raise InputError(
            f"{base.path} and {ft.path}: {what} ({next(iter(base.tensors))}... against {next(iter(ft.tensors))}...)",
            "is it the right base?",
        )
    return sources


def _fits(ft: Tensor, base: Tensor) -> bool:
    return ft.shape[1:] == base.shape[1:] and bool(ft.shape) == bool(base.shape)


def _prefix_mapping(base: Checkpoint, ft: Checkpoint, known: set[str]) -> tuple[str, str] | None:
    """Find the one exchange of a prefix that explains most of the unmatched names.

    Each unmatched name votes for the exchange that leaves the longest common end.

    Raises:
        InputError: two exchanges explain equally many.
    """
    ends: dict[str, list[str]] = {}
    for name in base.tensors:
        if name not in known:
            for prefix, end in _splits(name):
                ends.setdefault(end, []).append(prefix)
    votes: Counter[tuple[str, str]] = Counter()
    for name, tensor in ft.tensors.items():
        if name in known:
            continue
        for prefix, end in _splits(name):
            olds = [old for old in ends.get(end, ()) if _fits(tensor, base.tensors[old + end])]
            if olds:
                votes.update((prefix, old) for old in olds)
                break
    ranked = votes.most_common(2)
    if not ranked or (ranked[0][1] < 2 and len(ft.tensors) > 1):
        return None
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        pairs = [f"{new or '(none)'} -> {old or '(none)'}" for (new, old), _ in ranked]
        raise InputError(
            f"{base.path} and {ft.path}: names differ by a prefix, and two mappings fit equally well: {listed(pairs)}",
            "rename the tensors of one of the two so that the names agree",
        )
    return ranked[0][0]


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Yield (prefix, end) of a dotted name, longest end first."""
    start = 0
    while True:
        yield name[:start], name[start:]
        dot = name.find(".", start)
        if dot < 0 or "." not in name[dot + 1 :]:
            return
        start = dot + 1


def _tied_head(base: Checkpoint, ft: Checkpoint, sources: Mapping[str, str]) -> tuple[str, str] | None:
    """Find a head that is a change of the tied base's embedding: by the flag, the name and the shape."""
    if not tied(base.config):
        return None
    heads = [name for name in ft.tensors if name not in sources and name.endswith("head.weight")]
    if len(heads) != 1 or len(ft.tensors[heads[0]].shape) != 2:
        return None
    shape = ft.tensors[heads[0]].shape
    tables = [
        tensor
        for tensor in base.tensors.values()
        if len(tensor.shape) == 2 and tensor.shape[1] == shape[1] and tensor.dtype in FLOATING
        and any(word in tensor.name.lower() for word in ("embed", "wte", "tok"))
    ]  # fmt: skip
    largest = max((tensor.shape[0] for tensor in tables), default=0)
    found = [tensor.name for tensor in tables if tensor.shape[0] == largest]
    return (heads[0], found[0]) if len(found) == 1 else None


def tied(config: Mapping[str, Any]) -> bool:
    """Whether a config says that the head is the embedding, at its top or in its ``text_config``."""
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return bool(config.get("tie_word_embeddings", nested) or nested)


def _refuse_other_expert_layout(base: Checkpoint, ft: Checkpoint) -> None:
    """Experts fused in one model and apart in the other cannot be subtracted by name."""

    def layouts(one: Checkpoint, other: Checkpoint) -> tuple[list[str], list[str]]:
        alone = [name for name in one.tensors if name not in other.tensors and ".experts." in name]
        single = [name for name in alone if name.split(".experts.", 1)[1][:1].isdigit()]
        return single, [name for name in alone if name not in single and len(one.tensors[name].shape) == 3]

    base_single, base_fused = layouts(base, ft)
    ft_single, ft_fused = layouts(ft, base)
    for single, fused, one, other in ((base_single, ft_fused, base, ft), (ft_single, base_fused, ft, base)):
        if single and fused:
            raise InputError(
                f"{one.path} has one tensor per expert ({single[0]} {list(one.tensors[single[0]].shape)}), "
                f"{other.path} has them fused ({fused[0]} {list(other.tensors[fused[0]].shape)})",
                "bring both into one layout: load and save one with the transformers version that wrote the other",
            )


def _refuse_misfits(base: Checkpoint, ft: Checkpoint, misfits: list[str], sources: Mapping[str, str]) -> None:
    if misfits:
        many = f"{len(misfits)} of {len(sources)} tensors have other shapes"
        raise InputError(
            f"{base.path} and {ft.path}: {many}: {listed(misfits, 8)}",
            "is it the right base? Where they belong so, store them raw: --keep 'PATTERN=dense'",
        )
