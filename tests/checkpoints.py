"""Reference formulas, small odd checkpoints, and hands on the bytes of ``.bd`` files, for the tests of real faults.

    from checkpoints import restored, write

    write(tmp_path / "base", {"a.weight": matrix(0)})
    assert equal(load(tmp_path / "out"), restored(base, finetuned))

What is expected is computed here in plain torch from the published rule, never with zendelta's own code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from conftest import read_model, write_model

Tensors = dict[str, torch.Tensor]


def normal(*shape: int, seed: int = 0, scale: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded normal values."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def moved(values: torch.Tensor, seed: int = 100, scale: float = 2e-3) -> torch.Tensor:
    """Seeded noise added to values, in their dtype."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)) * scale
    return (values.double() + noise).to(values.dtype)


def change_all(tensors: Tensors, scale: float = 2e-3) -> Tensors:
    """A fine-tune: every floating tensor moved."""
    return {
        name: moved(value, 100 + i, scale) if value.is_floating_point() else value.clone()
        for i, (name, value) in enumerate(tensors.items())
    }


def write(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None, **more: Any) -> Path:
    """Write a model folder with a config.json; see conftest.write_model."""
    return write_model(folder, tensors, config=config or {"model_type": "synthetic"}, **more)


load = read_model


def equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are the same to the bit; says which are not."""
    assert sorted(found) == sorted(wanted)
    unequal = [name for name in wanted if not same_bits(found[name], wanted[name])]
    assert unequal == []
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


# --- The rule, in plain torch -----------------------------------------------------------------------------------


def signs_of(delta: torch.Tensor) -> torch.Tensor:
    """+1 and -1 of a matrix; an exact zero is +1 where row + column is even and -1 where it is odd."""
    rows, cols = torch.meshgrid(torch.arange(delta.shape[0]), torch.arange(delta.shape[1]), indexing="ij")
    checker = 1.0 - 2.0 * ((rows + cols) % 2)
    return torch.where(delta == 0, checker.to(delta.dtype), delta.sign())


def one_bit(base: torch.Tensor, finetuned: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """base + alpha * sign per stored row, added in float32 (float64 where a side is), rounded once."""
    dtype = dtype or finetuned.dtype
    wide = torch.float64 if torch.float64 in (base.dtype, finetuned.dtype, dtype) else torch.float32
    stacked = base.ndim == 3 and min(base.shape[1:]) >= 32
    shape = (-1, base.shape[-1]) if stacked else (base.shape[0], -1)
    b, f = base.to(wide).reshape(shape), finetuned.to(wide).reshape(shape)
    delta = (f - b).float()
    alpha = delta.double().abs().mean(1, keepdim=True).float()
    return (b + alpha.to(wide) * signs_of(delta.to(wide))).to(dtype).reshape(base.shape)


def pays(tensor: torch.Tensor) -> bool:
    """Whether signs and a scale per row are to stand for a floating tensor of this shape and dtype."""
    if tensor.ndim < 2 or tensor.numel() < 256:
        return False
    stacked = tensor.ndim == 3 and min(tensor.shape[1:]) >= 32
    cols = tensor.shape[-1] if stacked else tensor[0].numel()
    rows = tensor.numel() // cols
    return 2 * (rows * -(-cols // 8) + 4 * rows) <= tensor.numel() * tensor.element_size()


def restored(base: Tensors, finetuned: Tensors, sources: Mapping[str, str] | None = None) -> Tensors:
    """What apply must give back: signs where they pay, the fine-tune's own values elsewhere.

    Args:
        sources: which base tensor each fine-tuned one is a change of; by equal names if not given.
    """
    out = {}
    for name, value in finetuned.items():
        source = base.get(sources[name] if sources is not None and name in sources else name)
        floating = source is not None and source.is_floating_point() and value.is_floating_point()
        if source is None or not floating or not pays(value):
            out[name] = value
        elif source.shape == value.shape and torch.equal(source.double(), value.double()):
            out[name] = source.to(value.dtype)
        else:
            shared = min(len(source), len(value))
            out[name] = torch.cat([one_bit(source[:shared], value[:shared]), value[shared:]])
    return out


def relative_error(base: torch.Tensor, finetuned: torch.Tensor, approximation: torch.Tensor) -> float:
    """||finetuned - approximation|| / ||finetuned - base||, in float64."""
    wanted, found = finetuned.double() - base.double(), approximation.double() - finetuned.double()
    return float(found.norm() / wanted.norm())


# --- The bytes of a .bd file ------------------------------------------------------------------------------------


def outer_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def inner_header(path: Path) -> dict[str, Any]:
    """The JSON text in the metadata of a .bd file."""
    header: dict[str, Any] = json.loads(outer_header(path)["__metadata__"]["zendelta"])
    return header


def tensor_entry(path: Path, name: str) -> dict[str, Any]:
    """What a .bd file says of a tensor."""
    entry: dict[str, Any] = inner_header(path)["tensors"][name]
    return entry


def codecs(path: Path) -> dict[str, str]:
    """The codecs of every tensor of a .bd file, joined by +; `same` where there are none."""
    entries = inner_header(path)["tensors"]
    return {name: "+".join(term["codec"] for term in entry["terms"]) or "same" for name, entry in entries.items()}


def forge(source: Path, target: Path, edit: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """Write a .bd file of which every hash is right, whatever it says.

    Args:
        edit: is handed the inner header, without its check, and the arrays; changes them in place.
    """
    from safetensors import safe_open

    with safe_open(str(source), "pt") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    fields = inner_header(source)
    fields.pop("check")
    edit(fields, arrays)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    check = xxhash.xxh3_128_hexdigest(text.encode())
    text = json.dumps({**fields, "check": check}, sort_keys=True, separators=(",", ":"))
    kinds = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
    entries: dict[str, Any] = {"__metadata__": {"zendelta": text}}
    at, body = 0, b""
    for name, value in arrays.items():
        data = raw(value)
        kind = kinds[value.dtype]
        entries[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [at, at + len(data)]}
        at, body = at + len(data), body + data
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)
    target.write_bytes(struct.pack("<Q", len(header)) + header + body)
    return target


# --- What a test watches ----------------------------------------------------------------------------------------


@contextmanager
def untouched(*folders: Path) -> Iterator[None]:
    """Assert that no file in these folders is added, removed or changed, nor any temporary left."""

    def seen() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for folder in folders for p in sorted(folder.rglob("*")) if p.is_file()}

    before = seen()
    yield
    assert seen() == before
