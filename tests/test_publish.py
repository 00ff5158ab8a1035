"""Staged outputs: whole or not at all, whatever happens and whenever; and what is never written over."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zendelta.checkpoint import publish
from zendelta.checkpoint.publish import check_output, refuse_overlap, staged_file, staged_folder
from zendelta.errors import MachineError, UsageError

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name != "posix", reason="needs fork, signals and limits")


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import zendelta."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def model(folder: Path, version: int, *more: str) -> Path:
    """A stand-in for a model folder, whose files all tell its version."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json", *more):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{version} {name} " * 50)
    return folder


def publish_folder(final: Path, version: int, *, force: bool = False) -> None:
    with staged_folder(final, force=force) as folder:
        model(folder, version)


def publish_file(final: Path, version: int, *, force: bool = False) -> None:
    with staged_file(final, force=force) as file:
        file.write(f"{version} ".encode() * 1000)


def version_of(final: Path) -> int:
    """The version of a complete output; anything incomplete or mixed fails."""
    if final.is_file():
        words = final.read_text().split()
        assert len(words) == 1000
        assert len(set(words)) == 1
        return int(words[0])
    files = {file.relative_to(final).as_posix(): file.read_text() for file in final.rglob("*") if file.is_file()}
    version = int(files["config.json"].split()[0])
    extra = [name for name in files if name.startswith("model-")]
    assert files == {
        name: f"{version} {name} " * 50
        for name in ("config.json", "model.safetensors", "1_Pooling/config.json", *extra)
    }
    return version


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


Publisher = Callable[..., None]
both = pytest.mark.parametrize("put", [publish_file, publish_folder], ids=["file", "folder"])


# The plain ways


@both
def test_an_output_appears_only_at_the_end_and_leaves_nothing_beside_it(tmp_path: Path, put: Publisher) -> None:
    put(tmp_path / "out", 1)
    assert names(tmp_path) == ["out"]
    assert version_of(tmp_path / "out") == 1


def test_while_it_is_written_nothing_stands_under_the_final_name(tmp_path: Path) -> None:
    with staged_file(tmp_path / "x.bd") as file:
        file.write(b"abc")
        file.flush()
        assert Path(file.name).read_bytes() == b"abc"
        assert Path(file.name).parent == tmp_path
        assert not (tmp_path / "x.bd").exists()
        file.seek(0)
        file.write(b"X")
        assert os.pwrite(file.fileno(), b"Y", 2) == 1 if hasattr(os, "pwrite") else True
    assert (tmp_path / "x.bd").read_bytes() == (b"XbY" if hasattr(os, "pwrite") else b"Xbc")


def test_a_file_that_its_writer_closed_is_published_too(tmp_path: Path) -> None:
    with staged_file(tmp_path / "x.bd") as file:
        file.write(b"abc")
        file.close()
    assert (tmp_path / "x.bd").read_bytes() == b"abc"


@both
def test_an_existing_output_is_refused_with_force_as_the_hint_and_stays(tmp_path: Path, put: Publisher) -> None:
    put(tmp_path / "out", 1)
    with pytest.raises(UsageError, match="out exists already") as refused:
        put(tmp_path / "out", 2)
    assert "--force" in refused.value.hint
    assert refused.value.exit_code == 2
    assert version_of(tmp_path / "out") == 1
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
@both
def test_force_replaces_the_whole_old_output(
    tmp_path: Path, put: Publisher, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_renameat2", lambda: None)
    final = tmp_path / "out"
    if put is publish_folder:
        model(final, 1, "model-00001-of-00002.safetensors")
    else:
        put(final, 1)
    put(final, 2, force=True)
    assert version_of(final) == 2
    assert names(tmp_path) == ["out"]
    assert put is publish_file or names(final) == ["1_Pooling", "config.json", "model.safetensors"]
    put(tmp_path / "fresh", 3, force=True)
    assert version_of(tmp_path / "fresh") == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("old", [True, False])
@both
def test_any_exception_removes_the_temporary_and_keeps_the_old_output(
    tmp_path: Path, put: Publisher, old: bool, error: type[BaseException]
) -> None:
    final = tmp_path / "out"
    if old:
        put(final, 1)
    stage: Any = staged_file if put is publish_file else staged_folder
    with pytest.raises(error), stage(final, force=True) as place:
        (place / "config.json").write_text("half") if isinstance(place, Path) else place.write(b"half")
        raise error
    assert names(tmp_path) == (["out"] if old else [])
    assert not old or version_of(final) == 1


@both
def test_what_another_program_made_meanwhile_is_not_overwritten(
    tmp_path: Path, put: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (True, False):
        if not flags:
            monkeypatch.setattr(publish, "_renameat2", lambda: None)
        final = tmp_path / f"out{flags}"
        stage: Any = staged_file if put is publish_file else staged_folder
        with pytest.raises(UsageError, match="meanwhile"), stage(final):
            final.write_text("theirs") if put is publish_file else final.mkdir()
        assert final.is_dir() or final.read_text() == "theirs"
    assert names(tmp_path) == ["outFalse", "outTrue"]


def test_everything_is_flushed_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, publish._rename

    def fsync(handle: int) -> None:
        known = {os.stat(path).st_ino: path for path in (tmp_path, *tmp_path.rglob("*"))}
        events.append(known[os.fstat(handle).st_ino].name)
        real_sync(handle)

    def rename(source: Path, target: Path, flag: int) -> bool:
        events.append("rename")
        return real_rename(source, target, flag)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(publish, "_rename", rename)
    publish_folder(tmp_path / "out", 1)
    at = events.index("rename")
    assert sorted(events[:at]) == sorted(
        ["config.json", "config.json", "model.safetensors", "1_Pooling", ".out.zendelta-tmp"]
    )
    assert events[at + 1 :] == [tmp_path.name]
    events.clear()
    publish_file(tmp_path / "x.bd", 1)
    assert events == [".x.bd.zendelta-tmp", "rename", tmp_path.name]


def test_names_with_spaces_accents_and_the_longest_name_work(tmp_path: Path) -> None:
    for name in ("run+v2@best", "a b é ü", "x" * 255, "ü" * 127, ".hidden"):
        publish_file(tmp_path / name, 1)
        publish_file(tmp_path / name, 2, force=True)
        assert version_of(tmp_path / name) == 2
    assert len(names(tmp_path)) == 5
    with pytest.raises(UsageError, match="name too long") as refused:
        publish_file(tmp_path / ("x" * 256), 1)
    assert "shorter" in refused.value.hint


def test_a_relative_output_stays_where_it_was_meant_when_the_current_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for version in (1, 2):
        monkeypatch.chdir(tmp_path / "a")
        with staged_folder(Path("out"), force=True) as folder:
            model(folder, version)
            (tmp_path / "out").write_text("not meant")
            monkeypatch.chdir(tmp_path)
        assert version_of(tmp_path / "a/out") == version


def test_folders_around_a_folder_are_made_and_go_again_on_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError), staged_folder(tmp_path / "a/b/out"):
        raise ValueError
    assert names(tmp_path) == []
    publish_folder(tmp_path / "a/b/out", 1)
    assert version_of(tmp_path / "a/b/out") == 1


# What is refused


def test_a_missing_folder_around_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere") as refused:
        publish_file(tmp_path / "nowhere/x.bd", 1)
    assert "mkdir -p" in refused.value.hint
    (tmp_path / "file").write_text("")
    for put in (publish_file, publish_folder):
        with pytest.raises(UsageError, match="file is not a folder"):
            put(tmp_path / "file/out", 1)
    assert names(tmp_path) == ["file"]


def test_a_folder_where_a_file_is_meant_and_the_reverse_are_refused_even_with_force(tmp_path: Path) -> None:
    model(tmp_path / "folder", 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="folder is a folder, but the output is a file"):
        publish_file(tmp_path / "folder", 2, force=True)
    with pytest.raises(UsageError, match="file is a file, but the output is a folder"):
        publish_folder(tmp_path / "file", 2, force=True)
    if Path("/dev/null").exists():
        with pytest.raises(UsageError, match="a device"):
            publish_file(Path("/dev/null"), 1, force=True)
    for root in (Path("/"), Path("/..")):
        with pytest.raises(UsageError, match="cannot be an output"):
            publish_folder(root, 1, force=True)


@posix
@both
def test_a_link_is_neither_followed_nor_replaced(tmp_path: Path, put: Publisher) -> None:
    put(tmp_path / "target", 1)
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "nowhere").symlink_to("missing")
    for name in ("link", "nowhere"):
        with pytest.raises(UsageError, match=f"{name} is a link, to "):
            put(tmp_path / name, 2, force=True)
    assert version_of(tmp_path / "target") == 1
    assert names(tmp_path) == ["link", "nowhere", "target"]


def test_force_does_not_replace_a_folder_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.jpg").write_text("dear")
    run = model(tmp_path / "run", 1)
    model(run / "checkpoint-500", 1)
    clone = model(tmp_path / "clone", 1)
    (clone / ".git").mkdir()
    home = model(tmp_path / "home/me", 1)
    monkeypatch.setenv("HOME", str(home))
    here = model(tmp_path / "here", 1)
    monkeypatch.chdir(here)
    for folder, why in {
        photos: "not a model folder",
        run: r"also holds checkpoint-500/model\.safetensors",
        clone: "git repository",
        home: "home folder",
        home.parent: "home folder",
        Path("."): "current folder",
    }.items():
        with pytest.raises(UsageError, match=why) as refused:
            publish_folder(folder, 2, force=True)
        assert "--force replaces model folders only" in refused.value.hint
    assert (photos / "a.jpg").read_text() == "dear"
    assert names(tmp_path) == ["clone", "here", "home", "photos", "run"]
    (tmp_path / "empty").mkdir()
    publish_folder(tmp_path / "empty", 1, force=True)
    assert version_of(tmp_path / "empty") == 1


def test_a_verbs_own_folder_of_other_shape_is_replaced_if_it_holds_nothing_else(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    known = frozenset({"base", "a.bd"})
    for version in (1, 2):
        with staged_folder(demo, force=True, known=known) as folder:
            model(folder / "base", version)
    assert version_of(demo / "base") == 2
    (demo / "dear").write_text("")
    with pytest.raises(UsageError, match="not a model folder"):
        check_output(demo, folder=True, force=True, known=known)
    with pytest.raises(UsageError, match="exists already"):
        check_output(demo, folder=True, known=known)


def test_the_check_alone_touches_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a/b", folder=True)
    check_output(tmp_path / "b", folder=False)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    for put in (publish_file, publish_folder):
        with pytest.raises(MachineError, match="no permission to write"):
            put(tmp_path / "closed/out", 1)


def test_an_output_that_is_an_input_is_refused_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = model(tmp_path / "base", 1)
    weights = base / "model.safetensors"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("base")
    os.link(weights, tmp_path / "hard.bd")
    blobs = tmp_path / "hub/blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("w")
    snapshot = tmp_path / "hub/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    inside = [base / "out", base / "a/b", Path("base/../link/out"), Path("link/out.bd")]
    same = [base, Path("base"), Path("./link"), Path("link/../base"), tmp_path / "link"]
    for output, given, why in (
        *((output, base, "is the input") for output in same),
        *((output, base, "lies inside the input") for output in inside),
        (tmp_path, base, "holds the input"),
        (base, weights, "holds the input"),
        (weights, weights, "is the input"),
        (tmp_path / "hard.bd", weights, "is the input"),
        (tmp_path / "hard.bd", base, "is or holds .*model.safetensors, a part of the input"),
        (blobs, snapshot, "is or holds .*, a part of the input"),
        (blobs / "abc", snapshot, "is or holds .*, a part of the input"),
        (tmp_path / "gone", tmp_path / "x/../gone", "is the input"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            refuse_overlap(output, [Path("/not/there"), given])
        assert str(output) in refused.value.message
        assert str(given) in refused.value.message
    refuse_overlap(tmp_path / "out", [base, weights, snapshot, tmp_path / "link"])
    refuse_overlap(tmp_path / "out.bd", [tmp_path / "hard.bd"])
    refuse_overlap(tmp_path / "base2", [base])
    refuse_overlap(model(tmp_path / "old", 1), [base])


# A full disk


def test_a_full_disk_in_the_callers_own_code_is_translated_and_other_errors_are_not(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="out: No space"), staged_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), staged_file(tmp_path / "out"):
        (tmp_path / "input that is not there").read_bytes()
    assert names(tmp_path) == []


@posix
@both
def test_a_limit_on_file_sizes_in_the_middle_leaves_nothing_and_the_old_output(tmp_path: Path, put: Publisher) -> None:
    final = tmp_path / "out"
    put(final, 1)
    done = python(
        """
        import resource, sys
        from pathlib import Path
        from zendelta.checkpoint.publish import staged_file, staged_folder
        from zendelta.errors import MachineError
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        final = Path(sys.argv[1])
        try:
            if sys.argv[2] == "publish_file":
                with staged_file(final, force=True) as file:
                    file.write(bytes(9_000))
                    file.write(bytes(9_000))
            else:
                with staged_folder(final, force=True) as folder:
                    (folder / "config.json").write_bytes(bytes(20_000))
        except MachineError as error:
            print(error.exit_code, error.message, error.hint)
        """,
        final,
        put.__name__,
    )
    assert done.stdout.startswith(f"4 {final}: File too large"), done.stderr
    assert "ulimit -f" in done.stdout
    assert version_of(final) == 1
    assert names(tmp_path) == ["out"]


# Other systems


def test_it_imports_without_torch_and_numpy_and_as_on_windows(tmp_path: Path) -> None:
    done = python(
        """
        import sys
        for name in ("torch", "numpy", "numba", "fcntl"):
            sys.modules[name] = None
        import ctypes, shutil, tempfile, pathlib, hashlib, json, decimal, threading, warnings
        sys.platform = "win32"
        from pathlib import Path
        from zendelta.checkpoint import publish, sidecar, writer
        for number in (1, 2):
            with publish.staged_folder(Path(sys.argv[1], "out"), force=True) as folder:
                (folder / "config.json").write_text(str(number))
            with publish.staged_file(Path(sys.argv[1], "x.bd"), force=True) as file:
                file.write(b"x")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/config.json").read_text() == "2"
    assert names(tmp_path) == ["out", "x.bd"]
