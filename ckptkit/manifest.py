"""``ckptkit.json``: what was made, from what, by which plan, with which digests. A folder without it is no result.

Schema 1; fields are only ever added. Everything but ``started``, ``seconds``, ``fetched`` and the ``mtime_ns`` is equal for equal
plans run on equal sources.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from . import __version__
from .files.source import FileInfo, Source
from .plan import Plan

NAME = "ckptkit.json"
SCHEMA = 1


class ShardRecord(TypedDict):
    """A finished shard. ``link`` is ``written``, ``copy``, ``reflink``, ``hard`` or ``symlink``.

    ``plan`` is the digest of the plan's shard, ``source`` the file that the shard is, where it was left untouched;
    ``tensors`` maps names to the xxh3-128 (hex) of their bytes and is None where nobody has read them.
    """

    name: str
    plan: str
    link: str
    source: str | None
    size: int
    mtime_ns: int
    tensors: dict[str, str] | None


class FileRecord(TypedDict):
    """A file beside the shards: its size in bytes and the xxh3-128 (hex) of its content."""

    size: int
    xxh3: str


def manifest(
    plan: Plan, source: Source, shards: Iterable[ShardRecord], sidecars: Mapping[str, FileRecord]
) -> dict[str, Any]:
    """What the result is and what it was made from."""
    return {
        "schema": SCHEMA,
        "tool": {"name": "ckptkit", "version": __version__},
        "command": plan.command,
        "plan": plan.digest,
        "settings": dict(plan.settings),
        "source": {"uri": source.uri, **_revision(source), "files": source_files(plan, source)} | _others(source),
        "shards": sorted(shards, key=lambda record: record["name"]),
        "sidecars": dict(sorted(sidecars.items())),
        "left_out": {item.name: item.reason for item in plan.left_out},
        "dropped": {item.name: item.reason for item in plan.dropped},
    }


def _revision(source: Source) -> dict[str, str]:
    """The commit of a Hub repository."""
    return {"revision": source.revision} if source.revision else {}


def _others(source: Source) -> dict[str, Any]:
    """The other sources that the plan read, by the keys that their files have before their names."""
    return {"others": {key: other.uri for key, other in source.others.items()}} if source.others else {}


def files_read(plan: Plan) -> list[str]:
    """The source's files that decide the result's bytes, by name."""
    shards = {shard.source for shard in plan.shards if shard.source}
    tensors = {ref.file for step in plan.steps() for ref in step.inputs}
    return sorted(shards | tensors | {item.name for item in plan.sidecars if item.text is None})


def source_files(plan: Plan, source: Source) -> dict[str, dict[str, int | str]]:
    """What tells later if the source's files are still those that were read."""
    infos = ((name, source.files[name]) for name in files_read(plan))
    return {name: described(info) for name, info in infos}


def described(info: FileInfo) -> dict[str, int | str]:
    """Size, and when a local file was written; or what a server says of its own: ``sha256``, ``git`` or ``etag``."""
    if info.tag is None:
        return {"size": info.size, "mtime_ns": info.mtime_ns}
    kind, _, value = info.tag.partition(":")
    return {"size": info.size, kind: value}


def environment(backend: str, device: str) -> dict[str, Any]:
    """What the result was computed with; ``torch`` is None where it was not needed."""
    torch = sys.modules.get("torch")
    python, machine = platform.python_version(), f"{platform.system()} {platform.machine()}"
    version = None if torch is None else str(torch.__version__)
    return {"python": python, "platform": machine, "torch": version, "backend": backend, "device": device}


def encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def parse(text: bytes) -> dict[str, Any] | None:
    """The manifest in ``text``; None where it is none that this version can read."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def read_manifest(source: Source) -> dict[str, Any] | None:
    """The manifest that a source was made with; None where it has none that this version can read."""
    return parse(source.read(NAME, 0, source.files[NAME].size)) if NAME in source.files else None


def known_digests(content: Mapping[str, Any], files: Mapping[str, FileInfo]) -> dict[str, dict[str, str]]:
    """By file, the tensor digests that a source's manifest holds; only of files that it still describes."""
    known: dict[str, dict[str, str]] = {}
    records = content.get("shards")
    for record in records if isinstance(records, list) else ():
        match record:
            case {"name": str(name), "size": size, "mtime_ns": mtime, "tensors": dict() as tensors}:
                if name in files and [files[name].size, files[name].mtime_ns] == [size, mtime]:
                    known[name] = tensors
    return known
