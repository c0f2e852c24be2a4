"""A finished result, looked at and published on a server: on a branch of the Hub, or in a folder of an object store.

Published is what ``ckptkit.json`` names, after every byte was held against what it records; with the sha256 taken in the
same reading the servers are asked, too, whether they received it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Protocol

import xxhash

from ..errors import Finding, UserError, fail
from ..files.checkpoint import INDEX_SUFFIX, SUFFIX
from ..files.digests import SUMS, TENSORS, Recorded, ShardDigests, recorded, sums_text
from ..files.hashing import gather, take
from ..files.header import Header, read_header
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import read_manifest
from ..model_card import CARD, Facts, card
from ..naming.names import Matcher

_REMADE = "make it again; ckptkit config makes a result of another with keys of its config changed"

Told = Callable[[int], None]


class Item(NamedTuple):
    """A file to publish: where it lies, or its bytes if they are new; its size in bytes and its sha256 (hex)."""

    name: str
    content: Path | bytes
    size: int
    sha256: str


def content_of(item: Item) -> bytes:
    """All bytes of a small file."""
    return item.content if isinstance(item.content, bytes) else item.content.read_bytes()


class Made(NamedTuple):
    """A result that was looked at: its manifest, its files but the card, the card and whether somebody wrote it there.

    ``left`` are files that are no part of the result.
    """

    manifest: Mapping[str, Any]
    items: tuple[Item, ...]
    card: str | None
    is_written: bool
    left: tuple[str, ...]


class Pushed(NamedTuple):
    """What was published: ``uri`` names it as a source; ``nbytes`` in ``files`` were not there before, ``removed`` went."""

    uri: str
    files: int
    nbytes: int
    removed: tuple[str, ...] = ()


class Destination(Protocol):
    """A place on a server. ``uri`` names it as a source; ``served`` is what engines are given."""

    @property
    def uri(self) -> str: ...

    @property
    def served(self) -> str | None: ...

    def there(self) -> Source | None:
        """What is there now; None: nothing."""

    def refused(self, there: Source | None, overwrite: bool, manifest: bytes | None) -> Finding | None:
        """What forbids to publish; ``manifest`` is that of the result, None where it is not made yet."""

    def publish(
        self, items: tuple[Item, ...], manifest: Mapping[str, Any], there: Source | None, told: Told
    ) -> Pushed: ...


def destination(text: str, private: bool = False) -> Destination:
    """The place that ``org/name[@branch]`` or ``s3://bucket/folder`` names. Raises UserError ``usage.destination``."""
    scheme, separator, path = text.partition("://")
    if not separator or scheme.lower() == "hf":
        from .push_hub import branch

        return branch(text.removeprefix("hf://"), private)
    if scheme.lower() in {"http", "https", "file", "local"} or not path.strip("/"):
        message = f"{text} is no place that results are pushed to"
        raise fail(
            "usage.destination", message, hint="org/name, org/name@branch, s3://bucket/folder, gs://bucket/folder"
        )
    from .push_objects import StoreFolder

    return StoreFolder(text.rstrip("/"))


def publish(made: Made, place: Destination, there: Source | None, told: Told) -> Pushed:
    """Publish a result with its card at a place where :class:`Destination` refuses nothing.

    The card that somebody wrote into the result goes before the one that is there, and that before the source's.
    """
    said = there.text(CARD) if there and CARD in there.files and not made.is_written else made.card
    sums = {item.name: (item.size, item.sha256) for item in made.items if item.name != SUMS}
    text = card(said, Facts(made.manifest, sums, place.uri, place.served))
    return place.publish(_with_card(made.items, _new(CARD, text.encode())), made.manifest, there, told)


def _new(name: str, content: bytes) -> Item:
    return Item(name, content, len(content), hashlib.sha256(content).hexdigest())


def _with_card(items: Iterable[Item], added: Item) -> tuple[Item, ...]:
    """The files with the card, and SHA256SUMS with its digest."""
    files = {item.name: item for item in items} | {CARD: added}
    sums = files.get(SUMS)
    if sums:
        known = {name: item.sha256 for name, item in files.items() if name not in {SUMS, TENSORS}}
        files[SUMS] = _new(SUMS, sums_text(known).encode("utf-8", "surrogateescape"))
    return tuple(files[name] for name in sorted(files))


def stale(names: Iterable[str], old: Mapping[str, Any] | None, items: Iterable[Item]) -> list[str]:
    """Of the files that are at a place, those that a new result puts out of date.

    What an earlier result's manifest names, and weights, indexes and records that lie beside them; everything else is
    its author's.
    """
    mine = _named(old or {})
    new = {item.name for item in items}
    return [name for name in names if name not in new and (name in mine or is_weights(name) or name in {SUMS, TENSORS})]


def _named(old: Mapping[str, Any]) -> set[str]:
    """The files that a manifest names, but those that are the repository's: .gitattributes."""
    match old:
        case {"shards": list() as shards, "sidecars": dict() as sidecars}:
            names = {str(record.get("name")) for record in shards if isinstance(record, dict)} | sidecars.keys()
            return {name for name in names if not name.startswith(".")}
    return set()


def is_weights(name: str) -> bool:
    """Whether a file beside a checkpoint's config is a shard, or an index of some."""
    return "/" not in name and name.endswith((SUFFIX, INDEX_SUFFIX))


# --- the result --------------------------------------------------------------------------------------------


def manifest_of(source: Source) -> dict[str, Any]:
    """The manifest of a whole result in a local folder. Raises UserError ``push.no-result``."""
    content = None if source.is_remote else read_manifest(source)
    if content is not None and _is_whole(content):
        return content
    what = f"has no {MANIFEST}" if content is None else f"has a {MANIFEST} of a part, or of nothing that is whole"
    message = f"{source.uri} {what}: only what ckptkit made is pushed"
    raise fail("push.no-result", message, file=MANIFEST, hint="give a folder that a command made; hf upload takes any")


def _is_whole(content: Mapping[str, Any]) -> bool:
    match content:
        case {
            "command": str(),
            "plan": str(),
            "tool": {"version": str()},
            "source": {"uri": str()},
            "settings": dict() as settings,
            "shards": list() as shards,
            "sidecars": dict() as sidecars,
        }:
            records = [*shards, *sidecars.values()]
            named = all(isinstance(record, dict) and isinstance(record.get("size"), int) for record in records)
            return named and "part" not in settings and all("name" in record for record in shards)
    return False


def examine(source: Source, include: Iterable[str], told: Told, jobs: int = 0) -> Made:
    """Read all of a result and hold it against its manifest; README.md may have been changed.

    ``include``: patterns on further files to take along. Raises UserError: ``push.no-result``, ``push.changed``,
    ``usage.pattern-unmatched``, ``layout.*``.
    """
    content = manifest_of(source)
    sizes = {record["name"]: record.get("size") for record in content["shards"]}
    sizes |= {name: record.get("size") for name, record in content["sidecars"].items() if name != CARD}
    _refuse(_missing(source, sizes))
    records = {MANIFEST, SUMS, TENSORS} & source.files.keys()
    others = sorted(source.files.keys() - sizes.keys() - records - {CARD})
    also = _included(others, include)
    names = sorted({*sizes, *records, *also})
    shards = {name: _header(source, name) for name in sizes if name.endswith(SUFFIX)}
    sums, digests = gather(take(source, names, shards, told, jobs), shards)
    _refuse(_differing(source, content, sizes, sums, digests))
    items = tuple(Item(name, source.files[name].path, source.files[name].size, sums[name]) for name in names)
    text = source.text(CARD) if CARD in source.files else None
    return Made(content, items, text, _is_written(content, text), tuple(name for name in others if name not in also))


def _header(source: Source, name: str) -> Header:
    return read_header(lambda start, stop: source.read(name, start, stop), source.files[name].size, name)


def _refuse(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        raise UserError(found)


def _included(others: Iterable[str], include: Iterable[str]) -> set[str]:
    """Raises UserError ``usage.pattern-unmatched``."""
    patterns = list(include)
    matcher = Matcher(patterns)
    met = {name: matcher.all(name) for name in others}
    for pattern in patterns:
        if not any(pattern in found for found in met.values()):
            message = f"--include {pattern} matches no file beside the result's own"
            raise fail("usage.pattern-unmatched", message, hint="a file's name in OUT, a glob, or re: and a regex")
    return {name for name, found in met.items() if found}


def _is_written(content: Mapping[str, Any], text: str | None) -> bool:
    """Whether a card is not the one that the command took along from the source."""
    record = content["sidecars"].get(CARD) or {}
    return text is not None and xxhash.xxh3_128_hexdigest(text.encode()) != record.get("xxh3")


def _missing(source: Source, sizes: Mapping[str, Any]) -> Iterator[Finding]:
    for name, size in sizes.items():
        if name not in source.files:
            yield _changed(source, name, "is not there", _REMADE)
        elif source.files[name].size != size:
            yield _changed(source, name, f"has {source.files[name].size:,} bytes, and had {size:,}", _REMADE)


def _differing(
    source: Source,
    content: Mapping[str, Any],
    sizes: Mapping[str, Any],
    sums: Mapping[str, str],
    digests: Mapping[str, ShardDigests],
) -> Iterator[Finding]:
    """What is no longer as it was recorded. A shard that nobody recorded digests of has to be as old as it was."""
    known = recorded(source, content)
    yield from known.unreadable
    hint = f"make it again; if the change is meant: ckptkit hash {quote(source.uri)} --per-tensor --overwrite"
    times = {record["name"]: record.get("mtime_ns") for record in content["shards"]}
    for name in sizes:
        same = _is_same(source, name, known, sums, digests)
        if same is None and source.files[name].mtime_ns != times.get(name):
            yield _changed(source, name, "was written since, and no digest of it is recorded", hint)
        elif same is False:
            yield _changed(source, name, "has other bytes", hint)


def _is_same(
    source: Source, name: str, known: Recorded, sums: Mapping[str, str], digests: Mapping[str, ShardDigests]
) -> bool | None:
    """Whether a file is as it was recorded; None where nothing is."""
    if name in known.shards:
        return name in digests and known.shards[name].tensors == digests[name].tensors
    if name not in known.files:
        return None
    digest = known.files[name]
    if digest.algorithm == "sha256":
        return sums[name] == digest.value
    return xxhash.xxh3_128_hexdigest(source.read(name, 0, source.files[name].size)) == digest.value


def _changed(source: Source, name: str, what: str, hint: str) -> Finding:
    message = f"{name} {what}: {source.uri} is not what its {MANIFEST} says"
    return Finding("push.changed", message, file=name, hint=hint)
