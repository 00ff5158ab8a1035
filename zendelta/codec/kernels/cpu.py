"""The CPU kernels: one pass over a block of rows each, written as LLVM vector code and compiled at first use.

Why not numba: the loops below need bit masks of comparisons (`<16 x i1>` as 16 bits) and a fixed order of summation,
neither of which its vectoriser finds; and importing it takes longer than compressing a gigabyte. llvmlite, the part
of numba that talks to LLVM, starts in a tenth of a second and compiles a kernel in about 15 ms, so nothing is cached.

Every kernel walks rows, and each row in groups of 16 columns. Column c belongs to lane c mod 16; a lane adds up in
float64 in the order of its columns, and a row's sum is the sum of its lanes in order. That definition, not the
compiler or the vector width, fixes every result, so they are the same on any CPU. The last group of a row is copied
into a zeroed scratch vector when it is not whole; `%valid` has a bit for every column that exists.

The meaning of each kernel is written in plain torch in `reference.py`, and tests compare the two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from zendelta.codec.kernels.llvm_text import Kernel, Value
from zendelta.codec.kernels.protocol import DECODE, ENCODE, MOMENTS, RESIDUAL, Array, Counts, Floats


class CpuKernels:
    """The kernels over numpy arrays. Stateless, and free of the GIL while they run."""

    block_bytes = 1 << 20  # two such blocks and their signs stay in the caches near a core
    maps = True

    def buffer(self, nbytes: int) -> Array:
        """See `Kernels.buffer`."""
        return np.empty(nbytes, np.uint8)

    def encode(
        self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int, first_row: int, bits: Array
    ) -> Floats:
        """See `Kernels.encode`."""
        sums = np.empty((rows, ENCODE), np.float64)
        _encode(base_dtype, ft_dtype)(_at(base), _at(ft), rows, cols, first_row, _at(bits), _at(sums))
        return sums

    def decode(
        self, base: Array, base_dtype: str, bits: Array, alpha: Array, rows: int, cols: int, out: Array, out_dtype: str
    ) -> Counts:
        """See `Kernels.decode`."""
        sums = np.empty((rows, DECODE), np.float64)
        _decode(base_dtype, out_dtype)(_at(base), _at(bits), _at(alpha), rows, cols, _at(out), _at(sums))
        return Counts(*map(int, sums.sum(0)))

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
        sums = np.empty((rows, RESIDUAL), np.float64)
        kernel = _residual(base_dtype, ft_dtype, out_dtype)
        kernel(_at(base), _at(ft), _at(bits), _at(alpha), rows, cols, _at(sums))
        return sums

    def moments(self, base: Array, base_dtype: str, ft: Array, ft_dtype: str, rows: int, cols: int) -> Floats:
        """See `Kernels.moments`."""
        sums = np.empty((rows, MOMENTS), np.float64)
        _moments(base_dtype, ft_dtype)(_at(base), _at(ft), rows, cols, _at(sums))
        return sums

    def convert(self, values: Array, dtype: str, count: int, out: Array, out_dtype: str) -> Counts:
        """See `Kernels.convert`."""
        sums = np.empty((1, DECODE), np.float64)
        _convert(dtype, out_dtype)(_at(values), 1, count, _at(out), _at(sums))
        return Counts(*map(int, sums[0]))


def _at(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]  # half the time of array.ctypes.data
    return address


# --- the five kernels -------------------------------------------------------------------------------------------


@cache
def _encode(base: str, ft: str) -> Any:
    k = Kernel("encode", "ptr %base, ptr %ft, i64 %rows, i64 %cols, i64 %first, ptr %bits, ptr %sums")
    b, f = k.load("base", base), k.load("ft", ft)
    d = k.delta(b, f)
    k.row += [
        "%absolute = add i64 %r, %first",
        "%odd = trunc i64 %absolute to i1",
        "%zero.is.plus = select i1 %odd, i16 -21846, i16 21845",  # columns 1, 3, 5... or 0, 2, 4... of the group
    ]
    size = k.call("fabs", d.kind, d.reg)
    size64 = k.widened(Value(size, "float"))
    k.accumulate("s1", size64)
    k.accumulate("s2", k.op("fmul contract <16 x double>", size64, size64))  # exact, so it may fuse with the addition
    zero = k.mask(f"fcmp oeq <16 x float> {d.reg}, zeroinitializer")
    plus = k.mask(f"fcmp ogt <16 x float> {d.reg}, zeroinitializer")
    exact = k.difference(f, b)  # of F64 the delta may be too small for float32: no sign then, and yet a change
    k.count("zeros", k.mask(f"fcmp oeq <16 x {exact.kind}> {exact.reg}, zeroinitializer"))
    even = k.op("and i16", zero, "%zero.is.plus")
    signs = k.op("or i16", plus, even)
    k.store_bits(k.op("and i16", signs, "%valid"))
    return k.compile(sums=["s1", "s2", "zeros"])


@cache
def _decode(base: str, out: str) -> Any:
    k = Kernel("decode", "ptr %base, ptr %bits, ptr %alpha, i64 %rows, i64 %cols, ptr %out, ptr %sums")
    b = k.load("base", base)
    restored = k.restored(b, wide="F64" in (base, out))
    k.count("left", k.equal(k.store("out", out, k.clamped(restored, b, out, count=True)), b))
    return k.compile(sums=["clamped", "left"])


@cache
def _convert(dtype: str, out: str) -> Any:
    k = Kernel("convert", "ptr %values, i64 %rows, i64 %cols, ptr %out, ptr %sums")
    value = k.load("values", dtype)
    k.count("left", k.equal(k.store("out", out, k.clamped(value, value, out, count=True)), value))
    return k.compile(sums=["clamped", "left"])


@cache
def _residual(base: str, ft: str, out: str) -> Any:
    k = Kernel("residual", "ptr %base, ptr %ft, ptr %bits, ptr %alpha, i64 %rows, i64 %cols, ptr %sums")
    b, f = k.load("base", base), k.load("ft", ft)
    d = k.delta(b, f)
    restored = k.restored(b, wide="F64" in (base, out))
    minus = k.op(f"fneg <16 x float> {d.reg}")
    signed = k.op(f"select <16 x i1> %plus, <16 x float> {d.reg}, <16 x float> {minus}")
    k.accumulate("ds", k.widened(Value(signed, "float")))
    _, rounded = k.narrow(k.clamped(restored, b, out), out)
    off = k.existing(k.difference(f, rounded))
    wide = k.widened(off)
    k.accumulate("after2", k.op("fmul <16 x double>", wide, wide))
    k.largest("worst", k.call("fabs", "double", wide))
    k.count("left", k.equal(rounded, b))
    return k.compile(sums=["ds", "worst", "left", "after2"])


@cache
def _moments(base: str, ft: str) -> Any:
    k = Kernel("moments", "ptr %base, ptr %ft, i64 %rows, i64 %cols, ptr %sums")
    b, f = k.widened(k.load("base", base)), k.widened(k.load("ft", ft))
    for name, x, y in (("bb", b, b), ("bf", b, f), ("ff", f, f)):
        k.accumulate(name, k.op("fmul <16 x double>", x, y))
    return k.compile(sums=["bb", "bf", "ff"])
