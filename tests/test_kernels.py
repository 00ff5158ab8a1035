"""The compiled kernels against plain torch, bit for bit where bits are the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zendelta.codec.kernels.cpu import CpuKernels
from zendelta.codec.kernels.reference import TorchKernels

CPU, TORCH = CpuKernels(), TorchKernels("cpu")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
dtypes = st.sampled_from(sorted(DTYPES))
columns = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 4096]))


def raw(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def pair(seed: int, rows: int, cols: int, base: str, ft: str, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A base and a fine-tune of it in which about a third of the entries did not change."""
    g = torch.Generator().manual_seed(seed)
    b = torch.randn(rows, cols, generator=g, dtype=torch.float64) * 0.02
    moved = torch.rand(rows, cols, generator=g) > 0.3
    b = b.to(DTYPES[base])
    f = b.double() + torch.randn(rows, cols, generator=g, dtype=torch.float64) * spread * moved
    return b, f.to(DTYPES[ft])


def spare(rows: int, cols: int) -> np.ndarray:
    return np.zeros(rows * ((cols + 7) // 8) + 1, np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    columns,
    dtypes,
    dtypes,
    st.sampled_from([1e-8, 1e-4, 1e-2, 10.0]),
    st.integers(0, 3),
)
def test_encode_gives_the_reference_s_bits_and_sums(seed, rows, cols, base, ft, spread, first_row):
    b, f = pair(seed, rows, cols, base, ft, spread)
    bits, expected_bits = spare(rows, cols), spare(rows, cols)
    sums = CPU.encode(raw(b), base, raw(f), ft, rows, cols, first_row, bits)
    expected = TORCH.encode(raw(b), base, raw(f), ft, rows, cols, first_row, expected_bits)
    assert np.array_equal(bits[:-1], expected_bits[:-1])
    np.testing.assert_allclose(sums, expected, rtol=1e-13)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), columns, dtypes, dtypes, st.sampled_from([1e-9, 1e-4, 1.0, 1e5]))
def test_decode_rounds_once_like_the_reference(seed, rows, cols, base, out, scale):
    b, _ = pair(seed, rows, cols, base, base, 0.0)
    g = np.random.default_rng(seed)
    bits = g.integers(0, 256, rows * ((cols + 7) // 8) + 1, dtype=np.uint8)
    alpha = (g.random(rows) * scale).astype(np.float32)
    size = rows * cols * DTYPES[out].itemsize
    got, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    clamped = CPU.decode(raw(b), base, bits, alpha, rows, cols, got, out)
    assert clamped == TORCH.decode(raw(b), base, bits, alpha, rows, cols, expected, out)
    assert np.array_equal(got, expected)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), columns, dtypes, dtypes, dtypes, st.sampled_from([1e-6, 1e-2]))
def test_residual_and_moments_agree_with_the_reference(seed, rows, cols, base, ft, out, spread):
    b, f = pair(seed, rows, cols, base, ft, spread)
    bits = spare(rows, cols)
    alpha = (CPU.encode(raw(b), base, raw(f), ft, rows, cols, 0, bits)[:, 0] / cols).astype(np.float32)
    call = (raw(b), base, raw(f), ft, bits, alpha, rows, cols, out)
    np.testing.assert_allclose(CPU.residual(*call), TORCH.residual(*call), rtol=1e-12, atol=1e-300)
    call = (raw(b), base, raw(f), ft, rows, cols)
    np.testing.assert_allclose(CPU.moments(*call), TORCH.moments(*call), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_convert_keeps_infinities_and_nan_and_clamps_what_overflows(dtype, out):
    values = torch.tensor(
        [0.0, -0.0, 1.5, -3e-6, 65504.0, torch.inf, -torch.inf, torch.nan] + [1e-3] * 12, dtype=torch.float64
    )
    values = torch.cat([values, torch.tensor([torch.finfo(DTYPES[dtype]).max], dtype=torch.float64)]).to(DTYPES[dtype])
    got, expected = (np.zeros(len(values) * DTYPES[out].itemsize, np.uint8) for _ in range(2))
    clamped = CPU.convert(raw(values), dtype, len(values), got, out)
    assert clamped == TORCH.convert(raw(values), dtype, len(values), expected, out)
    result = torch.from_numpy(got).view(DTYPES[out])
    torch.testing.assert_close(result, torch.from_numpy(expected).view(DTYPES[out]), equal_nan=True, rtol=0, atol=0)
    assert torch.isinf(result[5:7]).all() and torch.isnan(result[7]) and torch.isfinite(result[-1])


def test_a_double_is_rounded_once_and_not_twice_on_its_way_to_16_bits():
    # 1 + 2^-8 + 2^-30 is above the middle of two bfloat16 numbers; by way of float32 it would fall onto the middle
    value = torch.tensor([1 + 2**-8 + 2**-30, 1 + 2**-11 + 2**-35], dtype=torch.float64)
    for kernels in (CPU, TORCH):
        out = np.zeros(4, np.uint8)
        kernels.convert(raw(value), "F64", 2, out, "BF16")
        assert torch.from_numpy(out).view(torch.bfloat16).tolist()[0] == 1 + 2**-7
        kernels.convert(raw(value), "F64", 2, out, "F16")
        assert torch.from_numpy(out).view(torch.float16).tolist()[1] == 1 + 2**-10


@pytest.mark.parametrize("kernels", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_single_value_that_is_not_finite_shows_in_the_sums_of_its_row(kernels, bad):
    b, f = pair(0, 3, 40, "F32", "F32", 1e-3)
    f[1, 37] = bad
    sums = kernels.encode(raw(b), "F32", raw(f), "F32", 3, 40, 0, spare(3, 40))
    assert np.isfinite(sums[:, 0]).tolist() == [True, False, True]
