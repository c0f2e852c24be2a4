"""What a plan is made of: the identity of each file of the source, by which ``apply`` knows them again.

Headers, configs and whatever else is small are known by their content. Tensor bytes are not: a plan is made without
reading them, and its result is computed from those that are there when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from ..errors import Finding
from ..planners.sidecars import sidecars
from .checkpoint import Checkpoint
from .header import Header
from .source import Source

LARGE = 64 << 20  # bytes: a file larger than the largest tokenizers is known by its size alone, as tensors are


class Identity(NamedTuple):
    """A file's size in bytes, and the sha256 (hex): of a shard's header, of another file's content.

    ``sha256`` is None for a large file that is no shard.
    """

    size: int
    sha256: str | None


def origins(checkpoint: Checkpoint, used: Iterable[str]) -> dict[str, Identity]:
    """By name, the files that a plan on ``checkpoint`` is made of: its shards, its index, all that it takes along.

    ``used`` are the sidecars that the plan has. What no plan takes along unless it is told to is not looked at, so a
    checksum file may come and go. Raises UserError where a file cannot be read.
    """
    files, shards = checkpoint.source.files, _shards(checkpoint)
    taken, _ = sidecars(checkpoint, {}, {}, ())
    index = [checkpoint.index.file] if checkpoint.index else []
    names = {*shards, *index, *(item.name for item in taken), *files.keys() & set(used)}
    return {name: _identity(checkpoint.source, shards.get(name), name) for name in sorted(names)}


def _shards(checkpoint: Checkpoint) -> dict[str, Header]:
    """Those of the checkpoints beside it, too."""
    return dict(chain(checkpoint.shards.items(), *(other.shards.items() for other in checkpoint.others.values())))


def _identity(source: Source, header: Header | None, name: str) -> Identity:
    size = source.files[name].size
    if header is None and size > LARGE:
        return Identity(size, None)
    known_by = source.read(name, 0, header.data_start if header else size)
    return Identity(size, hashlib.sha256(known_by).hexdigest())


def differing(planned: Mapping[str, Identity], found: Mapping[str, Identity]) -> Iterator[Finding]:
    """``source.plan-differs`` for each file that is gone, new, or not what it was when the plan was made."""
    for name in sorted(planned.keys() | found.keys()):
        if planned.get(name) == found.get(name):
            continue
        if name not in found:
            what = "is gone since the plan was made"
        elif name not in planned:
            what = "has come since the plan was made"
        else:
            what = "is not what it was when the plan was made"
        yield Finding("source.plan-differs", f"{name} {what}", file=name, hint="write the plan again with --plan")
