"""Store, merge and serve many fine-tunes of one model as one-bit deltas.

The public names are found on first use, so that `import zendelta` costs next to nothing:

    python -c "import zendelta; print(zendelta.__all__); help(zendelta.compress)"
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .bdfile import BdFile
    from .checkpoint.reader import Checkpoint
    from .errors import CheckFailed, InputError, MachineError, UsageError, ZendeltaError
    from .pipeline.apply import apply
    from .pipeline.compress import compress
    from .pipeline.diff import diff
    from .pipeline.inspect import inspect
    from .pipeline.validate import validate

__all__ = [
    "BdFile",
    "CheckFailed",
    "Checkpoint",
    "InputError",
    "MachineError",
    "UsageError",
    "ZendeltaError",
    "__version__",
    "apply",
    "compress",
    "diff",
    "inspect",
    "validate",
]

# Where each name lives. Type checkers and editors read the imports above; tests/test_imports.py compares the two.
_HOMES = {
    "BdFile": "bdfile",
    "CheckFailed": "errors",
    "Checkpoint": "checkpoint.reader",
    "InputError": "errors",
    "MachineError": "errors",
    "UsageError": "errors",
    "ZendeltaError": "errors",
    "apply": "pipeline.apply",
    "compress": "pipeline.compress",
    "diff": "pipeline.diff",
    "inspect": "pipeline.inspect",
    "validate": "pipeline.validate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
