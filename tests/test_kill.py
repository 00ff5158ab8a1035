"""Every writing verb is killed, interrupted, and starved of space, at many moments; then the same command is run again.

Whatever the moment: under the final name stands nothing, or the complete old output, or the complete new one. Ctrl-C,
SIGTERM and a full disk also leave no temporary; a kill does, until the next run, which succeeds and writes the bytes of
an undisturbed run. Each run is a child of its own, forked from here so that hundreds of them take seconds.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ROOT, write_model

from zendelta.checkpoint import disk
from zendelta.cli.run import run

resource = pytest.importorskip("resource", reason="limits and signals are Unix's")
pytestmark = pytest.mark.slow

MOMENTS = int(os.environ.get("ZENDELTA_MOMENTS", "8"))
"""How many moments each case is tried at; 15 and 60 were tried when this was written."""

Content = dict[str, bytes]


def content(path: Path) -> Content | None:
    """Every file of an output, or the file that it is; None where there is nothing."""
    if path.is_file():
        return {"": path.read_bytes()}
    if not path.is_dir():
        return None
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@dataclass
class Verb:
    """A command that writes, what it writes undisturbed, and an older output to be replaced.

    `place` is the folder of the output, with nothing else in it.
    """

    name: str
    arguments: list[str]
    old: Path
    wanted: Content = field(default_factory=dict)

    def line(self, place: Path, *, force: bool) -> list[str]:
        return [self.name, *self.arguments, "-o", str(place / "out"), "--quiet", *(["--force"] if force else [])]

    def prepare(self, place: Path, *, force: bool) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if force:
            (shutil.copytree if self.old.is_dir() else shutil.copy)(self.old, place / "out")

    def check(self, place: Path, *, force: bool) -> str:
        """Return which output stands under the final name: "none", "old" or "new"; it must be complete."""
        found = content(place / "out")
        if found is None:
            assert not force or content(place / ".out.zendelta-old") == content(self.old)
            return "none"
        if found == self.wanted:
            return "new"
        assert force
        assert found == content(self.old)
        return "old"

    def again(self, place: Path, *, force: bool) -> None:
        """Run the same command undisturbed; what stands then is right and alone."""
        code = in_child(self.line(place, force=force or content(place / "out") is not None)).wait()
        assert code == 0
        assert content(place / "out") == self.wanted
        assert [file.name for file in place.iterdir()] == ["out"]


@dataclass
class Child:
    """A run of the command line in a forked process."""

    pid: int
    started: float

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


def in_child(arguments: list[str], before: Callable[[], None] = lambda: None) -> Child:
    """Start a run; returns when it is about to begin."""
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (pytest's go elsewhere)
            before()
            os.write(begun, b".")
            code = run(arguments)
        except KeyboardInterrupt:  # as __main__ has it
            code = 130
        finally:
            os._exit(code)
    os.close(begun)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    return Child(pid, time.monotonic())


def slowly() -> None:
    """Let everything that writes take its time, so that a moment in between can be met."""

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_do(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.001)
            done = real(*arguments, **options)
            time.sleep(0.001)
            return done

        return wait_and_do

    for name in ("pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "open"):
        setattr(os, name, slow(getattr(os, name)))


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verb]:
    folder = tmp_path_factory.mktemp("kill")
    draw = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.weight": torch.randn(512, 1000, generator=draw).bfloat16() for i in range(4)}
    base["norm.weight"] = torch.randn(200_000, generator=draw)
    ft = {name: value + 0.01 * torch.randn(value.shape, generator=draw).to(value.dtype) for name, value in base.items()}
    write_model(folder / "base", base, config={"model_type": "x"}, shards=2)
    write_model(folder / "ft", ft, config={"model_type": "x"}, files={"README.md": "tuned"})
    pair = [str(folder / "base"), str(folder / "ft")]
    compress = Verb("compress", [*pair, "--threads", "2"], folder / "old.bd")
    delta = str(folder / "new.bd")
    apply = Verb("apply", [pair[0], delta, "--threads", "2", "--max-shard-size", "1MB"], folder / "old")
    assert run(["compress", *pair, "-o", str(compress.old), "--alpha", "matrix", "--quiet"]) == 0
    assert run(["compress", *pair, "-o", delta, "--quiet"]) == 0
    assert run(["apply", pair[0], str(compress.old), "-o", str(apply.old), "--quiet"]) == 0
    assert run(["apply", pair[0], delta, "-o", str(folder / "new"), "--max-shard-size", "1MB", "--quiet"]) == 0
    for verb, made in ((compress, Path(delta)), (apply, folder / "new")):
        verb.wanted = content(made) or {}
        assert verb.wanted != content(verb.old)
    return {"compress": compress, "apply": apply}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the outputs go: on a disk in memory where there is one, for the moments there are as good as any."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder) / "place"


each = pytest.mark.parametrize("force", [False, True], ids=["fresh", "force"])
each_verb = pytest.mark.parametrize("name", ["compress", "apply"])

SIGNALS = {
    "SIGKILL": [signal.SIGKILL],
    "SIGINT": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
}


@each
@each_verb
@pytest.mark.parametrize("how", SIGNALS)
def test_a_run_that_is_stopped_at_any_moment_leaves_nothing_half_made(
    verbs: dict[str, Verb], name: str, force: bool, how: str, place: Path
) -> None:
    verb, numbers = verbs[name], SIGNALS[how]
    chance = random.Random(f"{name} {force} {how}")
    verb.prepare(place, force=force)
    child = in_child(verb.line(place, force=force), slowly)
    assert child.wait() == 0
    whole, stopped, found = time.monotonic() - child.started, 0, []
    for _ in range(MOMENTS):
        verb.prepare(place, force=force)
        child = in_child(verb.line(place, force=force), slowly)
        time.sleep(chance.uniform(0, whole))
        for number in numbers:
            child.send(number)
            time.sleep(chance.uniform(0, 0.004) if len(numbers) > 1 else 0)
        code = child.wait()
        ends = {0, -numbers[0]} if numbers[0] in (signal.SIGKILL, signal.SIGTERM) else {0}
        assert code in ends | ({128 + numbers[0]} if numbers[0] != signal.SIGKILL else set())
        stopped += code != 0
        found.append(verb.check(place, force=force))
        if code == 0:
            assert found[-1] == "new"
        if code == 128 + numbers[0] and len(numbers) == 1:
            assert {file.name for file in place.iterdir()} <= {"out"}, "Ctrl-C and SIGTERM clean up"
        verb.again(place, force=force)
    assert stopped >= MOMENTS // 4, found
    assert {"old" if force else "none"} <= set(found)


@each
@each_verb
def test_a_limit_on_file_sizes_met_anywhere_ends_in_exit_code_4_and_nothing_else(
    verbs: dict[str, Verb], name: str, force: bool, place: Path
) -> None:
    verb = verbs[name]
    chance = random.Random(f"{name} {force}")
    largest = max(map(len, verb.wanted.values()))
    for level in [0, 1, largest - 1, *(chance.randrange(largest) for _ in range(MOMENTS - 3))]:

        def limit(level: int = level) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (level, level))

        verb.prepare(place, force=force)
        assert in_child(verb.line(place, force=force), limit).wait() == 4
        assert verb.check(place, force=force) == ("old" if force else "none")
        assert {file.name for file in place.iterdir()} <= {"out"}
        verb.again(place, force=force)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here; the limit on file sizes is tested all the same")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def believe_in_space() -> None:
    """As if others had filled the disk only after it was asked for its free space."""
    mock.patch.object(disk, "free_bytes", lambda folder: 10**15).start()


@each
@each_verb
@pytest.mark.parametrize("seen", ["before", "during"])
def test_a_full_disk_met_anywhere_ends_in_exit_code_4_and_nothing_else(
    verbs: dict[str, Verb], name: str, force: bool, seen: str, small_disk: Path
) -> None:
    verb, place, filler = verbs[name], small_disk / "place", small_disk / "filler"
    chance = random.Random(f"{name} {force} {seen}")
    size = sum(map(len, verb.wanted.values()))
    for left in [4096, *(chance.randrange(size - 8192) for _ in range(MOMENTS // 2))]:
        verb.prepare(place, force=force)
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(free - left))
        before = believe_in_space if seen == "during" else lambda: None
        code = in_child(verb.line(place, force=force), before).wait()
        assert code == 4
        assert verb.check(place, force=force) == ("old" if force else "none")
        assert {file.name for file in place.iterdir()} <= {"out"}
        filler.unlink()
        verb.again(place, force=force)


@each_verb
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_program_itself_ends_as_documented_when_it_is_stopped(
    verbs: dict[str, Verb], name: str, number: signal.Signals, place: Path
) -> None:
    verb = verbs[name]
    verb.prepare(place, force=False)
    program = [sys.executable, "-m", "zendelta", *verb.line(place, force=False)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(5):  # until it is met at work
        with subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
            while running.poll() is None and not any(place.iterdir()):
                time.sleep(0.0005)
            running.send_signal(number)
            _, said = running.communicate()
        if running.returncode != 0:
            break
        verb.prepare(place, force=False)
    assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert verb.check(place, force=False) in ("none", "new")
    if number != signal.SIGKILL:
        assert b"Traceback" not in said
        assert {file.name for file in place.iterdir()} <= {"out"}
    verb.again(place, force=False)
