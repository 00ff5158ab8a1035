"""Check and time the GPU path against the CPU's on one machine, in under three minutes, and write a report.

    python scripts/gpu_check.py [--gb 2] [--device cuda] [--report docs/benchmarks/gpu-NAME.json]
    python scripts/gpu_check.py --rehearse     # the same checks with the GPU's code on the CPU, at small size

Checks: `compress` on the GPU writes the same codecs and signs as on the CPU, alphas within one unit in the last place
and statistics within 1e-9; `validate` on the GPU passes both files and measures the same errors; `apply` on the GPU
restores the same bytes. Times: compress and validate on the GPU against a plain host-to-device copy of the same bytes
from pinned memory, and against the CPU. Exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zendelta.bdfile import BdFile
from zendelta.codec import kernels as kernel_choice
from zendelta.codec.kernels.reference import TorchKernels
from zendelta.pipeline import apply as apply_
from zendelta.pipeline import compress as compress_
from zendelta.pipeline import validate as validate_

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from pairs import llama, make_pair


def compare_files(cpu: Path, gpu: Path) -> dict[str, Any]:
    """Compare two `.bd` files of one pair array by array."""
    ours, theirs = BdFile.open(cpu), BdFile.open(gpu)
    codecs = {name: entry.codec for name, entry in ours.content.tensors.items()}
    same_codecs = codecs == {name: entry.codec for name, entry in theirs.content.tensors.items()}
    unequal, ulps, statistics = [], 0, 0.0
    for name in ours.arrays if same_codecs else ():
        a, b = ours.read(name), theirs.read(name)
        if name.endswith(":alpha"):
            ulps = max(ulps, int(np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max(initial=0)))
        elif not np.array_equal(a, b):
            unequal.append(name)
    for name, entry in ours.content.tensors.items():
        for key, value in entry.stats.items():
            other = theirs.content.tensors[name].stats[key]
            if value != other:
                statistics = max(statistics, abs(value - other) / max(abs(value), abs(other)))
    return {"same_codecs": same_codecs, "unequal_arrays": unequal, "alpha_ulps": ulps, "statistics_off_by": statistics}


def copy_speed(device: torch.device, nbytes: int) -> float:
    """Return bytes per second of host-to-device copies from pinned memory, 32 MB each."""
    if device.type != "cuda":
        return math.nan
    host = torch.empty(1 << 25, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    there.copy_(host)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(max(1, nbytes >> 25)):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    return max(1, nbytes >> 25) * (1 << 25) / (time.perf_counter() - start)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def rehearse(device: str = "auto") -> tuple[Any, str]:
    """Stand in for `kernels_for`: what would run on the GPU runs in torch on the CPU."""
    return (TorchKernels("cpu"), "cpu") if device.startswith("cuda") else kernel_choice.kernels_for(device)


def check(folder: Path, gb: float, device: str) -> dict[str, Any]:
    """Run everything and return the report."""
    base, ft = make_pair(folder, llama(gb))
    read = sum(file.stat().st_size for side in (base, ft) for file in side.glob("*.safetensors"))
    seconds: dict[str, float] = {}
    files = {}
    for where in ("cpu", device, "cpu", device):  # the second round counts: files are cached, kernels compiled
        files[where] = folder / f"{where.replace(':', '-')}.bd"
        seconds[f"compress_{where}"], _ = timed(
            lambda where=where: compress_.compress(base, ft, files[where], device=where, force=True)
        )
    reports = {}
    for where in ("cpu", device):
        for file in files:
            key = f"{file} file on {where}"
            seconds[f"validate_{where}"], reports[key] = timed(
                lambda where=where, file=file: validate_.validate(base, ft, files[file], device=where)
            )
        seconds[f"apply_{where}"], _ = timed(
            lambda where=where: apply_.apply(base, files["cpu"], folder / f"out-{where}", device=where)
        )
    outputs = [sorted((folder / f"out-{where}").glob("*.safetensors")) for where in ("cpu", device)]
    same = all(a.read_bytes() == b.read_bytes() for a, b in zip(*outputs, strict=True)) and len(outputs[0]) > 0
    errors = [report.error for report in reports.values()]
    compared = compare_files(files["cpu"], files[device])
    where = torch.device(device if torch.cuda.is_available() else "cpu")
    copy = copy_speed(where, read)
    checks = {
        "same codecs and signs": compared["same_codecs"] and not compared["unequal_arrays"],
        "alphas within 1 ulp": compared["alpha_ulps"] <= 1,
        "statistics within 1e-9": compared["statistics_off_by"] <= 1e-9,
        "validate passes everywhere": all(report.passed for report in reports.values()),
        "validate measures one error": max(errors) - min(errors) <= 1e-9,
        "apply restores the same bytes": same,
    }
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu (rehearsal)",
        "torch": torch.__version__,
        "bytes_read": read,
        "checks": checks,
        "passed": all(checks.values()),
        "alpha_ulps": compared["alpha_ulps"],
        "seconds": seconds,
        "gb_per_second": {key: read / value / 1e9 for key, value in seconds.items() if not key.startswith("apply")},
        "host_to_device_gb_per_second": None if math.isnan(copy) else copy / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0, help="GB (1e9 bytes) per checkpoint")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--report", type=Path, help="write the report to this file too")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: the same checks on the CPU, at small size")
    options = parser.parse_args()
    if options.rehearse:
        options.gb = min(options.gb, 0.02)
        for module in (compress_, validate_, apply_):
            module.kernels_for = rehearse  # type: ignore[attr-defined]
    folder = Path(tempfile.mkdtemp(prefix="zendelta-gpu-"))
    try:
        report = check(folder, options.gb, options.device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(report, indent=2)
    print(text)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text + "\n")
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
