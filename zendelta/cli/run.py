"""Runs the command line and ends it well: the one table from exception to message and exit code.

No command catches an exception to print it; everything that is raised arrives here.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import typer

from zendelta.cli.app import PROGRAM, build
from zendelta.cli.output import Output, Reported, StdoutClosed
from zendelta.errors import InputError, MachineError, UsageError, ZendeltaError

EXIT_CODES = {
    0: "done",
    1: "a check or a policy said no",
    2: "wrong usage; also an existing output without `--force`, and an output that is an input",
    3: "the input is at fault: damaged, unfit, missing, the wrong base",
    4: "the machine is at fault: space, memory, a missing extra, no such device",
    70: "a fault of zendelta, with how to report it",
    129: "the terminal was closed (SIGHUP), with nothing half-made left",
    130: "stopped by Ctrl-C, with nothing half-made left",
    141: "the reader of the result went away (`| head`)",
    143: "stopped by SIGTERM, with nothing half-made left",
}

_NO_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_EXHAUSTED = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO})

# Packages that an extra brings, for the import that forgot to say so itself.
_EXTRAS = {
    "transformers": "demo",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "uvicorn": "serve",
    "vllm": "vllm",
    "matplotlib": "plot",
}

# What typer raises for a wrong call. Its base class is public by no name of its own: with typer's private copy of click
# it is another class than with click itself, but always the parent of the public BadParameter.
_TyperUsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Stopped(BaseException):
    """A signal asks to end. Not an Exception, so that it passes every `except Exception` and every clean-up runs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupted(ZendeltaError):
    """The user or the system ended the run: Ctrl-C, SIGTERM, a closed terminal."""

    kind = "interrupted"

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class InternalError(ZendeltaError):
    """A fault of ours."""

    kind = "internal"
    exit_code = 70


def explain(error: BaseException) -> ZendeltaError:
    """Turn whatever was raised into one of our kinds: the table that decides message, hint and exit code."""
    text = " ".join(str(error).split())
    match error:
        case ZendeltaError():
            return error
        case KeyboardInterrupt() | typer.Abort():
            return Interrupted(signal.SIGINT)
        case Stopped():
            return Interrupted(error.number)
        case _ if isinstance(error, _TyperUsageError):
            return _wrong_call(error)
        case MemoryError():
            return MachineError(
                f"not enough memory{f': {text}' if text else ''}", "close other programs, or use a larger machine"
            )
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
            return MachineError(f"the GPU's memory is full: {text.split('. ')[0]}", "free the GPU, or use --device cpu")
        case RuntimeError() if "DefaultCPUAllocator" in text:
            return MachineError(f"not enough memory: {text}", "close other programs, or use a larger machine")
        case ModuleNotFoundError() if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is not None:
            return MachineError(f"this needs the package {error.name}", f"pip install '{PROGRAM}[{extra}]'")
        case OSError() if error.errno in _NO_SPACE:
            return MachineError(_about(error), "free some space, or write to another disk")
        case OSError() if error.errno in _FORBIDDEN:
            return MachineError(_about(error), "check the permissions of that file and its folder")
        case OSError() if error.errno in _EXHAUSTED:
            return MachineError(_about(error), "the system refused; free what it lacks and run again")
        case FileNotFoundError() if error.filename is not None:
            return InputError(_about(error), "check the path, and that nothing removes it meanwhile")
    name = type(error).__name__
    return InternalError(
        f"this should not happen: {f'{name}: {text}' if text else name}",
        f"please report it with the command, what `{PROGRAM} --version` prints, and this run's output with --debug",
    )


def run(arguments: Sequence[str], app: typer.Typer | None = None) -> int:
    """Run one command and return the exit code, with every failure told and nothing raised.

    Args:
        arguments: the command line without the program's name.
        app: taken instead of the whole command line, for tests.
    """
    arguments, debug, json = _global_options(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        with _signals_raise():
            _invoke(build() if app is None else app, arguments)
        return 0
    except typer.Exit as done:  # --help, --version
        return done.exit_code
    except StdoutClosed:
        return _give_up_stdout()
    except SystemExit as done:  # shell completion
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException as error:
        reported = isinstance(error, Reported)
        failure = error.failure if isinstance(error, Reported) else explain(error)
        if debug:
            import traceback

            traceback.print_exception(error)
        try:
            Output(json=json).error(failure, reported=reported)
        except StdoutClosed:
            _give_up_stdout()
        return failure.exit_code


def _global_options(arguments: Sequence[str]) -> tuple[list[str], bool, bool]:
    """Read what must be known even if the rest cannot be parsed: --debug, taken out wherever it stands, and --json."""
    own = list(arguments)
    rest = own[own.index("--") :] if "--" in own else []
    own = own[: len(own) - len(rest)]
    debug = "--debug" in own or os.environ.get("ZENDELTA_DEBUG", "0") not in ("", "0")
    return [argument for argument in own if argument != "--debug"] + rest, debug, "--json" in own


def _invoke(app: typer.Typer, arguments: list[str]) -> None:
    """Parse and call, as `app()` does, but leave every exception as it is raised."""
    if f"_{PROGRAM.upper()}_COMPLETE" in os.environ:  # a shell asks what could stand next
        app(args=arguments, prog_name=PROGRAM)
    command = typer.main.get_command(app)
    with command.make_context(PROGRAM, arguments or ["--help"]) as context:
        command.invoke(context)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise in the main thread, so that nothing half-made stays behind.

    A signal that is ignored (`nohup`) stays ignored. A second one does not interrupt the clean-up.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wrong_call(error: Exception) -> UsageError:
    """Our two lines from what typer says about a call that it cannot parse."""
    describe = getattr(error, "format_message", error.__str__)
    message = " ".join(str(describe()).split()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    return UsageError(message[:1].lower() + message[1:], f"see '{command} --help'")


def _about(error: OSError) -> str:
    reason = error.strerror or str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names)}: {reason}" if names else reason


def _give_up_stdout() -> int:
    """Point stdout nowhere, so that Python's own last flush does not complain, and return a pipe's exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return 141
