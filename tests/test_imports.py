"""What is imported when: nothing heavy for help, and the public names on their first use."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import make_pair

import zendelta

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numba", "llvmlite", "transformers", "accelerate")

BLOCKED = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, Blocker())
from zendelta.__main__ import main
sys.exit(main())
"""


def a_delta(folder: Path) -> Path:
    """A .bd file of a tiny pair."""
    pair = make_pair(folder)
    zendelta.compress(pair.base, pair.finetuned, folder / "a.bd")
    return folder / "a.bd"


# Calls that must do without the heavy packages: a name, and the arguments, which may make files in a folder.
LIGHT_CALLS: dict[str, Callable[[Path], list[str]]] = {
    "no arguments": lambda folder: [],
    "help": lambda folder: ["--help"],
    "inspect": lambda folder: ["inspect", str(a_delta(folder)), "--tensors"],
}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("call", LIGHT_CALLS)
def test_the_calls_that_need_no_arithmetic_import_nothing_heavy(call: str, tmp_path: Path) -> None:
    done = python(BLOCKED, *LIGHT_CALLS[call](tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_verb_shows_its_help_without_the_heavy_packages() -> None:
    from zendelta.cli.app import VERBS

    for module, _ in VERBS:
        verb = module.rpartition(".")[2].replace("_", "-")
        done = python(BLOCKED, verb, "--help")
        assert done.returncode == 0, done.stderr


def test_the_version_of_a_torch_that_cannot_be_imported_is_still_told() -> None:
    done = python(BLOCKED, "--version")
    assert done.returncode == 0, done.stderr
    assert f"zendelta {zendelta.__version__}" in done.stdout
    assert "torch" in done.stdout


def test_importing_the_package_and_its_light_modules_imports_nothing_heavy() -> None:
    light = ("zendelta", "zendelta.errors", "zendelta.checkpoint", "zendelta.bdfile", "zendelta.cli.run")
    modules = [name for name in light if importlib.util.find_spec(name) is not None]
    done = python(f"import sys, {', '.join(modules)}; print(*(name for name in {HEAVY} if name in sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("call", ["help", "inspect"])
def test_help_and_inspect_are_done_before_torch_alone_would_be_there(call: str, tmp_path: Path) -> None:
    def seconds(code: str, *arguments: str) -> float:
        start = time.perf_counter()
        done = python(code, *arguments)
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - start

    run = "import sys; from zendelta.__main__ import main; sys.exit(main())"
    arguments = LIGHT_CALLS[call](tmp_path)
    assert min(seconds(run, *arguments) for _ in range(3)) < 0.7 * seconds("import torch")


def test_the_public_names_are_written_down_three_times_alike() -> None:
    tree = ast.parse((ROOT / "zendelta" / "__init__.py").read_text(encoding="utf-8"))
    for_checkers = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_checkers == zendelta._HOMES
    assert set(zendelta.__all__) == {"__version__", *zendelta._HOMES}
    assert set(zendelta.__all__) <= set(dir(zendelta))


@pytest.mark.parametrize("name", sorted(zendelta._HOMES))
def test_every_public_name_is_found_on_first_use_and_documented(name: str) -> None:
    value = getattr(zendelta, name)
    assert value.__module__ == f"zendelta.{zendelta._HOMES[name]}"
    assert value.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = zendelta.nonsense
    assert not hasattr(zendelta, "nonsense")
