"""The files beside the weights: configuration, tokenizer, chat template. Which ones travel, and how they are written.

What travels is decided by name alone: ``*.json`` except weight indexes and a trainer's state, ``*.jinja``,
``*.model``, ``*.txt`` and README.md, in the model folder or one folder below it (``1_Pooling/config.json``), if the
file is not hidden and holds at most 64 MiB. Never weights, optimizer or random state, pickles or code, and nothing
from a trainer's ``checkpoint-500`` folders. The same rule judges the names that a ``.bd`` file brings.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zendelta.checkpoint.disk import disk_errors
from zendelta.errors import InputError

MAX_SIDE_BYTES = 64 * 2**20
"""The largest file that travels with the weights."""

_KINDS = (".json", ".jinja", ".model", ".txt")
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz|npy|pkl|pickle|distcp)$|\.index(\.[^.]+)?\.json$", re.I
)
_STATE = re.compile(r"^trainer_state\.json$", re.I)
_STATE_FOLDER = re.compile(r"^(checkpoint-\d+|global_step\d+)$", re.I)
_DEVICE = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.I)
_IS_WEIGHTS = "is a weights file or its index"
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def _unfit(path: str) -> str | None:
    """Why a relative path may not be written on some system, or may lead out of its folder; None if it is fit."""
    parts = path.split("/")
    if not path or "" in parts:
        return "is absolute or has an empty part"
    if "." in parts or ".." in parts:
        return "leads out of its folder, or to the folder itself"
    if "\\" in path or ":" in path:
        return "has a backslash or a colon"
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in path):
        return "has a control character"
    if any(part[-1] in ". " or part[0] == " " or len(part.encode()) > 255 or _DEVICE.match(part) for part in parts):
        return "is not a file name on every system"
    if len(parts) > 2:
        return "is more than one folder deep"
    return None


def _kept_back(path: str) -> str | None:
    """Why a file of this (fit) name does not travel; None if it does."""
    *folders, name = path.split("/")
    if _WEIGHTS.search(name):
        return _IS_WEIGHTS
    if any(part.startswith(".") for part in (*folders, name)):
        return "is hidden"
    if _STATE.match(name) or any(_STATE_FOLDER.match(folder) for folder in folders):
        return "belongs to a trainer's state"
    if not (name.endswith(_KINDS) and name not in _KINDS) and name != "README.md":
        return "is of no kind that travels with a model"
    return None


def check_side_path(path: str) -> None:
    """Refuse the name of a side file that may not be written beside weights.

    Args:
        path: relative, with ``/`` between folder and file.

    Raises:
        InputError: absolute, ``..``, an empty part, a backslash, a colon or drive letter, a control character, a name
            that some system reserves, more than one folder deep; or anything that `side_files` would not have given:
            a weights file or its index, trainer state, code, a hidden file.
    """
    reason = _unfit(path) or _kept_back(path)
    if reason:
        raise InputError(f"the side file {path!r} {reason}", "it is not written: use a file from a source you trust")


def _same(text: str) -> str:
    """What two names have in common if some file system takes them for one."""
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())


def check_side_paths(paths: Iterable[str]) -> None:
    """Refuse a set of side file names if one may not be written, or if two would be one file on some system.

    Raises:
        InputError: see `check_side_path`; or a name twice, two that differ only in case or Unicode form, or a name
            that is a file and a folder.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        check_side_path(path)
        key = _same(path)
        if key in seen:
            raise InputError(
                f"the side files {seen[key]!r} and {path!r} have one name on some systems", "rename or remove one"
            )
        seen[key] = path
        if "/" in path:
            folders[_same(path.split("/")[0])] = path
    for key in sorted(folders.keys() & seen.keys()):
        raise InputError(f"the side file {seen[key]!r} is also the folder of {folders[key]!r}", "rename or remove one")


def _look(folder: Path) -> Iterator[tuple[str, Path, str | None]]:
    """Every entry of a model folder and of the folders in it: its relative path, itself, why it does not travel."""
    for entry in folder.iterdir():
        name = entry.name
        if entry.is_dir() and not entry.is_symlink():
            if name.startswith(".") or _STATE_FOLDER.match(name):
                yield name, entry, _kept_back(f"{name}/config.json")
                continue
            for inner in entry.iterdir():
                path = f"{name}/{inner.name}"
                yield path, inner, _reason(path, inner)
        else:
            yield name, entry, _reason(name, entry)


def _reason(path: str, file: Path) -> str | None:
    reason = _unfit(path) or _kept_back(path)
    if reason is None and not file.is_file():
        reason = "is a folder" if file.is_dir() else "is no file, or a link to nothing"
    if reason is None and file.stat().st_size > MAX_SIDE_BYTES:
        reason = f"is too large ({file.stat().st_size:,} bytes, {MAX_SIDE_BYTES:,} at most)"
    return reason


def side_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the files that travel with the weights in a model folder.

    Links to files are followed, for the hub's cache links every file; links to folders are not.

    Returns:
        The files by relative path (``/`` between folder and file), sorted; and the relative paths of those that would
        have travelled but for their size, sorted.

    Raises:
        InputError: the folder cannot be read.
    """
    files: dict[str, Path] = {}
    too_large: list[str] = []
    try:
        for path, file, reason in _look(folder):
            if reason is None:
                files[path] = file
            elif reason.startswith("is too large"):
                too_large.append(path)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    return dict(sorted(files.items())), sorted(too_large)


def left_behind(folder: Path) -> dict[str, str]:
    """Return what does not travel though it is no weights file: relative path -> why ("is hidden"), sorted.

    Among them are files too large, code, and tokenizer files of kinds that `side_files` does not know. A hidden or a
    trainer's folder is one entry. Raises InputError if the folder cannot be read.
    """
    try:
        found = {path: reason for path, _, reason in _look(folder) if reason is not None and reason != _IS_WEIGHTS}
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    return dict(sorted(found.items()))


def weights_below(folder: Path) -> list[str]:
    """Return the weights files one folder below, such as ``2_Dense/model.safetensors``: not a part of the checkpoint.

    Raises InputError if the folder cannot be read.
    """
    try:
        found = [path for path, _, reason in _look(folder) if reason == _IS_WEIGHTS and "/" in path]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})", "check the path and its permissions") from None
    return sorted(path for path in found if not path.endswith(".json"))


def write_side_file(folder: Path, path: str, data: bytes | memoryview) -> Path:
    """Write one side file into an output folder, and return where it lies.

    The file must be new and no link is followed, so nothing outside `folder` can be written whatever `path` says.

    Args:
        folder: an existing folder.
        path: see `check_side_path`.
        data: its bytes.

    Raises:
        InputError: the name may not be written, or is there already (in another case, on a system that ignores it).
        MachineError: the disk is full or may not be written.
    """
    check_side_path(path)
    target = folder / path
    try:
        with disk_errors(target, len(data)):
            if target.parent != folder:
                target.parent.mkdir(exist_ok=True)
                if target.parent.is_symlink():
                    raise InputError(f"{target.parent} is a link: nothing is written through it", "remove the link")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(target, flags, 0o666), "wb") as file:
                file.write(data)
    except FileExistsError:
        raise InputError(f"the side file {path!r} is there already", "a name may be given once only") from None
    return target


# The dtype in config.json


def set_config_dtype(config_json: bytes, dtype: str) -> bytes:
    """Return config.json with another dtype, and every other byte as it was.

    The values of ``dtype`` and ``torch_dtype``, whichever are there, are replaced at the top and in the configurations
    nested in it (``text_config``, ``vision_config``, any other ``*_config``, and objects with a ``model_type``), also
    where there is one dtype per part. None is added, and ``quantization_config`` is left alone.

    Args:
        config_json: the file's bytes, UTF-8.
        dtype: ``bfloat16``, ``float16``, ``float32`` or ``float64``.

    Raises:
        InputError: it is not a JSON object.
        ValueError: another dtype.
    """
    if dtype not in _FLOATS:
        raise ValueError(f"{dtype} is not one of {', '.join(_FLOATS)}")
    try:
        text = config_json.decode("utf-8")
        config = json.loads(text)
        spans = list(_dtype_spans(text, _skip(text, 0))) if isinstance(config, dict) else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"config.json is not valid JSON ({error})", "the file is damaged: get it again") from None
    if spans is None:
        raise InputError("config.json is not a JSON object", "the file is damaged: get it again")
    pieces: list[str] = []
    done = 0
    for start, stop in spans:
        pieces += [text[done:start], json.dumps(dtype)]
        done = stop
    return "".join([*pieces, text[done:]]).encode()


_decoder = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    """The next place that is not white space."""
    while text[at] in " \t\n\r":
        at += 1
    return at


def _members(text: str, at: int) -> Iterator[tuple[str, Any, int, int]]:
    """The members of the object at `at` in valid JSON: key, value, and where the value's text starts and stops."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        if text[at] == ",":
            at = _skip(text, at + 1)
        key, at = _decoder.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        value, at = _decoder.raw_decode(text, start)
        yield key, value, start, at
        at = _skip(text, at)


def _dtype_spans(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Where the values of dtypes stand in the configuration that starts at `at`, in order."""
    for key, value, start, stop in _members(text, at):
        if key in ("dtype", "torch_dtype"):
            if value is None or isinstance(value, str):
                yield start, stop
            elif isinstance(value, dict):
                yield from ((begin, end) for _, part, begin, end in _members(text, start) if isinstance(part, str))
        elif isinstance(value, dict) and (
            (key.endswith("_config") and key != "quantization_config") or "model_type" in value
        ):
            yield from _dtype_spans(text, start)
