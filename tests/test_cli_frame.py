"""The frame of the command line, tried through one verb that fails as asked: tests/frame_probe.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zendelta.cli.app import VERBS, build
from zendelta.cli.run import EXIT_CODES, run

ROOT = Path(__file__).parents[1]
PROBE = [sys.executable, str(ROOT / "tests" / "frame_probe.py"), "frame-probe"]
unix = pytest.mark.skipif(os.name == "nt", reason="signals and terminals as Unix has them")


def probe(*arguments: str) -> int:
    """Run the verb in this process."""
    return run(["frame-probe", "model", *arguments], build([("frame_probe", "Test")]))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


def on_a_terminal(command: list[str], stdout_too: bool = True, **more: str) -> str:
    """What a command says to a terminal: on stderr, and on stdout if that is one too."""
    import pty

    ours, theirs = pty.openpty()
    stdout = theirs if stdout_too else subprocess.DEVNULL
    with subprocess.Popen(command, stdin=theirs, stdout=stdout, stderr=theirs, env=environment(**more)) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the other side is closed
                piece = b""
            if not piece:
                break
            said += piece
    os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


# --- Failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "error", "hint"),
    [
        ("check", 1, "the error is 0.5, over the threshold of 0.1", "try another codec"),
        ("usage", 2, "out.bd exists", "add --force to replace it"),
        ("input", 3, "model: 'a.weight' differs", "hand in the base that it was made from"),
        ("machine", 4, "12 bytes are free", "free some"),
        ("no space", 4, "out.bd: No space left on device", "free some space, or write to another disk"),
        ("no permission", 4, "out.bd: Permission denied", "check the permissions of that file and its folder"),
        ("vanished", 3, "model: No such file or directory", "check the path, and that nothing removes it meanwhile"),
        ("no memory", 4, "not enough memory: cannot allocate 9 GB", "close other programs, or use a larger machine"),
        ("gpu memory", 4, "the GPU's memory is full: CUDA out of memory", "free the GPU, or use --device cpu"),
        ("no package", 4, "this needs the package transformers", "pip install 'zendelta[demo]'"),
    ],
)
def test_every_kind_of_error_is_two_lines_and_an_exit_code(
    how: str, code: int, error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe("--quiet", "--fail", how) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[1:] == [f"error: {error}", f"hint: {hint}"]


def test_with_json_an_error_is_one_object_on_stdout_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--json", "--fail", "input") == 3
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "schema_version": 1,
        "error": {
            "kind": "input",
            "message": "model: 'a.weight' differs",
            "hint": "hand in the base that it was made from",
        },
    }
    assert "error: model: 'a.weight' differs" in said.err


def test_a_check_that_fails_with_its_result_prints_one_object_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--json", "--after", "--fail", "check") == 1
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["model"] == "model"
    assert printed["error"]["kind"] == "check"
    assert "error: the error is 0.5" in said.err


def test_a_check_that_fails_prints_its_table_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--after", "--fail", "check") == 1
    said = capsys.readouterr()
    assert "a.weight" in said.out
    assert said.err.endswith("error: the error is 0.5, over the threshold of 0.1\nhint: try another codec\n")


@pytest.mark.parametrize("how", ["bug", "broken pipe"])
def test_a_fault_of_ours_exits_70_and_says_how_to_report_it(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--fail", how) == 70
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: this should not happen: ")
    assert "report" in hint and "--version" in hint and "--debug" in hint


@pytest.mark.parametrize("front", [True, False])
def test_a_traceback_is_shown_only_with_debug_wherever_it_stands(
    front: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe("--fail", "bug") == 70
    assert "Traceback" not in capsys.readouterr().err
    line = ["frame-probe", "model", "--fail", "bug"]
    app = build([("frame_probe", "Test")])
    assert run(["--debug", *line] if front else [*line, "--debug"], app) == 70
    said = capsys.readouterr()
    assert "Traceback" in said.err and "ZeroDivisionError: division by zero" in said.err
    assert said.out == ""


def test_the_environment_asks_for_tracebacks_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENDELTA_DEBUG", "0")
    assert probe("--fail", "input") == 3
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("ZENDELTA_DEBUG", "1")
    assert probe("--fail", "input") == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "error", "verb"),
    [
        (["frame-probe"], "missing argument 'MODEL'", " frame-probe"),
        (["frame-probe", "model", "--nonsense"], "no such option", " frame-probe"),
        (["frame-probe", "model", "--threads", "0"], "invalid value for '--threads'", " frame-probe"),
        (["frame-probe", "model", "--device", "tpu"], "'tpu' is not one of auto, cpu, cuda", " frame-probe"),
        (["frame-probe", "model", "--dtype", "int8"], "'int8' is not one of float32, bfloat16", " frame-probe"),
        (["frobe"], "no such command 'frobe'", ""),
    ],
)
def test_a_wrong_call_is_two_lines_and_exits_2(
    line: list[str], error: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line, build([("frame_probe", "Test")])) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith("error: ") and error in first
    assert second == f"hint: see 'zendelta{verb} --help'"
    assert said.out == ""


def test_a_wrong_call_with_json_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--nonsense", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "usage"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_the_devices_that_the_help_names_are_taken(device: str) -> None:
    assert probe("--device", device) == 0


# --- Signals and closed pipes ---------------------------------------------------------------------------------------


def test_an_interrupt_within_the_work_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--json", "--fail", "interrupt") == 130
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "interrupted"


@unix
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_lets_the_clean_up_run_and_exits_with_its_own_code(name: str, code: int, tmp_path: Path) -> None:
    number = getattr(signal, name)
    half_made = tmp_path / "half-made"
    command = [*PROBE, "model", "--hang", str(half_made)]
    # A test run that was put into the background ignores SIGINT, and its children would too.
    heed = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    ) as process:
        wait_for(half_made.exists)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert not half_made.exists()
    assert out == ""
    assert err.endswith(f"error: stopped by {name}\n")
    assert "swallowed" not in err and "Traceback" not in err


@unix
def test_a_reader_who_leaves_is_no_error_worth_a_word() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*PROBE, "model", "--quiet"], env=environment(), stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert done.returncode == 141
    assert done.stderr == b"warning: a warning\n"


@unix
def test_a_stderr_that_nobody_reads_does_not_stop_the_work() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*PROBE, "model"], env=environment(), stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert done.returncode == 0
    assert b"a.weight" in done.stdout


# --- Results --------------------------------------------------------------------------------------------------------


def test_the_result_goes_to_stdout_and_everything_else_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe() == 0
    said = capsys.readouterr()
    assert said.err == "a note\nwarning: a warning\n"
    assert said.out.startswith("model model\n")
    assert re.search(r"a\.weight +12,345", said.out)
    assert "[tensors]" in said.out
    assert "note" not in said.out


def test_quiet_leaves_warnings_and_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--quiet") == 0
    said = capsys.readouterr()
    assert said.err == "warning: a warning\n"
    assert "a.weight" in said.out


def test_json_is_one_object_in_which_no_number_is_unreadable(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "model": "model",
        "path": str(Path("some") / "file"),
        "error": None,
        "rows": [["a.weight", 12345], ["evil\x1b[31m", 6]],
    }


def test_a_name_from_a_file_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe() == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"evil\x1b[31m" in out


def test_bars_are_blocks_or_where_the_encoding_has_none_hashes() -> None:
    for encoding, longest, shorter in (("utf-8", "█" * 10, "█████▏"), ("ascii", "#" * 10, "#####")):
        done = subprocess.run(
            [*PROBE, "été"],  # a name that ascii has not
            env=environment(PYTHONIOENCODING=encoding),
            capture_output=True,
            encoding=encoding,
            check=True,
        )
        lines = done.stdout.splitlines()
        assert any(longest in line and "1 GB" in line for line in lines)
        assert any(re.search(rf"layer 1[ |]+{shorter}[ |]+0\.5 GB", line) for line in lines)


@unix
def test_a_terminal_gets_colours_and_a_pipe_and_no_color_get_none() -> None:
    command = [*PROBE, "model"]
    assert "\x1b[33m" in on_a_terminal(command)
    assert re.search(r"\x1b\[[\d;]*m", on_a_terminal(command, NO_COLOR="1")) is None
    piped = subprocess.run(command, env=environment(), capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout + piped.stderr


@unix
def test_progress_is_shown_on_a_terminal_only_and_silenced_by_quiet_and_json() -> None:
    command = [*PROBE, "model"]
    shown = on_a_terminal(command, stdout_too=False)
    assert "probing" in shown and "/4.0 kB" in shown
    for option in ("--quiet", "--json"):
        assert "probing" not in on_a_terminal([*command, option], stdout_too=False)
    piped = subprocess.run(command, env=environment(), capture_output=True, check=True)
    assert b"probing" not in piped.stderr


# --- Help -----------------------------------------------------------------------------------------------------------


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in ([], ["-h"], ["--help"]):
        assert run(arguments) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert "--version" in shown[0]


def test_a_verb_is_one_line_in_the_registry_and_stands_in_its_panel(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"], build([("frame_probe", "My Panel")])) == 0
    out = capsys.readouterr().out
    assert "My Panel" in out and "frame-probe" in out and "Probe the frame." in out


def test_the_help_of_a_verb_ends_in_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["frame-probe", "-h"], build([("frame_probe", "Test")])) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[-3:] == [
        "Examples:",
        "zendelta frame-probe model --fail input",
        "zendelta frame-probe model --json  # [one] object",
    ]
    assert any("Performance" in line for line in lines)


def test_every_registered_verb_has_help_and_examples_that_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    for module, _ in VERBS:
        verb = module.rpartition(".")[2].replace("_", "-")
        assert run([verb, "--help"]) == 0
        out = capsys.readouterr().out
        assert "--json" in out, f"{verb} has no --json"
        assert f"zendelta {verb}" in out.partition("Examples:")[2], f"{verb} has no examples"


def test_the_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from zendelta import __version__

    assert run(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"zendelta {__version__}\npython   3.")
    assert "torch" in out


def test_the_module_runs_like_the_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zendelta", "nonsense"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: no such command 'nonsense'\nhint: see 'zendelta --help'\n"


def test_every_exit_code_is_explained() -> None:
    assert set(EXIT_CODES) == {0, 1, 2, 3, 4, 70, 129, 130, 141, 143}


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
