"""The scripts for people who have nothing installed yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for bash")


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def pretended_python(folder: Path, body: str) -> str:
    """A `python` that behaves as a few lines of bash say, and like this one in everything else."""
    path = folder / "python"
    path.write_text(f'#!/usr/bin/env bash\n{body}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_demo_script_explains_itself() -> None:
    done = script("demo", "--help")
    assert done.returncode == 0
    assert "--torch SPEC" in done.stdout and done.stderr == ""


def test_the_demo_script_refuses_an_old_python(tmp_path: Path) -> None:
    old = pretended_python(
        tmp_path, 'case "$*" in *version_info*) exit 1 ;; --version) echo Python 3.8.1; exit ;; esac'
    )
    done = script("demo", "--env", str(tmp_path / "env"), PYTHON=old)
    assert done.returncode == 4
    assert done.stderr.startswith("error: Python 3.10 or newer is needed, and there is Python 3.8.1 here\nhint: ")


def test_the_demo_script_names_a_python_that_is_not_there(tmp_path: Path) -> None:
    done = script("demo", "--env", str(tmp_path / "env"), PYTHON="python-of-nobody")
    assert done.returncode == 4
    assert "there is no python-of-nobody here" in done.stderr


def test_the_demo_script_says_which_package_brings_venv(tmp_path: Path) -> None:
    bare = pretended_python(tmp_path, 'case "$*" in *ensurepip*) exit 1 ;; esac')
    done = script("demo", "--env", str(tmp_path / "env"), PYTHON=bare)
    assert done.returncode == 4
    assert "lacks venv or ensurepip" in done.stderr
    assert f"apt install python3.{sys.version_info.minor}-venv" in done.stderr


def test_the_demo_script_leaves_a_folder_alone_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = script("demo", "--env", str(tmp_path), "--torch", "torch==2.13.0", PYTHON=sys.executable)
    assert done.returncode == 2
    assert "scripts/demo did not make it" in done.stderr
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_demo_script_starts_at_once_when_the_environment_is_there(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "zendelta"
    program.parent.mkdir()
    program.write_text('#!/usr/bin/env bash\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    checksum = subprocess.run(["cksum"], stdin=(ROOT / "pyproject.toml").open(), capture_output=True, text=True).stdout
    (tmp_path / "made-by-zendelta-demo").write_text(f"{checksum.strip()} {ROOT}\n\n")
    done = script("demo", f"--env={tmp_path}", "--seed", "1", "--", "--help", "a b", PYTHON="python-of-nobody")
    assert done.stdout == "<demo><--seed><1><--help><a b>"


def test_the_test_script_refuses_an_old_python(tmp_path: Path) -> None:
    old = pretended_python(
        tmp_path, 'case "$*" in *version_info*) exit 1 ;; --version) echo Python 3.8.1; exit ;; esac'
    )
    done = script("test", PYTHON=old)
    assert done.returncode == 4
    assert done.stderr.startswith("error: Python 3.8.1 is too old\nhint: ")
