"""What the verbs show and say to go on with, and the JSON keys that docs/cli.md promises."""

from __future__ import annotations

import dataclasses
import doctest
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Pair, Zendelta, make_pair, read_model, zendelta_process, zendelta_processes

from zendelta.bdfile import BdFile
from zendelta.cli import report, text
from zendelta.cli.app import VERBS
from zendelta.pipeline.report import TensorReport, alike

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
MODULES = [import_module(module) for module, _ in VERBS]


@pytest.fixture
def delta(pair: Pair, tmp_path: Path, zendelta: Zendelta) -> Path:
    """A .bd file of `pair`."""
    file = tmp_path / "coder.bd"
    assert zendelta("compress", pair.base, pair.finetuned, "-o", file, "--quiet").code == 0
    return file


def planned(name: str, codec: str = "sign", reason: str = "one bit per weight", raw: int = 100) -> TensorReport:
    return TensorReport(name, codec, "BF16", (8, 8), raw, raw // 10, None, None, None, reason)


def lines_of(*tensors: TensorReport) -> list[tuple[str, int]]:
    return [(line.name, line.tensors) for line in alike(tensors)]


# --- Words and numbers ----------------------------------------------------------------------------------------------


def test_the_examples_in_the_docstrings_are_true() -> None:
    found = doctest.testmod(text)
    assert found.attempted >= 5 and found.failed == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, None),
        (0.0, "none: every change is restored exactly"),
        (0.59778, "0.598 of the change's size (about 0.6 is usual at one bit)"),
        (0.8173, "0.817 of the change's size: coarse (about 0.6 is usual at one bit)"),
    ],
)
def test_an_error_is_put_into_words(error: float | None, words: str | None) -> None:
    assert report.error_words(error) == words


def test_the_ratio_without_carried_files_is_told_only_where_it_differs() -> None:
    assert report.ratio_words(14.3, 14.31, 2_000_000) == "14.30 times smaller than the fine-tune's 2 MB"
    assert report.ratio_words(4.1, 14.3, 2_000_000).endswith(", 14.30 without carried files")


def test_a_command_to_go_on_with_can_be_pasted_into_a_shell() -> None:
    line = report.command("apply", "org/base@main", Path("my model.bd"), "-o", "FOLDER", device="cuda:1", threads=2)
    assert line == "zendelta apply org/base@main 'my model.bd' -o FOLDER --device cuda:1 --threads 2"


# --- Plans ----------------------------------------------------------------------------------------------------------


def test_a_short_plan_names_every_tensor() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    assert lines_of(*map(planned, names)) == [(name, 1) for name in names]


def test_a_long_plan_takes_together_what_is_alike_and_names_exceptions() -> None:
    kept = planned("model.layers.7.mlp.up_proj.weight", "dense", "asked for with --keep")
    up = [planned(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(60) if layer != 7]
    head = planned("lm_head.weight")
    assert lines_of(head, *up, kept) == [("lm_head.weight", 1), ("mlp.up_proj.weight", 59), (kept.name, 1)]


def test_many_exceptions_are_taken_together_as_well() -> None:
    fused = [planned(f"model.layers.{layer}.mlp.up_proj.weight", "new", "not in the base") for layer in range(20)]
    up = [planned(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(20, 60)]
    assert lines_of(*fused, *up) == [("mlp.up_proj.weight", 40), ("mlp.up_proj.weight", 20)]


def test_a_dry_run_groups_by_codec_and_reason(tmp_path: Path, zendelta: Zendelta) -> None:
    def add_rows(base: dict[str, torch.Tensor], finetuned: dict[str, torch.Tensor]) -> None:
        finetuned["lm_head.weight"] = torch.cat([finetuned["lm_head.weight"]] * 2)[:99]

    pair = make_pair(tmp_path, edit=add_rows)
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--dry-run")
    out = done.out.splitlines()
    titles = [line.strip() for line in out if line.startswith(("sign", "dense:"))][:3]
    assert titles == ["sign: one bit per weight", "sign+new: 3 new rows", "dense: one-dimensional"]
    assert out[out.index(next(line for line in out if "3 new rows" in line)) + 1].startswith("  lm_head.weight")
    assert "at most" in done.out and "free" in done.out and "next:" not in done.err


@pytest.mark.parametrize("verb", ["compress", "apply"])
def test_a_plan_that_does_not_fit_on_the_disk_is_shown_and_ends_with_4(
    verb: str, pair: Pair, delta: Path, tmp_path: Path, zendelta: Zendelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    inputs = [pair.base, pair.finetuned] if verb == "compress" else [pair.base, delta]
    done = zendelta(verb, *inputs, "-o", tmp_path / "out", "--dry-run", "--json")
    assert done.code == 4
    assert done.json["free_bytes"] == 1000 < done.json["output_bytes"]
    assert done.json["error"]["kind"] == "machine"
    assert "1,000 bytes free on its disk" in done.err
    assert not (tmp_path / "out").exists()


# --- Results --------------------------------------------------------------------------------------------------------


def test_every_byte_of_the_file_is_in_the_table_by_codec(pair: Pair, delta: Path, zendelta: Zendelta) -> None:
    listed = zendelta("inspect", delta, "--json").json
    parts = [group["stored_bytes"] for group in listed["codecs"].values()]
    assert sum(parts) + listed["file_bytes"] + listed["header_bytes"] == listed["bytes"] == delta.stat().st_size
    assert "carried files" in zendelta("inspect", delta).out


def test_compress_says_how_to_go_on_in_the_user_s_own_words(pair: Pair, tmp_path: Path, zendelta: Zendelta) -> None:
    spaced = tmp_path / "my models"
    spaced.mkdir()
    base = pair.base.rename(spaced / "base")
    done = zendelta("compress", base, pair.finetuned, "-o", spaced / "a.bd", "--device", "cpu")
    lines = [line.removeprefix("next:").strip() for line in done.err.splitlines()]
    assert shlex.split(lines[0])[1:5] == ["validate", str(base), str(pair.finetuned), str(spaced / "a.bd")]
    assert shlex.split(lines[1])[1:4] == ["apply", str(base), str(spaced / "a.bd")]
    assert all(line.endswith("--device cpu") for line in lines)
    said = zendelta(*shlex.split(lines[0])[1:])
    assert said.code == 0, said.err


def test_quiet_leaves_nothing_on_stderr_where_all_is_well(pair: Pair, tmp_path: Path, zendelta: Zendelta) -> None:
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd", "--quiet")
    assert (done.code, done.err) == (0, "")


def test_names_that_share_storage_are_listed_as_aliases(pair: Pair, tmp_path: Path, zendelta: Zendelta) -> None:
    tensors = read_model(pair.finetuned)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for file in pair.finetuned.glob("model*"):
        file.unlink()
    torch.save(tensors, pair.finetuned / "pytorch_model.bin")
    done = zendelta("compress", pair.base, pair.finetuned, "-o", tmp_path / "a.bd")
    assert "aliases" in done.out and "lm_head.weight" in done.out.partition("aliases")[2]
    listed = zendelta("inspect", tmp_path / "a.bd", "--json").json
    assert set(listed["aliases"]) | set(listed["aliases"].values()) == {"lm_head.weight", "model.embed_tokens.weight"}


def test_of_many_shards_only_the_first_and_the_last_are_shown(
    pair: Pair, delta: Path, tmp_path: Path, zendelta: Zendelta
) -> None:
    line = ["apply", str(pair.base), str(delta), "-o", str(tmp_path / "out"), "--max-shard-size", "8KB", "--dry-run"]
    listed = zendelta(*line, "--json").json["files"]
    shards = [name for name in listed if name.endswith(".safetensors")]
    assert len(shards) > 8
    out = zendelta(*line).out
    assert shards[0] in out and shards[-1] in out and shards[1] not in out
    assert f"and {len(shards) - 2} more shards" in out and "tokenizer.json" in out


def test_a_narrow_terminal_breaks_names_and_no_numbers(pair: Pair, delta: Path) -> None:
    done = zendelta_process("validate", pair.base, pair.finetuned, delta, COLUMNS="60")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 60
    first = lines.index(next(line for line in lines if line.startswith("model.layers.")))
    cells = lines[first].split()
    assert cells[0].endswith(".") and len(cells) == 6 and cells[1].startswith("0.6")
    rest = "".join(line.strip() for line in lines[first + 1 : first + 3])
    assert (cells[0] + rest).startswith("model.layers.") and rest.endswith("_proj.weight")


def test_validate_tells_what_it_recomputed(pair: Pair, delta: Path, zendelta: Zendelta) -> None:
    found = zendelta("validate", pair.base, pair.finetuned, delta, "--json").json
    assert (found["signs"], found["alpha_ulps"], found["faults"]) == (1.0, 0, [])
    out = zendelta("validate", pair.base, pair.finetuned, delta, "--tensors").out
    assert all(tensor["name"] in out for tensor in found["tensors"])
    assert "100 % as in the fine-tune" in out and "passed" in out


def test_diff_takes_kinds_together_and_lists_tensors_on_demand(pair: Pair, zendelta: Zendelta) -> None:
    short, long = zendelta("diff", pair.base, pair.finetuned), zendelta("diff", pair.base, pair.finetuned, "--tensors")
    assert "model.layers.0.mlp.up_proj.weight" not in short.out and "mlp.up_proj.weight" in short.out
    assert "model.layers.0.mlp.up_proj.weight" in long.out
    assert "zendelta compress" in short.err
    listed = zendelta("diff", pair.base, pair.finetuned, "--json").json
    assert len(listed["kinds"]) == 12 < len(listed["tensors"])
    assert "zendelta compress" not in zendelta("diff", pair.base, pair.base).err


# --- JSON and help --------------------------------------------------------------------------------------------------


def test_the_json_objects_have_exactly_the_documented_keys(
    pair: Pair, delta: Path, tmp_path: Path, zendelta: Zendelta
) -> None:
    base, finetuned, file, out = map(str, (pair.base, pair.finetuned, delta, tmp_path / "out"))
    calls = {
        "compress": [base, finetuned, "-o", f"{out}.bd"],
        "apply": [base, file, "-o", out],
        "inspect": [file],
        "validate": [base, finetuned, file],
        "diff": [base, finetuned],
    }
    for verb, arguments in calls.items():
        done = zendelta(verb, *arguments, "--json")
        section = PAGE.partition(f"## zendelta {verb}\n")[2].partition("\n## ")[0]
        table = section.partition("`--json` prints:")[2].lstrip().partition("\n\n")[0]
        documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
        assert set(done.json) == {"schema_version", *documented}, verb
        for key in ("tensors", "kinds", "layers"):
            for item in done.json.get(key, []) if isinstance(done.json.get(key), list) else []:
                assert all(f"| `{name}` |" in PAGE for name in item), (verb, key)


def test_every_verb_names_the_report_that_its_json_is() -> None:
    for module in MODULES:
        place, _, name = module.REPORT.rpartition(".")
        assert dataclasses.is_dataclass(getattr(import_module(place), name))


@pytest.mark.parametrize("width", ["80", "120"])
def test_help_groups_its_options_and_ends_in_examples_that_fit_on_a_line(width: str) -> None:
    for module in MODULES:
        verb = module.__name__.rpartition(".")[2]
        out = zendelta_process(verb, "-h", COLUMNS=width).out
        lines = [line.strip() for line in out.splitlines() if line.strip()]
        assert lines[-len(module.EXAMPLES) :] == module.EXAMPLES, verb
        panels = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
        known = [name for name in ("Input", "Method", "Output", "Performance") if name in panels]
        assert [name for name in panels if name != "Options"] == known, verb


def test_the_examples_in_the_help_run_as_printed(tmp_path: Path) -> None:
    make_pair(tmp_path, names=("base", "ft"))
    for name, target in (("base", "base"), ("base@main", "base"), ("coder@main", "ft")):
        (tmp_path / "org").mkdir(exist_ok=True)
        (tmp_path / "org" / name).symlink_to(tmp_path / target)  # a path wins over a hub id
    made = {"compress": "coder.bd", "apply": "restored"}
    for module in MODULES:
        for example in module.EXAMPLES:
            words = shlex.split(example, comments=True)
            if words[:2] == ["zendelta", "demo"] or words[0] == "accelerate":
                continue
            output = tmp_path / made.get(words[1], "nothing")
            if output.is_dir():
                shutil.rmtree(output)
            output.unlink(missing_ok=True)
            done = zendelta_process(*words[1:], cwd=tmp_path, HF_HUB_OFFLINE="1")
            assert done.code == 0, f"{example}\n{done.err}"
            assert output.exists() == (words[1] in made and "--dry-run" not in words), example


# --- Several processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_tells_a_damage_that_any_of_them_finds(
    rank: int, pair: Pair, delta: Path
) -> None:
    file = BdFile.open(delta)
    names = sorted(file.content.tensors)
    name = next(name for name in names[rank::2] if file.content.tensors[name].terms)  # of this process's share
    at = file.arrays[next(file.payload_arrays(name))].offset
    content = bytearray(delta.read_bytes())
    content[at] ^= 1
    delta.write_bytes(content)
    first, second = zendelta_processes("validate", pair.base, pair.finetuned, delta, "--json", "--device", "cpu")
    assert (first.code, second.code) == (3, 3)
    assert first.json["error"]["kind"] == "input"
    assert f"the arrays of {name} are damaged" in first.json["error"]["message"]
    assert second.out == "" and "damaged" not in second.err


@pytest.mark.slow
def test_of_several_processes_all_exit_with_1_over_the_threshold_and_one_tells(pair: Pair, delta: Path) -> None:
    line = ["validate", pair.base, pair.finetuned, delta, "--json", "--device", "cpu", "--max-error", "0.1"]
    first, second = zendelta_processes(*line)
    assert (first.code, second.code) == (1, 1)
    assert first.json["passed"] is False and first.json["error"]["kind"] == "check"
    assert "over the threshold of 0.1" in first.err
    assert second.out == "" and "threshold" not in second.err


# --- The demo -------------------------------------------------------------------------------------------------------


def test_the_demo_refuses_what_is_there_and_with_force_what_is_no_demo(
    pair: Pair, tmp_path: Path, zendelta: Zendelta
) -> None:
    done = zendelta("demo", "-o", tmp_path)
    assert done.code == 2 and "exists already" in done.err
    done = zendelta("demo", "-o", pair.base, "--force")
    assert done.code == 2 and "holds more than an earlier demo" in done.err
    assert (pair.base / "config.json").exists()


@pytest.mark.slow
def test_the_demo_shows_its_table_and_commands_that_run(
    tmp_path: Path, zendelta: Zendelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zendelta.demo import run

    whole = run.run_demo
    monkeypatch.setattr(run, "run_demo", lambda folder, **more: whole(folder, steps=(4, 3), **more))
    monkeypatch.setattr(run, "perplexity", lambda checkpoint, text: 12.3)  # takes longer than all else here
    monkeypatch.chdir(tmp_path)
    done = zendelta("demo")
    assert done.code == 0, done.err
    assert "base + .bd file" in done.out and "times smaller" in done.out
    assert "fine-tune: step 3 of 3" in done.err
    commands = [line.strip() for line in done.out.splitlines() if line.startswith("  zendelta ")]
    assert [shlex.split(command)[1] for command in commands] == ["diff", "inspect", "validate", "apply"]
    for command in commands:
        assert zendelta(*shlex.split(command)[1:]).code == 0, command
    again = zendelta("demo", "--force", "--json", "--quiet")
    assert again.code == 0 and again.err == ""
    assert again.json["ratio"] > 10 and set(again.json["perplexities"]) == {"base", "finetuned", "restored"}
