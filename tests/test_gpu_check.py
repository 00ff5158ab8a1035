"""The GPU check, rehearsed: the GPU's code on the CPU must pass every check of the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_rehearsal_of_the_gpu_check_passes_every_check():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--rehearse", "--gb", "0.006"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["checks"]) == 6 and all(report["checks"].values())
    assert report["device"] == "cpu (rehearsal)" and report["host_to_device_gb_per_second"] is None
