"""A server on the loopback that speaks the Hub's endpoints, with faults on request.

    with hub({"org/model": folder}) as server:      HF_ENDPOINT=server.url
        server.faults.append(Fault("cut", after=1000))

Writing: see hub_writes.py. Reading: ``api/models/{id}[/revision/{rev}]``, ``tree``, ``resolve`` (small files answered at once, large ones by a redirect to
``/cdn`` under another name of this host, signed) with ranges. Plain LFS only, no Xet. What it answers is
computed here from the files, with no help of the package under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .hub_writes import Writes

TOKEN = "hf_" + "s3cret" * 5
LARGE = 100_000  # bytes: as on the Hub, larger files and all .safetensors are LFS


@dataclass
class Fault:
    """One thing that goes wrong with ``times`` answers for files whose path matches ``path``, after the first ``skip``.

    ``kind``: ``cut`` (the connection, after ``after`` bytes), ``stall`` (half a second of silence before that), ``status`` (``status`` instead), ``range`` (bytes from one
    further on), ``whole`` (the range is ignored), ``flip`` (one byte is another), ``expired`` (signed addresses),
    ``resized`` (Content-Range tells another size), ``gzip`` (says that it is encoded).
    """

    kind: str
    times: int = 1
    path: str = r".*"
    status: int = 503
    after: int = 0
    skip: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Repo:
    """``commit`` names the state of ``folder``; ``gated`` and ``private`` need :data:`TOKEN`."""

    folder: Path
    commit: str = "a" * 40
    gated: bool = False
    private: bool = False
    sha256: dict[str, str] = field(default_factory=dict)
    branches: dict[str, Repo] = field(default_factory=dict)


@dataclass
class Hub:
    """The server: what it serves, what is to go wrong, and what it was asked."""

    url: str
    repos: dict[str, Repo]
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    home: Path = Path("hub")  # of repositories that are made
    objects: dict[str, bytes] = field(default_factory=dict)  # large files that were sent, by sha256
    commits: list[list[dict[str, Any]]] = field(default_factory=list)

    def take(self, kinds: set[str], path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.kind in kinds and re.search(fault.path, path):
                    if not fault.skip:
                        fault.times -= 1
                        return fault
                    fault.skip -= 1
        return None

    def paths(self, method: str = "GET") -> list[str]:
        return [path for asked, path, _, _ in self.asked if asked == method]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may hang up: nothing to print."""


@contextlib.contextmanager
def hub(repos: dict[str, Path | Repo]) -> Iterator[Hub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    known = {name: repo if isinstance(repo, Repo) else Repo(repo) for name, repo in repos.items()}
    server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", known)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


@lru_cache(maxsize=1000)
def _sha256(path: Path, mtime: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class _Handler(Writes, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            asked = self.command, path, self.headers.get("Range"), self.headers.get("Authorization")
            self.hub.asked.append(asked)
        fault = self.hub.take({"status"}, path)
        if fault:
            self._send(fault.status, b"", fault.headers)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._cdn(found[1], found[2])
        else:
            self._send(404, b"")

    def _repo(self, name: str, revision: str, content: bool = False) -> Repo | None:
        """The repository; None after an answer that it may not be read."""
        repo, known = self.hub.repos.get(name), self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self._send(404 if known else 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
        elif branch := next((b for at, b in repo.branches.items() if revision in {at, b.commit}), None):
            return branch
        elif revision not in {"main", repo.commit}:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif repo.gated and content and not known:
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        else:
            return repo
        return None

    def _info(self, name: str, revision: str) -> None:
        repo = self._repo(name, revision)
        if repo:
            self._json(
                {"_id": "1", "id": name, "modelId": name, "sha": repo.commit, "private": repo.private, "tags": []}
            )

    def _tree(self, name: str, revision: str) -> None:
        """The files in pages of five, as the Hub has them in pages of 1,000."""
        repo = self._repo(name, revision)
        if not repo:
            return
        names = sorted(p.relative_to(repo.folder).as_posix() for p in repo.folder.rglob("*") if p.is_file())
        at = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        folders = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "folder"}] if at == 0 else []
        following = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={at + 5}"
        headers = {"Link": f'<{following}>; rel="next"'} if at + 5 < len(names) else {}
        self._json(folders + [self._entry(repo, item) for item in names[at : at + 5]], headers)

    def _entry(self, repo: Repo, name: str) -> dict[str, Any]:
        path, oid = repo.folder / name, self._oid(repo, name)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}
        if _is_lfs(path):
            entry |= {"oid": "1" * 40, "lfs": {"oid": oid, "size": entry["size"], "pointerSize": 134}}
        return entry

    def _oid(self, repo: Repo, name: str) -> str:
        path = repo.folder / name
        if _is_lfs(path):
            return repo.sha256.get(name) or _sha256(path, path.stat().st_mtime_ns)
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, revision, content=True)
        if not repo:
            return
        path = repo.folder / file
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            return
        oid = self._oid(repo, file)
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{oid}"'}
        if not _is_lfs(path):
            self._content(path, headers)
            return
        other = self.hub.url.replace("127.0.0.1", "localhost")
        headers |= {"X-Linked-Size": str(path.stat().st_size), "X-Linked-ETag": f'"{oid}"'}
        self._send(302, b"", headers | {"Location": f"{other}/cdn/{name}/{file}?signature=0123abcd"})

    def _cdn(self, name: str, file: str) -> None:
        if self.headers.get("Authorization") or self.hub.take({"expired"}, self.path):
            self._send(403, b"")
            return
        path = self.hub.repos[name].folder / file
        self._content(path, {"ETag": '"of the cdn"'})

    def _content(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2] or size) + 1, size)) if found else (0, size)
        kinds = {"cut", "stall", "range", "whole", "flip", "resized", "gzip"}
        fault = self.hub.take(kinds, self.path) if size and self.command == "GET" else None
        kind = fault.kind if fault else None
        if found and start >= size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        if kind == "range":
            start, stop = start + 1, min(stop + 1, size)
        if kind == "whole":
            found, start, stop = None, 0, size
        headers |= {"Content-Length": str(stop - start), "Accept-Ranges": "bytes"}
        if kind == "gzip":
            headers["Content-Encoding"] = "gzip"
        if found:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size + (kind == 'resized')}"
        self._begin(206 if found else 200, headers)
        if self.command == "GET":
            self._bytes(path, start, stop, fault)

    def _bytes(self, path: Path, start: int, stop: int, fault: Fault | None) -> None:
        end = min(stop, start + fault.after) if fault and fault.kind in {"cut", "stall"} else stop
        flip = fault is not None and fault.kind == "flip"
        with open(path, "rb") as file, contextlib.suppress(OSError):
            file.seek(start)
            while start < end:
                piece = bytearray(file.read(min(1 << 20, end - start)))
                if flip:
                    piece[-1] ^= 1
                    flip = False
                self.wfile.write(piece)
                start += len(piece)
                with self.hub.lock:
                    self.hub.sent += len(piece)
        if end < stop:
            time.sleep(0.5 if fault and fault.kind == "stall" else 0)
            self.close_connection = True

    def _json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


def _is_lfs(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.stat().st_size > LARGE
