"""transformers as the demo uses it: imported late, silent, and left as it was found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from zendelta.errors import MachineError


@contextmanager
def transformers_quietly() -> Iterator[ModuleType]:
    """Import transformers and keep it from printing progress, advice and warnings for as long as the block lasts.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            f"the demo trains its models with transformers, which cannot be imported here ({error})",
            "pip install 'zendelta[demo]'",
        ) from error
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
