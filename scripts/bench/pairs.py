"""Make a base and a fine-tune of a wanted size, for measuring: Llama shapes, bf16, shards of 1 GB.

    python scripts/bench/pairs.py FOLDER --gb 2

The values are normal (std 0.02) and the change a hundredth of that. They are drawn once, for 64 MB, and every tensor
begins at another place of that pool: speed does not depend on the values, and drawing 8 GB would take minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from zendelta.checkpoint.writer import CheckpointWriter, TensorSpec

POOL = 32_000_003  # values; odd, so that tensors do not begin at the same places


def llama(gb: float) -> list[TensorSpec]:
    """Return the tensors of a Llama of about `gb` GB (1e9 bytes) in bf16."""
    hidden, ffn, vocab = (4096, 11008, 32000) if gb > 1 else (1024, 2816, 16000)
    if gb < 0.05:
        hidden, ffn, vocab = 256, 704, 2000
    specs = [
        TensorSpec("model.embed_tokens.weight", "BF16", (vocab, hidden)),
        TensorSpec("lm_head.weight", "BF16", (vocab, hidden)),
    ]
    layer = {
        **{f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    number = 0
    while sum(spec.nbytes for spec in specs) < gb * 1e9 * 0.97:
        specs += [TensorSpec(f"model.layers.{number}.{name}", "BF16", shape) for name, shape in layer.items()]
        number += 1
    return [*specs, TensorSpec("model.norm.weight", "BF16", (hidden,))]


def one_tensor(gb: float) -> list[TensorSpec]:
    """Return a single matrix of `gb` GB."""
    return [TensorSpec("model.embed_tokens.weight", "BF16", (int(gb * 1e9 / 2 / 8192), 8192))]


def bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, as 16-bit words."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_pair(folder: Path, specs: list[TensorSpec], *, seed: int = 0) -> tuple[Path, Path]:
    """Write `folder`/base and `folder`/ft, unless they are there."""
    random = np.random.default_rng(seed)
    base = random.standard_normal(POOL, np.float32) * np.float32(0.02)
    ft = base + random.standard_normal(POOL, np.float32) * np.float32(0.0002)
    made = []
    for name, pool in (("base", bf16(base)), ("ft", bf16(ft))):
        target = folder / name
        made.append(target)
        if (target / "config.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        pool_bytes = pool.view(np.uint8)
        with CheckpointWriter(target, specs, max_shard_bytes=1_000_000_000) as writer:
            for number, spec in enumerate(specs):
                at = number * 7_919_002 % len(pool_bytes)
                written = 0
                while written < spec.nbytes:
                    part = pool_bytes[at : at + spec.nbytes - written]
                    writer.write(spec.name, written, part)
                    written, at = written + len(part), 0
            writer.finish()
        (target / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return made[0], made[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0, help="GB (1e9 bytes) per checkpoint")
    arguments = parser.parse_args()
    print(*make_pair(arguments.folder, llama(arguments.gb)))
