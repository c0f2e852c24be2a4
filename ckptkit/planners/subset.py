"""A part of a checkpoint as a checkpoint of its own: its tensors in shards with an index, small files beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import Finding
from ..files.checkpoint import INDEX, Checkpoint
from ..plan import Plan, Step
from .packing import pack
from .sidecars import index_text, sidecars

SHARD_LIMIT = 5_000_000_000  # bytes of a file


class Subset(NamedTuple):
    """A plan, and what a reader should know of it (warnings)."""

    plan: Plan
    warnings: tuple[Finding, ...]


def plan_subset(
    command: str,
    checkpoint: Checkpoint,
    steps: Mapping[str, Step],
    texts: Mapping[str, str],
    *,
    stale: Mapping[str, str] | None = None,
    include: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Subset:
    """The plan of ``command`` that makes ``steps``, each by the name of a source tensor: where that lies, it goes.

    What is left of neighbouring shards is joined to files of at most :data:`SHARD_LIMIT`; a shard that is taken as it
    stands is linked. There is an index even for one file: engines look for it before they look for weights. ``texts``
    maps files to what is written into them, ``stale`` files that the result makes untrue to the reason; all other
    small files come along, as in any result.
    """
    shards, notes = pack(checkpoint, steps, SHARD_LIMIT)
    index = checkpoint.index
    described = dict(index.metadata) if index else {}
    # The source's own count of what it holds is no longer true.
    described.pop("total_parameters", None)
    written = {**texts, index.file if index else INDEX: index_text(shards, described)}
    kept, left_out = sidecars(checkpoint, written, stale or {}, include)
    plan = Plan(command, shards, kept, left_out, settings=settings or {})
    return Subset(plan, (*checkpoint.warnings, *notes))
