"""The kernels in plain torch: the meaning of the compiled ones, and the path for GPUs.

On a GPU each worker thread of the walk uses a stream of its own, so that one block's copy overlaps another's
arithmetic and a third one's reading.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from zendelta.codec.kernels.protocol import Array, Counts, Floats

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TorchKernels:
    """See `Kernels`. Sums are float64 in torch's own order, so an alpha may differ by a unit in the last place."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.block_bytes = 1 << 25 if self.device.type == "cuda" else 1 << 19
        self.maps = False  # copies to a GPU are fast from pinned buffers only
        self._local = threading.local()

    def buffer(self, nbytes: int) -> Array:
        """See `Kernels.buffer`."""
        memory: Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda").numpy()
        return memory

    def encode(
        self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int, first_row: int, bits: Array
    ) -> Floats:
        """See `Kernels.encode`."""
        with self._stream():
            exact = _difference(self._load(ft, ft_dtype, rows, cols), self._load(base, base_dtype, rows, cols))
            d = exact.float()
            row = torch.arange(first_row, first_row + rows, device=self.device)[:, None]
            even = (row + torch.arange(cols, device=self.device)) % 2 == 0
            packed = pack((d > 0) | ((d == 0) & even))
            wide = d.double()
            sums = torch.stack([wide.abs().sum(1), wide.square().sum(1), (exact == 0).sum(1).double()], 1)
            bits[: packed.numel()] = packed.reshape(-1).cpu().numpy()
            return _numpy(sums)

    def decode(
        self, base: Array, base_dtype: str, bits: Array, alpha: Array, rows: int, cols: int, out: Array, out_dtype: str
    ) -> Counts:
        """See `Kernels.decode`."""
        with self._stream():
            b = self._load(base, base_dtype, rows, cols)
            restored, clamped = self._restored(b, self._step(bits, alpha, rows, cols), out_dtype)
            self._store(restored, out)
            return Counts(clamped, int((restored.double() == b.double()).sum()))

    def residual(
        self,
        base: Array,
        base_dtype: str,
        ft: Array,
        ft_dtype: str,
        bits: Array,
        alpha: Array,
        rows: int,
        cols: int,
        out_dtype: str,
    ) -> Floats:
        """See `Kernels.residual`."""
        with self._stream():
            b, f = self._load(base, base_dtype, rows, cols), self._load(ft, ft_dtype, rows, cols)
            step = self._step(bits, alpha, rows, cols)
            d, plus = _delta(b, f).double(), self._signs(bits, rows, cols)
            restored = self._restored(b, step, out_dtype)[0]
            after = _difference(f, restored).double()
            sums = [
                torch.where(plus, d, -d).sum(1),
                after.abs().amax(1),
                (restored.double() == b.double()).sum(1).double(),
                after.square().sum(1),
            ]
            return _numpy(torch.stack(sums, 1))

    def moments(self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int) -> Floats:
        """See `Kernels.moments`."""
        with self._stream():
            b = self._load(base, base_dtype, rows, cols).double()
            f = self._load(ft, ft_dtype, rows, cols).double()
            return _numpy(torch.stack([(b * b).sum(1), (b * f).sum(1), (f * f).sum(1)], 1))

    def convert(self, values: Array, dtype: str, count: int, out: Array, out_dtype: str) -> Counts:
        """See `Kernels.convert`."""
        with self._stream():
            value = self._load(values, dtype, 1, count)
            wide = value if value.dtype == torch.float64 else value.float()
            rounded, clamped = _clamp(wide, wide, out_dtype)
            self._store(rounded, out)
            return Counts(clamped, int((rounded.double() == value.double()).sum()))

    def _stream(self) -> Any:
        if self.device.type != "cuda":
            return torch.no_grad()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._local.stream)

    def _load(self, data: Array, dtype: str, rows: int, cols: int) -> torch.Tensor:
        nbytes = rows * cols * _DTYPES[dtype].itemsize
        return self._to_device(data[:nbytes]).view(_DTYPES[dtype]).reshape(rows, cols)

    def _to_device(self, data: Array) -> torch.Tensor:
        host = torch.from_numpy(data)
        return host.to(self.device, non_blocking=True)

    def _store(self, values: torch.Tensor, out: Array) -> None:
        raw = values.reshape(-1).contiguous().view(torch.uint8)
        torch.from_numpy(out)[: raw.numel()].copy_(raw)

    def _signs(self, bits: Array, rows: int, cols: int) -> torch.Tensor:
        stride = (cols + 7) // 8
        return unpack(self._to_device(bits[: rows * stride]).reshape(rows, stride), cols)

    def _step(self, bits: Array, alpha: Array, rows: int, cols: int) -> torch.Tensor:
        scale = self._to_device(alpha[:rows])[:, None]
        return torch.where(self._signs(bits, rows, cols), scale, -scale)

    def _restored(self, b: torch.Tensor, step: torch.Tensor, out_dtype: str) -> tuple[torch.Tensor, int]:
        wide = torch.float64 if b.dtype == torch.float64 or out_dtype == "F64" else torch.float32
        return _clamp(b.to(wide) + step.to(wide), b, out_dtype)


def pack(signs: torch.Tensor) -> torch.Tensor:
    """Pack bool [rows, cols] into uint8 [rows, ceil(cols / 8)], lowest bit first."""
    rows, cols = signs.shape
    padded = torch.nn.functional.pad(signs, (0, -cols % 8)).reshape(rows, -1, 8)
    weights = 1 << torch.arange(8, device=signs.device)
    return (padded * weights).sum(2).to(torch.uint8)


def unpack(packed: torch.Tensor, cols: int) -> torch.Tensor:
    """Undo `pack`: uint8 [rows, ceil(cols / 8)] to bool [rows, cols]."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).bool().reshape(packed.shape[0], -1)[:, :cols]


def _delta(b: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return _difference(f, b).float()


def _difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return x.to(wide) - y.to(wide)


def _clamp(value: torch.Tensor, b: torch.Tensor, out_dtype: str) -> tuple[torch.Tensor, int]:
    """Round `value` once to `out_dtype`, clamped where it would overflow and `b` is finite."""
    dtype = _DTYPES[out_dtype]
    limit = min(torch.finfo(dtype).max, torch.finfo(value.dtype).max)
    over = (value.abs() > limit) & b.isfinite()
    value = torch.where(over, value.clamp(-limit, limit), value)
    if value.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        value = _to_odd(value)
    return value.to(dtype), int(over.sum())


def _to_odd(value: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 with an odd last bit where inexact: rounding that to 16 bits equals rounding once."""
    near = value.float()
    back = near.double()
    bits = near.view(torch.int32) - (back.abs() > value.abs()).int()
    inexact = (back != value) & ~value.isnan()
    return (bits | inexact.int()).view(torch.float32)


def _numpy(sums: torch.Tensor) -> Floats:
    return np.ascontiguousarray(sums.cpu().numpy(), np.float64)
