"""Anonymous memory does not grow with the model: measured in processes of their own, on one large tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from zendelta.checkpoint.writer import CheckpointWriter, TensorSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssAnon is told by Linux only"),
]

MEASURED = """
import sys, threading, time
import zendelta

def rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1000

def watch():
    while running:
        peaks.append(rss())
        time.sleep(0.001)

base, ft, delta, out = sys.argv[1:]
zendelta.inspect, zendelta.compress, zendelta.apply, zendelta.validate
start, running, peaks = rss(), True, []
thread = threading.Thread(target=watch)
thread.start()
zendelta.compress(base, ft, delta, threads=2)
zendelta.validate(base, ft, delta, threads=2)
zendelta.apply(base, delta, out, threads=2)
running = False
thread.join()
print(max(peaks) - start)
"""


def test_one_tensor_of_400_mb_takes_less_than_60_mb(tmp_path: Path):
    spec = TensorSpec("model.embed_tokens.weight", "BF16", (100_000, 2000))
    block = (np.random.default_rng(0).standard_normal(2_000_000, np.float32) * 0.02).view(np.uint32)
    for name, change in (("base", 0), ("ft", 1)):
        (tmp_path / name).mkdir()
        words = ((block >> 16) + np.uint32(change)).astype(np.uint16).view(np.uint8)
        with CheckpointWriter(tmp_path / name, [spec], max_shard_bytes=10**9) as writer:
            for offset in range(0, spec.nbytes, len(words)):
                writer.write(spec.name, offset, words[: spec.nbytes - offset])
    paths = [str(tmp_path / name) for name in ("base", "ft", "a.bd", "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MEASURED, *paths], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 60
