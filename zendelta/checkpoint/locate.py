"""From what a user typed to a local path: a folder, a file, or a model on the Hugging Face hub.

An existing path wins over everything else and never touches the network. `org/name`, `org/name@revision` and
`hf://org/name@revision` are hub ids: what zendelta needs of them, and nothing more, comes through huggingface_hub
into its cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean everywhere.

    locate("meta-llama/Llama-3.1-8B@main").path  # a folder in the hub's cache
"""

from __future__ import annotations

import difflib
import errno
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zendelta._version import __version__
from zendelta.checkpoint.sidecar import check_side_path
from zendelta.errors import InputError, MachineError, ZendeltaError, listed

if TYPE_CHECKING:
    from huggingface_hub import HfApi

What = Literal["checkpoint", "adapter", "config"]

# One slash, the hub's own alphabet, and a revision whose only slashes are those of refs/pr/1 and the like.
_PART = r"(?=[A-Za-z0-9_])[\w.-]{1,96}(?<=[A-Za-z0-9_])"
_HUB_ID = re.compile(
    rf"(?:hf://(?:models/)?)?(?P<repo>{_PART}/{_PART})(?:@(?P<revision>refs/[^@\s\\:]+(?<!/)|[^@\s/\\:]+))?", re.ASCII
)
_CACHED = re.compile(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})(?=[/\\]|$)")

# Folders that hold the model once more, in a form that is not read here.
_OTHER_FORMS = re.compile(r"(original|onnx|openvino|coreml|metal|gguf|tf|flax)/")
_OTHER_WEIGHTS = re.compile(r"(?!optimizer|scheduler|rng_state|random_states|training_args|adapter_).+\.safetensors")


@dataclass(frozen=True)
class Located:
    """Where a checkpoint lies and what it is called.

    Attributes:
        path: the local folder, or file, as typed (with `~` expanded), or the folder in the hub's cache.
        name: the hub id `org/name`, or the last part of the real path; never a path.
        revision: the commit hash for what comes from the hub or lies in its cache, else None.
    """

    path: Path
    name: str
    revision: str | None


def is_hub_id(spec: str | os.PathLike[str]) -> bool:
    """Say whether `locate` would ask the hub: text that reads as a hub id, with nothing at that path."""
    return isinstance(spec, str) and _hub_id(spec) is not None and _existing(spec) is None


def locate(spec: str | os.PathLike[str], *, what: What = "checkpoint", quiet: bool = True) -> Located:
    """Turn a path or a hub id into a local path, downloading what is missing.

    An existing path wins, whatever it looks like. Else `org/name`, `org/name@revision` and `hf://` before either
    are hub ids; what starts with `.`, `/` or `~`, ends in a slash or has more than one is only ever a path, and so
    is an `os.PathLike`. Without a connection, or with HF_HUB_OFFLINE, the cache alone is used.

    Args:
        spec: what the user typed.
        what: "checkpoint" for weights and the files beside them, an adapter's where there is no model; "adapter"
            for the adapter's where there are both; "config" for the files beside the weights alone.
        quiet: show no progress bars; with False they are shown where stderr is a terminal.

    Raises:
        InputError: nothing at this path; no such model or revision, no access to it, nothing in it that zendelta
            reads; the hub cannot be reached and the cache lacks it or a part of it.
        MachineError: no space for it, or a cache folder that cannot be written.
    """
    text = os.fspath(spec)
    path = _existing(text)
    if path is not None:
        return _local(path)
    parsed = _hub_id(text) if isinstance(spec, str) else None
    if parsed is None:
        raise _nothing_at(text)
    with _progress(not quiet and sys.stderr.isatty()):
        return _from_hub(text, *parsed, what)


def wanted(files: Sequence[str], *, what: What = "checkpoint") -> list[str]:
    """Choose, by name alone, the files of a repository that zendelta needs.

    The weights are one set in the top folder: the safetensors model, else a safetensors adapter, else other
    safetensors files, else `pytorch_model*.bin`, else `adapter_model.bin`; an index wins over a single file, and
    that over variants such as `model.fp16.safetensors`. Beside them the files that travel with the weights (see
    `sidecar`), except in folders such as `original` or `onnx`, which hold the same model in another form.

    Args:
        files: paths in the repository, with forward slashes.
        what: as for `locate`.

    Returns:
        The chosen paths, sorted. Of an indexed set the shards with numbered names; `locate` reads the index.
    """
    index, weights = (None, []) if what == "config" else _weights(files, what)
    return sorted({*_side(files), *weights, *([index] if index else [])})


def _side(files: Sequence[str]) -> list[str]:
    return [file for file in files if not _OTHER_FORMS.match(file) and _travels(file)]


def _travels(file: str) -> bool:
    try:
        check_side_path(file)
    except InputError:
        return False
    return True


def _weights(files: Sequence[str], what: What) -> tuple[str | None, list[str]]:
    """Return the one set of weights to read: its index, if it has one, and its files."""
    top = sorted(file for file in files if "/" not in file)

    def named(stem: str, ending: str) -> tuple[str | None, list[str]]:
        numbered = [file for file in top if re.fullmatch(rf"{stem}-\d+-of-\d+\{ending}", file)]
        single, index = f"{stem}{ending}", f"{stem}{ending}.index.json"
        return (index, numbered) if index in top else (None, [single] if single in top else numbered)

    other = [file for file in top if _OTHER_WEIGHTS.fullmatch(file)]
    other = [file for file in other if not file.startswith("consolidated")] or other
    lone = [file for file in top if file.endswith(".safetensors.index.json") and not file.startswith("adapter_")]
    other_set = (lone[0] if len(lone) == 1 else None, other)
    other_bin = [file for file in top if re.fullmatch(r"pytorch_model.*\.bin", file)]
    adapter, adapter_bin = named("adapter_model", ".safetensors"), named("adapter_model", ".bin")
    sets = [named("model", ".safetensors"), adapter, other_set, named("pytorch_model", ".bin"), (None, other_bin)]
    sets = [adapter, adapter_bin, *sets] if what == "adapter" else [*sets, adapter_bin]
    return next((chosen for chosen in sets if any(chosen)), (None, []))


def _hub_id(text: str) -> tuple[str, str | None] | None:
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in text or "--" in match["repo"] or match["repo"].endswith(".git"):
        return None
    return match["repo"], match["revision"]


def _existing(text: str) -> Path | None:
    for candidate in (text, os.path.expanduser(text)):
        try:
            os.stat(candidate)
        except PermissionError as error:
            raise InputError(f"{_shown(text)} may not be read: {error.strerror}", "check its permissions") from error
        except (OSError, ValueError):  # not there, a name that cannot exist
            continue
        return Path(candidate)
    return None


def _local(path: Path) -> Located:
    """Name a local path: a folder by its real last part, a file by its own, both by the hub's cache layout."""
    real = Path(os.path.realpath(path)) if path.is_dir() else Path(os.path.realpath(path.parent), path.name)
    cached = _CACHED.search(str(real))
    if cached is not None:
        return Located(path, cached[1].replace("--", "/", 1), cached[2])
    return Located(path, real.name or "root", None)


def _nothing_at(text: str) -> InputError:
    """Say that a path does not exist, from the first part that is missing, and what is there instead."""
    if text.startswith("hf://"):
        return InputError(f"{_shown(text)} is not a model's hub id", "write hf://org/name or hf://org/name@revision")
    if not text:
        return InputError("the path is empty", "give a folder, a file or a hub id such as org/name")
    path = Path(os.path.expanduser(text))
    if path.is_symlink():
        return InputError(f"{_shown(text)} is a link to {os.readlink(path)}, which does not exist", "mend the link")
    near, parent = _near(path)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif "/" not in text:
        hint = "check the spelling; a model on the hub is written org/name"
    else:
        hint = f"check the spelling; the first folder on the way that exists is {_shown(str(parent))}"
    return InputError(f"nothing at {_shown(text)}: no such file or folder", hint)


def _near(path: Path) -> tuple[list[str], Path]:
    """Return names like the first missing part of a path, and the folder in which it is missing."""
    parent, missing = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    try:
        names = {name.lower(): name for name in sorted(os.listdir(parent))}
    except OSError:
        names = {}
    return [_shown(str(parent / names[m])) for m in difflib.get_close_matches(missing.lower(), names)], parent


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """Keep huggingface_hub's bars off while nobody should see them."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _from_hub(text: str, repo: str, revision: str | None, what: What) -> Located:
    """Download what is wanted and missing; whatever keeps us from it, a complete copy in the cache will do."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi(library_name="zendelta", library_version=__version__)
    try:
        folder = _download(api, repo, revision, what)
    except ZendeltaError:
        raise
    except Exception as error:  # of httpx or requests or xet, by the version of huggingface_hub
        cached, missing = _cached(api, repo, revision, what)
        if cached is None or missing or isinstance(error, RevisionNotFoundError):
            raise _explained(error, text, repo, revision, missing) from error
        folder = cached
    return Located(folder, repo, folder.name)


def _download(api: HfApi, repo: str, revision: str | None, what: What) -> Path:
    from huggingface_hub import constants

    info = api.model_info(repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    repo_cache = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")

    def fetch(at: str | None, names: list[str]) -> Path:
        """Download files that are not in the cache, if there is space for them."""
        needed = 0
        for file in (siblings[name] for name in names):
            blob = repo_cache / "blobs" / str(file.lfs.sha256 if file.lfs else file.blob_id)
            if not blob.exists() and not (repo_cache / f"snapshots/{info.sha}/{file.rfilename}").exists():
                needed += file.size or 0
        free = shutil.disk_usage(next(folder for folder in repo_cache.absolute().parents if folder.exists())).free
        if needed > free:
            raise MachineError(
                f"{repo} needs {needed / 1e9:.1f} GB more in {constants.HF_HUB_CACHE}, which has {free / 1e9:.1f} GB",
                "free some space, or set HF_HOME to a folder on a larger disk",
            )
        found = Path(api.snapshot_download(repo, revision=at, allow_patterns=[glob.escape(name) for name in names]))
        if found.name != info.sha or not all((found / name).exists() for name in names):
            raise InputError(f"{repo}: the download broke off, or the model was changed meanwhile", "run it again")
        return found

    index, weights = (None, []) if what == "config" else _weights(list(siblings), what)
    if what != "config" and not weights and index is None:
        others = sorted(set(siblings) - set(_side(list(siblings))) - {".gitattributes"})
        raise InputError(
            f"{repo} has no weights that zendelta reads; it has {listed(others) or 'no other files either'}",
            "name a model that has safetensors files (or pytorch_model*.bin) in its top folder",
        )
    # By the revision as typed first, since that is how the cache learns which commit it means.
    folder = fetch(revision, [*_side(list(siblings)), *([index] if index else weights)])
    if index:
        shards = _indexed(folder / index, repo)
        absent = [shard for shard in shards if shard not in siblings]
        if absent:
            raise InputError(
                f"{repo}: {index} names {len(absent)} of {len(shards)} shards that the model does not have: "
                f"{listed(absent)}",
                f"name a revision that is complete, as {repo}@revision",
            )
        fetch(info.sha, shards)
    return folder


def _indexed(path: Path, repo: str) -> list[str]:
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{repo}: {path.name} is damaged: {error}", "name another revision of it") from error
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise InputError(f"{repo}: {path.name} names no shards", "name another revision of it")
    return shards


def _cached(api: HfApi, repo: str, revision: str | None, what: What) -> tuple[Path | None, list[str]]:
    """Return the folder of a revision in the cache, if there is one, and what it lacks."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found: str | None = api.snapshot_download(repo, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError as error:
        # Newer versions call a folder without the files that we never wanted incomplete.
        found = getattr(error, "snapshot_path", None)
    if found is None:
        return None, []
    folder = Path(found)
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    if what == "config":
        return folder, [] if _side(files) else ["config.json"]
    index, weights = _weights(files, what)
    if index is None:
        return folder, [] if weights else ["the weights"]
    return folder, [shard for shard in _indexed(folder / index, repo) if shard not in files]


def _explained(error: Exception, text: str, repo: str, revision: str | None, missing: list[str]) -> ZendeltaError:
    """Say in one line why a model could not be had, and in one what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)

    def caused_by(kind: type[BaseException]) -> bool:
        return any(isinstance(link, kind) for link in chain)

    page = f"{constants.ENDPOINT}/{repo}"
    status = next((r.status_code for link in chain if (r := getattr(link, "response", None)) is not None), None)
    numbers = {link.errno for link in chain if isinstance(link, OSError)}
    unwritable = {link.errno for link in chain if isinstance(link, OSError) and link.filename is not None}
    reason = next((line.strip() for line in str(chain[-1]).splitlines() if line.strip()), type(chain[-1]).__name__)
    near = _near(Path(text))[0] if Path(text).parent.is_dir() else []
    instead = f"did you mean {' or '.join(near)}? if not: " if near else ""
    lacking = f"the cache lacks {listed(missing)} of it" if missing else f"it is not in {constants.HF_HUB_CACHE}"
    or_else = "or give the path of a folder that holds it, as in `--base path`"

    if numbers & {errno.ENOSPC, errno.EDQUOT} or any("No space left" in str(link) for link in chain):
        return MachineError(
            f"no space left in {constants.HF_HUB_CACHE} for {text}",
            "free some space, or set HF_HOME to a folder on a larger disk, and run again: finished files are kept",
        )
    if unwritable & {errno.EACCES, errno.EPERM, errno.EROFS}:
        return MachineError(f"{text} could not be stored: {reason}", "set HF_HOME to a folder that can be written")
    if caused_by(GatedRepoError):
        return InputError(f"{text} is gated, and you have no access to it", f"ask on {page}, then run `hf auth login`")
    if caused_by(RevisionNotFoundError):
        return InputError(f"{repo} has no revision {revision or 'main'}", f"see {page} for those that it has")
    if caused_by(RepositoryNotFoundError):
        return InputError(
            f"nothing at {text}: neither a path here nor a model on the hub that you may read",
            f"{instead}check the spelling; for a private model run `hf auth login`",
        )
    if status in (401, 403):
        return InputError(f"the hub refused {text} ({status})", "run `hf auth login`, or check the token in HF_TOKEN")
    if caused_by(OfflineModeIsEnabled):
        return InputError(
            f"{text} is not here: no such path, HF_HUB_OFFLINE is set, and {lacking}",
            f"{instead}unset HF_HUB_OFFLINE, {or_else}",
        )
    reason = f"the answer was {status}" if status else reason
    return InputError(
        f"{text} is no path here, {lacking}, and {constants.ENDPOINT} failed ({reason})",
        f"{instead}check the network and try again, {or_else}",
    )
