"""The disk's refusals, by name and number."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zendelta.checkpoint.disk import check_space, disk_errors, free_bytes
from zendelta.errors import MachineError


def test_a_disk_that_is_too_small_is_refused_before_any_work(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not/yet/there")
    assert abs(free - free_bytes(tmp_path)) < 2**30
    check_space(tmp_path / "out", 1)
    with pytest.raises(MachineError, match=r"out: 1,000,000,000,000,000,000 bytes needed, [\d,]+ bytes free") as full:
        check_space(tmp_path / "out", 10**18)
    assert full.value.exit_code == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOENT])
def test_what_the_disk_refuses_names_the_file(tmp_path: Path, number: int) -> None:
    path = tmp_path / ".out.zendelta-tmp" / "model.safetensors"
    with pytest.raises(MachineError, match=os.strerror(number)) as failed, disk_errors(path, 12345):
        raise OSError(number, os.strerror(number))
    assert failed.value.message.startswith(f"{tmp_path / 'out' / 'model.safetensors'}: ")
    assert failed.value.hint
    assert ("12,345 bytes needed" in failed.value.message) == (number in (errno.ENOSPC, errno.EFBIG))


def test_errors_that_only_a_fault_of_ours_explains_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), disk_errors(tmp_path):
        raise FileExistsError(errno.EEXIST, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_the_machines_fault() -> None:
    with (
        pytest.raises(MachineError, match="/dev/full: No space left"),
        disk_errors(Path("/dev/full")),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")
