"""Numbers that break such tools: tiny changes, zeros, NaN, odd shapes, overflow. Expectations are plain torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    Tensors,
    codecs,
    equal,
    load,
    moved,
    normal,
    one_bit,
    relative_error,
    restored,
    same_bits,
    signs_of,
    tensor_entry,
    untouched,
    write,
)
from conftest import Zendelta

from zendelta import InputError, apply, compress, diff, validate
from zendelta.bdfile import BdWriter
from zendelta.checkpoint.writer import CheckpointWriter, TensorSpec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk is most of the time that these tests would take."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Trip:
    """A pair of checkpoints of a few tensors, compressed, validated and applied."""

    def __init__(self, folder: Path, base: Tensors, finetuned: Tensors, dtype: str | None = None, **options: Any):
        self.folder, self.base, self.finetuned = folder, base, finetuned
        self.places = write(folder / "base", base), write(folder / "tuned", finetuned)
        self.file = folder / "tuned.bd"
        self.report = compress(*self.places, self.file, **options)
        self.validation = validate(*self.places, self.file)
        assert self.validation.passed, self.validation.faults
        self.applied = apply(self.places[0], self.file, folder / "out", dtype=dtype)
        self.out = load(folder / "out")

    def tensor(self, name: str) -> Any:
        """What compress reported of a tensor."""
        return next(tensor for tensor in self.report.tensors if tensor.name == name)

    def check(self, name: str) -> Any:
        """What validate measured of a tensor."""
        return next(tensor for tensor in self.validation.tensors if tensor.name == name)

    def alphas(self, name: str) -> torch.Tensor:
        """The stored scales of a tensor."""
        return load_arrays(self.file)[f"{name}:alpha"]


def load_arrays(file: Path) -> Tensors:
    """The arrays of a .bd file, by the safetensors library."""
    from safetensors import safe_open

    with safe_open(str(file), "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


# N1: changes near the step of bfloat16


def test_a_tiny_change_in_bf16_reports_its_zeros_its_error_and_what_rounding_loses(tmp_path: Path) -> None:
    wide = normal(128, 256, dtype=torch.float32)
    base = {"a.weight": wide.bfloat16(), "b.weight": normal(64, 64, seed=1)}
    noise = normal(128, 256, seed=2, scale=3e-5, dtype=torch.float32)
    finetuned = {"a.weight": (base["a.weight"].float() + noise).bfloat16(), "b.weight": base["b.weight"]}
    trip = Trip(tmp_path, base, finetuned)
    delta = finetuned["a.weight"].double() - base["a.weight"].double()
    zeros = float((delta == 0).double().mean())
    assert 0.5 < zeros < 0.95
    assert trip.tensor("a.weight").zeros == zeros
    exact = one_bit(base["a.weight"].double(), finetuned["a.weight"].double())  # in float64: before rounding
    error = relative_error(base["a.weight"], finetuned["a.weight"], exact)
    assert trip.tensor("a.weight").error == pytest.approx(error, rel=1e-6)
    assert error > 0.8, "far from the 0.60 of a change that has no zeros"

    assert equal(trip.out, restored(base, finetuned))
    unmoved = float((trip.out["a.weight"] == base["a.weight"]).double().mean())
    assert trip.applied.unmoved == trip.check("a.weight").unmoved == unmoved > 0.3
    assert any(f"{unmoved:.0%} of the weights" in note and "--dtype float32" in note for note in trip.applied.notes)
    assert trip.check("a.weight").error == pytest.approx(error, rel=1e-6)
    assert trip.check("a.weight").error_rounded == pytest.approx(
        relative_error(base["a.weight"], finetuned["a.weight"], trip.out["a.weight"]), rel=1e-6
    )

    report = apply(trip.places[0], trip.file, tmp_path / "wide", dtype="float32")
    assert report.unmoved is None and report.notes == []
    found = load(tmp_path / "wide")["a.weight"]
    assert same_bits(found, one_bit(base["a.weight"], finetuned["a.weight"], torch.float32))
    assert not (found == base["a.weight"].float()).any()


def test_the_command_line_offers_float32_where_rounding_swallows_the_change(tmp_path: Path, zendelta: Zendelta) -> None:
    base = {"a.weight": normal(64, 256)}
    pair = write(tmp_path / "b", base), write(tmp_path / "f", {"a.weight": moved(base["a.weight"], scale=3e-5)})
    assert zendelta("compress", *pair, "-o", tmp_path / "a.bd").code == 0
    inspected = zendelta("inspect", tmp_path / "a.bd", "--json").json
    delta = load(pair[1])["a.weight"].double() - base["a.weight"].double()
    assert inspected["zeros"] == pytest.approx(float((delta == 0).double().mean()), rel=1e-12)
    applied = zendelta("apply", pair[0], tmp_path / "a.bd", "-o", tmp_path / "out")
    assert applied.code == 0 and "--dtype float32" in applied.err
    checked = zendelta("validate", *pair, tmp_path / "a.bd")
    assert checked.code == 0 and "--dtype float32" in checked.err


def test_an_ordinary_change_raises_no_alarm(tmp_path: Path) -> None:
    base = {"a.weight": normal(64, 256)}
    trip = Trip(tmp_path, base, {"a.weight": moved(base["a.weight"])})
    assert trip.applied.notes == [] and trip.applied.unmoved is not None and trip.applied.unmoved < 0.05


# N2: zeros under positive inputs


def test_zeros_add_no_shift_when_all_inputs_are_positive(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"a.weight": normal(1000, 220, dtype=torch.float32)}
    delta = torch.randn(1000, 220, generator=generator) * 0.01
    delta[torch.rand(1000, 220, generator=generator) < 0.3] = 0
    finetuned = {"a.weight": base["a.weight"] + delta}
    trip = Trip(tmp_path, base, finetuned)
    true = finetuned["a.weight"].double() - base["a.weight"].double()
    assert float((true == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    inputs = torch.randn(220, 500, generator=generator).double().abs()
    effect = true @ inputs

    def output_error(step: torch.Tensor) -> float:
        return float(((true - step) @ inputs).norm() / effect.norm())

    assert output_error(trip.out["a.weight"].double() - base["a.weight"].double()) == pytest.approx(0.74, abs=0.04)
    alpha = true.abs().mean(1, keepdim=True)
    plus = torch.where(true >= 0, alpha, -alpha)
    assert output_error(plus) > 2.2, "as the published code has it, the same zeros would do this much harm"


# N3: rows of very unequal change


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_rows_of_tiny_changes_are_as_good_as_rows_of_large_ones(tmp_path: Path, dtype: str) -> None:
    base = normal(64, 512, scale=1e-4, dtype=torch.float64)
    sizes = torch.where(torch.arange(64) % 2 == 0, 1e-8, 1e-2).double()[:, None]
    noise = torch.randn(64, 512, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    finetuned = (base + sizes * noise).to(DTYPES[dtype])
    base = base.to(DTYPES[dtype])
    trip = Trip(tmp_path, {"a.weight": base}, {"a.weight": finetuned})
    alphas = trip.alphas("a.weight").double()
    true = finetuned.double() - base.double()
    assert torch.isfinite(alphas).all() and (alphas > 0).all()
    torch.testing.assert_close(alphas, true.abs().mean(1), rtol=1e-6, atol=0)
    for row in range(64):
        error = relative_error(base[row], finetuned[row], trip.out["a.weight"][row])
        assert error == pytest.approx(math.sqrt(1 - 2 / math.pi), abs=0.06), f"row {row}, change {sizes[row]}"


# N4: NaN and infinities


def poisoned(place: str, dtype: torch.dtype, value: float) -> tuple[Tensors, Tensors, str, list[int]]:
    """A base, a fine-tune with one bad value, the tensor that holds it, and where."""
    base = {
        "matrix.weight": normal(48, 64, dtype=dtype),
        "norm.weight": normal(40, seed=1, dtype=dtype),
        "conv.weight": normal(32, 4, 5, seed=2, dtype=dtype),
        "experts.up": normal(3, 32, 32, seed=3, dtype=dtype),
        "scale": torch.ones((), dtype=dtype),
    }
    finetuned = {name: moved(tensor) for name, tensor in base.items()}
    finetuned["matrix.weight"] = torch.cat([finetuned["matrix.weight"], normal(2, 64, seed=4, dtype=dtype)])
    finetuned["projector.weight"] = normal(16, 24, seed=5, dtype=dtype)
    name, index = {
        "a matrix": ("matrix.weight", [17, 63]),
        "a new row": ("matrix.weight", [49, 3]),
        "a vector": ("norm.weight", [39]),
        "a convolution": ("conv.weight", [31, 2, 4]),
        "a stack": ("experts.up", [2, 0, 31]),
        "a number": ("scale", []),
        "a tensor that the base lacks": ("projector.weight", [15, 0]),
    }[place]
    finetuned[name][tuple(index)] = value
    return base, finetuned, name, index


PLACES = [
    "a matrix", "a new row", "a vector", "a convolution", "a stack", "a number", "a tensor that the base lacks",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("dtype", "value"), [("BF16", math.nan), ("F16", math.inf), ("F32", -math.inf), ("F64", math.nan)]
)
def test_one_value_that_is_not_finite_is_refused_with_tensor_and_index(
    tmp_path: Path, place: str, dtype: str, value: float
) -> None:
    base, finetuned, name, index = poisoned(place, DTYPES[dtype], value)
    pair = write(tmp_path / "b", base), write(tmp_path / "f", finetuned)
    with untouched(tmp_path), pytest.raises(InputError) as caught:
        compress(*pair, tmp_path / "a.bd")
    assert f"model.safetensors: {name} has a NaN or an infinity at {index}" in caught.value.message
    assert str(pair[1]) in caught.value.message
    assert f"--keep '{name}=dense'" in caught.value.hint
    file = tmp_path / "kept.bd"
    compress(*pair, file, keep=[f"{name}=dense"])  # the way out works
    assert validate(*pair, file).passed
    apply(pair[0], file, tmp_path / "out")
    assert same_bits(load(tmp_path / "out")[name], finetuned[name])


def test_a_value_that_is_not_finite_in_the_base_is_refused_as_the_base_s(tmp_path: Path) -> None:
    base = {"a.weight": normal(32, 32), "b.weight": normal(32, 32, seed=1)}
    finetuned = {name: moved(tensor) for name, tensor in base.items()}
    base["b.weight"][7, 9] = math.inf
    with pytest.raises(InputError, match=r"b/model\.safetensors: b\.weight has a NaN or an infinity at \[7, 9\]"):
        compress(write(tmp_path / "b", base), write(tmp_path / "f", finetuned), tmp_path / "a.bd")


def test_a_mask_of_infinities_that_both_have_is_the_same(tmp_path: Path) -> None:
    mask = torch.full((32, 32), -math.inf).triu(1)
    base = {"attn.mask": mask, "a.weight": normal(32, 32)}
    trip = Trip(tmp_path, base, {"attn.mask": mask.clone(), "a.weight": moved(base["a.weight"])})
    assert codecs(trip.file)["attn.mask"] == "same"
    assert same_bits(trip.out["attn.mask"], mask)
    report = diff(*trip.places)
    assert next(t for t in report.tensors if t.name == "attn.mask").change == 0
    json.dumps(report.to_json(), allow_nan=False)


def test_a_mask_that_only_one_dtype_holds_as_infinity_can_be_kept(tmp_path: Path) -> None:
    mask = torch.full((32, 32), -1e9).triu(1)
    base = {"attn.mask": mask, "a.weight": normal(32, 32, dtype=torch.float32)}
    finetuned = {"attn.mask": mask.half(), "a.weight": moved(base["a.weight"]).half()}
    assert torch.isinf(finetuned["attn.mask"]).any()
    pair = write(tmp_path / "b", base), write(tmp_path / "f", finetuned)
    with pytest.raises(InputError, match=r"attn\.mask has a NaN or an infinity at \[0, 1\]"):
        compress(*pair, tmp_path / "a.bd")
    trip = Trip(tmp_path / "kept", base, finetuned, keep=["attn.mask=dense"])
    assert equal(trip.out, {**restored(base, finetuned), "attn.mask": finetuned["attn.mask"]})


def test_a_tensor_that_is_not_finite_is_left_out_of_the_comparison_and_named(tmp_path: Path) -> None:
    base, finetuned, name, _ = poisoned("a stack", torch.bfloat16, math.nan)
    report = diff(write(tmp_path / "b", base), write(tmp_path / "f", finetuned))
    assert f"not compared, since they hold a NaN or an infinity: {name}" in report.notes
    assert next(t for t in report.tensors if t.name == name).change is None
    shared = {n: (base[n].double(), finetuned[n][: len(base[n])].double()) for n in base if n not in (name, "scale")}
    shared["scale"] = base["scale"].double(), finetuned["scale"].double()
    change = sum(float((f - b).square().sum()) for b, f in shared.values())
    norm = sum(float(b.square().sum()) for b, f in shared.values())
    assert report.change == pytest.approx(math.sqrt(change / norm), rel=1e-6)
    json.dumps(report.to_json(), allow_nan=False)


def test_every_verb_gives_valid_json_whatever_the_weights_hold(tmp_path: Path, zendelta: Zendelta) -> None:
    base, finetuned, name, _ = poisoned("a matrix", torch.bfloat16, math.nan)
    pair = write(tmp_path / "b", base), write(tmp_path / "f", finetuned)
    refused = zendelta("compress", *pair, "-o", tmp_path / "a.bd", "--json")
    assert refused.code == 3 and refused.json["error"]["kind"] == "input" and name in refused.json["error"]["message"]
    assert zendelta("compress", *pair, "-o", tmp_path / "a.bd", "--keep", f"{name}=dense", "--json").code == 0

    def constant(text: str) -> None:
        pytest.fail(f"{text} is not JSON")

    for verb in (["diff", *pair], ["validate", *pair, tmp_path / "a.bd"], ["inspect", tmp_path / "a.bd"]):
        done = zendelta(*verb, "--json")
        json.loads(done.out, parse_constant=constant)
        assert done.code == 0, done.err


# N5: shapes and dtypes


@pytest.mark.parametrize("cols", [1, 7, 8, 67, 72])
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("alpha", ["row", "matrix"])
def test_any_number_of_columns_packs(tmp_path: Path, cols: int, rows: int, alpha: str) -> None:
    base = {"a.weight": normal(rows, cols), "b.weight": normal(64, 64, seed=1)}
    finetuned = {name: moved(tensor) for name, tensor in base.items()}
    trip = Trip(tmp_path, base, finetuned, keep=["a.weight=sign"], alpha=alpha)
    assert codecs(trip.file)["a.weight"] == "sign"
    delta = finetuned["a.weight"].float() - base["a.weight"].float()
    packed = load_arrays(trip.file)["a.weight:sign"]
    assert packed.shape == (rows, -(-cols // 8))
    bits = np.unpackbits(packed.numpy(), axis=1, bitorder="little")
    assert np.array_equal(bits[:, :cols], (signs_of(delta) > 0).numpy())
    assert not bits[:, cols:].any(), "unused bits are 0"
    if alpha == "row":
        assert same_bits(trip.out["a.weight"], one_bit(base["a.weight"], finetuned["a.weight"]))
    else:
        scale = delta.double().abs().mean().float()
        assert same_bits(trip.out["a.weight"], (base["a.weight"].float() + scale * signs_of(delta)).bfloat16())


def test_what_is_no_matrix_of_floats_comes_back_to_the_bit(tmp_path: Path) -> None:
    base = {
        "a.weight": normal(64, 64),
        "empty": torch.zeros(0),
        "empty.rows": torch.zeros(0, 64, dtype=torch.bfloat16),
        "empty.columns": torch.zeros(64, 0, dtype=torch.float16),
        "empty.experts": torch.zeros(0, 64, 64),
        "number": torch.tensor(1.5),
        "count": torch.tensor(7),
        "flag": torch.tensor(True),
        "position_ids": torch.arange(77)[None],
        "mask": torch.ones(1, 1, 32, 32, dtype=torch.bool).tril(),
        "bytes": torch.arange(256, dtype=torch.uint8).reshape(16, 16),
        "table": torch.arange(1024, dtype=torch.int32).reshape(32, 32),
        "shorts": torch.arange(1024, dtype=torch.int16).reshape(32, 32),
        "wave": torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.complex64),
        "row.weight": normal(1, 4096, seed=3),
        "column.weight": normal(4096, 1, seed=4),
    }
    finetuned = {name: value.clone() for name, value in base.items()}
    finetuned.update({
        "a.weight": moved(base["a.weight"]),
        "number": torch.tensor(2.5),
        "count": torch.tensor(9_007_199_254_740_993),
        "flag": torch.tensor(False),
        "position_ids": torch.arange(80)[None],
        "mask": base["mask"].logical_not(),
        "bytes": base["bytes"].flip(0),
        "table": base["table"] - 2**31,
        "shorts": base["shorts"].flip(1),
        "wave": base["wave"] * 2,
        "row.weight": moved(base["row.weight"]),
        "column.weight": moved(base["column.weight"]),
        "empty.rows": torch.zeros(3, 64, dtype=torch.bfloat16),
    })  # fmt: skip
    trip = Trip(tmp_path, base, finetuned)
    assert trip.tensor("position_ids").reason == "[1, 77] in the base"
    del base["position_ids"]  # of another shape: nothing of it is used
    assert equal(trip.out, restored(base, finetuned))
    assert all(
        same_bits(trip.out[name], finetuned[name]) for name in finetuned if name not in {"a.weight", "row.weight"}
    )
    assert {name for name, codec in codecs(trip.file).items() if codec == "sign"} == {"a.weight", "row.weight"}


@pytest.mark.parametrize("turn", [False, True])
def test_a_number_that_is_floating_in_one_and_whole_in_the_other_is_not_subtracted(tmp_path: Path, turn: bool) -> None:
    base = {"a.weight": normal(64, 64), "b": torch.arange(4096).reshape(64, 64)}
    finetuned = {"a.weight": moved(base["a.weight"]), "b": normal(64, 64, seed=3)}
    trip = Trip(tmp_path, *((finetuned, base) if turn else (base, finetuned)))
    assert same_bits(trip.out["b"], trip.finetuned["b"])
    assert tensor_entry(trip.file, "b")["stats"] == {}


# N6: zeros on either side


def test_tensors_of_zeros_are_handled_on_either_side(tmp_path: Path) -> None:
    zero = torch.zeros(64, 64, dtype=torch.bfloat16)
    rows = normal(64, 64, seed=3)
    half = rows.clone()
    half[:32] = moved(rows[:32])
    base = {"from_zero": zero, "to_zero": normal(64, 64, seed=1), "both": zero.clone(), "half": rows}
    finetuned = {"from_zero": normal(64, 64, seed=2), "to_zero": zero, "both": zero.clone(), "half": half}
    trip = Trip(tmp_path, base, finetuned)
    assert equal(trip.out, restored(base, finetuned))
    assert codecs(trip.file) == {"from_zero": "sign", "to_zero": "sign", "both": "same", "half": "sign"}
    assert (trip.alphas("half")[32:] == 0).all() and (trip.alphas("half")[:32] > 0).all()
    assert same_bits(trip.out["half"][32:], rows[32:]), "rows without a change stay as they are"
    for name in ("from_zero", "to_zero", "half"):
        exact = one_bit(base[name].double(), finetuned[name].double())
        assert trip.tensor(name).error == pytest.approx(relative_error(base[name], finetuned[name], exact), rel=1e-6)
    json.dumps([trip.report.to_json(), trip.validation.to_json(), diff(*trip.places).to_json()], allow_nan=False)


# N7: arrays that do not lie in order


def test_transposed_and_sliced_parameters_are_read_as_they_are_meant(tmp_path: Path) -> None:
    wide = normal(96, 160, seed=1)
    base = {"a.weight": normal(80, 48), "b.weight": normal(96, 80, seed=2), "c.weight": normal(3, 32, 40, seed=3)}
    finetuned = {
        "a.weight": moved(base["a.weight"]).t().contiguous().t(),
        "b.weight": wide[:, ::2],
        "c.weight": moved(base["c.weight"]).permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "d.weight": torch.ones(1, 6).expand(5, 6),
    }
    assert not any(tensor.is_contiguous() for tensor in finetuned.values())
    folder = tmp_path / "tuned"
    folder.mkdir()
    torch.save(finetuned, folder / "pytorch_model.bin")
    base_folder = write(tmp_path / "base", base)
    compress(base_folder, folder, tmp_path / "a.bd")
    apply(base_folder, tmp_path / "a.bd", tmp_path / "out")
    wanted = restored(base, {name: tensor.contiguous() for name, tensor in finetuned.items()})
    assert equal(load(tmp_path / "out"), wanted)
    assert validate(base_folder, folder, tmp_path / "a.bd").passed


def test_a_transposed_array_is_never_written_in_the_order_of_its_memory(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "out").mkdir()
    with CheckpointWriter(tmp_path / "out", [TensorSpec("a", "F32", (4, 3))], max_shard_bytes=1000) as writer:
        with pytest.raises(ValueError, match="contiguous"):
            writer.write("a", 0, values.T)
        writer.write("a", 0, np.ascontiguousarray(values.T))
    assert load(tmp_path / "out")["a"].tolist() == values.T.tolist()
    with (tmp_path / "x.bd").open("w+b") as file:
        bd = BdWriter(file.fileno(), tmp_path / "x.bd", 64)
        bd.begin("a", "F32", (4, 3))
        with pytest.raises(TypeError, match="contiguous"):
            bd.write("a", 0, memoryview(values.T))
        bd.write("a", 0, memoryview(np.ascontiguousarray(values.T)))
        back = memoryview(bytearray(48))
        bd.read_into("a", 0, back)
    assert np.frombuffer(back, np.float32).reshape(4, 3).tolist() == values.T.tolist()


# N8: overflow


def test_what_overflows_float16_is_clamped_counted_and_said(tmp_path: Path) -> None:
    base = {"a.weight": normal(64, 64, dtype=torch.float16)}
    base["a.weight"][::4, ::4] = 65504
    base["a.weight"][1::4, ::4] = -65504
    finetuned = {"a.weight": base["a.weight"].clone()}
    finetuned["a.weight"][:, 1::2] = 1000
    trip = Trip(tmp_path, base, finetuned)
    delta = finetuned["a.weight"].float() - base["a.weight"].float()
    exact = base["a.weight"].float() + delta.double().abs().mean(1, keepdim=True).float() * signs_of(delta)
    over = int((exact.abs() > 65504).sum())
    assert over > 0 and trip.applied.clamped == {"a.weight": over}
    assert same_bits(trip.out["a.weight"], exact.clamp(-65504, 65504).half())
    assert torch.isfinite(trip.out["a.weight"]).all()
    (note,) = [note for note in trip.applied.notes if "overflowed" in note]
    assert f"{over} weights" in note and "a.weight" in note and "--dtype float32" in note
    wide = apply(trip.places[0], trip.file, tmp_path / "wide", dtype="float32")
    assert wide.clamped == {}
    assert same_bits(load(tmp_path / "wide")["a.weight"], exact)


def test_a_wider_model_written_as_float16_is_clamped_in_every_kind_of_tensor(tmp_path: Path) -> None:
    base = {"a.weight": normal(64, 64), "norm.weight": normal(64, seed=1), "same.weight": normal(64, 64, seed=2)}
    for tensor in base.values():
        tensor.view(-1)[3] = -1e6
    finetuned = {name: moved(tensor) for name, tensor in base.items()}
    finetuned.update({"same.weight": base["same.weight"], "new.weight": normal(8, 8, seed=3) * 1e9})
    trip = Trip(tmp_path, base, finetuned, dtype="float16")
    wide = {**restored(base, finetuned), "a.weight": one_bit(base["a.weight"], finetuned["a.weight"], torch.float32)}
    wanted = {name: tensor.float().clamp(-65504, 65504).half() for name, tensor in wide.items()}
    assert equal(trip.out, wanted)
    assert trip.applied.clamped == {name: int((tensor.float().abs() > 65504).sum()) for name, tensor in wide.items()}
    assert sum(trip.applied.clamped.values()) > 3


# N9: equal values in other bits


def test_a_fine_tune_that_differs_in_the_sign_of_zeros_alone_is_the_same_and_says_why(tmp_path: Path) -> None:
    base = {"a.weight": normal(64, 64), "norm.weight": normal(64, seed=1)}
    for tensor in base.values():
        tensor.view(-1)[::3] = 0.0
    finetuned = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in finetuned.values():
        tensor.view(-1)[::6] = -0.0
    trip = Trip(tmp_path, base, finetuned)
    assert set(codecs(trip.file).values()) == {"same"}
    assert trip.tensor("a.weight").reason == "equals the base's in value (0.0 against -0.0)"
    assert equal(trip.out, base)
    assert trip.validation.error == 0


@pytest.mark.parametrize(
    ("of_base", "of_finetuned"), [("BF16", "F32"), ("F32", "BF16"), ("F16", "F64"), ("F64", "F16")]
)
def test_a_fine_tune_that_differs_in_its_dtype_alone_is_the_same_and_keeps_it(
    tmp_path: Path, of_base: str, of_finetuned: str
) -> None:
    narrow = min(of_base, of_finetuned, key=lambda name: DTYPES[name].itemsize)
    values = {"a.weight": normal(64, 64, dtype=DTYPES[narrow]), "norm.weight": normal(64, seed=1, dtype=DTYPES[narrow])}
    base = {name: tensor.to(DTYPES[of_base]) for name, tensor in values.items()}
    finetuned = {name: tensor.to(DTYPES[of_finetuned]) for name, tensor in values.items()}
    trip = Trip(tmp_path, base, finetuned)
    assert set(codecs(trip.file).values()) == {"same"}
    assert trip.tensor("a.weight").reason == f"equals the base's in value, as {of_finetuned} instead of {of_base}"
    assert tensor_entry(trip.file, "a.weight")["dtype"] == of_finetuned
    assert equal(trip.out, finetuned)


def test_whole_numbers_in_another_dtype_are_not_called_the_same(tmp_path: Path) -> None:
    base = {"a.weight": normal(64, 64), "ids": torch.arange(300)}
    finetuned = {"a.weight": base["a.weight"], "ids": torch.arange(300, dtype=torch.int32)}
    trip = Trip(tmp_path, base, finetuned)
    assert codecs(trip.file) == {"a.weight": "same", "ids": "dense"}
    assert equal(trip.out, finetuned)


# N10: changes of one size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", ["row", "matrix"])
def test_changes_of_one_size_are_restored_exactly_with_an_error_of_zero(tmp_path: Path, dtype: str, alpha: str) -> None:
    generator = torch.Generator().manual_seed(0)
    base = (torch.randint(-40, 40, (64, 96), generator=generator) / 64).to(DTYPES[dtype])
    step = torch.where(torch.rand(64, 96, generator=generator) < 0.5, 1 / 32, -1 / 32).to(DTYPES[dtype])
    trip = Trip(tmp_path, {"a.weight": base}, {"a.weight": base + step}, alpha=alpha)
    assert trip.tensor("a.weight").error == trip.report.error == 0.0
    check = trip.check("a.weight")
    assert check.error == check.error_rounded == check.worst == 0.0 and check.cosine == pytest.approx(1, abs=1e-12)
    assert same_bits(trip.out["a.weight"], base + step)
    assert diff(*trip.places).error == 0.0
    assert tensor_entry(trip.file, "a.weight")["stats"]["error"] == 0.0


def test_a_size_that_no_float_holds_exactly_is_never_nan(tmp_path: Path) -> None:
    base = torch.zeros(64, 1000)
    step = torch.where(torch.rand(64, 1000, generator=torch.Generator().manual_seed(1)) < 0.5, 0.1, -0.1) / 3
    trip = Trip(tmp_path, {"a.weight": base}, {"a.weight": step})
    assert trip.tensor("a.weight").error == 0.0 and trip.check("a.weight").error == 0.0
    assert same_bits(trip.out["a.weight"], step)


# N11: convolutions


@pytest.mark.parametrize(
    ("shape", "codec", "matrix"),
    [
        ((1280, 80, 3), "sign", [1, 1280, 240]),
        ((1152, 3, 14, 14), "sign", [1, 1152, 588]),
        ((64, 1, 4), "dense", [1, 64, 4]),
        ((32, 32, 1, 1), "sign", [1, 32, 32]),
        ((96, 31, 32), "sign", [1, 96, 992]),
        ((4, 32, 32), "sign", [4, 32, 32]),
    ],
)
def test_a_convolution_has_its_first_dimension_as_rows(
    tmp_path: Path, shape: tuple[int, ...], codec: str, matrix: list[int]
) -> None:
    base = {"conv.weight": normal(*shape)}
    finetuned = {"conv.weight": moved(base["conv.weight"])}
    trip = Trip(tmp_path, base, finetuned)
    assert codecs(trip.file) == {"conv.weight": codec}
    assert tensor_entry(trip.file, "conv.weight")["matrix"] == matrix
    assert equal(trip.out, restored(base, finetuned))
    if codec == "sign":
        assert len(trip.alphas("conv.weight")) == matrix[0] * matrix[1]
    else:
        assert trip.tensor("conv.weight").reason == "signs and scales would take more than half of its bytes"
