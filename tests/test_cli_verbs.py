"""Every verb through its command line: what it prints, how it ends, and that --json is one clean object."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Pair, Zendelta, make_pair, read_model, zendelta_process, zendelta_processes

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def delta(pair: Pair, tmp_path: Path, zendelta: Zendelta) -> Path:
    """A .bd file of `pair`."""
    file = tmp_path / "coder.bd"
    assert zendelta("compress", pair.base, pair.finetuned, "-o", file, "--quiet").code == 0
    return file


def test_compress_says_how_small_and_how_good_the_file_is(pair: Pair, tmp_path: Path, zendelta: Zendelta):
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd")
    assert done.code == 0
    size = (tmp_path / "a.bd").stat().st_size
    raw = sum(tensor.nbytes for tensor in read_model(pair.finetuned).values())
    assert f"{raw / size:.2f} times smaller" in done.out
    assert "error" in done.out and "worst" in done.out
    assert f"zendelta validate {pair.base} {pair.finetuned} {tmp_path / 'a.bd'}" in done.err


def test_compress_json_is_one_object_with_every_tensor(pair: Pair, tmp_path: Path, zendelta: Zendelta):
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--json")
    assert done.json["schema_version"] == 1
    assert done.json["output_bytes"] == (tmp_path / "a.bd").stat().st_size
    assert {tensor["name"] for tensor in done.json["tensors"]} == set(read_model(pair.finetuned))
    assert 0.5 < done.json["error"] < 0.7


def test_dry_run_shows_the_plan_and_writes_nothing(pair: Pair, tmp_path: Path, zendelta: Zendelta):
    before = sorted(tmp_path.rglob("*"))
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--dry-run")
    assert done.code == 0 and "one-dimensional" in done.out and "one bit per weight" in done.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_never_promises_less_than_the_file_takes(pair: Pair, tmp_path: Path, zendelta: Zendelta):
    planned = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--dry-run", "--json").json
    made = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--json").json
    assert made["output_bytes"] <= planned["output_bytes"] < 1.2 * made["output_bytes"]


def test_keep_stores_the_named_tensors_exactly(pair: Pair, tmp_path: Path, zendelta: Zendelta):
    file, out = tmp_path / "a.bd", tmp_path / "out"
    zendelta("compress", pair.base, pair.finetuned, "-o", file, "--keep", "*.q_proj.weight=dense")
    zendelta("apply", pair.base, file, "-o", out)
    restored, finetuned = read_model(out), read_model(pair.finetuned)
    equal = {name for name in finetuned if torch.equal(restored[name], finetuned[name])}
    assert {name for name in finetuned if "q_proj" in name} <= equal
    assert not any("v_proj" in name for name in equal)


def test_inspect_shows_layers_kinds_and_on_demand_every_tensor(delta: Path, pair: Pair, zendelta: Zendelta):
    short, long = zendelta("inspect", delta), zendelta("inspect", delta, "--tensors")
    assert short.code == 0 and "model.layers.1" in short.out and "mlp.down_proj.weight" in short.out
    assert all(name in long.out for name in read_model(pair.finetuned))
    listed = zendelta("inspect", delta, "--json").json
    assert listed["base"]["name"] == "base" and len(listed["layers"]) == 3


def test_validate_passes_and_fails_by_its_threshold(pair: Pair, delta: Path, zendelta: Zendelta):
    done = zendelta("validate", pair.base, pair.finetuned, delta, "--max-error", "0.9")
    assert done.code == 0 and "passed" in done.out
    done = zendelta("validate", pair.base, pair.finetuned, delta, "--max-error", "0.1", "--json")
    assert done.code == 1
    assert done.json["error"]["kind"] == "check" and len(done.json["tensors"]) > 5


def test_validate_with_another_fine_tune_exits_with_1_and_says_so_briefly(pair: Pair, delta: Path, tmp_path: Path):
    other = make_pair(tmp_path / "other", change=5e-3)
    done = zendelta_process("validate", pair.base, other.finetuned, delta)
    assert done.code == 1
    assert "does not agree with the models" in done.err
    assert len(done.out.splitlines()) < 60


def test_rounding_that_swallows_the_change_is_said_with_the_way_out(tmp_path: Path, zendelta: Zendelta):
    tiny = make_pair(tmp_path, change=3e-5)
    zendelta("compress", tiny.base, tiny.finetuned, "-o", tmp_path / "a.bd")
    done = zendelta("validate", tiny.base, tiny.finetuned, tmp_path / "a.bd")
    assert "--dtype float32" in done.err


def test_apply_lists_its_files_and_takes_another_dtype(pair: Pair, delta: Path, tmp_path: Path, zendelta: Zendelta):
    done = zendelta("apply", pair.base, delta, "-o", tmp_path / "out", "--dtype", "float32", "--json")
    assert done.code == 0
    files = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert done.json["files"] == files
    assert {tensor.dtype for tensor in read_model(tmp_path / "out").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_apply_dry_run_writes_nothing(pair: Pair, delta: Path, tmp_path: Path, zendelta: Zendelta):
    done = zendelta("apply", pair.base, delta, "-o", tmp_path / "out", "--dry-run")
    assert done.code == 0 and "model.safetensors" in done.out and not (tmp_path / "out").exists()


def test_diff_gives_a_verdict(pair: Pair, zendelta: Zendelta):
    done = zendelta("diff", pair.base, pair.finetuned)
    assert done.code == 0 and "ordinary" in done.out
    assert zendelta("diff", pair.base, pair.base, "--json").json["verdict"] == "nothing changed"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["compress", "{base}", "{nowhere}", "-o", "{out}"], 3, "nowhere"),
        (["compress", "{base}", "{finetuned}"], 2, "--output"),
        (["compress", "{base}", "{finetuned}", "-o", "{finetuned}/a.bd"], 2, "inside the input"),
        (["compress", "{base}", "{finetuned}", "-o", "{delta}"], 2, "--force"),
        (["compress", "{base}", "{finetuned}", "-o", "{out}", "--keep", "nothing*=dense"], 2, "matches no tensor"),
        (["compress", "{base}", "{finetuned}", "-o", "{out}", "--alpha", "column"], 2, "column"),
        (["compress", "{base}", "{finetuned}", "-o", "{out}", "--device", "cuda:99"], 4, "cuda:99"),
        (["inspect", "{base}/model.safetensors.index.json"], 3, "safetensors"),
        (["inspect", "{nowhere}"], 3, "nowhere"),
        (["validate", "{finetuned}", "{base}", "{delta}"], 3, "not the base"),
        (["apply", "{finetuned}", "{delta}", "-o", "{out}"], 3, "not the base"),
        (["apply", "{base}", "{delta}", "-o", "{base}"], 2, "is the input"),
        (["apply", "{base}", "{delta}", "-o", "{out}", "--max-shard-size", "much"], 2, "much"),
        (["diff", "{base}"], 2, "FT"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_what_is_wrong_ends_with_its_code_and_two_lines(
    arguments: list[str],
    code: int,
    said: str,
    as_json: bool,
    pair: Pair,
    delta: Path,
    tmp_path: Path,
    zendelta: Zendelta,
):
    places = {
        "base": pair.base, "finetuned": pair.finetuned, "delta": delta, "out": tmp_path / "out",
        "nowhere": tmp_path / "nowhere",
    }  # fmt: skip
    done = zendelta(*(argument.format(**places) for argument in arguments), *(["--json"] if as_json else []))
    assert done.code == code, done.err
    assert said in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
    if as_json:
        assert done.json["error"]["message"] and done.json["error"]["kind"]
    else:
        assert done.out == "" and "hint: " in done.err


def test_the_readme_s_commands_run_as_written(pair: Pair, tmp_path: Path):
    commands = re.findall(r"^zendelta [a-z]+ .*?(?=\s+#|$)", README, re.MULTILINE)
    assert [shlex.split(command)[1] for command in commands] == ["diff", "compress", "inspect", "validate", "apply"]
    (tmp_path / "ft").symlink_to(pair.finetuned)
    for command in commands:
        done = zendelta_process(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.code == 0, f"{command}\n{done.err}"
    assert read_model(tmp_path / "restored").keys() == read_model(pair.finetuned).keys()


def test_the_readme_s_python_runs_as_written(pair: Pair, tmp_path: Path):
    (tmp_path / "ft").symlink_to(pair.finetuned)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code[1]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "restored" / "config.json").exists()


@pytest.mark.slow
def test_two_processes_of_a_launcher_find_what_one_does(pair: Pair, delta: Path, tmp_path: Path):
    # accelerate launch hands these variables to one process for each GPU; here two processes share the CPU
    alone = zendelta_process("validate", pair.base, pair.finetuned, delta, "--json", "--device", "cpu").json
    first, second = zendelta_processes("validate", pair.base, pair.finetuned, delta, "--json", "--device", "cpu")
    assert (first.code, second.code) == (0, 0) and second.out == ""
    together = first.json
    assert together.pop("processes") == 2 and alone.pop("processes") == 1
    assert together == alone


@pytest.mark.slow
def test_the_demo_trains_compresses_and_comes_close_to_the_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from zendelta.demo.run import run_demo

    report = run_demo(tmp_path / "demo", steps=(30, 20))
    known = {name: value["finetuned_text"] for name, value in report.perplexities.items()}
    assert known["finetuned"] < known["restored"] < known["base"]
    assert report.validated and report.ratio > 10
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"base", "finetuned", "finetuned.bd", "restored"}
