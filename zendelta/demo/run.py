"""The demo itself: train a pair, take it through every verb, and compare what the models know."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zendelta.checkpoint.publish import check_output, staged_folder
from zendelta.errors import UsageError, listed
from zendelta.pipeline.apply import apply
from zendelta.pipeline.compress import compress
from zendelta.pipeline.inspect import inspect
from zendelta.pipeline.validate import validate

from .measure import perplexity
from .texts import held_out
from .train import STEPS, train_pair

_PARTS = frozenset({"base", "finetuned", "finetuned.bd", "restored"})


@dataclass
class DemoReport:
    """What the demo found. Sizes are bytes; perplexities are per token on text that no training has seen.

    Attributes:
        folder: holds `base`, `finetuned`, `finetuned.bd` and `restored`.
        base_bytes, finetuned_bytes: the checkpoints' weights.
        delta_bytes: the ``.bd`` file; `carried_bytes` of it are config and tokenizer.
        ratio: fine-tuned weights against the file; `ratio_without_files` against the file less what it carries.
        perplexities: of base, finetuned and restored, on the text of the base and on that of the fine-tune.
    """

    folder: str
    parameters: int
    base_bytes: int
    finetuned_bytes: int
    delta_bytes: int
    carried_bytes: int
    ratio: float
    ratio_without_files: float
    bits_per_weight: float
    error: float | None
    error_rounded: float | None
    unmoved: float | None
    validated: bool
    perplexities: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def run_demo(
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    steps: tuple[int, int] = STEPS,
    report: Callable[[str], None] = lambda line: None,
) -> DemoReport:
    """Train a tiny base and a fine-tune in `folder`, then compress, inspect, validate and apply.

    Args:
        folder: is made; it appears when all is done, and keeps the models and the file.
        force: replace a demo that is there already.
        steps: optimizer steps of the base and of the fine-tune.
        report: is handed a line now and then that says how far the demo is.

    Raises:
        UsageError: `folder` exists, or with `force` holds something else than a demo.
        MachineError: transformers is missing; the disk is full.
    """
    folder = Path(folder)
    check_output(folder, folder=True, force=force, known=_PARTS)
    strange = sorted({entry.name for entry in folder.iterdir()} - _PARTS) if folder.is_dir() else []
    if strange:
        raise UsageError(f"{folder} holds more than an earlier demo: {listed(strange)}", "choose another -o/--output")
    with staged_folder(folder, force=force, known=_PARTS) as place:
        pair = train_pair(place, steps=steps, report=report)
        delta, restored = place / "finetuned.bd", place / "restored"
        report("compressing")
        compress(pair.base, pair.finetuned, delta)
        contents = inspect(delta)
        report("validating")
        checked = validate(pair.base, pair.finetuned, delta)
        report("applying")
        apply(pair.base, delta, restored)
        report("measuring perplexities on text that no training has seen")
        texts = held_out()
        models = {"base": pair.base, "finetuned": pair.finetuned, "restored": restored}
        perplexities = {
            name: {
                "base_text": perplexity(model, texts.base),
                "finetuned_text": perplexity(model, texts.finetuned),
            }
            for name, model in models.items()
        }
    return DemoReport(
        folder=str(folder),
        parameters=pair.parameters,
        base_bytes=sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors")),
        finetuned_bytes=contents.finetuned_bytes,
        delta_bytes=contents.bytes,
        carried_bytes=contents.file_bytes,
        ratio=contents.ratio,
        ratio_without_files=contents.ratio_without_files,
        bits_per_weight=contents.bits_per_weight,
        error=checked.error,
        error_rounded=checked.error_rounded,
        unmoved=checked.unmoved,
        validated=checked.passed,
        perplexities=perplexities,
    )
