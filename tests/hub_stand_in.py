"""A stand-in for the Hugging Face hub on 127.0.0.1: as much of its HTTP interface as a download needs.

with StandIn({"org/name": Model({"main": {"config.json": b"{}"}})}) as hub:
    env = hub.environment(tmp_path)  # for a child process
    hub.downloaded()                 # what was fetched since the last call
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit(files: Files) -> str:
    """The commit hash of a set of files; any 40 hex digits that depend on the content will do."""
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha1(data).digest())
    return digest.hexdigest()


@dataclass
class Model:
    """One repository: its branches, and who may read it."""

    branches: dict[str, Files]
    gated: bool = False  # listed for everyone, downloaded only with the token
    private: bool = False  # not even listed without the token
    broken: str = ""  # a file that cannot be downloaded

    def files(self, revision: str) -> Files | None:
        for branch, files in self.branches.items():
            if revision in (branch, commit(files)):
                return files
        return None


class StandIn:
    """The server, running while the `with` block does."""

    token = "hf_of_the_test"

    def __init__(self, models: dict[str, Model]) -> None:
        self.models = models
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Go down; further requests are refused by the system."""
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Environment of a child process that knows this hub alone and keeps its cache in `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
        return {**kept, "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}

    def downloaded(self) -> list[str]:
        """Files whose content was sent since the last call, sorted."""
        sent = [path.split("/", 5)[5] for method, path in self.requests if method == "GET" and "/resolve/" in path]
        self.requests.clear()
        return sorted(sent)

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(call.path).path)
        self.requests.append((call.command, path))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        model = self.models.get(repo)
        known = call.headers.get("authorization") == f"Bearer {self.token}"
        if model is None or (model.private and not known):
            return self.send(call, 401, b"", {"X-Error-Code": "RepoNotFound"})
        verb = rest[0] if rest else "revision"
        # A revision such as refs/pr/1 arrives quoted, so it is one part before it is unquoted.
        raw = urlsplit(call.path).path.strip("/").split("/")[4 if api else 2 :]
        revision = unquote(raw[1]) if len(raw) > 1 else "main"
        files = model.files(revision)
        if files is None:
            return self.send(call, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        if verb == "revision":
            siblings = [{"rfilename": name, **self.entry(name, data)} for name, data in files.items()]
            info = {"id": repo, "sha": commit(files), "private": model.private, "siblings": siblings, "tags": []}
            return self.send(call, 200, json.dumps(info).encode())
        if verb == "tree":
            tree = [{"type": "file", "path": name, **self.entry(name, data)} for name, data in files.items()]
            return self.send(call, 200, json.dumps(tree).encode())
        name = unquote("/".join(raw[2:]))
        if model.gated and not known:
            return self.send(call, 401, b"", {"X-Error-Code": "GatedRepo"})
        if name not in files:
            return self.send(call, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if name == model.broken:
            return self.send(call, 410, b"")
        entry = self.entry(name, files[name])
        etag = entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"]
        return self.send(call, 200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": commit(files)})

    @staticmethod
    def entry(name: str, data: bytes) -> dict:
        """What listings say of one file: weights lie in large file storage, the rest in git."""
        oid = hashlib.sha1(data).hexdigest()
        entry: dict = {"size": len(data), "oid": oid, "blobId": oid}
        if name.endswith((".safetensors", ".bin", ".pth", ".gguf")):
            entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            entry["lfs"]["oid"] = entry["lfs"]["sha256"]  # so the tree calls it
        return entry

    @staticmethod
    def send(call: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        call.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            call.send_header(key, value)
        call.end_headers()
        if call.command != "HEAD":
            call.wfile.write(body)
