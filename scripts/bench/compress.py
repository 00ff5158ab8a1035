"""Measure compress, apply and validate against reading, copying and plain torch, each as a whole process, in one run.

    python scripts/bench/compress.py [--gb 0.2 2 8] [--one-tensor-gb 4] [--folder FOLDER] [--json FILE]

Every row is a fresh process on files in the page cache: start-up is included, and also shown alone. Outputs go to a
folder in memory (/dev/shm), the copy's too, so that no side waits for a disk. The best of `--repeat` runs counts.
Reading fills 16 MB buffers, over and over, with as many threads as zendelta uses. Plain torch loads whole tensors with
safetensors and runs subtract, abs, mean, compare and numpy.packbits. RssAnon is the anonymous memory of the process,
sampled every 2 ms, less what `import torch` alone takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pairs import llama, make_pair, one_tensor

READ = """
import os, sys, threading
buffer, threads, files = 1 << 24, int(sys.argv[1]), sys.argv[2:]
parts = [(f, o) for f in files for o in range(0, os.path.getsize(f), buffer)]
def work(k):
    memory, opened = memoryview(bytearray(buffer)), {}
    for file, offset in parts[k::threads]:
        if file not in opened: opened[file] = os.open(file, os.O_RDONLY)
        os.preadv(opened[file], [memory], offset)
ts = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
[t.start() for t in ts]; [t.join() for t in ts]
"""

HASH_AND_COMPUTE = """
import sys, threading, time, numpy as np, xxhash
from zendelta.codec.kernels.cpu import CpuKernels
kernels, threads, nbytes = CpuKernels(), int(sys.argv[1]), int(float(sys.argv[2]))
size, cols = kernels.block_bytes, 4096
rows = size // 2 // cols
def work():
    random = np.random.default_rng(0)
    base = (random.standard_normal(size // 2, np.float32) * .02)
    ft = base + random.standard_normal(size // 2, np.float32) * np.float32(.0002)
    base, ft = ((v.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for v in (base, ft))
    bits, running = np.empty(size // 16 + 1, np.uint8), xxhash.xxh3_128()
    barrier.wait()
    for _ in range(nbytes // 2 // size // threads):
        kernels.encode(base, "BF16", ft, "BF16", rows, cols, 0, bits)
        running.update(base); running.update(ft)
barrier = threading.Barrier(threads + 1)
ts = [threading.Thread(target=work) for _ in range(threads)]
[t.start() for t in ts]; barrier.wait(); start = time.perf_counter(); [t.join() for t in ts]
print(time.perf_counter() - start)
"""

PLAIN_TORCH = """
import glob, sys, numpy as np, torch
from safetensors import safe_open
base, ft = ({k: (f, k) for p in sorted(glob.glob(d + "/*.safetensors")) for f in [safe_open(p, "pt")] for k in f.keys()} for d in sys.argv[1:3])
out = {}
for name, (file, key) in ft.items():
    f, b = file.get_tensor(key).float(), base[name][0].get_tensor(key).float()
    d = f - b
    if d.dim() == 2:
        out[name] = (d.abs().mean(1), np.packbits((d > 0).numpy(), axis=1, bitorder="little"))
"""  # noqa: E501


def run(command: list[str], *, repeat: int, memory: bool = False, before: list[Path] | None = None) -> dict[str, float]:
    """Run a command `repeat` times; return the least seconds, and the most RssAnon in bytes where asked for."""
    best, rss = float("inf"), 0
    for _ in range(repeat):
        for path in before or []:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if memory:
            status = Path(f"/proc/{process.pid}/status")
            while process.poll() is None:
                try:
                    lines = status.read_text().splitlines()
                except OSError:
                    break
                rss = max([rss, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
                time.sleep(0.002)
        stdout, stderr = process.communicate()
        best = min(best, time.perf_counter() - start)
        if process.returncode:
            sys.exit(f"{' '.join(command)}\n{stdout}{stderr}")
    return {"seconds": best, "rss_anon": rss, "said": stdout}  # type: ignore[dict-item]


def weights(folder: Path) -> list[str]:
    return [str(file) for file in sorted(folder.glob("*.safetensors"))]


def zendelta(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zendelta", *map(str, arguments)]


def measure(folder: Path, memory: Path, specs: list, options: argparse.Namespace, *, torch: bool) -> dict:  # type: ignore[type-arg]
    """Measure every verb on one pair."""
    threads, repeat = options.threads, options.repeat
    base, ft = make_pair(folder, specs)
    delta, restored, copied = memory / "out.bd", memory / "restored", memory / "copied"
    python = [sys.executable, "-c"]
    files = [*weights(base), *weights(ft)]
    nbytes = sum(Path(file).stat().st_size for file in files)
    run([*python, READ, str(threads), *files], repeat=1)  # into the page cache
    row: dict[str, float] = {"gb": nbytes / 2e9}
    row["read"] = run([*python, READ, str(threads), *files], repeat=repeat)["seconds"]
    compress = zendelta("compress", base, ft, "-o", delta, "--threads", threads, "--quiet", "--device", "cpu")
    row["compress"] = run(compress, repeat=repeat, before=[delta])["seconds"]
    row["compress_rss_anon"] = run(compress, repeat=1, memory=True, before=[delta])["rss_anon"]
    validate = zendelta("validate", base, ft, delta, "--threads", threads, "--quiet", "--device", "cpu")
    row["validate"] = run(validate, repeat=repeat)["seconds"]
    row["validate_rss_anon"] = run(validate, repeat=1, memory=True)["rss_anon"]
    apply = zendelta("apply", base, delta, "-o", restored, "--threads", threads, "--quiet", "--device", "cpu")
    row["apply"] = run(apply, repeat=repeat, before=[restored])["seconds"]
    row["apply_rss_anon"] = run(apply, repeat=1, memory=True, before=[restored])["rss_anon"]
    shutil.rmtree(restored)
    row["copy"] = run(["cp", "-r", str(base), str(copied)], repeat=repeat, before=[copied])["seconds"]
    shutil.rmtree(copied)
    compute = run([*python, HASH_AND_COMPUTE, str(threads), str(nbytes)], repeat=repeat)
    row["hash_and_compute"] = float(compute["said"])
    if torch:
        row["plain_torch"] = run([*python, PLAIN_TORCH, str(base), str(ft)], repeat=1)["seconds"]
    row["ratio"] = nbytes / 2 / delta.stat().st_size
    delta.unlink()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, nargs="*", default=[0.2, 2, 8], help="GB (1e9 bytes) per checkpoint")
    parser.add_argument(
        "--one-tensor-gb", type=float, default=4.0, help="also a pair of one tensor of this size; 0: not"
    )
    parser.add_argument("--folder", type=Path, help="where pairs are made and kept; default: a temporary folder")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory for the outputs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="zendelta-bench-"))
    memory = Path(tempfile.mkdtemp(prefix="zendelta-bench-", dir=options.memory))
    python = [sys.executable, "-c"]
    result: dict = {"cpu": cpu_name(), "threads": options.threads, "python": platform.python_version(), "pairs": []}  # type: ignore[type-arg]
    torch = run([*python, "import torch"], repeat=3, memory=True)
    result["import_torch"], result["import_torch_rss_anon"] = torch["seconds"], torch["rss_anon"]
    result["help"] = run(zendelta("--help"), repeat=3)["seconds"]
    try:
        base, ft = make_pair(folder / "tiny", llama(0.005))
        tiny = memory / "tiny.bd"
        result["start_up"] = run(zendelta("compress", base, ft, "-o", tiny, "--quiet"), repeat=3, before=[tiny])[
            "seconds"
        ]
        for gb in options.gb:
            row = measure(folder / f"{gb:g}gb", memory, llama(gb), options, torch=True)
            result["pairs"].append(row)
            show(result, row)
            if not options.folder:
                shutil.rmtree(folder / f"{gb:g}gb")
        if options.one_tensor_gb:
            row = measure(folder / "one", memory, one_tensor(options.one_tensor_gb), options, torch=False)
            result["one_tensor"] = row
            show(result, row)
        base, ft = make_pair(folder / "inspect", llama(1.7))
        big = memory / "inspect.bd"
        run(zendelta("compress", base, ft, "-o", big, "--quiet"), repeat=1)
        result["inspect_file_bytes"] = big.stat().st_size
        result["inspect"] = run(zendelta("inspect", big), repeat=3)["seconds"]
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    torch_seconds = result["import_torch"]
    print(
        f"import torch {torch_seconds:.2f} s; zendelta --help {result['help'] / torch_seconds:.2f} of it, inspect of a",
        end=" ",
    )
    print(f"{result['inspect_file_bytes'] / 1e6:.0f} MB file {result['inspect'] / torch_seconds:.2f} of it")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def show(result: dict, row: dict) -> None:  # type: ignore[type-arg]
    """Print one pair's ratios; higher is better in each."""
    over = {key: (row[key] - result["import_torch_rss_anon"]) / 1e6 for key in row if key.endswith("rss_anon")}
    print(f"{row['gb']:.2f} GB per checkpoint, start-up {result['start_up']:.2f} s of each")
    speed = 2 * row["gb"] / row["read"]
    print(f"  read {row['read']:.2f} s ({speed:.1f} GB/s); hashing and arithmetic {row['hash_and_compute']:.2f} s")
    print(f"  compress {row['compress']:.2f} s: {row['read'] / row['compress']:.2f} of the speed of reading", end="")
    print(f", {row['plain_torch'] / row['compress']:.1f} times plain torch" if "plain_torch" in row else "")
    print(f"  validate {row['validate']:.2f} s: {row['read'] / row['validate']:.2f} of the speed of reading")
    print(f"  apply {row['apply']:.2f} s: {row['copy'] / row['apply']:.2f} of the speed of cp ({row['copy']:.2f} s)")
    print(
        "  RssAnon over import torch, MB: " + ", ".join(f"{key[:-9]} {value:.0f}" for key, value in over.items()),
        flush=True,
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
