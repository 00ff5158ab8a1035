"""Small checkpoints for the tests, and the command line as a function.

    from conftest import make_pair, read_model, write_model


    def test_something(tmp_path: Path, zendelta: Zendelta) -> None:
        pair = make_pair(tmp_path)  # a Llama of two layers in bf16 shards, and a fine-tune of it
        done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--json")
        assert done.code == 0 and done.json["dry_run"] is False

`make_pair(tmp_path, edit=f)` calls ``f(base, finetuned)`` with the two dicts of torch tensors before they are written:
add, drop, reshape, poison or retype tensors there. `make_pair(tmp_path, base_config={...})` and its like change the
configurations. Everything is seeded: the same call writes the same bytes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

ROOT = Path(__file__).parents[1]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Pair:
    """Two model folders."""

    base: Path
    finetuned: Path


def make_pair(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 96,
    tied: bool = False,
    change: float = 2e-3,
    seed: int = 0,
    dtype: str = "bfloat16",
    finetuned_dtype: str | None = None,
    shards: int = 2,
    finetuned_shards: int | None = None,
    edit: Callable[[Tensors, Tensors], None] = lambda base, finetuned: None,
    base_config: Mapping[str, Any] | None = None,
    finetuned_config: Mapping[str, Any] | None = None,
    names: tuple[str, str] = ("base", "finetuned"),
) -> Pair:
    """Write a tiny Llama and a fine-tune of it, as `folder`/base and `folder`/finetuned, in a second or less.

    Weights are normal with a standard deviation of 0.02. Every weight is changed, by normal noise of `change`, before
    both are rounded to their dtypes. transformers loads both.

    Args:
        layers, hidden, vocab: the size; heads have 16 dimensions, the MLP twice the hidden size.
        tied: no `lm_head.weight`, and `tie_word_embeddings` in the configuration.
        dtype, finetuned_dtype: names of torch dtypes; the fine-tune has the base's if not given.
        shards, finetuned_shards: how many weights files; 1 is a plain model.safetensors without index.
        edit: is handed both dicts of tensors, already rounded, and changes them in place.
        base_config, finetuned_config: added to config.json.
        names: of the two folders.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * scale

    base, finetuned = {}, {}
    for name, shape in llama_shapes(layers=layers, hidden=hidden, vocab=vocab, tied=tied).items():
        values = normal(shape, 0.02) + (1.0 if "norm" in name else 0.0)
        base[name] = values.to(getattr(torch, dtype))
        finetuned[name] = (values + normal(shape, change)).to(getattr(torch, finetuned_dtype or dtype))
    edit(base, finetuned)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": hidden // 16,
        "num_hidden_layers": layers,
        "num_key_value_heads": hidden // 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }
    pair = Pair(folder / names[0], folder / names[1])
    write_model(pair.base, base, config={**config, "dtype": dtype, **(base_config or {})}, shards=shards)
    write_model(
        pair.finetuned,
        finetuned,
        config={**config, "dtype": finetuned_dtype or dtype, **(finetuned_config or {})},
        shards=finetuned_shards or shards,
        files={
            "chat_template.jinja": CHAT_TEMPLATE,
            "generation_config.json": {"do_sample": True, "eos_token_id": 1, "temperature": 0.7},
        },
    )
    return pair


def llama_shapes(*, layers: int, hidden: int, vocab: int, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's tensors."""
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes


def write_model(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    files: Mapping[str, str | bytes | Mapping[str, Any]] | None = None,
) -> Path:
    """Write a model folder with the safetensors library: weights, config.json and a tokenizer's files.

    Args:
        tensors: dealt out to the shards in turn, so that neighbours lie in different files.
        config: the content of config.json; none is written without it.
        files: further files by relative path, mappings as JSON; they replace those written here.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Tensors] = [{} for _ in range(shards)]
    for index, (name, tensor) in enumerate(tensors.items()):
        parts[index % shards][name] = tensor.contiguous()
    if shards == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        where = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
    written: dict[str, str | bytes | Mapping[str, Any]] = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        **({"config.json": config} if config is not None else {}),
        **(files or {}),
    }
    for path, content in written.items():
        (folder / path).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content, indent=2) + "\n"
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def read_model(folder: Path) -> Tensors:
    """All tensors of a model folder, read with the safetensors library."""
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _tokenizer() -> dict[str, Any]:
    words = ["<s>", "</s>", "<unk>", "one", "bit", "per", "weight"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "<unk>"},
    }


# --- The command line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """How a run of the command line ended."""

    code: int
    out: str
    err: str

    @cached_property
    def json(self) -> Any:
        """Stdout as the one JSON object that it must be."""
        return json.loads(self.out)


class Zendelta(Protocol):
    """`zendelta(*arguments)` runs the command line; paths may be given as they are."""

    def __call__(self, *arguments: str | os.PathLike[str]) -> Done: ...


@pytest.fixture
def zendelta(capsys: pytest.CaptureFixture[str]) -> Zendelta:
    """The command line, run in this process: fast."""

    def call(*arguments: str | os.PathLike[str]) -> Done:
        from zendelta.cli.run import run

        capsys.readouterr()
        code = run([os.fspath(argument) for argument in arguments])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


def zendelta_process(*arguments: str | os.PathLike[str], cwd: Path | None = None, **environment: str) -> Done:
    """Run the command line in a process of its own, as `python -m zendelta`."""
    done = subprocess.run(
        [sys.executable, "-m", "zendelta", *map(os.fspath, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def zendelta_processes(*arguments: str | os.PathLike[str], count: int = 2) -> list[Done]:
    """Run the command line in several processes that know of each other, as `accelerate launch` does on GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "zendelta", *map(os.fspath, arguments)],
            env={**os.environ, **shared, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Done(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A base and a fine-tune of this test's own."""
    return make_pair(tmp_path)
