"""The two texts of the demo and their one split into a training part and a held-out part.

Both lie in `texts/`, each in the public domain; `texts/README.md` tells where they come from and what was cut.

    python -c "from zendelta.demo.texts import held_out; print(held_out().finetuned[:300])"
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

BASE_FILE = "austen.txt"  # a novel: what the base is trained on
FINETUNED_FILE = "newton.txt"  # a treatise on light, a century older: what the fine-tune is trained on
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Texts:
    """One text of either kind: `base` for the base model, `finetuned` for the fine-tune."""

    base: str
    finetuned: str


def training() -> Texts:
    """The texts that the models are trained on: all but the last tenth of each."""
    return Texts(_split(BASE_FILE)[0], _split(FINETUNED_FILE)[0])


def held_out() -> Texts:
    """The texts that no model has seen in training: the last tenth of each."""
    return Texts(_split(BASE_FILE)[1], _split(FINETUNED_FILE)[1])


def _split(name: str) -> tuple[str, str]:
    """Training part and held-out part of a text, parted between two paragraphs."""
    paragraphs = _paragraphs(name)
    wanted = HELD_OUT_SHARE * sum(map(len, paragraphs))
    first, size = len(paragraphs), 0
    while size < wanted:
        first -= 1
        size += len(paragraphs[first])
    return "\n".join(paragraphs[:first]), "\n".join(paragraphs[first:])


def _paragraphs(name: str) -> list[str]:
    """A text's paragraphs, each on one line: where a printed line ends says nothing about the language."""
    text = files("zendelta.demo").joinpath("texts", name).read_text(encoding="utf-8")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
