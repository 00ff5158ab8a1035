"""LLVM's text for one kernel: two loops, over rows and over groups of 16 columns, around the instructions of a group.

A small writer rather than a compiler: each method appends the instructions of one step to the group's body and returns
the register that holds its result. `Kernel.compile` closes the loops and hands the text to llvmlite.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding as llvm

_LANES = 16
_WORD = {"F64": "i64", "F32": "i32", "F16": "i16", "BF16": "i16"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX = {
    "F64": 1.7976931348623157e308,
    "F32": 3.4028234663852886e38,
    "F16": 65504.0,
    "BF16": 3.3895313892515355e38,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A vector register of 16 floats or doubles."""

    reg: str
    kind: str


def _splat(kind: str, number: float | int) -> str:
    if kind.startswith("i"):
        one = f"{kind} {number}"
    else:  # LLVM writes floats by the bits of the double
        one = f"{kind} 0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    return f"<{', '.join([one] * _LANES)}>"


@dataclass
class Kernel:
    """The text of one kernel: what a group of 16 columns does, inside the loops over groups and rows."""

    name: str
    arguments: str
    row: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    spill: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    pointers: list[str] = field(default_factory=list)
    sums: dict[str, str] = field(default_factory=dict)  # accumulator -> its LLVM type
    used: int = 0

    def op(self, operation: str, *operands: str) -> str:
        """Append one instruction and return its register."""
        self.used += 1
        self.body.append(f"%v{self.used} = {operation} {', '.join(operands)}".rstrip())
        return f"%v{self.used}"

    def call(self, function: str, kind: str, *operands: str) -> str:
        vector = f"<16 x {kind}>"
        suffix = "f32" if kind == "float" else "f64"
        arguments = ", ".join(f"{vector} {operand}" for operand in operands)
        return self.op(f"call {vector} @llvm.{function}.v16{suffix}({arguments})")

    def mask(self, comparison: str) -> str:
        """Compare 16 lanes and return the result as the bits of an i16."""
        return self.op(f"bitcast <16 x i1> {self.op(comparison)} to i16")

    def pointer(self, name: str, dtype: str, *, read: bool) -> str:
        """Point at the group in array `name`, or at its scratch vector in an incomplete group."""
        word, size = _WORD[dtype], _BYTES[dtype]
        self.entry.append(f"%{name}.tail = alloca <16 x {word}>, align 64")
        self.direct.append(f"%{name}.direct = getelementptr {word}, ptr %{name}, i64 %at")
        if read:
            self.tail += [
                f"store <16 x {word}> zeroinitializer, ptr %{name}.tail, align 64",
                f"%{name}.bytes = mul i64 %left, {size}",
                f"call void @llvm.memcpy.p0.p0.i64(ptr %{name}.tail, ptr %{name}.direct, i64 %{name}.bytes, i1 false)",
            ]
        self.pointers.append(f"%{name}.ptr = phi ptr [%{name}.direct, %group], [%{name}.tail, %tail]")
        return f"%{name}.ptr"

    def load(self, name: str, dtype: str) -> Value:
        """Load the group of array `name` and widen it, exactly, to float (F64: to double)."""
        word = _WORD[dtype]
        pointer = self.pointer(name, dtype, read=True)
        raw = self.op(f"load <16 x {word}>, ptr {pointer}, align 1")
        return self.from_bits(raw, dtype)

    def from_bits(self, raw: str, dtype: str) -> Value:
        if dtype == "F64":
            return Value(self.op(f"bitcast <16 x i64> {raw} to <16 x double>"), "double")
        if dtype == "F32":
            return Value(self.op(f"bitcast <16 x i32> {raw} to <16 x float>"), "float")
        if dtype == "F16":
            half = self.op(f"bitcast <16 x i16> {raw} to <16 x half>")
            return Value(self.op(f"fpext <16 x half> {half} to <16 x float>"), "float")
        wide = self.op(f"zext <16 x i16> {raw} to <16 x i32>")
        high = self.op("shl <16 x i32>", wide, _splat("i32", 16))
        return Value(self.op(f"bitcast <16 x i32> {high} to <16 x float>"), "float")

    def widened(self, value: Value) -> str:
        """Return the register of `value` as doubles."""
        if value.kind == "double":
            return value.reg
        return self.op(f"fpext <16 x float> {value.reg} to <16 x double>")

    def delta(self, b: Value, f: Value) -> Value:
        """Fine-tuned minus base, rounded once to float32."""
        d = self.difference(f, b)
        if d.kind == "float":
            return d
        return Value(self.op(f"fptrunc <16 x double> {d.reg} to <16 x float>"), "float")

    def difference(self, x: Value, y: Value) -> Value:
        """x minus y, in float32, or in float64 where a side is that wide."""
        if "double" not in (x.kind, y.kind):
            return Value(self.op("fsub <16 x float>", x.reg, y.reg), "float")
        return Value(self.op("fsub <16 x double>", self.widened(x), self.widened(y)), "double")

    def equal(self, x: Value, y: Value) -> str:
        """The lanes in which x equals y, as the bits of an i16."""
        if "double" not in (x.kind, y.kind):
            return self.mask(f"fcmp oeq <16 x float> {x.reg}, {y.reg}")
        return self.mask(f"fcmp oeq <16 x double> {self.widened(x)}, {self.widened(y)}")

    def restored(self, b: Value, *, wide: bool) -> Value:
        """Base plus alpha times sign, in float32 (in float64 where base or output is F64). Sets %step."""
        self.row += [
            "%a.ptr = getelementptr float, ptr %alpha, i64 %r",
            "%a.one = load float, ptr %a.ptr, align 4",
            "%a.first = insertelement <16 x float> undef, float %a.one, i32 0",
            "%a = shufflevector <16 x float> %a.first, <16 x float> undef, <16 x i32> zeroinitializer",
            "%a.minus = fneg <16 x float> %a",
        ]
        self.bits_pointer()
        word = self.op("load i16, ptr %bits.at, align 1")
        self.body.append(f"%plus = bitcast i16 {word} to <16 x i1>")
        self.body.append("%step = select <16 x i1> %plus, <16 x float> %a, <16 x float> %a.minus")
        if not wide:
            return Value(self.op("fadd <16 x float>", b.reg, "%step"), "float")
        step = self.widened(Value("%step", "float"))
        return Value(self.op("fadd <16 x double>", self.widened(b), step), "double")

    def clamped(self, value: Value, b: Value, dtype: str, *, count: bool = False) -> Value:
        """Clamp what overflows `dtype` to its largest finite value; an infinite base stays what it is."""
        kind, limit = value.kind, _splat(value.kind, _MAX[dtype if value.kind == "double" else _narrower(dtype)])
        size = self.call("fabs", kind, value.reg)
        over = self.op(f"fcmp ogt <16 x {kind}> {size}, {limit}")
        b_size = self.call("fabs", b.kind, b.reg)
        finite = self.op(f"fcmp ole <16 x {b.kind}> {b_size}, {_splat(b.kind, _MAX[_full(b.kind)])}")
        both = self.op("and <16 x i1>", over, finite)
        if count:
            self.count("clamped", self.op(f"bitcast <16 x i1> {both} to i16"))
        signed = self.call("copysign", kind, limit, value.reg)
        vector = f"<16 x {kind}>"
        return Value(self.op(f"select <16 x i1> {both}, {vector} {signed}, {vector} {value.reg}"), kind)

    def narrow(self, value: Value, dtype: str) -> tuple[str, Value]:
        """Round to `dtype`, once, to nearest even: the stored words, and the value that they stand for."""
        if dtype == "F64":
            wide = self.widened(value)
            return self.op(f"bitcast <16 x double> {wide} to <16 x i64>"), Value(wide, "double")
        if dtype == "F32":
            if value.kind == "double":
                value = Value(self.op(f"fptrunc <16 x double> {value.reg} to <16 x float>"), "float")
            return self.op(f"bitcast <16 x float> {value.reg} to <16 x i32>"), value
        bits = (
            self.to_odd(value) if value.kind == "double" else self.op(f"bitcast <16 x float> {value.reg} to <16 x i32>")
        )
        single = self.op(f"bitcast <16 x i32> {bits} to <16 x float>")
        if dtype == "F16":
            half = self.op(f"fptrunc <16 x float> {single} to <16 x half>")
            words = self.op(f"bitcast <16 x half> {half} to <16 x i16>")
            return words, self.from_bits(words, dtype)
        high = self.op("lshr <16 x i32>", bits, _splat("i32", 16))
        odd = self.op("and <16 x i32>", high, _splat("i32", 1))
        bias = self.op("add <16 x i32>", odd, _splat("i32", 0x7FFF))
        up = self.op("lshr <16 x i32>", self.op("add <16 x i32>", bits, bias), _splat("i32", 16))
        quiet = self.op("or <16 x i32>", high, _splat("i32", 0x40))  # a NaN must not round to infinity
        nan = self.op(f"fcmp uno <16 x float> {single}, zeroinitializer")
        chosen = self.op(f"select <16 x i1> {nan}, <16 x i32> {quiet}, <16 x i32> {up}")
        words = self.op(f"trunc <16 x i32> {chosen} to <16 x i16>")
        return words, self.from_bits(words, dtype)

    def to_odd(self, value: Value) -> str:
        """Bits of a double as a float rounded to odd: rounding that again, to 16 bits, equals rounding once."""
        near = self.op(f"fptrunc <16 x double> {value.reg} to <16 x float>")
        back = self.op(f"fpext <16 x float> {near} to <16 x double>")
        inexact = self.op(f"fcmp one <16 x double> {back}, {value.reg}")
        beyond = self.op(
            f"fcmp ogt <16 x double> {self.call('fabs', 'double', back)}, {self.call('fabs', 'double', value.reg)}"
        )
        bits = self.op(f"bitcast <16 x float> {near} to <16 x i32>")
        less = self.op("sub <16 x i32>", bits, self.op(f"zext <16 x i1> {beyond} to <16 x i32>"))
        return self.op("or <16 x i32>", less, self.op(f"zext <16 x i1> {inexact} to <16 x i32>"))

    def store(self, name: str, dtype: str, value: Value) -> Value:
        """Round and store the group into array `name`; return the rounded values."""
        words, rounded = self.narrow(value, dtype)
        pointer = self.pointer(name, dtype, read=False)
        self.body.append(f"store <16 x {_WORD[dtype]}> {words}, ptr {pointer}, align {_BYTES[dtype]}")
        self.spill += [
            f"%{name}.bytes = mul i64 %left, {_BYTES[dtype]}",
            f"call void @llvm.memcpy.p0.p0.i64(ptr %{name}.direct, ptr %{name}.tail, i64 %{name}.bytes, i1 false)",
        ]
        return rounded

    def bits_pointer(self) -> None:
        self.row.append("%bits.row = mul i64 %r, %bits.stride")
        self.direct += [
            "%bits.byte = shl i64 %g, 1",
            "%bits.offset = add i64 %bits.row, %bits.byte",
            "%bits.at = getelementptr i8, ptr %bits, i64 %bits.offset",
        ]

    def store_bits(self, word: str) -> None:
        """Store 16 sign bits. A row that ends in the first byte spills a zero into the next row, written after it."""
        self.bits_pointer()
        self.body.append(f"store i16 {word}, ptr %bits.at, align 1")

    def existing(self, value: Value) -> Value:
        """Set the lanes without a column to zero."""
        lanes, vector = self.op("bitcast i16 %valid to <16 x i1>"), f"<16 x {value.kind}>"
        kept = self.op(f"select <16 x i1> {lanes}, {vector} {value.reg}, {vector} zeroinitializer")
        return Value(kept, value.kind)

    def accumulate(self, name: str, value: str) -> None:
        self.sums[name] = "<16 x double>"
        self.body.append(f"%sum.{name}.next = fadd contract <16 x double> %sum.{name}, {value}")

    def largest(self, name: str, value: str) -> None:
        self.sums[name] = "<16 x double>"
        larger = self.op(f"fcmp ogt <16 x double> {value}, %sum.{name}")
        self.body.append(
            f"%sum.{name}.next = select <16 x i1> {larger}, <16 x double> {value}, <16 x double> %sum.{name}"
        )

    def count(self, name: str, bits: str) -> None:
        """Count the set bits among the columns that exist."""
        self.sums[name] = "i64"
        there = self.op("and i16", bits, "%valid")
        ones = self.op(f"call i16 @llvm.ctpop.i16(i16 {there})")
        self.body.append(f"%sum.{name}.next = add i64 %sum.{name}, {self.op(f'zext i16 {ones} to i64')}")

    def compile(self, sums: list[str]) -> Any:
        """Close the loops around the group, compile, and return a callable on addresses and integers."""
        phis = [f"%sum.{n} = phi {t} [{_zero(t)}, %row], [%sum.{n}.next, %next]" for n, t in self.sums.items()]
        end: list[str] = []
        for index, name in enumerate(sums):
            end += _reduced(name, self.sums[name], index, len(sums))
        text = f"""
{_DECLARATIONS}
define void @{self.name}({self.arguments}) {{
entry:
  %bits.up = add i64 %cols, 7
  %bits.stride = lshr i64 %bits.up, 3
  {_lines(self.entry)}
  br label %row
row:
  %r = phi i64 [0, %entry], [%r.next, %row.end]
  {_lines(self.row)}
  %start = mul i64 %r, %cols
  br label %group
group:
  %g = phi i64 [0, %row], [%g.next, %next]
  {_lines(phis)}
  %c = shl i64 %g, 4
  %left = sub i64 %cols, %c
  %whole = icmp sge i64 %left, 16
  %at = add i64 %start, %c
  {_lines(self.direct)}
  br i1 %whole, label %body, label %tail
tail:
  {_lines(self.tail)}
  br label %body
body:
  {_lines(self.pointers)}
  %left16 = trunc i64 %left to i16
  %shift = select i1 %whole, i16 0, i16 %left16
  %ones = shl i16 1, %shift
  %some = sub i16 %ones, 1
  %valid = select i1 %whole, i16 -1, i16 %some
  {_lines(self.body)}
  br i1 %whole, label %next, label %spill
spill:
  {_lines(self.spill)}
  br label %next
next:
  %g.next = add i64 %g, 1
  %c.next = add i64 %c, 16
  %more = icmp slt i64 %c.next, %cols
  br i1 %more, label %group, label %row.end
row.end:
  {_lines(end)}
  %r.next = add i64 %r, 1
  %rows.left = icmp slt i64 %r.next, %rows
  br i1 %rows.left, label %row, label %done
done:
  ret void
}}
"""
        return _compiled(text, self.name, self.arguments)


_DECLARATIONS = """
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x double> @llvm.fabs.v16f64(<16 x double>)
declare <16 x float> @llvm.copysign.v16f32(<16 x float>, <16 x float>)
declare <16 x double> @llvm.copysign.v16f64(<16 x double>, <16 x double>)
declare double @llvm.vector.reduce.fadd.v16f64(double, <16 x double>)
declare double @llvm.vector.reduce.fmax.v16f64(<16 x double>)
declare i16 @llvm.ctpop.i16(i16)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""


def _lines(lines: list[str]) -> str:
    return "\n  ".join(lines)


def _zero(kind: str) -> str:
    return "0" if kind == "i64" else "zeroinitializer"


def _full(kind: str) -> str:
    return "F64" if kind == "double" else "F32"


def _narrower(dtype: str) -> str:
    """A float cannot exceed F64's limit: its own is the one that counts."""
    return "F32" if dtype == "F64" else dtype


def _reduced(name: str, kind: str, index: int, width: int) -> list[str]:
    """Fold one accumulator's lanes and store it at `sums[row, index]`."""
    if kind == "i64":
        fold = f"%row.{name} = sitofp i64 %sum.{name}.next to double"
    elif name == "worst":
        fold = f"%row.{name} = call double @llvm.vector.reduce.fmax.v16f64(<16 x double> %sum.{name}.next)"
    else:
        fold = f"%row.{name} = call double @llvm.vector.reduce.fadd.v16f64(double 0.0, <16 x double> %sum.{name}.next)"
    return [
        fold,
        f"%{name}.base = mul i64 %r, {width}",
        f"%{name}.index = add i64 %{name}.base, {index}",
        f"%{name}.out = getelementptr double, ptr %sums, i64 %{name}.index",
        f"store double %row.{name}, ptr %{name}.out, align 8",
    ]


_engines: list[Any] = []  # compiled code lives as long as its engine


def _compiled(text: str, name: str, arguments: str) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    types = [ctypes.c_void_p if part.strip().startswith("ptr") else ctypes.c_int64 for part in arguments.split(",")]
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name))
