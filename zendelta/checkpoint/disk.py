"""What the disk says while something is written: refusals as errors that name the file, free space, flushing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zendelta.errors import MachineError, UsageError, ZendeltaError

TEMPORARY = ".zendelta-tmp"
"""How the name of a temporary ends; it begins with a dot and the final name."""

_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
_OURS = frozenset({errno.EBADF, errno.EINVAL, errno.EFAULT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES})


def _shown(path: Path) -> Path:
    """The path as the user knows it: a temporary goes by the name that it stands for."""
    names = (
        name[1 : -len(TEMPORARY)] if name.startswith(".") and name.endswith(TEMPORARY) else name for name in path.parts
    )
    return Path(*names)


def _disk_error(error: OSError, path: Path, need: int | None) -> ZendeltaError | None:
    """What to raise instead of `error`; None for an error that tells of a fault of ours."""
    shown = _shown(path)
    reason = error.strerror or str(error)
    if error.errno in _SPACE:
        numbers = [] if need is None else [f"{need:,} bytes needed"]
        with suppress(OSError):
            numbers.append(f"{free_bytes(path):,} bytes free on its disk")
        if error.errno == errno.EFBIG:
            hint = "raise the limit on file sizes (ulimit -f), use smaller shards, or write to another disk"
        else:
            hint = "free some space, or write to another disk with -o/--output"
        return MachineError(f"{shown}: {reason} ({', '.join(numbers)})" if numbers else f"{shown}: {reason}", hint)
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{shown}: {reason}", "choose a shorter name")
    if error.errno in _OURS:
        return None
    return MachineError(f"{shown}: cannot be written ({reason})", "check the folder's permissions and its disk")


@contextmanager
def disk_errors(path: Path, need: int | None = None) -> Iterator[None]:
    """Turn the system's refusals to write `path` into errors that name it. Wrap only the writing itself.

    Args:
        path: the file or folder that is being written; a temporary is shown by its final name.
        need: bytes that writing takes in all, where known; named in the message.

    Raises:
        MachineError: no space, a quota, a limit on file sizes, no permission, a read-only or failing disk.
        UsageError: the name is too long for the file system.
        OSError: errors that only a fault in zendelta explains (a closed file, a name that is there already).
    """
    try:
        yield
    except OSError as error:
        instead = _disk_error(error, path, need)
        if instead is None:
            raise
        raise instead from error


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Translate only a full disk: around a caller's own code, where other errors may come from its inputs.

    Raises:
        MachineError: no space, a quota, a limit on file sizes.
    """
    try:
        yield
    except OSError as error:
        instead = _disk_error(error, path, None) if error.errno in _SPACE else None
        if instead is None:
            raise
        raise instead from error


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write where `folder` is, or will be, made."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, need: int) -> None:
    """Refuse work whose output of `need` bytes cannot fit where `folder` is, or will be, made.

    Raises:
        MachineError: fewer than `need` bytes are free. With --force the old output still stands beside the new one,
            so its size does not count as free.
    """
    with disk_errors(folder):
        free = free_bytes(folder)
    if free < need:
        raise MachineError(
            f"{_shown(folder)}: {need:,} bytes needed, {free:,} bytes free on its disk",
            "free some space, or write to another disk with -o/--output",
        )


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names where the system can, to the disk. Raises OSError."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0) if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not folder or error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder in `folder`, and itself, to the disk. Raises OSError."""
    for where, _, files in os.walk(folder, topdown=False):
        for name in files:
            file = Path(where, name)
            if file.is_file() and not file.is_symlink():
                sync(file)
        sync(Path(where))
