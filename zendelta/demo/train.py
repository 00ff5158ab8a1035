"""Trains the demo's two models for real: a tiny Llama on a novel, then a full fine-tune of it on a treatise.

Everything is made on the spot from the texts in `texts/`: the tokenizer, the base, the fine-tune. Both models are saved
as a publisher would save them: bfloat16 safetensors in several shards, beside configuration, tokenizer and chat
template. Needs the extra `demo` (transformers, which brings tokenizers).

    python -c "from pathlib import Path; from zendelta.demo import train_pair; train_pair(Path('demo'), report=print)"
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import texts
from .quiet import transformers_quietly

VOCABULARY = 1024
CONTEXT = 128  # tokens in a training sequence, the start token included
SEQUENCES = 8  # in a step
STEPS = (260, 100)  # of the base and of the fine-tune
WARMUP = 0.1  # share of the steps in which the learning rate rises to its peak
SHARD_SIZE = "2MB"

START, END = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: the learning rate's peak, and the share of it that is left at the end."""

    name: str
    peak_rate: float
    final_share: float


BASE = Recipe("base", 3e-3, 0.1)
# The rate stays up: checkpoints of such a run are worth merging, and a minute leaves no time for a timid one.
FINETUNE = Recipe("fine-tune", 1.2e-3, 1.0)


@dataclass(frozen=True)
class DemoPair:
    """What `train_pair` made: folders in the Hugging Face layout, and how large the model is."""

    base: Path
    finetuned: Path
    checkpoints: tuple[Path, ...]  # of the fine-tune's run, oldest first
    parameters: int


def train_pair(
    folder: Path,
    *,
    seed: int = 0,
    steps: tuple[int, int] = STEPS,
    checkpoints_every: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> DemoPair:
    """Train a tiny base model and one full fine-tune of it, and save both under a folder.

    The number of steps is fixed: on one machine with one thread count the same seed gives the same bytes, however busy
    the machine is.

    Args:
        folder: gets the subfolders `base`, `finetuned` and, if asked for, `ckpt-20`, `ckpt-40` and so on.
        seed: decides the initial weights and which pieces of the texts are seen when.
        steps: optimizer steps of the base and of the fine-tune.
        checkpoints_every: also save the fine-tune after every so many steps; 0 for never.
        report: is handed a line now and then that says how far the training is.
    """
    text = texts.training()
    checkpoints: list[Path] = []
    with transformers_quietly() as transformers:
        import torch

        tokenizer = _new_tokenizer(transformers, text)
        with torch.random.fork_rng(devices=[]):  # the initial weights come from the global generator: put it back
            torch.manual_seed(seed)
            model = _new_model(transformers, tokenizer)
        report(f"tokenizer of {len(tokenizer):,} tokens, model of {model.num_parameters():,} parameters")

        def save(name: str) -> Path:
            _save(model, tokenizer, folder / name)
            return folder / name

        def save_checkpoint(step: int) -> None:
            if checkpoints_every and step % checkpoints_every == 0:
                checkpoints.append(save(f"ckpt-{step}"))

        _train(model, _encode(tokenizer, text.base), BASE, steps[0], seed, report)
        base = save("base")
        for parameter in model.parameters():  # a fine-tune starts from what was published, which is bfloat16
            parameter.data = parameter.data.bfloat16().float()
        _train(model, _encode(tokenizer, text.finetuned), FINETUNE, steps[1], seed + 1, report, save_checkpoint)
        finetuned = save("finetuned")
    return DemoPair(base, finetuned, tuple(checkpoints), model.num_parameters())


def _new_tokenizer(transformers: Any, text: texts.Texts) -> Any:
    """A byte-level BPE tokenizer trained on both training texts, wrapped for transformers."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text.base, text.finetuned], trainer)
    start = bpe.token_to_id(START)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(f"{START} $A", special_tokens=[(START, start)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=START, eos_token=END, model_max_length=CONTEXT, chat_template=CHAT_TEMPLATE
    )


def _new_model(transformers: Any, tokenizer: Any) -> Any:
    """A Llama small enough to train in a minute, with rows long enough that one bit a weight pays.

    A row of 384 weights costs 384 bits of signs and 32 of scale, against 6,144 bits in bfloat16. The head is tied to
    the embedding, as in the small models of the Llama family: every step then trains the rows of rare tokens too, and
    the demo meets a tied pair. Weights start with variance 1 / width (LeCun et al. 1998, "Efficient BackProp", section
    4.6) instead of the library's fixed deviation of 0.02, with which the base gets less far in the same steps.
    """
    width = 384
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=width**-0.5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def _encode(tokenizer: Any, text: str) -> Any:
    """A whole text as one row of tokens, without start token."""
    import torch

    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def _train(
    model: Any,
    tokens: Any,
    recipe: Recipe,
    steps: int,
    seed: int,
    report: Callable[[str], None],
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train all weights, for a fixed number of steps, on pieces cut from the tokens at random places."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    start = torch.full((SEQUENCES, 1), model.config.bos_token_id)
    offsets = torch.arange(CONTEXT - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = recipe.peak_rate * _rate_share(step, steps, recipe.final_share)
        places = torch.randint(len(tokens) - CONTEXT, (SEQUENCES, 1), generator=draw)
        batch = torch.cat([start, tokens[places + offsets]], dim=1)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps:
            report(f"{recipe.name}: step {step} of {steps}, loss {loss.item():.3f}")
        after_step(step)
    model.eval()


def _rate_share(step: int, steps: int, final_share: float) -> float:
    """Share of the peak learning rate: a straight rise, then half a cosine down (Loshchilov and Hutter 2017)."""
    rise = max(1, round(WARMUP * steps))
    if step <= rise:
        return step / rise
    progress = (step - rise) / (steps - rise)
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * progress))


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the model in bfloat16 and in shards, with its tokenizer, as one would publish it."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
