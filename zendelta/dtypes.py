"""The dtypes of safetensors files, by the names that their headers use.

The list is that of the safetensors library (0.8), without the types that are smaller than a byte (``F4``,
``F6_E2M3``, ``F6_E3M2``): an array of those has no whole number of bytes per element, and nobody subtracts them.
"""

from __future__ import annotations

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes per element of every dtype that zendelta reads and writes."""

FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes whose difference means something: only these get a delta."""

SUB_BYTE = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Dtypes that safetensors knows and zendelta does not: several elements share a byte."""

QUANTISED = frozenset({"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}) | SUB_BYTE
"""Dtypes that hold quantised weights, which mean nothing without their scales."""

CONFIG_NAMES: dict[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What config.json calls each floating dtype."""
