"""The writing half of the loopback Hub: repositories, branches, ``preupload``, LFS batch and storage, commits.

Further faults: ``moved`` (another commit comes before the one that is sent), ``lost`` (the commit is made, its answer is
cut), ``cut`` of what is sent to storage. A reader's token may read and not write.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from typing import Any
from urllib.parse import unquote, urlsplit

READER = "hf_" + "reader" * 5
_BRANCH = r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/([^/]+)"


class Writes:
    """Answers to POST, PUT and DELETE; ``self`` is the handler of hub_server.py."""

    hub: Any
    headers: Any
    rfile: Any
    path: str
    command: str
    _send: Any
    _json: Any
    close_connection: bool

    def do_POST(self) -> None:
        self._write()

    def do_PUT(self) -> None:
        self._write()

    def do_DELETE(self) -> None:
        self._write()

    def _write(self) -> None:
        path, quoted = unquote(urlsplit(self.path).path), urlsplit(self.path).path
        with self.hub.lock:
            self.hub.asked.append((self.command, path, None, self.headers.get("Authorization")))
        if self.command == "PUT" and (fault := self.hub.take({"cut"}, path)):
            self.rfile.read(fault.after)
            self.close_connection = True
            self.connection.close()  # type: ignore[attr-defined]
            return
        body = self._body()
        if fault := self.hub.take({"status"}, path):
            self._send(fault.status, json.dumps({"error": "no"}).encode(), fault.headers)
        elif self.command == "PUT":
            self._store(path.rpartition("/")[2], body)
        elif not self._may_write():
            return
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            wrong = "base_model: [" in json.loads(body)["content"]
            self._send(400 if wrong else 200, json.dumps({"errors": [{"message": "bad"}] if wrong else []}).encode())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif found := re.fullmatch(_BRANCH, quoted):
            name, what, branch = found[1], found[2], unquote(found[3])
            {"branch": self._branch, "preupload": self._preupload, "commit": self._commit}[what](name, branch, body)
        else:
            self._send(200 if path == "/verify" else 404, b"{}")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return bytes(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _may_write(self) -> bool:
        said = self.headers.get("Authorization")
        if said and READER not in said:
            return True
        self._send(403 if said else 401, b'{"error": "no"}')
        return False

    def _create(self, asked: dict[str, Any]) -> None:
        from .hub_server import Repo

        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            self._send(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
            return
        folder = self.hub.home / name
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[name] = Repo(folder, commit="0" * 40, private=private)
        self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _branch(self, name: str, branch: str, body: bytes) -> None:
        from .hub_server import Repo

        repo = self.hub.repos[name]
        if self.command == "DELETE":
            del repo.branches[branch]
        else:
            folder = self.hub.home / f"{name}-{branch.replace('/', '-')}"
            shutil.copytree(repo.folder, folder, dirs_exist_ok=True)
            repo.branches[branch] = Repo(folder, commit=hashlib.sha1(branch.encode()).hexdigest())
        self._send(200, b"")

    def _preupload(self, name: str, branch: str, body: bytes) -> None:
        """Large files and .safetensors are LFS; what the repository's .gitignore names is ignored unless another is sent."""
        asked, repo = json.loads(body), self._at(name, branch)
        ignored = repo.folder / ".gitignore"
        names = ignored.read_text().split() if "gitIgnore" not in asked and ignored.exists() else []
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") or file["size"] > 100_000 else "regular",
                "shouldIgnore": file["path"] in names,
            }
            for file in asked["files"]
        ]
        self._json({"files": files})

    def _at(self, name: str, branch: str) -> Any:
        repo = self.hub.repos[name]
        return repo if branch == "main" else repo.branches[branch]

    def _batch(self, asked: dict[str, Any]) -> None:
        other = self.hub.url.replace("127.0.0.1", "localhost")
        actions = {
            "upload": {"href": f"{other}/lfs/%s?signature=0123abcd"},
            "verify": {"href": f"{self.hub.url}/verify"},
        }
        objects = [
            dict(item)
            if item["oid"] in self.hub.objects
            else item | {"actions": json.loads(json.dumps(actions).replace("%s", item["oid"]))}
            for item in asked["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if self.headers.get("Authorization") or hashlib.sha256(body).hexdigest() != oid:
            self._send(400, b"")
            return
        with self.hub.lock:
            self.hub.objects[oid] = body
        self._send(200, b"")

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        repo, lines = self._at(name, branch), [json.loads(line) for line in body.splitlines()]
        if self.hub.take({"moved"}, self.path):
            repo.commit = "c" * 40
        if lines[0]["value"].get("parentCommit", repo.commit) != repo.commit:
            self._send(412, b'{"error": "the branch has moved"}')
            return
        for line in lines[1:]:
            path, value = repo.folder / line["value"]["path"], line["value"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "deletedFile":
                path.unlink()
            else:
                lfs = line["key"] == "lfsFile"
                path.write_bytes(self.hub.objects[value["oid"]] if lfs else base64.b64decode(value["content"]))
        repo.commit = hashlib.sha1(body).hexdigest()
        self.hub.commits.append(lines)
        if self.hub.take({"lost"}, self.path):
            self.close_connection = True
            self.connection.close()  # type: ignore[attr-defined]
            return
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.commit}", "commitOid": repo.commit})
