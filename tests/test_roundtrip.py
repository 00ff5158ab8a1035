"""Random models through every verb, against a reference in float64 that is written here, from the documents alone.

The reference knows `docs/format.md` and nothing of zendelta's code: which codec a tensor gets, its signs, alphas and
statistics, the restored values bit for bit, and what validate and diff measure.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, write_model
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from zendelta import BdFile, UsageError, apply, compress, diff, inspect, validate
from zendelta.codec.kernels.cpu import CpuKernels
from zendelta.codec.kernels.reference import TorchKernels

TORCH = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
    "BOOL": torch.bool,
}  # fmt: skip
LONG = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
NAMES = {dtype: name for name, dtype in TORCH.items()}
FLOATS = ("BF16", "F16", "F32", "F64")
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "BOOL": 1}
DIGITS = {"BF16": (8, -126), "F16": (11, -14), "F32": (24, -126)}  # bits of the significand, smallest exponent
LARGEST = {"BF16": 3.3895313892515355e38, "F16": 65504.0, "F32": 3.4028234663852886e38, "F64": sys.float_info.max}

Doubles = np.ndarray[Any, np.dtype[np.float64]]
Model = dict[str, torch.Tensor]


# --- the reference ------------------------------------------------------------------------------------------------


def doubles(tensor: torch.Tensor) -> Doubles:
    return tensor.double().numpy()


def rounded(values: Doubles, dtype: str) -> Doubles:
    """Doubles rounded once, to nearest even, to what `dtype` can hold, however large."""
    if dtype == "F64":
        return values
    digits, least = DIGITS[dtype]
    exponent = np.maximum(np.frexp(values)[1] - 1, least)
    step = np.ldexp(1.0, exponent - digits + 1)
    return np.rint(values / step) * step


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) == 3 and shape[1] >= 32 and shape[2] >= 32:
        return shape
    return (1, shape[0], math.prod(shape[1:])) if shape else (1, 1, 1)


def by_rows(values: Any) -> Any:
    """A tensor or an array as the rows of its matrices, one below the other."""
    stack, rows, cols = matrix_of(tuple(values.shape))
    return values.reshape(stack * rows, cols)


@dataclass
class Expected:
    """What a tensor must become. `delta` and `signs` are [rows, cols] of the rows that it shares with the base."""

    codec: str
    base: torch.Tensor | None
    delta: Doubles | None = None
    equal: int = 0
    signs: np.ndarray[Any, Any] | None = None

    @property
    def stats(self) -> bool:
        return self.delta is not None


def dtype_of(tensor: torch.Tensor) -> str:
    return NAMES[tensor.dtype]


def expected(ft: torch.Tensor, base: torch.Tensor | None, alpha: str, wanted: str | None) -> Expected:
    """Codec, delta and signs of a tensor, from the documents."""
    if base is None:
        return Expected("new", None)
    dtype, shape = dtype_of(ft), tuple(ft.shape)
    stack, rows, cols = matrix_of(shape)
    shared = min(stack * rows, math.prod(matrix_of(tuple(base.shape))[:2]))
    floating = {dtype, dtype_of(base)} <= set(FLOATS)
    delta, unchanged, signs = None, 0, None
    if floating:
        f, b = (by_rows(doubles(tensor))[:shared] for tensor in (ft, base))
        delta, unchanged = rounded(f - b, "F32"), int((f == b).sum())
        zero = (np.arange(shared)[:, None] + np.arange(cols)) % 2 == 0
        signs = (delta > 0) | ((delta == 0) & zero)
    scales = stack * rows if alpha == "row" else stack
    pays = 2 * (stack * rows * math.ceil(cols / 8) + 4 * scales) <= ft.numel() * BYTES[dtype]
    codec = "sign" if floating and ft.dim() >= 2 and ft.numel() >= 256 and pays else "dense"
    codec = wanted or codec if ft.numel() else "dense"
    fresh = stack * rows > shared
    codec = "+".join(([codec] if shared or not fresh else []) + (["new"] if fresh else []))
    equal = dtype == dtype_of(base) and raw(ft) == raw(base)
    if ft.shape == base.shape and (equal or (floating and np.array_equal(doubles(ft), doubles(base)))):
        codec = "same"
    return Expected(codec, base, delta, unchanged, signs)


def clamped(values: Doubles, dtype: str) -> Doubles:
    """Values rounded once to `dtype`; what overflows becomes its largest finite value."""
    over = np.abs(values) > LARGEST[dtype]
    return np.where(over, np.copysign(LARGEST[dtype], values), rounded(np.where(over, 0, values), dtype))


def restored(base: torch.Tensor, step: Doubles, dtype: str) -> Doubles:
    """Base plus alpha times sign: added in float32 (in float64 where a side is), rounded once, clamped."""
    total = doubles(base) + step
    return clamped(total if "F64" in (dtype_of(base), dtype) else rounded(total, "F32"), dtype)


def raw(tensor: torch.Tensor) -> bytes:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole).numpy().tobytes()


def to_torch(values: Doubles, dtype: str, shape: Any) -> torch.Tensor:
    """Doubles that `dtype` holds exactly."""
    return torch.from_numpy(np.array(values, np.float64)).reshape(shape).to(TORCH[dtype])


def converted(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return to_torch(clamped(doubles(tensor), dtype), dtype, tensor.shape)


def close(found: float | None, wanted: float | None, tolerance: float = 1e-9, floor: float = 0.0) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=floor)


def error_close(found: float | None, square: float, error_sum: float) -> bool:
    """A relative error against its two sums; of a small one, where large sums cancel, the squares are compared."""
    wanted = math.sqrt(max(0.0, error_sum / square)) if square > 0 else 0.0
    return found is not None and (close(found, wanted) or abs(found**2 - wanted**2) < 2e-12)


# --- the comparison -----------------------------------------------------------------------------------------------


def arrays_of(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert set(metadata) == {"zendelta"}
    header: dict[str, Any] = json.loads(metadata["zendelta"])
    return header


def bits_of(packed: torch.Tensor, cols: int) -> np.ndarray[Any, Any]:
    unpacked = np.unpackbits(packed.numpy(), axis=1, bitorder="little")
    assert not unpacked[:, cols:].any(), "unused bits of the last byte are 0"
    return unpacked[:, :cols].astype(bool)


def ulps(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> int:
    return int(np.abs(found.view(np.int32).astype(np.int64) - wanted.view(np.int32)).max(initial=0))


@dataclass
class Measured:
    """A tensor's sums, from its expectation and the alphas in the file; and its restored values in any dtype."""

    values: Callable[[str], torch.Tensor]
    square: float | None = None
    error_sum: float = 0.0
    after: float = 0.0
    worst: float = 0.0
    dot: float = 0.0
    gain: float = 0.0
    left: int = 0
    zeros: int = 0
    count: int = 0


def check_tensor(name: str, ft: torch.Tensor, want: Expected, entry: dict[str, Any], arrays: Any) -> Measured:
    """Compare one tensor's entry and arrays with the reference; return what validate must find."""
    shape, dtype = tuple(ft.shape), dtype_of(ft)
    stack, rows, cols = matrix_of(shape)
    terms = entry["terms"]
    assert "+".join(term["codec"] for term in terms) == ("" if want.codec == "same" else want.codec), name
    assert (entry["dtype"], entry["shape"], entry["matrix"]) == (dtype, list(shape), [stack, rows, cols])
    source = want.base if want.codec == "same" else ft
    assert source is not None
    measured = Measured(lambda out: source if dtype_of(source) == out else converted(source, out))
    step = np.zeros((stack * rows, cols))
    for term in terms:
        first, last = term["rows"]
        if term["codec"] != "sign":
            values = arrays[term["parts"]["values"]]
            assert values.dtype == ft.dtype
            assert raw(values) == raw(by_rows(ft)[first:last])
            continue
        assert want.delta is not None and want.signs is not None and want.base is not None
        signs = bits_of(arrays[term["parts"]["sign"]], cols)
        assert np.array_equal(signs, want.signs), name
        sizes = np.array([math.fsum(row) for row in np.abs(want.delta)])
        count = cols
        if term["scale"] == "matrix":
            height = rows if stack > 1 else last
            sizes = np.array([math.fsum(sizes[at : at + height]) for at in range(0, last, height)] if last else [])
            count = height * cols
        alphas = arrays[term["parts"]["alpha"]].numpy()
        with np.errstate(invalid="ignore"):
            assert ulps(alphas, np.nan_to_num(sizes / count).astype(np.float32)) <= 1, name
        per_row = alphas.astype(np.float64).repeat(1 if term["scale"] == "row" else height)[:last]
        step[:last] = np.where(signs, per_row[:, None], -per_row[:, None])
        base = by_rows(want.base)[:last]
        values = restored(base, step[:last], dtype)
        full = step[:last]

        def again(out: str, base: torch.Tensor = base, step: Doubles = full, last: int = last) -> torch.Tensor:
            shared, new = to_torch(restored(base, step, out), out, (last, cols)), by_rows(ft)[last:]
            return torch.cat([shared, new if dtype == out else converted(new, out)]).reshape(shape)

        d, s = want.delta, np.where(signs, 1.0, -1.0)
        f = by_rows(doubles(ft))[:last]
        after = f - values if dtype == "F64" else rounded(f - values, "F32")
        square = math.fsum((d * d).ravel())
        dot = math.fsum((d * s * per_row[:, None]).ravel())
        gain = math.fsum(cols * per_row**2)
        measured = Measured(
            again, square, square - 2 * dot + gain, math.fsum((after * after).ravel()),
            float(np.abs(after).max(initial=0)), dot, gain, int((values == doubles(base)).sum()),
        )  # fmt: skip
    if not want.stats:
        assert entry["stats"] == {}
        return measured
    assert want.delta is not None
    measured.count, measured.zeros = want.delta.size, want.equal
    stats = entry["stats"]
    assert close(stats["abs_sum"], math.fsum(np.abs(want.delta).ravel()))
    assert close(stats["square_sum"], math.fsum((want.delta**2).ravel()))
    assert stats["zeros"] == measured.zeros
    assert error_close(stats["error"], stats["square_sum"], measured.error_sum)
    measured.square = stats["square_sum"]
    return measured


def overall(pairs: list[tuple[float, float]]) -> float | None:
    total = sum(square for _, square in pairs)
    return None if not pairs else math.sqrt(sum(e * e * s for e, s in pairs) / total) if total else 0.0


@dataclass
class Case:
    """A drawn pair, and how it is to be compressed."""

    base: Model
    ft: Model
    alpha: str
    keep: dict[str, str]

    def source(self, name: str) -> torch.Tensor | None:
        return self.base.get(name)

    @property
    def rules(self) -> list[str]:
        return [f"{name}={codec}" for name, codec in self.keep.items()]


def check_file(case: Case, folder: Path) -> dict[str, Measured]:
    """Compare ``a.bd`` with the reference, tensor by tensor."""
    header, arrays = header_of(folder / "a.bd"), arrays_of(folder / "a.bd")
    wanted = {
        name: expected(ft, case.source(name), case.alpha, case.keep.get(name)) for name, ft in sorted(case.ft.items())
    }
    seen: dict[tuple[str | None, str, tuple[int, ...], bytes], str] = {}
    aliases, measured = {}, {}
    for name, want in wanted.items():
        ft = case.ft[name]
        key = (name if want.base is not None else None, dtype_of(ft), tuple(ft.shape), raw(ft))
        if seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
            continue
        measured[name] = check_tensor(name, ft, want, header["tensors"][name], arrays)
    assert header["aliases"] == aliases
    assert header["tensors"].keys() == measured.keys()
    assert header["dropped"] == sorted(case.base.keys() - case.ft.keys())
    assert header["options"] == {"alpha": case.alpha, "keep": case.rules}
    shown = inspect(folder / "a.bd")
    assert shown.bytes == (folder / "a.bd").stat().st_size
    assert shown.finetuned_bytes == sum(ft.numel() * ft.element_size() for ft in case.ft.values())
    for tensor in shown.tensors:
        assert tensor.codec == wanted[tensor.name].codec
        found = measured[tensor.name]
        if found.count:
            assert close(tensor.zeros, found.zeros / found.count), tensor.name
    pairs = [(tensor.error, tensor.square_sum) for tensor in shown.tensors if tensor.error is not None]
    assert close(shown.error, overall(pairs))
    return measured


def check_validation(case: Case, folder: Path, measured: dict[str, Measured], tolerance: float = 1e-9) -> None:
    report = validate(folder / "base", folder / "ft", folder / "a.bd", threads=2)
    assert report.faults == []
    assert report.passed
    assert [tensor.name for tensor in report.tensors] == sorted(measured)
    for tensor in report.tensors:
        found = measured[tensor.name]
        if found.count:
            assert close(tensor.zeros, found.zeros / found.count)
        if tensor.signs is None:
            assert tensor.error == (0.0 if found.square is not None else None), tensor.name
            continue
        assert found.square is not None
        assert tensor.signs == 1.0
        assert tensor.alpha_ulps is not None and tensor.alpha_ulps <= 1
        assert error_close(tensor.error, found.square, found.error_sum), tensor.name
        assert error_close(tensor.error_rounded, found.square, found.after), tensor.name
        assert close(tensor.worst, found.worst), tensor.name
        assert close(tensor.unmoved, found.left / max(found.count, 1))
        if found.square > 0:
            assert close(tensor.cosine, found.dot / math.sqrt(found.square) / math.sqrt(found.gain), 1e-8)
    assert close(report.error, overall([(t.error, t.square_sum) for t in report.tensors if t.error is not None]))


def check_diff(case: Case, folder: Path) -> None:
    report = diff(folder / "base", folder / "ft", threads=2)
    squares = base_squares = zeros = weights = cosines = angled = 0.0
    for tensor in report.tensors:
        ft = case.ft[tensor.name]
        want = expected(ft, case.source(tensor.name), "row", None)
        if want.delta is None or want.base is None or not want.delta.size:
            assert (tensor.change, tensor.cosine, tensor.zeros, tensor.error) == (None,) * 4
            continue
        shared = len(want.delta)
        b, f = (by_rows(doubles(t))[:shared] for t in (want.base, ft))
        square, bb, ff = (math.fsum((x * x).ravel()) for x in (want.delta, b, f))
        assert close(tensor.change, math.sqrt(square / bb) if bb else 0.0 if not square else None)
        cosine = math.fsum((b * f).ravel()) / math.sqrt(bb) / math.sqrt(ff) if bb and ff else None
        assert close(tensor.cosine, cosine, 1e-8, 1e-12)
        assert close(tensor.zeros, want.equal / want.delta.size)
        if tensor.change is not None:
            squares, base_squares, weights = squares + square, base_squares + bb, weights + want.delta.size
            zeros += want.equal
            if cosine is not None:
                cosines, angled = cosines + cosine * want.delta.size, angled + want.delta.size
    change = None if not weights or (squares and not base_squares) else math.sqrt(squares / (base_squares or 1))
    assert close(report.change, change)
    if change is None or change == 0:
        verdict = "nothing changed"
    elif change > 1 or (angled and cosines / angled < 0.5):
        verdict = "unrelated"
    else:
        verdict = "tiny change" if zeros / weights > 0.5 else "ordinary"
    if change is None or abs(change - 1) > 1e-9:
        assert report.verdict == verdict


def check_restored(case: Case, folder: Path, measured: dict[str, Measured], dtype: str | None = None) -> None:
    got = arrays_of(folder / "out/model.safetensors")
    assert got.keys() == case.ft.keys()
    aliases = header_of(folder / "a.bd")["aliases"]
    for name, tensor in got.items():
        own = dtype_of(case.ft[name])
        want = measured[aliases.get(name, name)].values(dtype if dtype and own in FLOATS else own)
        assert tensor.dtype == want.dtype
        assert tensor.shape == case.ft[name].shape
        assert raw(tensor) == raw(want), name


# --- drawing models -----------------------------------------------------------------------------------------------

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 300)),
    st.sampled_from([(0,), (0, 5), (3, 0), (0, 32, 32), (2, 0, 4), (1, 1), (1, 7), (7, 1), (1, 4096)]),
    st.tuples(st.integers(1, 40), st.integers(1, 200)),
    st.tuples(st.integers(4, 24), st.sampled_from([64, 67, 72, 256])),
    st.tuples(st.integers(1, 3), st.integers(30, 34), st.integers(31, 48)),
    st.sampled_from([(40, 8, 3), (12, 3, 5, 5), (64, 1, 4), (16, 33, 3), (2, 2, 40, 40), (5, 2, 2, 2, 3)]),
)
WIDE = st.sampled_from([(1, 65536), (2, 65537), (3, 65536 + 8), (1, 131073)])
SIZES = [0.0, 1e-90, 1e-50, 1e-8, 1e-3, 0.02, 1.0, 3e4, 1e30]


def values(draw: np.random.Generator, shape: tuple[int, ...], size: float, zeros: float) -> Doubles:
    found = draw.standard_normal(shape) * size
    if zeros:
        found = np.where(draw.random(shape) < zeros, draw.choice([0.0, -0.0], shape), found)
    return np.asarray(found, np.float64)


def cast(numbers: Doubles, dtype: str, draw: np.random.Generator) -> torch.Tensor:
    if dtype in ("I64", "BOOL"):
        whole = draw.integers(0, 2 if dtype == "BOOL" else 1 << 62, numbers.shape)
        return torch.from_numpy(np.asarray(whole)).to(TORCH[dtype])
    limit = LARGEST[dtype] if dtype == "F16" else 1e30
    return torch.from_numpy(np.asarray(np.clip(numbers, -limit, limit))).to(TORCH[dtype])


def drawn_tensor(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the base and one of the fine-tune."""
    shape = draw(shapes)
    base_dtype = draw(st.sampled_from([*FLOATS, *FLOATS, "I64", "BOOL"]))
    ft_dtype = draw(st.one_of(st.just(base_dtype), st.sampled_from([*FLOATS, "I64"])))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, change = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    zeros = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    grown = draw(st.sampled_from([0, 0, 0, 1, 3, -1])) if shape and math.prod(shape) < 1e5 else 0
    base_shape = (max(0, shape[0] - grown), *shape[1:]) if grown else shape
    base = values(chance, base_shape, size, draw(st.sampled_from([0.0, 0.3])))
    delta = values(chance, shape, change, zeros)
    how = draw(st.sampled_from(["normal", "normal", "rows", "constant", "none"]))
    if how == "rows" and len(shape) > 1:  # rows of very unequal change
        delta *= 10.0 ** chance.integers(-8, 1, (shape[0], *[1] * (len(shape) - 1)))
    elif how == "constant":
        delta = np.copysign(change, delta)
    elif how == "none":
        delta = np.zeros(shape)
    b = cast(base, base_dtype, chance)
    start = values(chance, shape, size, 0.0)
    if base_dtype in FLOATS:
        shared = min(len(base), len(start)) if shape else None
        if shape:
            start[:shared] = doubles(b)[:shared]
        else:
            start = doubles(b)
    ft = cast(start + delta, ft_dtype, chance)
    if ft_dtype == base_dtype and how == "none" and ft.shape == b.shape and draw(st.booleans()):
        ft = b.clone()
    return b, ft


@st.composite
def cases(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES, most: int = 6) -> Case:
    base: Model = {}
    ft: Model = {}
    for index in range(draw(st.integers(1, most))):
        name = draw(st.sampled_from([f"t{index}.weight", f"model.layers.{index}.x{index}.weight", f"é ü:{index}.b"]))
        b, f = drawn_tensor(draw, shapes)
        where = draw(st.sampled_from(["both", "both", "both", "base", "ft"])) if index else "both"
        if where != "ft":
            base[name] = b
        if where != "base":
            ft[name] = f
        if where != "base" and draw(st.integers(0, 5)) == 0:
            ft[f"twin{index}.weight"] = f.clone()
    alpha = draw(st.sampled_from(["row", "row", "matrix"]))
    keep = {}
    for name in draw(st.lists(st.sampled_from(sorted(ft)), max_size=2, unique=True)):
        comparable = name in base and {dtype_of(base[name]), dtype_of(ft[name])} <= set(FLOATS)
        keep[name] = draw(st.sampled_from(["dense", "sign"])) if comparable else "dense"
    return Case(base, ft, alpha, keep)


@contextmanager
def folder() -> Iterator[Path]:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


def write_case(case: Case, where: Path) -> None:
    write_model(where / "base", case.base, config={"model_type": "x"})
    write_model(where / "ft", case.ft, config={"model_type": "x"}, files={"README.md": "of the fine-tune"})


@contextmanager
def blocks(nbytes: int) -> Iterator[None]:
    with mock.patch.object(CpuKernels, "block_bytes", nbytes):
        yield


@contextmanager
def plain_torch() -> Iterator[None]:
    """Every verb with the kernels in plain torch: those of GPUs, and of systems without llvmlite."""
    with ExitStack() as stack:
        for verb in ("compress", "apply", "validate", "diff"):
            target = f"zendelta.pipeline.{verb}.kernels_for"
            stack.enter_context(mock.patch(target, lambda device: (TorchKernels("cpu"), "cpu")))
        yield


quick = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(autouse=True, scope="module")
def no_flush() -> Iterator[None]:
    """Nothing here is about a power cut."""
    with mock.patch("os.fsync"):
        yield


def run_all(case: Case, where: Path, out: str) -> None:
    write_case(case, where)
    compress(where / "base", where / "ft", where / "a.bd", alpha=case.alpha, keep=case.rules, threads=2)
    measured = check_file(case, where)
    check_validation(case, where, measured)
    check_diff(case, where)
    apply(where / "base", where / "a.bd", where / "out", threads=2)
    check_restored(case, where, measured)
    apply(where / "base", where / "a.bd", where / "out", threads=2, dtype=LONG[out], force=True)
    check_restored(case, where, measured, out)
    assert (where / "out/README.md").read_text() == "of the fine-tune"
    assert (where / "out/config.json").read_bytes() == (where / "base/config.json").read_bytes()
    for codec in {tensor.codec for tensor in inspect(where / "a.bd").tensors}:
        event(codec)


@pytest.mark.slow
@quick
@given(cases(), st.sampled_from(FLOATS))
def test_a_random_model_goes_through_every_verb_as_the_documents_say(case: Case, out: str) -> None:
    with folder() as where:
        run_all(case, where, out)


@settings(quick, max_examples=12)
@given(cases(WIDE, most=2), st.sampled_from(FLOATS))
def test_rows_wider_than_a_segment_go_through_every_verb_as_the_documents_say(case: Case, out: str) -> None:
    with folder() as where:
        run_all(case, where, out)


@pytest.mark.slow
@settings(quick, max_examples=40)
@given(cases(), st.permutations([(1, 1 << 20), (2, 64), (1, 1000), (2, 1 << 20)]))
def test_threads_and_block_sizes_change_no_byte(case: Case, ways: list[tuple[int, int]]) -> None:
    with folder() as where:
        write_case(case, where)
        files, models, checks, diffs = set(), set(), set(), set()
        for threads, nbytes in ways:
            with blocks(nbytes):
                arguments: Any = {"alpha": case.alpha, "keep": case.rules, "threads": threads, "force": True}
                compress(where / "base", where / "ft", where / "a.bd", **arguments)
                apply(where / "base", where / "a.bd", where / "out", threads=threads, force=True)
                report = validate(where / "base", where / "ft", where / "a.bd", threads=threads)
                found = diff(where / "base", where / "ft", threads=threads)
            files.add((where / "a.bd").read_bytes())
            models.add((where / "out/model.safetensors").read_bytes())
            checks.add(json.dumps(report.to_json()))
            diffs.add(json.dumps(found.to_json()))
        assert [len(found) for found in (files, models, checks, diffs)] == [1, 1, 1, 1]


@pytest.mark.parametrize("shape", [(2, 65537), (1, 131072), (3, 70000)])
def test_threads_and_block_sizes_change_no_byte_of_wide_rows(shape: tuple[int, ...], tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(1)
    base = {"w": torch.randn(shape, generator=chance).bfloat16(), "v": torch.randn(70000, generator=chance)}
    ft = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=chance) for name, tensor in base.items()}
    case = Case(base, ft, "row", {})
    write_case(case, tmp_path)
    found = set()
    for threads, nbytes in [(1, 1 << 20), (2, 64), (2, 1000), (2, 1 << 22)]:
        with blocks(nbytes):
            compress(tmp_path / "base", tmp_path / "ft", tmp_path / "a.bd", threads=threads, force=True)
        found.add((tmp_path / "a.bd").read_bytes())
    assert len(found) == 1


def alphas_differ(one: Path, other: Path) -> int:
    """Compare two files of one pair: all arrays but alphas equal; return the largest difference of an alpha in ulps."""
    a, b = arrays_of(one), arrays_of(other)
    assert a.keys() == b.keys()
    alphas = [name for name in a if name.endswith(":alpha")]
    assert all(raw(a[name]) == raw(b[name]) for name in a if name not in alphas)
    return max((ulps(a[name].numpy(), b[name].numpy()) for name in alphas), default=0)


def compare_headers(one: Path, other: Path) -> None:
    """Two headers of one pair: everything equal but the payloads' names and statistics, and these within 1e-9."""
    a, b = (header_of(path) for path in (one, other))
    for name, entry in a["tensors"].items():
        stats, others = entry.pop("stats"), b["tensors"][name].pop("stats")
        assert stats.keys() == others.keys()
        assert stats.get("zeros") == others.get("zeros")
        for key in stats.keys() - {"error"}:
            assert close(stats[key], others[key]), (name, key)
        if stats:
            assert close(stats["error"], others["error"]) or abs(stats["error"] ** 2 - others["error"] ** 2) < 2e-12
        entry.pop("payload"), b["tensors"][name].pop("payload")
    a.pop("check"), b.pop("check")
    assert a == b


@pytest.mark.slow
@settings(quick, max_examples=40)
@given(cases(), st.sampled_from([64, 1000, 1 << 19]))
def test_plain_torch_makes_the_same_file_and_each_validates_the_other(case: Case, nbytes: int) -> None:
    with folder() as where:
        write_case(case, where)
        arguments: Any = {"alpha": case.alpha, "keep": case.rules, "threads": 2}
        compress(where / "base", where / "ft", where / "cpu.bd", **arguments)
        with plain_torch():
            compress(where / "base", where / "ft", where / "a.bd", **arguments)
        assert alphas_differ(where / "cpu.bd", where / "a.bd") <= 1
        compare_headers(where / "cpu.bd", where / "a.bd")
        measured = check_file(case, where)
        check_validation(case, where, measured)  # the CPU's kernels on torch's file
        with plain_torch():
            check_validation(case, where, measured)
            check_diff(case, where)
            apply(where / "base", where / "a.bd", where / "out")
            report = validate(where / "base", where / "ft", where / "cpu.bd")
        assert report.passed, report.faults
        check_restored(case, where, measured)


WITHOUT = """
import sys
sys.modules["llvmlite"] = None
from pathlib import Path
from zendelta import apply, compress, diff, inspect, validate
where = Path(sys.argv[1])
compress(where / "base", where / "ft", where / "a.bd")
assert inspect(where / "a.bd").tensors
assert validate(where / "base", where / "ft", where / "a.bd").passed
assert validate(where / "base", where / "ft", where / "cpu.bd").passed
assert diff(where / "base", where / "ft").tensors
apply(where / "base", where / "cpu.bd", where / "out")
assert "zendelta.codec.kernels.cpu" not in sys.modules
"""


def test_every_verb_works_without_llvmlite(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(3)
    base = {"w": torch.randn(40, 200, generator=chance), "v": torch.randn(30, generator=chance)}
    ft = {name: (tensor + 1e-3 * torch.randn(tensor.shape, generator=chance)).half() for name, tensor in base.items()}
    write_case(Case(base, ft, "row", {}), tmp_path)
    compress(tmp_path / "base", tmp_path / "ft", tmp_path / "cpu.bd")
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert alphas_differ(tmp_path / "cpu.bd", tmp_path / "a.bd") <= 1
    apply(tmp_path / "base", tmp_path / "cpu.bd", tmp_path / "out2")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "out2/model.safetensors").read_bytes()


def test_signs_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    model = {"w": torch.ones(4, 200), "n": torch.ones(4, 200, dtype=torch.int64)}
    write_case(Case(model, {name: tensor + 1 for name, tensor in model.items()}, "row", {}), tmp_path)
    with pytest.raises(UsageError, match="signs of n"):
        compress(tmp_path / "base", tmp_path / "ft", tmp_path / "a.bd", keep=["n=sign"])


def test_tensors_without_entries_have_no_signs_even_where_they_are_asked_for(tmp_path: Path) -> None:
    base = {"a": torch.ones(3, 0), "b": torch.ones(0, 64, 64), "w": torch.zeros(2, 300)}
    ft = {**base, "c": torch.ones(4, 0), "w": torch.ones(2, 300)}
    case = Case(base, {**ft, "a": torch.ones(5, 0)}, "matrix", {"a": "sign", "b": "sign", "c": "sign"})
    write_case(case, tmp_path)
    compress(tmp_path / "base", tmp_path / "ft", tmp_path / "a.bd", alpha="matrix", keep=case.rules)
    check_validation(case, tmp_path, check_file(case, tmp_path))


def test_a_change_too_small_for_float32_is_still_a_change(tmp_path: Path) -> None:
    base = {"v": torch.zeros(3, dtype=torch.float64), "w": torch.zeros(16, 64, dtype=torch.float64)}
    ft = {name: tensor + 1e-60 for name, tensor in base.items()}
    write_case(Case(base, ft, "row", {}), tmp_path)
    report = compress(tmp_path / "base", tmp_path / "ft", tmp_path / "a.bd")
    assert [(tensor.codec, tensor.zeros) for tensor in report.tensors] == [("dense", 0.0), ("sign", 0.0)]
    apply(tmp_path / "base", tmp_path / "a.bd", tmp_path / "out")
    assert arrays_of(tmp_path / "out/model.safetensors")["v"].tolist() == [1e-60] * 3


@pytest.mark.parametrize("size", [1e-90, 1e-170, 1e90, 1e160])
def test_double_weights_of_any_size_have_a_cosine_that_is_a_number(size: float, tmp_path: Path) -> None:
    base = {"w": torch.full((16, 64), size, dtype=torch.float64)}
    write_case(Case(base, base, "row", {}), tmp_path)
    report = diff(tmp_path / "base", tmp_path / "ft")
    assert report.verdict == "nothing changed"
    assert report.cosine is None or close(report.cosine, 1.0)


def test_a_file_is_one_safetensors_file_that_the_reference_reader_opens(tmp_path: Path) -> None:
    base = {"w": torch.zeros(16, 64)}
    write_case(Case(base, {"w": torch.ones(16, 64)}, "row", {}), tmp_path)
    compress(tmp_path / "base", tmp_path / "ft", tmp_path / "a.bd")
    assert arrays_of(tmp_path / "a.bd").keys() == BdFile.open(tmp_path / "a.bd").arrays.keys()
