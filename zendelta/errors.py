"""What can go wrong, in the few kinds that a user or a script must tell apart.

Every error carries one line that says what is wrong (with names and numbers), one that says what to do, and the
exit code that the command line ends with. Library code raises these and never prints.
"""

from __future__ import annotations


class ZendeltaError(Exception):
    """Base of every error that zendelta raises on purpose.

    Args:
        message: one line that says what is wrong, naming the file and the tensor.
        hint: one line that says what to do about it; may be empty.
    """

    kind = "error"
    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckFailed(ZendeltaError):
    """A check or a policy said no: validation over its threshold, a refusing pool."""

    kind = "check"
    exit_code = 1


class UsageError(ZendeltaError):
    """The call itself is wrong: an option, an existing output, an output that is an input."""

    kind = "usage"
    exit_code = 2


class InputError(ZendeltaError):
    """A file or a model that was handed in is at fault: damaged, unfit, the wrong base."""

    kind = "input"
    exit_code = 3


class MachineError(ZendeltaError):
    """The machine is at fault: no space, no memory, a missing extra, no such device."""

    kind = "machine"
    exit_code = 4


def listed(names: list[str], limit: int = 5) -> str:
    """Join names for a message, the first few of them and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
