"""Digests that are recorded somewhere: of whole files, and of tensors.

============================  ==================================================================================
``ckptkit.digests.json``      xxh3-128 of each shard's header and tensors; written by ``ckptkit hash --per-tensor``
``ckptkit.json``              the same of the shards that a command wrote, and xxh3-128 of the files beside them
``SHA256SUMS``                sha256 of whole files, as ``sha256sum`` writes and checks it
the Hub                       sha256 of its large files: the name of a cache's blob, or the ETag kept beside a
                              download (``.cache/huggingface/download/NAME.metadata``)
============================  ==================================================================================

Of a shard that the first of them covers, header and tensors, nothing else need be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..manifest import NAME as MANIFEST
from ..model_card import CARD
from .checkpoint import parse_json
from .source import Source

SUMS = "SHA256SUMS"
TENSORS = "ckptkit.digests.json"
SCHEMA = 1

_SUM = re.compile(r"(\\?)([0-9a-f]{64}) [ *](.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Digest(NamedTuple):
    """A digest of a whole file: ``sha256`` or ``xxh3`` (128 bits, hex), and where it is recorded."""

    algorithm: str
    value: str
    where: str


class ShardDigests(NamedTuple):
    """xxh3-128 (hex) of a shard's header, where that is recorded, and of its tensors by name."""

    header: str | None
    tensors: Mapping[str, str]


class Recorded(NamedTuple):
    """Digests of shards' parts, and of whole files; ``unreadable``: what is wrong with records that cannot be read."""

    shards: Mapping[str, ShardDigests]
    files: Mapping[str, Digest]
    unreadable: tuple[Finding, ...]


def recorded(source: Source, manifest: Mapping[str, Any] | None) -> Recorded:
    """Everything that is recorded of a source's files."""
    made = manifest or {}
    unreadable: list[Finding] = []
    shards = dict(_shards_of_manifest(made)) | _record(source, TENSORS, _shards, unreadable)
    files = dict(_from_hub(source))
    files |= {name: Digest("xxh3", value, MANIFEST) for name, value in _sidecars_of_manifest(made)}
    files |= {name: Digest("sha256", value, SUMS) for name, value in _record(source, SUMS, _sums, unreadable).items()}
    return Recorded(shards, files, tuple(unreadable))


def _record(
    source: Source, name: str, parse: Callable[[str], dict[str, Any]], unreadable: list[Finding]
) -> dict[str, Any]:
    """What the file ``name`` records, nothing where there is none; what is wrong with it joins ``unreadable``."""
    try:
        return parse(source.text(name, "surrogateescape")) if name in source.files else {}
    except UserError as error:
        unreadable += error.findings
        return {}


def _shards(text: str) -> dict[str, ShardDigests]:
    return parse_shards(text, TENSORS)


def _sums(text: str) -> dict[str, str]:
    found = dict(parse_sums(text))
    if not found:
        raise fail("config.parse", f"{SUMS} holds no line that sha256sum would read", file=SUMS)
    return found


def _shards_of_manifest(content: Mapping[str, Any]) -> Iterator[tuple[str, ShardDigests]]:
    records = content.get("shards")
    for record in records if isinstance(records, list) else ():
        match record:
            case {"name": str(name), "tensors": dict() as tensors}:
                yield name, ShardDigests(None, tensors)


def _sidecars_of_manifest(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    records = content.get("sidecars")
    for name, record in records.items() if isinstance(records, dict) else ():
        match record:
            case {"xxh3": str(value)} if name != CARD:  # a card is written on, by `ckptkit push` for one
                yield name, value


def _from_hub(source: Source) -> Iterator[tuple[str, Digest]]:
    for name, info in source.files.items():
        if info.tag is not None:
            kind, _, value = info.tag.partition(":")
            if kind == "sha256":
                yield name, Digest(kind, value, "the Hub's record")
            continue
        if info.path.parent.name == "blobs" and _SHA256.fullmatch(info.path.name):
            yield name, Digest("sha256", info.path.name, "the name of the Hub cache's blob")
            continue
        etag = _etag(source.root / ".cache/huggingface/download" / f"{name}.metadata")
        if etag:
            yield name, Digest("sha256", etag, f".cache/huggingface/download/{name}.metadata")


def _etag(path: Path) -> str | None:
    """The sha256 that the Hub gave with a download; other files' ETags are git's own digests."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


# --- the files ---------------------------------------------------------------------------------------------


def parse_sums(text: str) -> Iterator[tuple[str, str]]:
    """File names and sha256 of the lines that ``sha256sum`` would read; a backslash before a line escapes its name."""
    for line in text.splitlines():
        found = _SUM.fullmatch(line)
        if found:
            name = found[3].replace(r"\n", "\n").replace(r"\\", "\\") if found[1] else found[3]
            yield name.removeprefix("./"), found[2]


def sums_text(sums: Mapping[str, str]) -> str:
    """The file that ``sha256sum --check`` reads, sorted by name."""
    return "".join(f"{_escaped(name, value)}\n" for name, value in sorted(sums.items()))


def _escaped(name: str, value: str) -> str:
    if "\n" not in name and "\\" not in name:
        return f"{value}  {name}"
    return "\\{}  {}".format(value, name.replace("\\", r"\\").replace("\n", r"\n"))


def parse_shards(text: str, file: str) -> dict[str, ShardDigests]:
    """By shard, the digests of its parts. Raises UserError (``config.parse``)."""
    found = {}
    match parse_json(text, file, "config.parse"):
        case {"schema": 1, "shards": dict() as shards}:
            for name, shard in shards.items():
                match shard:
                    case {"header": str(header), "tensors": dict() as tensors}:
                        found[name] = ShardDigests(header, tensors)
            if len(found) == len(shards):
                return found
    raise fail("config.parse", f"{file} does not hold digests of tensors that this version can read", file=file)


def shards_text(shards: Mapping[str, ShardDigests]) -> str:
    """The file of tensor digests."""
    table = {name: digests._asdict() for name, digests in sorted(shards.items())}
    return json.dumps({"schema": SCHEMA, "algorithm": "xxh3-128", "shards": table}, indent=1) + "\n"
