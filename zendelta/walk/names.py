"""Which of the base's names a fine-tune's name is a change of: equal names, exchanged prefixes, tied heads.

From headers and config.json alone. A guess is made only where one answer stands out, and every one is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from zendelta.checkpoint.reader import Checkpoint, Tensor
from zendelta.dtypes import FLOATING
from zendelta.errors import InputError, listed

_HEADS = ("head.weight", "embed_out.weight", "decoder.weight")
_HEADED = ("LMHead", "CausalLM", "ConditionalGeneration", "MaskedLM", "Seq2SeqLM")


def sources_of(base: Checkpoint, ft: Checkpoint, notes: list[str]) -> dict[str, str]:
    """Map each fine-tuned name to the base's tensor that it is a change of, where there is one.

    Args:
        notes: told of every name that is mapped to another one.

    Raises:
        InputError: not one tensor in common, experts in another layout, or two prefix mappings that fit equally well.
    """
    known = {**{name: name for name in base.tensors}, **base.aliases}
    sources = {name: known[name] for name in ft.tensors if name in known}
    _refuse_other_expert_layout(base, ft)
    _map_prefixes(base, ft, known, sources, notes)
    head = _tied_head(base, ft, sources)
    if head is not None:
        sources[head[0]] = head[1]
        notes.append(f"the base's head is tied: {head[0]} is stored as a change of {head[1]}")
    if not any(fits(ft.tensors[name], base.tensors[source]) for name, source in sources.items()):
        shapes = [
            f"{name} {list(base.tensors[source].shape)} against {list(ft.tensors[name].shape)}"
            for name, source in sources.items()
        ]
        what = f"names agree but no shape does: {listed(shapes, 3)}" if shapes else "not one tensor name in common"
        raise InputError(
            f"{base.path} and {ft.path}: {what} ({next(iter(base.tensors))}... against {next(iter(ft.tensors))}...)",
            "is it the right base?",
        )
    if 2 * len(sources) < len(ft.tensors):
        notes.append(f"only {len(sources)} of the fine-tune's {len(ft.tensors)} tensors are in the base")
    return sources


def fits(ft: Tensor, base: Tensor) -> bool:
    """Whether one can be a change of the other: all but the first dimension agree."""
    return ft.shape[1:] == base.shape[1:] and bool(ft.shape) == bool(base.shape)


def _map_prefixes(
    base: Checkpoint, ft: Checkpoint, known: Mapping[str, str], sources: dict[str, str], notes: list[str]
) -> None:
    """Add to `sources` the names that agree once a prefix is exchanged, as ``model.`` for ``model.language_model.``.

    Where fewer than half of the names agree as they are, the exchange that explains most of the others is taken. Parts
    of a model may have prefixes of their own (``visual.`` against ``model.visual.``), so the search goes on with what
    is left; there the prefixes must be made of the same words but for added ones, and every shape must fit.

    Raises:
        InputError: two exchanges explain equally many names.
    """
    direct = sum(fits(ft.tensors[name], base.tensors[source]) for name, source in sources.items())
    free = 2 * direct < min(len(base.tensors), len(ft.tensors))
    words = {""}  # of the prefixes exchanged so far
    while True:
        found = _exchange(base, ft, known, sources, free, words)
        if found is None:
            return
        (new, old), mapped = found
        sources.update(mapped)
        notes.append(f"names mapped: {new or '(none)'} here is {old or '(none)'} in the base, {len(mapped)} tensors")
        words |= _words(new) | _words(old)
        free = False


Exchange = tuple[str, str]  # the fine-tune's prefix, the base's


def _exchange(
    base: Checkpoint, ft: Checkpoint, known: Mapping[str, str], sources: Mapping[str, str], free: bool, words: set[str]
) -> tuple[Exchange, dict[str, str]] | None:
    """Find the exchange that explains most of the names left over, and what it maps.

    Each name votes for the exchange that leaves the longest common end. One vote is enough only where the prefixes
    differ in `words` alone, or where there is but one name.
    """
    used = set(sources.values())
    ours = [name for name in ft.tensors if name not in sources]
    theirs = {name: source for name, source in known.items() if source not in used}
    ends: dict[str, list[str]] = {}
    for name in theirs:
        for prefix, end in _splits(name):
            ends.setdefault(end, []).append(prefix)
    votes: Counter[Exchange] = Counter()
    for name in ours:
        for new, end in _splits(name):
            olds = [old for old in ends.get(end, ()) if fits(ft.tensors[name], base.tensors[theirs[old + end]])]
            olds = [old for old in olds if free or _kin(new, old)]
            votes.update((new, old) for old in olds)
            if olds:
                break

    def mapped_by(new: str, old: str) -> dict[str, str]:
        renamed = {name: old + name[len(new) :] for name in ours if name.startswith(new)}
        return {name: theirs[as_] for name, as_ in renamed.items() if as_ in theirs}

    ranked = votes.most_common()
    for (new, old), count in ranked:
        if count < 2 and len(ft.tensors) > 1 and not _words(new) ^ _words(old) <= words:
            continue
        mapped = mapped_by(new, old)
        if not free and not all(fits(ft.tensors[name], base.tensors[source]) for name, source in mapped.items()):
            continue
        rivals = [
            other
            for other, others in ranked
            if others == count and other != (new, old) and (other[0] == new or other[1] == old)
        ]
        rival = next((other for other in rivals if _clash(mapped, mapped_by(*other))), None)
        if rival is None:
            return (new, old), mapped
        if free:
            pairs = [f"{one or '(none)'} -> {other or '(none)'}" for one, other in ((new, old), rival)]
            raise InputError(
                f"{base.path} and {ft.path}: names differ by a prefix, and two mappings fit equally well: "
                f"{' and '.join(pairs)}",
                "rename the tensors of one of the two so that the names agree",
            )
    return None


def _clash(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two exchanges want the same name, on either side."""
    return not one.keys().isdisjoint(other) or not set(one.values()).isdisjoint(other.values())


def _words(prefix: str) -> set[str]:
    return set(prefix.split("."))


def _kin(new: str, old: str) -> bool:
    """Whether two prefixes are made of the same words, or one of the other's and more."""
    return _words(new) <= _words(old) or _words(old) <= _words(new)


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
    heads = [name for name in ft.tensors if name not in sources and name.endswith(_HEADS)]
    if len(heads) != 1 or len(ft.tensors[heads[0]].shape) != 2 or not _tied(base):
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


def _tied(base: Checkpoint) -> bool:
    """Whether the head of `base` is its embedding: by its config, at the top or in ``text_config``.

    Older configs leave the flag out where it is the default; then by an architecture with a head and none stored.
    """
    parts = (base.config, base.config.get("text_config"))
    flags = [part["tie_word_embeddings"] for part in parts if isinstance(part, dict) and "tie_word_embeddings" in part]
    if flags:
        return any(flags)
    names = base.config.get("architectures")
    headed = isinstance(names, list) and any(word in str(name) for name in names for word in _HEADED)
    return headed and not any(name.endswith(_HEADS) for name in (*base.tensors, *base.aliases))


def _refuse_other_expert_layout(base: Checkpoint, ft: Checkpoint) -> None:
    """Experts fused in one model and apart in the other cannot be subtracted by name."""

    def layouts(one: Checkpoint, other: Checkpoint) -> tuple[list[str], list[str]]:
        alone = [name for name in one.tensors if name not in other.tensors and ".experts." in name]
        numbered = [name.split(".experts.", 1)[1][:1].isdigit() for name in alone]
        single = [name for name, apart in zip(alone, numbered, strict=True) if apart]
        fused = [name for name, apart in zip(alone, numbered, strict=True) if not apart]
        return single, [name for name in fused if len(one.tensors[name].shape) > 1]

    base_single, base_fused = layouts(base, ft)
    ft_single, ft_fused = layouts(ft, base)
    for single, fused, no_single, one, other in (
        (base_single, ft_fused, ft_single, base, ft),
        (ft_single, base_fused, base_single, ft, base),
    ):
        if single and fused and not no_single:
            raise InputError(
                f"{one.path} has one tensor per expert ({single[0]} {list(one.tensors[single[0]].shape)}), "
                f"{other.path} has them fused ({fused[0]} {list(other.tensors[fused[0]].shape)})",
                "bring both into one layout: load and save one with the transformers version that wrote the other",
            )
