"""A folder of an object store as a destination, through fsspec. The manifest comes last: a folder without it is no result.

A record lies there meanwhile of what has arrived, so that the same command carries on where a cut one stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..files.checkpoint import SUFFIX
from ..files.parallel import on_threads
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import read_manifest
from .objects import Folder, asking_store, file_at, folder_at, open_objects
from .push import Item, Pushed, Told, content_of, is_weights, stale

RECORD = ".ckptkit.push.json"
_AT_ONCE = 4  # files; the store's library may send parts of each side by side

Arrived = dict[str, list[str]]  # by file, its sha256 and what the store said of it then


class StoreFolder(NamedTuple):
    """A folder by its URL."""

    uri: str

    @property
    def served(self) -> str | None:
        return None

    def there(self) -> Source | None:
        """Raises UserError ``access.*``, ``usage.*``."""
        try:
            return open_objects(self.uri)
        except UserError as error:
            if error.findings[0].id == "source.missing":
                return None
            raise

    def refused(self, there: Source | None, overwrite: bool, manifest: bytes | None) -> Finding | None:
        """``output.exists``: another result, or weights that are not of an unfinished push of this one."""
        found = [name for name in there.files if name == MANIFEST or is_weights(name)] if there else []
        if there is None or not found or overwrite:
            return None
        lying = _content(there, MANIFEST)
        if manifest and (lying == manifest or (lying is None and _arrived(there, manifest) is not None)):
            return None
        hint = "name another folder; ckptkit push --overwrite replaces what is there"
        return Finding("output.exists", f"{self.uri} holds {found[0]} already", file=found[0], hint=hint)

    def publish(self, items: tuple[Item, ...], manifest: Mapping[str, Any], there: Source | None, told: Told) -> Pushed:
        """Raises UserError: ``access.*``, ``output.write``, ``output.verify``."""
        content = next(content_of(item) for item in items if item.name == MANIFEST)
        is_finished = there is not None and _content(there, MANIFEST) == content
        arrived = (_arrived(there, content) if there else None) or {}
        kept = {item.name for item in items if there and _is_there(item, there, arrived, is_finished)}
        new = sorted((i for i in items if i.name not in {*kept, MANIFEST}), key=attrgetter("size"), reverse=True)
        gone = stale(there.files, read_manifest(there), items) if there else []
        folder = folder_at(self.uri)
        with _writing(self.uri):
            if new or gone or not is_finished:
                if there and MANIFEST in there.files:
                    folder.system.rm_file(folder.prefix + MANIFEST)
                _send(folder, new, {name: arrived[name] for name in kept & arrived.keys()}, content, told)
                for name in gone:
                    folder.system.rm_file(folder.prefix + name)
                folder.system.pipe_file(folder.prefix + MANIFEST, content)
                folder.system.rm_file(folder.prefix + RECORD)
        return Pushed(self.uri, len(items), sum(item.size for item in new), tuple(gone))


def _send(folder: Folder, items: list[Item], arrived: Arrived, manifest: bytes, told: Told) -> None:
    """Put the files there, each with its line in the record."""
    _write_record(folder, arrived, manifest)
    tags = on_threads((partial(_put, folder, item) for item in items), _AT_ONCE)
    for item, tag in zip(items, tags, strict=True):
        arrived[item.name] = [item.sha256, tag]
        _write_record(folder, arrived, manifest)
        told(item.size)


def _put(folder: Folder, item: Item) -> str:
    """Send one file; gives what the store says of it. Raises UserError ``output.verify`` where it lacks bytes."""
    path = folder.prefix + item.name
    if isinstance(item.content, bytes):
        folder.system.pipe_file(path, item.content)
    else:
        folder.system.put_file(str(item.content), path)
    found = file_at(folder, folder.system.info(path))
    if found.size != item.size:
        message = f"{item.name} has {found.size:,} bytes at {folder.url}, {item.size:,} were sent"
        raise fail("output.verify", message, file=item.name, hint="the same command again")
    return str(found.tag)


# --- what is there -----------------------------------------------------------------------------------------


def _write_record(folder: Folder, arrived: Arrived, manifest: bytes) -> None:
    content = {"schema": 1, "manifest": hashlib.sha256(manifest).hexdigest(), "files": arrived}
    folder.system.pipe_file(folder.prefix + RECORD, json.dumps(content).encode())


def _arrived(there: Source, manifest: bytes) -> Arrived | None:
    """What an unfinished push of the result with this manifest left; None where there was none."""
    try:
        content = json.loads(_content(there, RECORD) or b"null")
    except (ValueError, RecursionError):
        return None
    match content:
        case {"schema": 1, "manifest": str(digest), "files": dict() as files}:
            return dict(files) if digest == hashlib.sha256(manifest).hexdigest() else None
    return None


def _is_there(item: Item, there: Source, arrived: Arrived, is_finished: bool) -> bool:
    """Whether a file need not be sent: as the record says, or, of a finished result, by size and small files' bytes."""
    info = there.files.get(item.name)
    if info is None or info.size != item.size:
        return False
    if item.name in arrived:
        return arrived[item.name] == [item.sha256, info.tag]
    return is_finished and (item.name.endswith(SUFFIX) or _content(there, item.name) == content_of(item))


def _content(there: Source, name: str) -> bytes | None:
    return there.read(name, 0, there.files[name].size) if name in there.files else None


@contextlib.contextmanager
def _writing(url: str) -> Iterator[None]:
    with asking_store(url, "written"):
        try:
            yield
        except FileNotFoundError:
            message = f"{url} cannot be written: there is no such bucket"
            raise fail("output.write", message, file=url, hint="make the bucket, or correct its name") from None
