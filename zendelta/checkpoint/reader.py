"""A Hugging Face checkpoint on disk: names, shapes, dtypes, and the bytes of a tensor or of a part of it.

Opening one reads headers only. Bytes are read with ``pread`` into memory of the caller, so any number of threads may
read at once and nothing stays in memory. Weights come from safetensors files; the older ``.bin`` files go through
torch's weights-only loader, which maps them and executes nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zendelta.checkpoint import sidecar
from zendelta.checkpoint.header import LFS_POINTER, ArrayInfo, read_header, read_json
from zendelta.checkpoint.locate import locate
from zendelta.errors import InputError, listed

_ADAPTER = "adapter_config.json"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Read = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint; `file` is the shard that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


@dataclass
class Checkpoint:
    """A checkpoint that was found and whose headers were read.

    Attributes:
        path: the folder (or the single ``.safetensors`` file).
        name: a hub id, or the folder's last part; never a path.
        revision: the commit of a hub id, else None.
        tensors: every stored tensor by name, sorted.
        aliases: names that share another tensor's storage (only ``.bin`` files can say so), to that tensor's name.
        warnings: what was noticed and did not stop the reading, one line each.
    """

    path: Path
    name: str
    revision: str | None
    tensors: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    _reads: dict[str, Read] = field(default_factory=dict, repr=False)
    _places: dict[str, tuple[OpenFile, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, where: Where, *, quiet: bool = True) -> Checkpoint:
        """Find a checkpoint (a folder, a ``.safetensors`` file or a hub id) and read its headers.

        One that is open already is returned as it is. Unless `quiet`, a download shows its progress on a terminal.

        Raises:
            InputError: nothing there, something else than a checkpoint, or files that are missing or damaged.
        """
        if isinstance(where, Checkpoint):
            return where
        found = locate(where, quiet=quiet)
        checkpoint = cls(found.path, found.name, found.revision, {})
        files, mapped = _weight_files(found.path, checkpoint.warnings)
        _refuse_pointers(files)
        owners: dict[str, Path] = {}
        for file, tensors in zip(files, _open_files(files, checkpoint), strict=True):
            for name, info, read in tensors:
                if name in owners:
                    raise InputError(
                        f"{found.path}: {name} is in {owners[name].name} and in {file.name}",
                        "keep one of the two files",
                    )
                owners[name] = file
                checkpoint.tensors[name] = Tensor(name, info.dtype, info.shape, info.nbytes, file)
                checkpoint._reads[name] = read
        _check_index(
            found.path, mapped, {**owners, **{a: owners[t] for a, t in checkpoint.aliases.items()}}, checkpoint
        )
        if not checkpoint.tensors:
            raise InputError(f"{found.path}: the weights hold no tensor at all", "is it the right folder?")
        checkpoint.tensors = dict(sorted(checkpoint.tensors.items()))
        if (checkpoint.folder / _ADAPTER).is_file() and found.path.is_dir():
            checkpoint.warnings.append(
                f"{found.name}: the adapter beside the weights is neither read nor carried; "
                "if it belongs to the model, merge it into them first"
            )
        return checkpoint

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of tensor `name` from its byte `offset` on. Safe from any thread.

        Raises:
            InputError: the file became shorter since it was opened, or cannot be read.
        """
        self._reads[name](offset, out)

    def fetch(self, name: str, first: int, last: int, spare: Bytes, *, mapped: bool) -> Bytes:
        """Return bytes [first, last) of tensor `name`: mapped from its file where asked for, else read into `spare`.

        What is mapped is not copied, must not be written to, and lives as long as it is used. Files that cannot be
        mapped by offset (``.bin``) are read.

        Raises:
            InputError: see `read_into`.
        """
        place = self._places.get(name)
        if mapped and place is not None:
            file, offset = place
            return file.view(offset + first, offset + last)
        self.read_into(name, first, memoryview(spare)[: last - first])
        return spare[: last - first]

    def read(self, name: str) -> Bytes:
        """Return all bytes of tensor `name`. For small tensors: memory is not bounded."""
        data = np.empty(self.tensors[name].nbytes, np.uint8)
        self.read_into(name, 0, memoryview(data))
        return data

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed config.json, or {} where there is none. Raises InputError if it is damaged."""
        file = self.folder / "config.json"
        if not self.path.is_dir() or not file.is_file():
            return {}
        return read_json(file)

    @property
    def folder(self) -> Path:
        """The folder that holds the weights."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def side_files(self) -> dict[str, Path]:
        """The files that travel with the weights, by relative path; none for a single weights file."""
        if not self.path.is_dir():
            return {}
        files = sidecar.side_files(self.path)[0]
        files.pop(_ADAPTER, None)  # without the adapter's weights it would keep the restored model from loading
        return files

    @cached_property
    def left_behind(self) -> list[str]:
        """What lies beside the weights and is neither read nor carried, in notes for the user."""
        if not self.path.is_dir():
            return []
        others = [path for path, reason in sidecar.left_behind(self.path).items() if reason != "is hidden"]
        below = sidecar.weights_below(self.path)
        notes = [f"{self.name}: not carried: {listed(others, 8)}"] if others else []
        if below:
            notes.append(f"{self.name}: weights in subfolders are neither read nor carried: {listed(below, 8)}")
        return notes

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


Where = str | os.PathLike[str] | Checkpoint
"""Wherever a checkpoint is taken: a path, a hub id, or one that is open."""


def _weight_files(path: Path, warnings: list[str]) -> tuple[list[Path], dict[str, str]]:
    """Choose the weights files of `path`; also the index's tensor -> file map, empty without an index."""
    if path.is_file():
        if path.suffix != ".safetensors" or path.name.startswith("adapter_model"):
            raise InputError(f"{path}: {_what_is(path)}, not a checkpoint", _way_out(path))
        return [path], {}
    for suffix in (".safetensors", ".bin"):
        indexes = sorted(file for file in path.glob(f"*{suffix}.index.json") if not file.name.startswith("."))
        stem = "model" if suffix == ".safetensors" else "pytorch_model"
        index = path / f"{stem}{suffix}.index.json"
        if index not in indexes and len(indexes) == 1:
            index = indexes[0]
        if index in indexes:
            return _indexed(index, suffix, warnings)
        found = sorted(
            file
            for file in path.glob(f"*{suffix}")
            if not file.name.startswith((".", "adapter_", "training_args", "optimizer", "scheduler", "rng_state"))
        )
        single = path / f"{stem}{suffix}"
        if single in found:
            return [single], {}
        if len(found) == 1:
            return found, {}
        if found:
            raise InputError(
                f"{path}: {len(found)} {suffix} files and no index ({listed([file.name for file in found])})",
                f"add {stem}{suffix}.index.json, or name one file",
            )
    raise InputError(f"{path}: {_what_is(path)}, not a checkpoint", _way_out(path))


def _indexed(index: Path, suffix: str, warnings: list[str]) -> tuple[list[Path], dict[str, str]]:
    mapped = read_json(index).get("weight_map")
    if not isinstance(mapped, dict) or not mapped or not all(isinstance(file, str) for file in mapped.values()):
        raise InputError(f"{index}: it has no weight_map of tensor names to files", "get the index again")
    names = sorted(set(mapped.values()))
    outside = [name for name in names if Path(name).name != name or name in (".", "..") or "\\" in name]
    if outside:
        raise InputError(f"{index}: it names files outside its folder: {listed(outside)}", "do not trust this folder")
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        raise InputError(
            f"{index.parent}: {len(missing)} of {len(names)} shards are missing: {listed(missing, 20)}",
            "fetch them, for instance with `hf download`",
        )
    wrong = [name for name in names if not name.endswith(suffix)]
    if wrong:
        raise InputError(f"{index}: it names files that are not {suffix}: {listed(wrong)}", "get the index again")
    stray = sorted(file.name for file in index.parent.glob(f"*{suffix}") if _is_stray(file.name, names))
    if stray:
        warnings.append(f"{index.name} decides; not read: {listed(stray)}")
    return [index.parent / name for name in names], mapped


def _is_stray(name: str, shards: list[str]) -> bool:
    other = ("adapter_", "training_args", "optimizer", "scheduler", "rng_state", "consolidated", ".")
    return name not in shards and not name.startswith(other)


def _check_index(path: Path, mapped: dict[str, str], owners: dict[str, Path], checkpoint: Checkpoint) -> None:
    """Compare an index with what its shards really hold."""
    if not mapped:
        return
    absent = [f"{name} ({file})" for name, file in mapped.items() if name not in owners]
    moved = [
        f"{name} (index: {file}, is in {owners[name].name})"
        for name, file in mapped.items()
        if name in owners and owners[name].name != file
    ]
    if absent or moved:
        parts = [f"not in their shard: {listed(absent)}"] if absent else []
        parts += [f"in another shard: {listed(moved)}"] if moved else []
        raise InputError(f"{path}: the index and the shards disagree: {'; '.join(parts)}", "get index and shards again")
    extra = sorted(set(owners) - set(mapped))
    if extra:
        checkpoint.warnings.append(f"in the shards but not in the index, read all the same: {listed(extra)}")


def _refuse_pointers(files: list[Path]) -> None:
    """Say at once which files Git LFS has not fetched."""
    pointers = []
    for file in filter(os.path.isfile, files):
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                pointers.append(file)
    if not pointers:
        return
    folder, names = pointers[0].parent, [file.name for file in pointers]
    what = f"{len(names)} of {len(files)} weights files are Git LFS pointers" if len(files) > 1 else "a Git LFS pointer"
    size = pointers[0].stat().st_size
    raise InputError(
        f"{folder if len(files) > 1 else pointers[0]}: {what} of {size} bytes, not the weights themselves"
        + (f": {listed(names)}" if len(files) > 1 else ""),
        f"fetch them: cd '{folder}' && git lfs pull --include '{','.join(names)}'",
    )


def _open_files(files: list[Path], checkpoint: Checkpoint) -> list[list[tuple[str, ArrayInfo, Read]]]:
    """Open every file, and report all that are at fault together."""
    opened, errors = [], []
    for file in files:
        try:
            opened.append(_open_file(file, checkpoint))
        except InputError as error:
            errors.append(error)
    if len(errors) > 1:
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        raise InputError("; ".join(error.message for error in errors[:5]) + more, errors[0].hint)
    if errors:
        raise errors[0]
    return opened


def _open_file(file: Path, checkpoint: Checkpoint) -> list[tuple[str, ArrayInfo, Read]]:
    if file.suffix == ".safetensors":
        arrays = read_header(file).arrays
        opened = OpenFile(file)
        checkpoint._places.update({name: (opened, info.offset) for name, info in arrays.items()})
        return [(name, info, opened.reader(info)) for name, info in arrays.items()]
    from zendelta.checkpoint.legacy import open_bin

    tensors, aliases, warnings = open_bin(file)
    checkpoint.aliases.update(aliases)
    checkpoint.warnings += warnings
    return tensors


class OpenFile:
    """A file descriptor that closes itself when the last reader is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        os.close(self.fd)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset` of the file on."""
        read_fully(self.fd, offset, out, self.path)

    def view(self, first: int, last: int) -> Bytes:
        """Return bytes [first, last) of the file, mapped. Raises InputError where the file has become shorter."""
        size = os.fstat(self.fd).st_size  # touching a page beyond the end would end the process
        if size < last:
            raise InputError(f"{self.path}: ends at byte {size}, it was cut since it was opened", "get it again")
        return self._mapped[first:last]

    @cached_property
    def _mapped(self) -> Bytes:
        return np.frombuffer(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ), np.uint8)

    def reader(self, info: ArrayInfo) -> Read:
        """Return a function that reads within one array."""
        return lambda offset, out: self.read_into(info.offset + offset, out)


def read_fully(fd: int, offset: int, out: memoryview, path: Path) -> None:
    """Fill `out` from `offset` on. Raises InputError where the file ends early or cannot be read."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(fd, [out[done:] if done else out], offset + done)
        except OSError as error:
            raise InputError(f"{path}: reading failed ({error.strerror})", "check the disk") from None
        if count == 0:
            raise InputError(f"{path}: ends at byte {offset + done}, it was cut since it was opened", "get it again")
        done += count


def _what_is(path: Path) -> str:
    """Say what stands at `path` instead of a checkpoint."""
    names = [path.name] if path.is_file() else sorted(file.name for file in path.iterdir())
    if _ADAPTER in names or path.name.startswith("adapter_model"):
        return "a PEFT adapter"
    for suffix, what in ((".bd", "a zendelta delta file"), (".gguf", "a GGUF file"), (".pth", "raw torch weights")):
        if any(name.endswith(suffix) for name in names):
            return what if path.is_file() else f"a folder with {what}"
    if path.is_file():
        return f"a {path.suffix or 'nameless'} file"
    return f"a folder without weights ({listed(names, 4) or 'empty'})"


def _way_out(path: Path) -> str:
    what = _what_is(path)
    if "adapter" in what:
        return "merge it into its base first (PEFT: merge_and_unload, then save_pretrained)"
    if "delta file" in what:
        return "turn it back into a checkpoint first: zendelta apply BASE FILE.bd -o FOLDER"
    if "GGUF" in what:
        return "use the safetensors checkpoint that it was converted from"
    if "raw torch" in what:
        return "convert it to a Hugging Face checkpoint first (transformers has a conversion script for each family)"
    if path.suffix == ".bin":
        return f"name the folder that holds it: {path.parent}"
    return "name a folder that holds model.safetensors, or shards with their index"
