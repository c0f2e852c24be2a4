"""Taking digests of a checkpoint: of whole files and of tensors, with one reading for both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import xxhash

from ..errors import Finding
from .digests import ShardDigests
from .header import Header
from .parallel import on_threads
from .reading import Span, parts, spans
from .source import Source

Told = Callable[[int], None]


class Taken(NamedTuple):
    """Digests (hex) of some bytes of a file: its sha256, and the xxh3-128 of its header, if asked for and there.

    ``tensors``: the xxh3-128 of those that lie there.
    """

    file: str
    sha256: str | None
    header: str | None
    tensors: Mapping[str, str]


def take(
    source: Source, files: Iterable[str], shards: Mapping[str, Header], told: Told = lambda nbytes: None, jobs: int = 0
) -> Iterator[Taken]:
    """The sha256 of ``files`` and the digests of the tensors of ``shards``; a file that is both is read once.

    ``told`` hears of the bytes read.
    """
    names = list(files)
    whole = dict.fromkeys(names, "sha256")
    work = [*spans(shards, lambda ref: True, whole)]
    work += [Span(name, 0, source.files[name].size, (), "sha256") for name in names if name not in shards]
    for span, taken in zip(work, on_threads((partial(_take, source, span) for span in work), jobs), strict=True):
        told(span.nbytes)
        yield taken
    nothing = xxhash.xxh3_128().hexdigest()
    for file, header in shards.items():
        yield Taken(file, None, None, {entry.name: nothing for entry in header.entries if not entry.nbytes})


def _take(source: Source, span: Span) -> Taken:
    whole = hashlib.sha256() if span.digest else None
    header = xxhash.xxh3_128()
    tensors = {ref.name: xxhash.xxh3_128() for ref in span.tensors}
    for ref, view in parts(source, span):
        if whole is not None:
            whole.update(view)
        (header if ref is None else tensors[ref.name]).update(view)
    digests = {name: digest.hexdigest() for name, digest in tensors.items()}
    return Taken(
        span.file,
        None if whole is None else whole.hexdigest(),
        header.hexdigest() if span.start == 0 else None,
        digests,
    )


def gather(taken: Iterable[Taken], shards: Collection[str]) -> tuple[dict[str, str], dict[str, ShardDigests]]:
    """The sha256 of each file, and the digests of the parts of each of ``shards``."""
    sums: dict[str, str] = {}
    headers: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {shard: {} for shard in shards}
    for item in taken:
        if item.sha256 is not None:
            sums[item.file] = item.sha256
        if item.header is not None:
            headers[item.file] = item.header
        if item.file in tensors:
            tensors[item.file].update(item.tensors)
    return sums, {shard: ShardDigests(headers[shard], found) for shard, found in tensors.items()}


def differing(
    expected: Mapping[str, str], found: Mapping[str, str], where: str, shard: str | None = None
) -> Iterator[Finding]:
    """Findings (``data.digest``) for what is recorded in ``where`` and has another digest, or is not there.

    The names are those of files, or of the tensors of ``shard``.
    """
    for name, digest in expected.items():
        if found.get(name) == digest:
            continue
        what = "is not there" if name not in found else "has another digest"
        message = f"{name} {what}; it is recorded in {where}"
        yield Finding("data.digest", message, file=shard or name, tensor=name if shard else None)
