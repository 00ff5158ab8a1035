"""How well a checkpoint predicts a text.

Assumes a folder in the Hugging Face layout whose tokenizer starts every text with a start token, as the demo's does.
"""

from __future__ import annotations

import math
from pathlib import Path

from .quiet import transformers_quietly
from .train import CONTEXT

WINDOWS = 16  # in one forward pass


def perplexity(checkpoint: Path, text: str) -> float:
    """Perplexity of a checkpoint on a text: exp of the mean negative log likelihood of its tokens.

    The text is cut into windows of the length that the model was trained at; each opens with the start token, so that
    every token of the text is predicted exactly once. The weights are widened to float32 and so is the arithmetic.
    Perplexities per token can be compared between models that share a tokenizer, as the demo's do.

    Args:
        checkpoint: a folder with weights, configuration and tokenizer. Nothing is looked up anywhere else.
        text: any text, best one that no training has seen.
    """
    with transformers_quietly() as transformers:
        import torch

        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        # Widened after loading: the keyword that asks for a dtype has had two names.
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True).float().eval()
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        start = torch.tensor([tokenizer.bos_token_id])
        windows = [torch.cat([start, window]) for window in tokens.split(CONTEXT - 1)]
        total = 0.0
        with torch.inference_mode():
            # Only the last window may be shorter; it goes alone.
            full = [window for window in windows if len(window) == CONTEXT]
            batches = [torch.stack(full[i : i + WINDOWS]) for i in range(0, len(full), WINDOWS)]
            batches += [window[None] for window in windows[len(full) :]]
            for batch in batches:
                logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
                total += loss.item()
    return math.exp(total / len(tokens))
