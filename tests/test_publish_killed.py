"""Staged outputs when two runs meet, when one is killed, and when Ctrl-C comes, at any moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_publish import ROOT, Publisher, both, model, names, posix, publish_file, publish_folder, version_of

from zendelta.checkpoint import disk, publish
from zendelta.checkpoint.publish import staged_file, staged_folder
from zendelta.errors import UsageError


@posix
@both
def test_a_second_live_run_on_the_same_output_is_refused_and_harms_nothing(tmp_path: Path, put: Publisher) -> None:
    final = tmp_path / "out"
    stage: Callable[..., AbstractContextManager[Any]] = staged_file if put is publish_file else staged_folder
    with stage(final) as first:
        first.write(b"1 " * 1000) if put is publish_file else model(first, 1)
        with pytest.raises(UsageError, match=r"another run is writing .*out right now"):
            put(final, 2)
        put(tmp_path / "other", 3)
    assert version_of(final) == 1
    put(final, 4, force=True)
    assert version_of(final) == 4
    assert names(tmp_path) == ["other", "out"]


@posix
def test_a_lock_whose_holder_ended_just_before_it_was_taken_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".out.zendelta-lock"
    real = publish.fcntl.flock
    held: list[bool] = []

    def flock(file: Any, operation: int) -> None:
        if not held:
            lock.unlink()  # as the run that held it does at its end
        held.append(True)
        real(file, operation)

    monkeypatch.setattr(publish.fcntl, "flock", flock)
    with staged_folder(tmp_path / "out") as folder:
        model(folder, 1)
        assert len(held) == 2
        assert lock.exists()
    assert version_of(tmp_path / "out") == 1


@posix
def test_many_threads_at_one_output_publish_it_whole_one_at_a_time(tmp_path: Path) -> None:
    final = tmp_path / "out"
    outcomes: list[str] = []

    def run(number: int) -> None:
        for round_ in range(20):
            try:
                publish_folder(final, number * 100 + round_, force=True)
                outcomes.append("done")
            except UsageError as error:
                outcomes.append(error.message.split(str(final))[0])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"done", "another run is writing "}
    assert "done" in outcomes
    version_of(final)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("put", [publish_file, publish_folder])
def test_what_a_killed_run_left_is_replaced(tmp_path: Path, put: Publisher) -> None:
    model(tmp_path / ".out.zendelta-tmp", 1)
    (tmp_path / ".out.zendelta-lock").write_text("")
    put(tmp_path / "out", 2)
    assert version_of(tmp_path / "out") == 2
    assert names(tmp_path) == ["out"]
    (tmp_path / ".out.zendelta-tmp").symlink_to(model(tmp_path / "mine", 7))
    put(tmp_path / "out", 3, force=True)
    assert version_of(tmp_path / "out") == 3
    assert version_of(tmp_path / "mine") == 7
    assert names(tmp_path) == ["mine", "out"]
    (tmp_path / ".out.zendelta-tmp").write_text("half")
    with pytest.raises(UsageError, match="exists already"):
        put(tmp_path / "out", 4)
    assert names(tmp_path) == ["mine", "out"]


def test_an_old_folder_that_was_moved_aside_comes_back_before_anything_else(tmp_path: Path) -> None:
    final = tmp_path / "out"
    model(tmp_path / ".out.zendelta-old", 1)
    model(tmp_path / ".out.zendelta-tmp", 2)
    with pytest.raises(UsageError, match="exists already"):
        publish_folder(final, 3)
    assert version_of(final) == 1
    assert names(tmp_path) == ["out"]
    final.rename(tmp_path / ".out.zendelta-old")
    with pytest.raises(ValueError), staged_folder(final, force=True):
        raise ValueError
    assert version_of(final) == 1
    model(tmp_path / ".out.zendelta-old", 0)
    model(tmp_path / ".out.zendelta-tmp", 2)
    publish_folder(final, 3, force=True)
    assert version_of(final) == 3
    assert names(tmp_path) == ["out"]


def kill_before_system_call(number: int) -> None:
    """Kill this process before the `number`-th call from now on that could change a file's name or content."""
    count = 0

    def hook(event: str, _: object) -> None:
        nonlocal count
        if event in ("open", "fcntl.flock") or event.startswith(("os.", "shutil.", "ctypes.")):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def interrupt_before_line(number: int, work: Callable[[], None]) -> bool:
    """Do `work`, with Ctrl-C before its `number`-th line of zendelta's code; False if there are fewer."""
    count = 0

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        if count == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename in (publish.__file__, disk.__file__) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check_after_the_end(final: Path, put: Publisher, *, old: bool) -> None:
    """A complete old or new output stands (or the old one aside, complete), and the next run cleans up."""
    aside = final.with_name(".out.zendelta-old")
    assert not aside.exists() or version_of(aside) == 1  # complete at any moment: it may be put back
    standing = version_of(final) if final.exists() else version_of(aside) if aside.exists() else 0
    assert standing in ((1, 2) if old else (0, 2))
    put(final, 3, force=True)
    assert version_of(final) == 3
    assert names(final.parent) == ["out"]


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk in memory where there is one: a thousand removed folders take seconds on some others."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


exchanges = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "aside"])


@posix
@exchanges
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
@both
def test_a_kill_before_any_system_call_of_publishing_leaves_old_or_new(
    memory_path: Path, put: Publisher, old: bool, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what it is for, a kill cannot show
    publish._renameat2()  # found before, not by each child anew
    if not exchange:
        monkeypatch.setattr(publish, "_renameat2", lambda: None)
    number, killed = 1, True
    while killed:
        final = memory_path / str(number) / "out"
        final.parent.mkdir()
        if old:
            put(final, 1)
        child = os.fork()
        if child == 0:
            try:
                kill_before_system_call(number)
                put(final, 2, force=old)
            finally:
                os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        check_after_the_end(final, put, old=old)
        number += 1
    assert number > 10


@exchanges
@both
def test_ctrl_c_before_any_line_of_publishing_leaves_old_or_new(
    memory_path: Path, put: Publisher, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    if not exchange:
        monkeypatch.setattr(publish, "_renameat2", lambda: None)
    number, left, interrupted = 1, 0, True
    while interrupted:
        final = memory_path / str(number) / "out"
        final.parent.mkdir()
        put(final, 1)
        interrupted = interrupt_before_line(number, partial(put, final, 2, force=True))
        left += len(names(final.parent)) > 1
        check_after_the_end(final, put, old=True)
        number += 1
    assert number > 50
    assert left < number / 10, "only an interrupt within the cleanup itself may leave something"


LOOP = """
import itertools, sys
from pathlib import Path
from zendelta.checkpoint.publish import staged_file, staged_folder
print("ready", flush=True)
for number in itertools.count(2):
    force = sys.argv[3] == "force"
    final = Path(sys.argv[1], "out" if force else f"out{number}")
    if sys.argv[2] == "file":
        with staged_file(final, force=force) as file:
            file.write(f"{number} ".encode() * 1000)
    else:
        with staged_folder(final, force=force) as folder:
            (folder / "1_Pooling").mkdir()
            for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
                (folder / name).write_text(f"{number} {name} " * 50)
"""


@posix
@pytest.mark.parametrize("mode", ["force", "fresh"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_sigkill_at_random_moments_leaves_old_or_new_and_the_next_run_succeeds(
    tmp_path: Path, kind: str, mode: str
) -> None:
    put = publish_file if kind == "file" else publish_folder
    chance = random.Random(f"{kind}{mode}")
    if mode == "force":
        put(tmp_path / "out", 1)
    for _ in range(6):
        run = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path), kind, mode], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0, 0.03))
        run.kill()
        run.wait()
        run.stdout.close()
        finals = [name for name in names(tmp_path) if not name.startswith(".")]
        if mode == "force":
            assert finals == ["out"]
            assert version_of(tmp_path / "out") >= 1
            put(tmp_path / "out", 1, force=True)
            assert names(tmp_path) == ["out"]
        else:
            assert all(version_of(tmp_path / name) == int(name[3:]) for name in finals)
            number = len(finals) + 2
            for again in (number - 1, number):  # the kill may have come before or after the last one was named
                try:
                    put(tmp_path / f"out{again}", again)
                except UsageError as refused:
                    assert "exists already" in refused.message
            assert all(name.startswith("out") for name in names(tmp_path))
            for name in names(tmp_path):
                assert version_of(tmp_path / name) == int(name[3:])
                shutil.rmtree(tmp_path / name) if kind == "folder" else (tmp_path / name).unlink()
