"""The app: which verbs there are, and what stands before them.

zendelta --help
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Annotated

import typer

PROGRAM = "zendelta"

COMPRESS, INSPECT, DEMO = "Compress", "Inspect", "Demo"
"""The panels of `zendelta --help`, in the order in which their first verbs stand in VERBS."""

# A verb is one file, zendelta/cli/NAME.py with a function NAME, and one line here: the module and its panel.
VERBS: list[tuple[str, str]] = [
    ("zendelta.cli.compress", COMPRESS),
    ("zendelta.cli.apply", COMPRESS),
    ("zendelta.cli.inspect", INSPECT),
    ("zendelta.cli.validate", INSPECT),
    ("zendelta.cli.diff", INSPECT),
    ("zendelta.cli.demo", DEMO),
]


def build(verbs: Iterable[tuple[str, str]] | None = None) -> typer.Typer:
    """Make the app.

    Args:
        verbs: modules, each with a function of the module's own name and a list EXAMPLES, and their panels in the
            help; VERBS if not given. Tests hand in their own.
    """
    app = typer.Typer(
        name=PROGRAM,
        help="Store, merge and serve many fine-tunes of one model as one-bit deltas.",
        callback=_before_every_verb,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name, panel in VERBS if verbs is None else verbs:
        module = import_module(name)
        verb = name.rpartition(".")[2]
        app.command(verb.replace("_", "-"), rich_help_panel=panel, epilog=_examples(module))(getattr(module, verb))
    return app


def examples(module: ModuleType) -> list[str]:
    """The command lines that a verb's help page ends with."""
    return list(getattr(module, "EXAMPLES", []))


def _examples(module: ModuleType) -> str:
    lines = ["Examples:", *examples(module)]
    return "\n\n".join(line.replace("[", r"\[") for line in lines) if len(lines) > 1 else ""


def _version(wanted: bool) -> None:
    if wanted:
        from zendelta.cli.output import Output
        from zendelta.cli.version import version_lines

        Output().result({}, *version_lines())
        raise typer.Exit


def _before_every_verb(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and the device."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Print the traceback of a failure; anywhere on the line, or ZENDELTA_DEBUG=1."),
    ] = False,
) -> None:
    """Nothing: --version ends the program, and `run` has taken --debug off the line."""
