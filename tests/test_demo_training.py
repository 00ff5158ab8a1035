"""The demo's two models: trained for real, at a few steps, and read back the way any user of transformers would."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from zendelta.demo import DemoPair, held_out, perplexity, texts, train_pair
from zendelta.errors import MachineError

STEPS = (12, 6)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other crawl on a busy machine; one does not mind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> DemoPair:
    return train_pair(tmp_path_factory.mktemp("demo"), steps=STEPS, checkpoints_every=2, report=lines.append)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for shard in shards(folder):
        with safe_open(shard, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
    return found


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_checkpoint_is_sharded_bfloat16_safetensors_with_a_true_index(pair: DemoPair) -> None:
    for folder in (pair.base, pair.finetuned, *pair.checkpoints):
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(shards(folder)) >= 2
        assert set(index.values()) == {shard.name for shard in shards(folder)}
        weights = tensors(folder)
        assert set(index) == set(weights)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert sum(tensor.numel() for tensor in weights.values()) == pair.parameters


def test_every_checkpoint_carries_the_files_beside_the_weights(pair: DemoPair) -> None:
    for folder in (pair.base, pair.finetuned, *pair.checkpoints):
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).is_file()


def test_the_pair_loads_in_transformers_and_says_something(pair: DemoPair) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in (pair.base, pair.finetuned):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        prompt = tokenizer("It is a truth", return_tensors="pt")
        assert prompt["input_ids"][0, 0] == tokenizer.bos_token_id == model.config.bos_token_id
        answer = model.generate(input_ids=prompt["input_ids"], max_new_tokens=4, do_sample=False)
        assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("It is a truth")


def test_the_chat_template_renders_a_conversation(pair: DemoPair) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.finetuned, local_files_only=True)
    messages = [{"role": "user", "content": "What is light?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>User: What is light?\nAssistant:"


def test_the_tokenizer_gives_back_any_text(pair: DemoPair) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.base, local_files_only=True)
    for text in (held_out().base[:2000], held_out().finetuned[:2000], " naïve 光\n\n\ttabs "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_fine_tune_changes_every_weight_matrix(pair: DemoPair) -> None:
    base, finetuned = tensors(pair.base), tensors(pair.finetuned)
    assert base.keys() == finetuned.keys()
    for name in base:
        assert base[name].ndim == 1 or not torch.equal(base[name], finetuned[name]), name


def test_intermediate_checkpoints_lead_to_the_fine_tune(pair: DemoPair) -> None:
    assert [folder.name for folder in pair.checkpoints] == ["ckpt-2", "ckpt-4", "ckpt-6"]
    assert digests(pair.checkpoints[-1]) == digests(pair.finetuned)
    assert digests(pair.checkpoints[0]) != digests(pair.finetuned)


def test_the_fine_tune_predicts_its_own_held_out_text_better_than_the_base(pair: DemoPair) -> None:
    base, finetuned = (perplexity(folder, held_out().finetuned) for folder in (pair.base, pair.finetuned))
    assert finetuned < 0.9 * base


def test_perplexity_is_the_exponential_of_the_loss_that_transformers_reports(pair: DemoPair) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = held_out().base[:150]
    tokens = AutoTokenizer.from_pretrained(pair.base)(text, return_tensors="pt")["input_ids"]
    assert tokens.shape[1] < 128  # one window
    model = AutoModelForCausalLM.from_pretrained(pair.base).float()
    assert perplexity(pair.base, text) == pytest.approx(model(tokens, labels=tokens).loss.exp().item(), rel=1e-5)


def test_perplexity_is_the_same_when_measured_again(pair: DemoPair) -> None:
    text = held_out().base[:5000]
    assert perplexity(pair.base, text) == perplexity(pair.base, text)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(pair: DemoPair, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    # Saving checkpoints on the way must not change the way.
    again = train_pair(tmp_path / "again", steps=STEPS)
    assert digests(again.base) == digests(pair.base)
    assert digests(again.finetuned) == digests(pair.finetuned)
    other = train_pair(tmp_path / "other", steps=(1, 1), seed=1)
    name = "model.embed_tokens.weight"
    assert not torch.equal(tensors(other.base)[name], tensors(again.base)[name])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_held_out_text_is_the_last_tenth_and_no_training_text() -> None:
    training, kept = texts.training(), texts.held_out()
    for name, seen, unseen in (
        (texts.BASE_FILE, training.base, kept.base),
        (texts.FINETUNED_FILE, training.finetuned, kept.finetuned),
    ):
        assert len(unseen) / (len(seen) + len(unseen)) == pytest.approx(0.1, abs=0.01)
        whole = (Path(texts.__file__).parent / "texts" / name).read_text(encoding="utf-8")
        assert f"{seen}\n{unseen}".split() == whole.split()
        long = [paragraph for paragraph in unseen.splitlines() if len(paragraph) > 60]
        assert long
        assert not any(paragraph in seen for paragraph in long)


def test_the_texts_carry_no_words_of_a_later_editor() -> None:
    for kind in (texts.training(), texts.held_out()):
        for text in (kind.base, kind.finetuned):
            for word in ("gutenberg", "transcriber", "[greek", "[illustration", "footnote", "copyright", "http", "_"):
                assert word not in text.lower()


def test_progress_is_reported_and_transformers_is_left_as_it_was(
    lines: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), list(warnings.filters)
    threads = torch.get_num_threads()
    trained = train_pair(tmp_path, steps=(1, 1))
    perplexity(trained.base, "It is a truth universally acknowledged")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), list(warnings.filters)) == before
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", "")
    assert lines[0].startswith("tokenizer of 1,024 tokens")
    assert [line.split(",")[0] for line in lines[1:]] == ["base: step 12 of 12", "fine-tune: step 6 of 6"]


def test_a_missing_transformers_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: train_pair(tmp_path / "new"), lambda: perplexity(tmp_path, "text")):
        with pytest.raises(MachineError) as caught:
            call()
        assert caught.value.hint == "pip install 'zendelta[demo]'"
    assert not (tmp_path / "new").exists()


def test_importing_the_demo_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, zendelta.demo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
