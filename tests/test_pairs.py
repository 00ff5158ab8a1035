"""Pairs of checkpoints that do not fit each other at first sight: every one as users reported it, rebuilt small."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    Tensors,
    change_all,
    codecs,
    equal,
    inner_header,
    load,
    moved,
    normal,
    one_bit,
    outer_header,
    relative_error,
    restored,
    same_bits,
    tensor_entry,
    untouched,
    write,
)
from conftest import make_pair

from zendelta import InputError, UsageError, apply, compress, diff, inspect, validate


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk is most of the time that these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def compressed(base: Path, finetuned: Path, **options: Any) -> Path:
    """Compress beside the fine-tune, and return the .bd file."""
    output = finetuned.parent / f"{finetuned.name}.bd"
    compress(base, finetuned, output, force=True, **options)
    return output


def there_and_back(base: Path, finetuned: Path, **options: Any) -> Tensors:
    """Compress, validate and apply; return what stands in the restored folder."""
    file = compressed(base, finetuned, **options)
    report = validate(base, finetuned, file)
    assert report.passed, report.faults
    apply(base, file, finetuned.parent / "out", force=True)
    return load(finetuned.parent / "out")


def refused(base: Path, finetuned: Path) -> str:
    """Assert that every verb that takes a pair refuses it in the same words, before any work; return them."""
    said = []
    with untouched(base.parent):
        for verb in (compress, diff):
            arguments = (base, finetuned) + ((finetuned.parent / "x.bd",) if verb is compress else ())
            with pytest.raises(InputError) as caught:
                verb(*arguments, progress=lambda done, total: pytest.fail("work was begun"))  # type: ignore[operator]
            said.append(f"{caught.value.message} | {caught.value.hint}")
    assert said[0] == said[1]
    return said[0]


def llama(folder: Path, name: str) -> Any:
    """Load a folder as transformers does, and return the model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / name)


# P1, P11: rows that one of the two lacks


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("alpha", ["row", "matrix"])
def test_added_tokens_are_stored_raw_and_the_shared_rows_as_signs(tmp_path: Path, extra: int, alpha: str) -> None:
    grown = ("model.embed_tokens.weight", "lm_head.weight")

    def edit(base: Tensors, finetuned: Tensors) -> None:
        for i, name in enumerate(grown):
            finetuned[name] = torch.cat([finetuned[name], normal(extra, 64, seed=7 + i)])

    pair = make_pair(tmp_path, edit=edit, finetuned_config={"vocab_size": 96 + extra})
    base, finetuned = load(pair.base), load(pair.finetuned)
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd", alpha=alpha)
    for tensor in report.tensors:
        assert (tensor.codec, tensor.reason) == ("sign+new", f"{extra} new rows") or tensor.name not in grown
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    out = load(tmp_path / "out")
    for name in grown:
        assert same_bits(out[name][96:], finetuned[name][96:])
        if alpha == "row":
            assert same_bits(out[name][:96], one_bit(base[name], finetuned[name][:96]))
        else:
            shared = finetuned[name][:96].double() - base[name].double()
            shift = (out[name][:96].float() - base[name].float()).abs().median()
            assert shift == pytest.approx(float(shared.abs().mean()), rel=0.02)
    model = llama(tmp_path, "out")
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 96 + extra
    assert (tmp_path / "out/config.json").read_bytes() == (pair.finetuned / "config.json").read_bytes()


def test_a_head_s_bias_and_a_kept_embedding_grow_too_and_count_only_what_they_share(tmp_path: Path) -> None:
    base = {"lm_head.bias": normal(500, seed=1), "embed.weight": normal(40, 64), "ids": torch.arange(500)}
    base["lm_head.bias"][::2] = 0
    finetuned = change_all(base)
    finetuned["lm_head.bias"][::4] = 0
    for name, more in (("lm_head.bias", torch.zeros(3)), ("embed.weight", normal(2, 64)), ("ids", torch.arange(2))):
        finetuned[name] = torch.cat([finetuned[name], more.to(finetuned[name].dtype)])
    out = there_and_back(write(tmp_path / "b", base), write(tmp_path / "f", finetuned), keep=["embed.*=dense"])
    assert equal(out, finetuned)
    assert set(codecs(tmp_path / "f.bd").values()) == {"dense+new"}
    plan = compress(tmp_path / "b", tmp_path / "f", tmp_path / "x.bd", dry_run=True)
    assert {t.name: t.reason for t in plan.tensors}["lm_head.bias"] == "one-dimensional; 3 new rows"
    found = {t.name: t for t in inspect(tmp_path / "f.bd").tensors}
    delta = finetuned["lm_head.bias"][:500].double() - base["lm_head.bias"].double()
    assert found["lm_head.bias"].zeros == float((delta == 0).double().mean()) > 0.2
    assert found["lm_head.bias"].square_sum == pytest.approx(float(delta.square().sum()), rel=1e-9)
    assert found["ids"].zeros is None


def test_fewer_rows_than_the_base_are_a_change_of_the_shared_ones(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")

    def edit(base: Tensors, finetuned: Tensors) -> None:
        finetuned.update({name: finetuned[name][:90].clone() for name in names})

    pair = make_pair(tmp_path, edit=edit, finetuned_config={"vocab_size": 90})
    out = there_and_back(pair.base, pair.finetuned)
    assert equal(out, restored(load(pair.base), load(pair.finetuned)))
    assert out["lm_head.weight"].shape == (90, 64)
    assert codecs(tmp_path / "finetuned.bd")["lm_head.weight"] == "sign"
    report = compress(pair.base, pair.finetuned, tmp_path / "b.bd")
    assert {t.reason for t in report.tensors if t.name in names} == {"6 rows fewer than the base"}
    assert llama(tmp_path, "out").get_output_embeddings().weight.shape == (90, 64)


@pytest.mark.parametrize("alpha", ["row", "matrix"])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_a_stack_of_experts_that_grew_or_shrank_keeps_each_matrix_apart(
    tmp_path: Path, alpha: str, old: int, new: int
) -> None:
    name = "model.layers.0.mlp.experts.up_proj"
    base = {name: normal(old, 32, 40), "a.weight": normal(16, 32, seed=1)}
    stack = [moved(base[name][i], 5 + i, 1e-3 * 10**i) if i < old else normal(32, 40, seed=9) for i in range(new)]
    finetuned = {name: torch.stack(stack), "a.weight": base["a.weight"]}
    out = there_and_back(write(tmp_path / "b", base), write(tmp_path / "f", finetuned), alpha=alpha)[name]
    assert out.shape == (new, 32, 40)
    for i in range(min(old, new)):
        error = relative_error(base[name][i], finetuned[name][i], out[i])
        assert error == pytest.approx(0.6, abs=0.05), "a matrix of small changes beside one of large ones"
    if new > old:
        assert same_bits(out[old:], finetuned[name][old:])


# P2, P12: tensors that one of the two lacks


def test_tensors_that_the_base_lacks_are_stored_raw_and_listed(tmp_path: Path) -> None:
    added = {
        "mm_projector.weight": normal(64, 24, seed=3, dtype=torch.float32),
        "mm_projector.bias": normal(64, seed=4),
        "model.visual.blocks.0.attn.qkv.weight": normal(96, 32, seed=5, dtype=torch.float16),
        "model.visual.patch_embed.proj.weight": normal(32, 3, 4, 4, seed=6),
        "model.visual.position_ids": torch.arange(9)[None],
    }
    pair = make_pair(tmp_path, edit=lambda base, finetuned: finetuned.update(added))
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd", dry_run=True)
    assert {t.name for t in report.tensors if t.codec == "new"} == set(added)
    out = there_and_back(pair.base, pair.finetuned)
    assert equal({name: out[name] for name in added}, added)
    assert {name for name, codec in codecs(tmp_path / "finetuned.bd").items() if codec == "new"} == set(added)
    assert all(tensor_entry(tmp_path / "finetuned.bd", name)["from"] is None for name in added)


def test_tensors_and_buffers_that_the_fine_tune_lacks_are_listed_and_stay_away(tmp_path: Path) -> None:
    gone = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "mtp.fc.weight": normal(64, 128)}
    names = [*gone, "model.layers.1.mlp.up_proj.weight"]

    def edit(base: Tensors, finetuned: Tensors) -> None:
        base.update(gone)
        del finetuned[names[-1]]

    pair = make_pair(tmp_path, edit=edit)
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert report.dropped == inner_header(tmp_path / "a.bd")["dropped"] == sorted(names)
    assert diff(pair.base, pair.finetuned).dropped == sorted(names)
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert sorted(load(tmp_path / "out")) == sorted(load(pair.finetuned))


def test_a_pair_with_little_in_common_says_how_little(tmp_path: Path) -> None:
    base = {"shared.weight": normal(32, 32), **{f"old.{i}.weight": normal(8, 8, seed=i) for i in range(4)}}
    finetuned = {"shared.weight": normal(32, 32), **{f"new.{i}.kernel": normal(8, 8, seed=i) for i in range(4)}}
    report = compress(write(tmp_path / "b", base), write(tmp_path / "f", finetuned), tmp_path / "a.bd")
    assert "only 1 of the fine-tune's 5 tensors are in the base" in report.notes
    assert len(report.dropped) == 4


# P3: names that differ by a prefix


def renamed(tensors: Tensors, *exchanges: tuple[str, str]) -> Tensors:
    """Exchange the first prefix that fits of every name; None drops the tensor."""
    out = {}
    for name, value in tensors.items():
        old, new = next(((old, new) for old, new in exchanges if name.startswith(old)), ("", ""))
        out[new + name.removeprefix(old)] = value
    return out


def text_model(layers: int = 2) -> Tensors:
    """A language model of two layers with odd shapes."""
    out = {"model.embed_tokens.weight": normal(48, 32, seed=1), "model.norm.weight": 1 + normal(32, seed=2)}
    for i in range(layers):
        at = f"model.layers.{i}"
        out[f"{at}.self_attn.q_proj.weight"] = normal(32, 32, seed=10 * i + 3)
        out[f"{at}.mlp.up_proj.weight"] = normal(64, 32, seed=10 * i + 4)
        out[f"{at}.mlp.down_proj.weight"] = normal(32, 64, seed=10 * i + 5)
        out[f"{at}.input_layernorm.weight"] = 1 + normal(32, seed=10 * i + 6)
    out["lm_head.weight"] = normal(48, 32, seed=99)
    return out


def vision_model(blocks: int = 3) -> Tensors:
    """A vision tower with a merger, under the prefix visual."""
    out = {"visual.patch_embed.proj.weight": normal(32, 3, 4, 4, seed=200), "visual.merger.mlp.weight": normal(32, 32)}
    for i in range(blocks):
        out[f"visual.blocks.{i}.attn.qkv.weight"] = normal(96, 32, seed=201 + i)
        out[f"visual.blocks.{i}.norm1.weight"] = 1 + normal(32, seed=211 + i)
        out[f"visual.blocks.{i}.mlp.fc1.weight"] = normal(64, 32, seed=221 + i)
    return out


def headless(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name != "lm_head.weight"}


PREFIXES = {
    "a language model inside a multimodal one": ([], [("model.", "model.language_model.")]),
    "a language model taken out of one": ([("model.", "language_model.model.")], []),
    "a fine-tune saved without the prefix": ([], [("model.", "")]),
    "a base saved without the prefix": ([("model.", "")], []),
    "DataParallel's prefix": ([], [("", "module.")]),
    "PEFT's prefix": ([], [("", "base_model.model.")]),
    "two layouts of one multimodal family": (
        [("model.", "language_model.model."), ("lm_head", "language_model.lm_head")],
        [("model.", "model.language_model.")],
    ),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_names_that_differ_by_a_prefix_are_mapped_and_the_mapping_is_noted(tmp_path: Path, case: str) -> None:
    of_base, of_finetuned = PREFIXES[case]
    plain = text_model()
    changed = change_all(plain)
    sources = {
        new: old
        for new, old in zip(renamed(plain, *of_finetuned), renamed(plain, *of_base), strict=True)
    }  # fmt: skip
    base, finetuned = renamed(plain, *of_base), renamed(changed, *of_finetuned)
    report = compress(write(tmp_path / "base", base), write(tmp_path / "tuned", finetuned), tmp_path / "a.bd")
    assert {t.name: t.source for t in report.tensors} == sources
    assert report.dropped == []
    assert sum(int(re.search(r"(\d+) tensors", note)[1]) for note in report.notes) == sum(  # type: ignore[index]
        new != old for new, old in sources.items()
    )
    out = there_and_back(tmp_path / "base", tmp_path / "tuned")
    assert equal(out, restored(base, finetuned, sources))


def test_a_headless_fine_tune_without_the_prefix_lists_the_head_as_dropped(tmp_path: Path) -> None:
    plain = text_model()
    tuned = renamed(headless(change_all(plain)), ("model.", ""))
    report = compress(write(tmp_path / "b", plain), write(tmp_path / "f", tuned), tmp_path / "a.bd")
    assert report.dropped == ["lm_head.weight"]
    assert report.notes == ["names mapped: (none) here is model. in the base, 10 tensors"]
    assert {t.name: t.source for t in report.tensors} == {name: f"model.{name}" for name in tuned}


def test_a_headless_base_without_the_prefix_stores_the_head_raw(tmp_path: Path) -> None:
    plain = text_model()
    base = write(tmp_path / "b", renamed(headless(plain), ("model.", "")), {"architectures": ["LlamaModel"]})
    finetuned = change_all(plain)
    report = compress(base, write(tmp_path / "f", finetuned), tmp_path / "a.bd")
    assert report.notes == ["names mapped: model. here is (none) in the base, 10 tensors"]
    assert {t.name for t in report.tensors if t.codec == "new"} == {"lm_head.weight"}
    apply(base, tmp_path / "a.bd", tmp_path / "out")
    assert same_bits(load(tmp_path / "out")["lm_head.weight"], finetuned["lm_head.weight"])


def test_parts_of_a_model_may_have_prefixes_of_their_own(tmp_path: Path) -> None:
    plain = {**text_model(), **vision_model()}
    finetuned = renamed(change_all(plain), ("model.", "model.language_model."), ("visual.", "model.visual."))
    sources = dict(
        zip(renamed(plain, ("model.", "model.language_model."), ("visual.", "model.visual.")), plain, strict=True)
    )
    out = there_and_back(write(tmp_path / "b", plain), write(tmp_path / "f", finetuned))
    assert equal(out, restored(plain, finetuned, sources))
    report = diff(tmp_path / "b", tmp_path / "f")
    assert report.notes == [
        "names mapped: model. here is (none) in the base, 11 tensors",
        "names mapped: model.language_model. here is model. in the base, 10 tensors",
    ]


def test_a_prefix_is_found_also_where_most_of_the_names_agree_as_they_are(tmp_path: Path) -> None:
    plain = {**text_model(1), **vision_model(6)}
    finetuned = renamed(change_all(plain), ("model.", "model.language_model."))
    report = diff(write(tmp_path / "b", plain), write(tmp_path / "f", finetuned))
    assert report.notes == ["names mapped: model.language_model. here is model. in the base, 6 tensors"]
    assert report.dropped == []
    assert all(tensor.change is not None for tensor in report.tensors)


def test_leftovers_with_a_common_end_are_not_taken_for_one_another(tmp_path: Path) -> None:
    shared = {f"bert.encoder.{i}.dense.weight": normal(32, 32, seed=i) for i in range(6)}
    base = {**shared, "cls.transform.dense.weight": normal(32, 32, seed=8), "cls.transform.dense.bias": normal(32)}
    finetuned = {
        **change_all(shared),
        "bert.pooler.dense.weight": normal(32, 32, seed=9),
        "bert.pooler.dense.bias": normal(32, seed=3),
    }
    report = compress(write(tmp_path / "b", base), write(tmp_path / "f", finetuned), tmp_path / "a.bd")
    assert {t.name for t in report.tensors if t.codec == "new"} == {n for n in finetuned if "pooler" in n}
    assert report.dropped == sorted(set(base) - set(shared))


def test_gpt2_with_and_without_its_prefix_maps_every_layer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.transformer.save_pretrained(tmp_path / "base")  # h.0..., no head
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(moved(parameter, i))
    model.save_pretrained(tmp_path / "tuned")  # transformer.h.0...
    base, finetuned = load(tmp_path / "base"), load(tmp_path / "tuned")
    assert sorted(finetuned) == sorted(f"transformer.{name}" for name in base)
    out = there_and_back(tmp_path / "base", tmp_path / "tuned")
    wanted = restored(base, finetuned, {name: name.removeprefix("transformer.") for name in finetuned})
    assert equal(out, wanted)
    reference = GPT2LMHeadModel(config)
    reference.load_state_dict(wanted, strict=False)
    reference.tie_weights()
    tokens = torch.arange(10)[None]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, reference.eval()(tokens).logits)


def test_two_prefixes_that_fit_equally_well_are_an_error_that_names_both(tmp_path: Path) -> None:
    plain = text_model()
    base = {**renamed(plain, ("", "student.")), **renamed(change_all(plain), ("", "teacher."))}
    said = refused(write(tmp_path / "b", base), write(tmp_path / "f", change_all(plain)))
    assert "two mappings fit equally well" in said
    assert "(none) -> student." in said and "(none) -> teacher." in said
    assert str(tmp_path / "b") in said and "rename" in said


@pytest.mark.parametrize("shapes", ["other names", "other shapes"])
def test_nothing_in_common_is_an_error_that_shows_names_of_both(tmp_path: Path, shapes: str) -> None:
    plain = text_model()
    if shapes == "other names":
        finetuned = {f"encoder.stage_{i}.kernel_{i}": value for i, value in enumerate(plain.values())}
    else:
        finetuned = {name: normal(*(9 for _ in value.shape)) for name, value in plain.items() if value.ndim > 1}
    said = refused(write(tmp_path / "b", plain), write(tmp_path / "f", finetuned))
    assert str(tmp_path / "b") in said and str(tmp_path / "f") in said
    assert "lm_head.weight" in said and "is it the right base?" in said
    assert ("not one tensor name in common" in said) == (shapes == "other names")
    assert ("lm_head.weight [48, 32] against [9, 9]" in said) == (shapes == "other shapes")


def test_shapes_that_do_not_fit_are_all_listed_with_the_way_out(tmp_path: Path) -> None:
    plain = text_model()
    finetuned = change_all(plain)
    misfits = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    finetuned.update({name: normal(32, 80) for name in misfits})
    said = refused(write(tmp_path / "b", plain), write(tmp_path / "f", finetuned))
    assert all(f"{name} [32, 64] against [32, 80]" in said for name in misfits)
    assert "2 of 11 tensors" in said and "--keep" in said
    out = there_and_back(tmp_path / "b", tmp_path / "f", keep=["*.down_proj.weight=dense"])
    assert all(same_bits(out[name], finetuned[name]) for name in misfits)


# P4, P5: another base, and the same one in other files


@pytest.mark.parametrize("which", ["all tensors", "one tensor"])
def test_a_base_of_equal_shapes_and_other_values_is_refused_by_name(tmp_path: Path, which: str) -> None:
    pair = make_pair(tmp_path)
    file = compressed(pair.base, pair.finetuned)
    other = load(pair.base)
    name = "model.layers.1.mlp.up_proj.weight"
    if which == "all tensors":
        other = change_all(other)
    else:
        other[name][5, 7] += 1
    config = json.loads((pair.base / "config.json").read_text())
    wrong = write(tmp_path / "wrong", other, config)
    with untouched(tmp_path):
        for run in (lambda: apply(wrong, file, tmp_path / "out"), lambda: validate(wrong, pair.finetuned, file)):
            with pytest.raises(
                InputError, match=r"wrong is not the base of .*finetuned\.bd: its values differ"
            ) as said:
                run()
            named = name if which == "one tensor" else "lm_head.weight"
            assert f"first in {named}" in said.value.message
            assert "made from base" in said.value.hint


def test_a_base_that_differs_only_where_the_file_does_not_use_it_is_taken(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, edit=lambda base, finetuned: base.update({"mtp.fc.weight": normal(64, 64)}))
    file = compressed(pair.base, pair.finetuned)
    other = load(pair.base)
    other["mtp.fc.weight"] += 1  # the fine-tune has no such tensor
    other["model.norm.weight"] += 1  # stored whole
    config = json.loads((pair.base / "config.json").read_text())
    apply(write(tmp_path / "other", other, config), file, tmp_path / "out")
    assert equal(load(tmp_path / "out"), restored(load(pair.base), load(pair.finetuned)))


def test_a_base_that_cannot_be_the_one_is_refused_with_everything_that_is_missing(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    file = compressed(pair.base, pair.finetuned)
    other = load(pair.base)
    gone = [name for name in other if name.startswith("model.layers.1.mlp")]
    for name in gone:
        del other[name]
    other["lm_head.weight"] = normal(96, 32)
    wrong = write(tmp_path / "wrong", other)
    with untouched(tmp_path), pytest.raises(InputError) as said:
        apply(wrong, file, tmp_path / "out")
    assert all(name in said.value.message for name in (*gone, "lm_head.weight [96, 64] on BF16 [96, 32]"))


def test_a_base_without_the_files_that_are_only_referred_to_is_told_which(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    file = compressed(pair.base, pair.finetuned)
    (pair.base / "tokenizer.json").unlink()
    (pair.base / "tokenizer_config.json").write_text("{}")
    with untouched(tmp_path), pytest.raises(InputError) as said:
        apply(pair.base, file, tmp_path / "out")
    assert "tokenizer.json (missing), tokenizer_config.json (another one)" in said.value.message
    assert "put that base's files beside these weights" in said.value.hint


def test_the_same_base_in_other_shards_and_another_order_is_the_same_base(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, shards=1)
    config = json.loads((pair.base / "config.json").read_text())
    backwards = dict(reversed(load(pair.base).items()))
    again = write(tmp_path / "again/base", backwards, config, shards=3)
    assert len(list(again.glob("*.safetensors"))) == 3
    file, other = tmp_path / "one.bd", tmp_path / "other.bd"
    compress(pair.base, pair.finetuned, file)
    compress(again, pair.finetuned, other)
    assert file.read_bytes() == other.read_bytes()
    apply(again, file, tmp_path / "out")
    assert equal(load(tmp_path / "out"), restored(load(pair.base), load(pair.finetuned)))
    assert validate(again, pair.finetuned, file).passed


# P6: a head that is the embedding in one of the two


def untie(base: Tensors, finetuned: Tensors) -> None:
    finetuned["lm_head.weight"] = moved(base["model.embed_tokens.weight"], 55)


TIED = {
    "the flag": {},
    "the flag in text_config only": {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}},
    "no flag, but an architecture with a head": {"tie_word_embeddings": None},
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("grown", [0, 2])
def test_a_separate_head_is_a_change_of_the_tied_base_s_embedding(tmp_path: Path, case: str, grown: int) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        untie(base, finetuned)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            finetuned[name] = torch.cat([finetuned[name], normal(grown, 64, seed=3)])

    tuned = {"tie_word_embeddings": False, "vocab_size": 96 + grown}
    pair = make_pair(tmp_path, tied=True, edit=edit, finetuned_config=tuned)
    config = json.loads((pair.base / "config.json").read_text()) | TIED[case]
    config = {key: value for key, value in config.items() if value is not None}
    (pair.base / "config.json").write_text(json.dumps(config))
    plan = compress(pair.base, pair.finetuned, tmp_path / "a.bd", dry_run=True)
    assert any("head is tied: lm_head.weight is stored as a change of model.embed" in note for note in plan.notes)
    out = there_and_back(pair.base, pair.finetuned)
    base, finetuned = load(pair.base), load(pair.finetuned)
    assert equal(out, restored(base, finetuned, {"lm_head.weight": "model.embed_tokens.weight"}))
    assert codecs(tmp_path / "finetuned.bd")["lm_head.weight"] == "sign" + "+new" * bool(grown)
    model = llama(tmp_path, "out")
    assert model.config.tie_word_embeddings is False
    assert torch.equal(model.get_output_embeddings().weight, out["lm_head.weight"].to(model.dtype))
    assert not torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def test_a_tied_fine_tune_of_a_base_with_a_head_drops_the_head_and_stays_tied(tmp_path: Path) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        del finetuned["lm_head.weight"]

    pair = make_pair(tmp_path, edit=edit, finetuned_config={"tie_word_embeddings": True})
    plan = compress(pair.base, pair.finetuned, tmp_path / "a.bd", dry_run=True)
    assert plan.dropped == ["lm_head.weight"]
    out = there_and_back(pair.base, pair.finetuned)
    assert equal(out, restored(load(pair.base), load(pair.finetuned)))
    model = llama(tmp_path, "out")
    assert model.config.tie_word_embeddings is True
    assert torch.equal(model.get_output_embeddings().weight, out["model.embed_tokens.weight"].to(model.dtype))


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"architectures": ["LlamaModel"]}])
def test_a_head_is_not_guessed_to_be_tied_where_the_base_does_not_say_so(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    base = headless(text_model())
    finetuned = change_all(text_model())
    report = compress(write(tmp_path / "b", base, config), write(tmp_path / "f", finetuned), tmp_path / "a.bd")
    assert {t.name: t.codec for t in report.tensors}["lm_head.weight"] == "new"


def test_a_tied_head_that_is_stored_twice_with_equal_values_is_stored_once(tmp_path: Path) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        finetuned["lm_head.weight"] = finetuned["model.embed_tokens.weight"].clone()

    pair = make_pair(tmp_path, tied=True, edit=edit)
    out = there_and_back(pair.base, pair.finetuned)
    assert same_bits(out["lm_head.weight"], out["model.embed_tokens.weight"])
    assert inner_header(tmp_path / "finetuned.bd")["aliases"] == {"model.embed_tokens.weight": "lm_head.weight"}
    changed = load(pair.finetuned)
    changed["model.embed_tokens.weight"][0, 0] += 1
    config = json.loads((pair.finetuned / "config.json").read_text())
    report = validate(pair.base, write(tmp_path / "other", changed, config), tmp_path / "finetuned.bd")
    assert not report.passed
    assert report.faults == ["lm_head.weight: model.embed_tokens.weight has other values, the file says they are one"]


# P7: experts fused in one model and apart in the other


def mixtral(folder: Path, hidden: int, fused: bool, change: float = 0.0) -> Path:
    """A Mixtral of one layer as transformers makes it, its experts apart or, as they are in memory, fused."""
    from safetensors.torch import save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, vocab_size=40, max_position_embeddings=32, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(moved(parameter, i, change))
    model.save_pretrained(folder)
    if fused:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("hidden", [16, 64])
@pytest.mark.parametrize("fused", ["base", "tuned"])
def test_experts_in_two_layouts_are_refused_with_both_named(tmp_path: Path, hidden: int, fused: str) -> None:
    base = mixtral(tmp_path / "base", hidden, fused == "base")
    tuned = mixtral(tmp_path / "tuned", hidden, fused == "tuned", 1e-3)
    said = refused(base, tuned)
    apart = tuned if fused == "base" else base
    together = base if fused == "base" else tuned
    one = (
        f"{apart} has one tensor per expert (model.layers.0.block_sparse_moe.experts.0.w1.weight [{hidden}, {hidden}])"
    )
    assert one in said
    assert f"{together} has them fused (model.layers.0.mlp.experts.down_proj [4, {hidden}, {hidden}])" in said
    assert "bring both into one layout" in said


@pytest.mark.parametrize("fused", [False, True])
def test_experts_in_one_layout_come_back_and_load_in_transformers(tmp_path: Path, fused: bool) -> None:
    from transformers import AutoModelForCausalLM

    base, tuned = mixtral(tmp_path / "base", 32, fused), mixtral(tmp_path / "tuned", 32, fused, 1e-3)
    out = there_and_back(base, tuned)
    assert equal(out, restored(load(base), load(tuned)))
    if not fused:  # only this layout is one that transformers reads
        tokens = torch.arange(12)[None]
        model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", base))
        with torch.no_grad():
            for (name, found), wanted in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
                assert found.shape == wanted.shape and not torch.equal(found, wanted), name
            assert torch.isfinite(model(tokens).logits).all()


def test_per_expert_tensors_under_two_prefixes_are_mapped_like_any_others(tmp_path: Path) -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{kind}_proj.weight" for i in range(2) for e in range(3) for kind in "ud"
    ]
    plain = {name: normal(32, 32, seed=i) for i, name in enumerate(names)}
    finetuned = renamed(change_all(plain), ("model.", "model.language_model."))
    sources = dict(zip(finetuned, plain, strict=True))
    out = there_and_back(write(tmp_path / "b", plain), write(tmp_path / "f", finetuned))
    assert equal(out, restored(plain, finetuned, sources))


# P8: quantised weights


def fp8(base: Tensors, finetuned: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    finetuned[name] = finetuned[name].to(torch.float8_e4m3fn)
    finetuned[f"{name}_scale_inv"] = torch.ones(1, 1)


def gptq(base: Tensors, finetuned: Tensors) -> None:
    at = "model.layers.0.mlp.up_proj"
    del finetuned[f"{at}.weight"]
    finetuned[f"{at}.qweight"] = torch.ones(8, 128, dtype=torch.int32)
    finetuned[f"{at}.qzeros"] = torch.ones(1, 16, dtype=torch.int32)


def bnb(base: Tensors, finetuned: Tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    finetuned[name] = torch.ones(4096, 1, dtype=torch.uint8)
    finetuned[f"{name}.absmax"] = torch.ones(64, dtype=torch.uint8)
    finetuned[f"{name}.quant_map"] = torch.ones(16)


QUANTISED = {
    "fp8": (fp8, {}, ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"]),
    "gptq": (gptq, {}, ["model.layers.0.mlp.up_proj.qweight", "model.layers.0.mlp.up_proj.qzeros"]),
    "bitsandbytes": (bnb, {}, ["model.layers.0.mlp.up_proj.weight.absmax"]),
    "config": (lambda base, finetuned: None, {"quantization_config": {"quant_method": "awq"}}, ["config.json", "awq"]),
    "config without a method": (
        lambda base, finetuned: None,
        {"quantization_config": {"fmt": "e4m3"}},
        ["config.json", "e4m3"],
    ),
}


@pytest.mark.parametrize("case", QUANTISED)
@pytest.mark.parametrize("swapped", [False, True])
def test_quantised_weights_are_refused_by_name_before_any_work(tmp_path: Path, case: str, swapped: bool) -> None:
    edit, config, named = QUANTISED[case]
    pair = make_pair(tmp_path, edit=edit, finetuned_config=config)
    base, finetuned = (pair.finetuned, pair.base) if swapped else (pair.base, pair.finetuned)
    said = refused(base, finetuned)
    assert str(pair.finetuned) in said and all(name in said for name in named)
    assert "use the unquantised checkpoint" in said


def test_both_sides_quantised_are_both_named(tmp_path: Path) -> None:
    def edit(base: Tensors, finetuned: Tensors) -> None:
        fp8(base, finetuned)
        gptq(finetuned, base)

    pair = make_pair(tmp_path, edit=edit)
    said = refused(pair.base, pair.finetuned)
    assert f"{pair.base}: quantised weights: model.layers.0.mlp.up_proj.qweight" in said
    assert f"{pair.finetuned}: quantised weights: model.layers.0.mlp.up_proj.weight" in said


def test_whole_numbers_are_never_subtracted(tmp_path: Path) -> None:
    base = {"a.weight": normal(32, 32), "b.weight": torch.arange(1024, dtype=torch.int8).reshape(32, 32)}
    finetuned = {"a.weight": moved(base["a.weight"]), "b.weight": base["b.weight"].flip(0)}
    pair = write(tmp_path / "b", base), write(tmp_path / "f", finetuned)
    assert equal(there_and_back(*pair), restored(base, finetuned))
    assert codecs(tmp_path / "f.bd")["b.weight"] == "dense"
    with pytest.raises(UsageError, match=r"asks for signs of b\.weight, which is I8"):
        compress(*pair, tmp_path / "x.bd", keep=["b.*=sign"])


# P9: other dtypes


@pytest.mark.parametrize(
    ("of_base", "of_finetuned"),
    [
        pair
        for pair in itertools.product(("bfloat16", "float16", "float32", "float64"), repeat=2)
        if pair[0] != pair[1] and "bfloat16" in pair
    ],
)
def test_a_fine_tune_in_another_dtype_comes_back_in_it(tmp_path: Path, of_base: str, of_finetuned: str) -> None:
    pair = make_pair(tmp_path, dtype=of_base, finetuned_dtype=of_finetuned, layers=1)
    base, finetuned = load(pair.base), load(pair.finetuned)
    out = there_and_back(pair.base, pair.finetuned)
    assert equal(out, restored(base, finetuned))
    assert {str(value.dtype) for value in out.values()} == {f"torch.{of_finetuned}"}
    kinds = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
    assert {entry["dtype"] for entry in inner_header(tmp_path / "finetuned.bd")["tensors"].values()} == {
        kinds[of_finetuned]
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == of_finetuned


def test_a_model_of_mixed_dtypes_keeps_each_tensor_s_own(tmp_path: Path) -> None:
    base = {"a.weight": normal(32, 32), "b.weight": normal(32, 32, seed=1), "c.weight": normal(32, 32, seed=2)}
    finetuned = {
        "a.weight": moved(base["a.weight"]).half(),
        "b.weight": moved(base["b.weight"]).float(),
        "c.weight": moved(base["c.weight"]),
    }
    out = there_and_back(write(tmp_path / "b", base), write(tmp_path / "f", finetuned))
    assert equal(out, restored(base, finetuned))
    apply(tmp_path / "b", tmp_path / "f.bd", tmp_path / "wide", dtype="float32")
    assert equal(load(tmp_path / "wide"), {name: one_bit(base[name], finetuned[name], torch.float32) for name in base})


# P10: nothing changed


def test_two_identical_checkpoints_make_a_small_file_that_gives_the_base_back(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, edit=lambda base, finetuned: finetuned.update(base))
    report = compress(pair.base, pair.finetuned, tmp_path / "a.bd")
    assert set(codecs(tmp_path / "a.bd").values()) == {"same"}
    assert report.error == 0 and sum(t.stored_bytes for t in report.tensors) == 0
    assert report.ratio > 8
    assert all(name.startswith((":file:", "__metadata__")) for name in outer_header(tmp_path / "a.bd"))
    assert {t.reason for t in report.tensors} == {"equals the base's"}
    checked = validate(pair.base, pair.finetuned, tmp_path / "a.bd", max_error=0)
    assert checked.passed and checked.error == 0
    assert diff(pair.base, pair.finetuned).verdict == "nothing changed"
    apply(pair.base, tmp_path / "a.bd", tmp_path / "out")
    assert equal(load(tmp_path / "out"), load(pair.base))


def test_a_checkpoint_compressed_against_itself_works(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    compress(pair.base, pair.base, tmp_path / "a.bd")
    assert set(codecs(tmp_path / "a.bd").values()) == {"same"}
    assert set(outer_header(tmp_path / "a.bd")) == {"__metadata__"}, "no array at all, nor any file"
