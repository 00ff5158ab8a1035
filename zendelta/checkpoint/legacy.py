"""The older ``.bin`` weights, through torch's weights-only loader: nothing in them is executed.

Zip files (torch >= 1.6) are mapped, so their tensors cost no memory until they are read. The format before that is
loaded whole, which is the one place where memory is bounded by a file.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zendelta.checkpoint.header import LFS_POINTER, ArrayInfo
from zendelta.errors import InputError

if TYPE_CHECKING:
    import torch

Read = Callable[[int, memoryview], None]

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}  # fmt: skip
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def open_bin(file: Path) -> tuple[list[tuple[str, ArrayInfo, Read]], dict[str, str], list[str]]:
    """Open a ``.bin`` file: its tensors with a reader each, aliases (shared storage), and warnings.

    Raises:
        InputError: a pickle that would run code, a damaged file, or a Git LFS pointer.
    """
    import torch

    if not file.is_file():  # opening a pipe would wait for whoever writes into it
        raise InputError(f"{file}: not a regular file", "is it the right path?")
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    if start.startswith(LFS_POINTER):
        raise InputError(
            f"{file}: a Git LFS pointer, not the weights themselves",
            f"fetch the file: cd '{file.parent}' && git lfs pull --include '{file.name}'",
        )
    if not start.startswith((b"PK", b"\x80")):
        raise InputError(
            f"{file}: cannot be read as torch weights ({file.stat().st_size} bytes, the first are {start[:16]!r})",
            "is it the right file? Fetch it again",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on old formats are not for whoever compresses them
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=start[:2] == b"PK")
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"more than tensors ({wanted[1]})" if wanted else "more than tensors"
        raise InputError(
            f"{file}: the pickle holds {what}; loading it could run code, so it was not loaded",
            "ask its author for safetensors, or convert it yourself where you trust it",
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = str(error).splitlines()[0].partition(". In PyTorch")[0] if str(error) else type(error).__name__
        raise InputError(f"{file}: cannot be read as torch weights ({reason})", "fetch the file again") from None
    while isinstance(loaded, Mapping):
        inside = next((loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if inside is None:
            break
        loaded = inside
    if not isinstance(loaded, Mapping):
        raise InputError(f"{file}: holds a {type(loaded).__name__}, not named tensors", "is it the right file?")

    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    other: list[str] = []
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in sorted(loaded.items()):
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            other.append(str(name))
            continue
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and place in owners:
            aliases[name] = owners[place]
            continue
        owners[place] = name
        found[name] = value.detach()
    notes = [f"{file.name}: not tensors, left out: {', '.join(other)}"] if other else []
    return [_entry(file, name, value) for name, value in found.items()], aliases, notes


def _entry(file: Path, name: str, value: torch.Tensor) -> tuple[str, ArrayInfo, Read]:
    import torch

    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        raise InputError(f"{file}: {name} has the dtype {value.dtype}, which zendelta cannot read", "convert it first")
    nbytes = value.numel() * value.element_size()
    if value.is_contiguous() or value.numel() == 0:
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()

        def read(offset: int, out: memoryview) -> None:
            out[:] = flat[offset : offset + len(out)].data

    else:  # a transposed or sliced parameter: made contiguous a few rows at a time, never as a whole
        row = nbytes // value.shape[0]

        def read(offset: int, out: memoryview) -> None:
            first, last = offset // row, -(-(offset + len(out)) // row)
            part = value[first:last].contiguous().reshape(-1).view(torch.uint8).numpy()
            out[:] = part[offset - first * row :][: len(out)].data

    return name, ArrayInfo(dtype, tuple(value.shape), 0, nbytes), read
