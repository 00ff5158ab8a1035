"""Outputs that appear whole or not at all: staged beside their final name, then renamed.

Work happens in ``.NAME.zendelta-tmp`` beside NAME. When it is done, everything is flushed to the disk (fsync), renamed
to NAME, and the parent folder is flushed too. An exception of any kind, Ctrl-C included, removes the temporary. A kill
leaves it behind; its name is always the same, so the next run on that output recognises and replaces it. A lock
(``.NAME.zendelta-lock``, flock where there is one) keeps a second live run away from the same output.

A folder that is there already is replaced in one step, by an exchange rename, where the system has one (Linux).
Elsewhere the old folder is renamed to ``.NAME.zendelta-old``, the new one to NAME, and the old one is removed. A kill
between the first two steps leaves no NAME, but a complete old and a complete new folder under those two names; the
next run first puts the old one back.

    with staged_folder(Path("out"), force=True) as folder:
        (folder / "config.json").write_bytes(config)
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zendelta.checkpoint.disk import TEMPORARY, check_space, disk_errors, free_bytes, full_disk, sync, sync_tree
from zendelta.errors import MachineError, UsageError, ZendeltaError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "check_output",
    "check_space",
    "disk_errors",
    "free_bytes",
    "refuse_overlap",
    "staged_file",
    "staged_folder",
    "sync",
]

_ASIDE, _LOCK = ".zendelta-old", ".zendelta-lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL})
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_ELSEWHERE = "choose another -o/--output"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


# What may be written, and over what


def check_output(final: Path, *, folder: bool, force: bool = False, known: frozenset[str] = frozenset()) -> None:
    """Refuse an output that may not be written, before any work; `staged_file` and `staged_folder` ask this too.

    A link is refused, not followed and not replaced. With `force` a folder must be empty or look like a model folder
    (config.json, ``*.safetensors`` or ``*.bin`` in it), and must be neither the home nor the current folder nor
    around them, a git repository, or a folder with weights in its subfolders (a trainer's checkpoints).

    Args:
        final: the output as the user names it.
        folder: whether it is to be a folder (else a file).
        force: whether an existing one may be replaced.
        known: names that a verb's own output folder holds; one that holds nothing else may be replaced, too.

    Raises:
        UsageError: as above; it exists and there is no `force`; a file where a folder is meant or the reverse; a
            file's parent folder is missing.
        MachineError: no permission to write there.
    """
    _check(_places(final), folder=folder, force=force, known=known)


def _check(output: _Places, *, folder: bool, force: bool, known: frozenset[str]) -> None:
    final, place = output.given, output.final
    wanted, other = ("folder", "file") if folder else ("file", "folder")
    with disk_errors(final):
        try:
            mode = place.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            _check_parent(final, place.parent, folder)
            return
        if stat.S_ISLNK(mode):
            raise UsageError(f"{final} is a link, to {os.readlink(place)}", "give the target itself as -o/--output")
        if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
            what = f"a {other}" if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else "a device, pipe or socket"
            raise UsageError(f"{final} is {what}, but the output is a {wanted}", _ELSEWHERE)
        if not force:
            raise UsageError(f"{final} exists already", f"--force replaces it, or {_ELSEWHERE}")
        if folder:
            _check_replaceable(final, place, known)
        _check_parent(final, place.parent, folder)


def _check_parent(final: Path, parent: Path, folder: bool) -> None:
    nearest = parent
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UsageError(f"{final}: {nearest} is not a folder", _ELSEWHERE)
    if nearest != parent and not folder:
        raise UsageError(f"{final}: there is no folder {final.parent}", f"make it first: mkdir -p '{final.parent}'")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise MachineError(f"{final}: no permission to write in {nearest}", _ELSEWHERE)


def _check_replaceable(final: Path, place: Path, known: frozenset[str]) -> None:
    """Raise UsageError unless the folder at `place` is one that --force may replace whole."""
    hint = "--force replaces model folders only: choose a new folder, or remove this one yourself"
    real = place.resolve()
    with suppress(RuntimeError, FileNotFoundError):  # no home, or a current folder that was removed
        for name, dear in (("your home folder", Path.home()), ("the current folder", Path.cwd())):
            if real == dear.resolve() or real in dear.resolve().parents:
                raise UsageError(f"{final} is or holds {name}", hint)
    entries = list(os.scandir(place))
    names = {entry.name for entry in entries}
    if ".git" in names:
        raise UsageError(f"{final} is a git repository, whose history would be lost", hint)
    if not names <= known:
        _check_model_folder(final, entries, hint)
    if not os.access(place, os.W_OK | os.X_OK):
        raise MachineError(f"{final}: no permission to replace it", _ELSEWHERE)


def _check_model_folder(final: Path, entries: list[os.DirEntry[str]], hint: str) -> None:
    names = [entry.name for entry in entries]
    if "config.json" not in names and not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UsageError(f"{final} is not a model folder ({len(names)} entries, none of them a model's)", hint)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            weights = sorted(item.name for item in os.scandir(entry) if item.name.lower().endswith(_WEIGHTS))
            if weights:
                raise UsageError(f"{final} also holds {entry.name}/{weights[0]}, which would be lost", hint)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _chain(path: Path) -> set[tuple[int, int]]:
    """Identities of what `path` leads to and of every folder around that."""
    real = path.resolve()
    return {known for known in map(_identity, (real, *real.parents)) if known is not None}


def _files_near(folder: Path) -> Iterator[Path]:
    """The entries of a model folder, and of the folders in it."""
    with suppress(OSError):
        for entry in sorted(folder.iterdir()):
            yield entry
            if entry.is_dir() and not entry.is_symlink():
                with suppress(OSError):
                    yield from sorted(entry.iterdir())


def refuse_overlap(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is an input, lies inside one, or holds one.

    Files and folders are compared by what they are (device and inode), so other spellings, links of both kinds and
    another case on a file system that ignores it are seen through. The files that an input folder links to (the hub
    cache links every file) count as the input, too.

    Args:
        output: a file or folder, there or not.
        inputs: files and folders that will be read.

    Raises:
        UsageError: naming both.
    """
    itself, around = _identity(output), _chain(output)
    for given in inputs:
        known = _identity(given)
        if output.resolve() == given.resolve() or (known is not None and known == itself):
            raise UsageError(f"the output {output} is the input {given}", _ELSEWHERE)
        if known in around:
            raise UsageError(f"the output {output} lies inside the input {given}", _ELSEWHERE)
        if itself is None:
            continue
        if itself in _chain(given):
            raise UsageError(f"the output {output} holds the input {given}", _ELSEWHERE)
        for file in _files_near(given) if given.is_dir() else ():
            if itself in _chain(file):
                raise UsageError(f"the output {output} is or holds {file}, a part of the input {given}", _ELSEWHERE)


# Staging


@dataclass(frozen=True, slots=True)
class _Places:
    """An output (`given` as the user wrote it, `final` absolute) and the three names beside it."""

    given: Path
    final: Path
    temporary: Path
    aside: Path
    lock: Path

    def leftovers(self) -> bool:
        return any(map(os.path.lexists, (self.temporary, self.aside, self.lock)))


def _places(given: Path) -> _Places:
    final = given.resolve() if given.name in ("", "..") else given.absolute()
    if not final.name:
        raise UsageError(f"{given} cannot be an output", _ELSEWHERE)
    name = final.name
    if len(os.fsencode(name)) > 240:  # the longest name that leaves room for ours; file systems allow 255
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return _Places(given, final, *(final.with_name(f".{name}{suffix}") for suffix in (TEMPORARY, _ASIDE, _LOCK)))


def _lock(place: _Places, *, create: bool = True) -> io.FileIO | None:
    """Take the lock of an output, an open file; None where the system has no locks."""
    if sys.platform == "win32":
        return None

    def opener(path: str, flags: int) -> int:
        return os.open(path, (flags if create else flags & ~os.O_CREAT) | os.O_NOFOLLOW, 0o666)

    while True:
        # A file object, not a descriptor: it is closed also if Ctrl-C comes before anybody could say so.
        file = io.FileIO(place.lock, "a", opener=opener)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing {place.given} right now", f"wait for it to end, or {_ELSEWHERE}"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            # The run that held the lock removes the file at its end: a lock on a removed file guards nothing.
            if _is_lock(place, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


@contextmanager
def _locked(place: _Places) -> Iterator[None]:
    """Hold the lock of an output. Raises UsageError while another run holds it."""
    file = None
    try:
        with disk_errors(place.given):
            file = _lock(place)
        yield
    finally:
        if file is None:  # a signal may have come between making the file and saying so here
            with suppress(OSError, UsageError):
                file = _lock(place, create=False)
        if file is not None:
            try:
                _unlock(place, file)
            finally:
                _unlock(place, file)  # again, for a signal within the first attempt
                file.close()


def _is_lock(place: _Places, file: io.FileIO) -> bool:
    found = os.fstat(file.fileno())
    return _identity(place.lock) == (found.st_dev, found.st_ino)


def _unlock(place: _Places, file: io.FileIO) -> None:
    """Remove the lock, unless it is another run's by now."""
    with suppress(OSError):
        if _is_lock(place, file):
            place.lock.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _settle(place: _Places) -> None:
    """Bring the names beside an output in order, whatever moment a run ended at. Needs the lock."""
    if os.path.lexists(place.aside):
        if os.path.lexists(place.final):
            # Renamed before it is removed: what stands under `aside` is complete at any moment.
            _remove(place.temporary)
            place.aside.rename(place.temporary)
        else:
            place.aside.rename(place.final)
    _remove(place.temporary)


def _make_parents(folder: Path) -> list[Path]:
    """Make the missing folders down to `folder`; return them, the deepest first."""
    missing: list[Path] = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
    return missing


@contextmanager
def _session(given: Path, *, folder: bool, force: bool, known: frozenset[str] = frozenset()) -> Iterator[_Places]:
    """Check, lock, and clean up before and after; what is yielded is ready to be staged in."""
    place = _places(given)
    try:
        _check(place, folder=folder, force=force, known=known)
    except UsageError:
        if place.leftovers():  # of a run that was killed: removed even though this run goes no further
            with suppress(ZendeltaError, OSError), _locked(place):
                _settle(place)
        raise
    made: list[Path] = []
    try:
        with disk_errors(given):
            made = _make_parents(place.final.parent)
        with _locked(place):
            try:
                with disk_errors(given):
                    _settle(place)
                _check(place, folder=folder, force=force, known=known)  # again: an old one may have been put back
                yield place
                with disk_errors(given):
                    for parent in (place.final.parent, *(path.parent for path in made)):
                        sync(parent)
                try:
                    _settle(place)  # removes what was replaced
                except OSError as error:
                    warnings.warn(f"{given} is replaced, but the old one could not be removed: {error}", stacklevel=4)
            except BaseException:
                with suppress(OSError):
                    _settle(place)
                raise
    except BaseException:
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


@functools.cache
def _renameat2() -> Callable[[Path, Path, int], int] | None:
    """The C library's renameat2 (source, target, flag -> error number, 0 when done), where it has one."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)

    def rename(source: Path, target: Path, flag: int) -> int:
        done = function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0
        return 0 if done else ctypes.get_errno()

    return rename


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Rename with a flag; False where that failed, mostly because the system or the file system has no flags.

    The caller then renames without one, and so meets every other reason of the failure as an OSError.
    """
    function = _renameat2()
    number = errno.ENOSYS if function is None else function(source, target, flag)
    if number == errno.EEXIST:
        raise FileExistsError(number, os.strerror(number), str(target))
    return number == 0


def _publish(place: _Places, *, folder: bool, force: bool, known: frozenset[str] = frozenset()) -> None:
    """Rename the finished temporary to its final name. What it replaces is left under another name."""
    with disk_errors(place.given):
        if force and os.path.lexists(place.final):
            _check(place, folder=folder, force=True, known=known)  # hours may have passed
            if not folder:
                place.temporary.replace(place.final)
            elif not _rename(place.temporary, place.final, _RENAME_EXCHANGE):
                place.final.rename(place.aside)
                place.temporary.rename(place.final)
            return
        try:
            if not _rename(place.temporary, place.final, _RENAME_NOREPLACE):
                if os.path.lexists(place.final):
                    raise FileExistsError(place.final)
                place.temporary.rename(place.final)
        except FileExistsError:
            raise UsageError(f"{place.given} was made by something else meanwhile", _ELSEWHERE) from None


@contextmanager
def staged_file(final: Path, *, force: bool = False) -> Iterator[io.BufferedRandom]:
    """Write one file that appears under its final name whole or not at all.

    Yields a binary file, open for writing and reading, of a temporary beside `final`. Its ``name`` is the temporary's
    path (a string), for a self-check before publishing: flush first. When the block ends without an exception, the
    file is flushed to the disk and renamed; else it is removed, and `final` is untouched.

    Args:
        final: where the file is to appear. Its folder must exist.
        force: replace a file that is there already.

    Raises:
        UsageError: see `check_output`; another run is writing `final`.
        MachineError: the disk is full or may not be written. A full disk inside the block is translated, too.
    """
    with _session(final, folder=False, force=force) as place:
        with disk_errors(final):
            file = place.temporary.open("x+b")
        try:
            with full_disk(final):
                yield file
            with disk_errors(final):
                file.close()
        except BaseException:
            with suppress(OSError):
                file.close()
            raise
        with disk_errors(final):
            sync(place.temporary)
        _publish(place, folder=False, force=force)


@contextmanager
def staged_folder(final: Path, *, force: bool = False, known: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Fill a folder that appears under its final name whole or not at all.

    Yields an empty temporary folder beside `final`. When the block ends without an exception, everything in it is
    flushed to the disk and it is renamed; else it is removed, and `final` is untouched.

    Args:
        final: where the folder is to appear. Missing folders around it are made (and removed again on failure).
        force: replace a model folder that is there already, whole; see `check_output` for what is never replaced.
        known: see `check_output`.

    Raises:
        UsageError: see `check_output`; another run is writing `final`.
        MachineError: the disk is full or may not be written. A full disk inside the block is translated, too.
    """
    with _session(final, folder=True, force=force, known=known) as place:
        with disk_errors(final):
            place.temporary.mkdir()
        with full_disk(final):
            yield place.temporary
        with disk_errors(final):
            sync_tree(place.temporary)
        _publish(place, folder=True, force=force, known=known)
