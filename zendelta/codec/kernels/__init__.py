"""The passes over a block of a delta, on the device that was asked for."""

from __future__ import annotations

import ctypes
import sys

from zendelta.codec.kernels.protocol import Kernels
from zendelta.errors import MachineError, UsageError


def kernels_for(device: str = "auto") -> tuple[Kernels, str]:
    """Return the kernels for `device` (auto, cpu, cuda or cuda:N), and the device they run on.

    On the CPU these are compiled with llvmlite; where that is missing, plain torch does the same. ``auto`` takes a GPU
    where there is one, and imports torch to look for it only where a CUDA driver is installed.

    Raises:
        UsageError: an unknown device name.
        MachineError: a GPU was asked for and there is none.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UsageError(f"unknown device {device!r}", "use auto, cpu, cuda or cuda:N")
    if kind == "cuda" or (kind == "auto" and _has_cuda_driver()):
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count > int(index or 0):
            from zendelta.codec.kernels.reference import TorchKernels

            name = device if index else "cuda:0"
            return TorchKernels(name), name
        if kind == "cuda":
            raise MachineError(
                f"no device {device}: torch {torch.__version__} sees {count} CUDA devices",
                "use --device cpu, or install a torch build that fits the driver",
            )
    try:
        from zendelta.codec.kernels.cpu import CpuKernels
    except ImportError:
        from zendelta.codec.kernels.reference import TorchKernels

        return TorchKernels("cpu"), "cpu"
    return CpuKernels(), "cpu"


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


__all__ = ["Kernels", "kernels_for"]
