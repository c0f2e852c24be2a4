"""What a run takes from a server: which bytes, and which whole files go through a local cache on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ..files.source import FileInfo, Source
from ..manifest import ShardRecord
from ..plan import Plan, Ref
from ..remote.proof import is_provable
from .links import links_without_bytes


def ranges(refs: Iterable[Ref]) -> list[tuple[int, int]]:
    """The bytes [start, stop) of one file that ``refs`` take up, neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((ref.start, ref.stop) for ref in refs if ref.nbytes):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def parts_read(plan: Plan, source: Source) -> dict[str, list[tuple[int, int]]]:
    """By file of a server, the ranges that the plan's computed and copied tensors lie in."""
    refs: dict[str, list[Ref]] = {}
    for ref in (ref for shard in plan.shards if not shard.linked for step in shard.steps for ref in step.inputs):
        if source.files[ref.file].tag is not None:
            refs.setdefault(ref.file, []).append(ref)
    return {file: ranges(found) for file, found in sorted(refs.items())}


def to_fetch(plan: Plan, source: Source) -> int:
    """Bytes that a run has to fetch of shards and the files beside them; what is here already costs none."""
    parts = {file: found for file, found in parts_read(plan, source).items() if not source.files[file].here}
    whole = [*_whole_files(plan)]
    sizes = (source.files[name].size for name in whole if not source.files[name].here)
    return sum(sizes) + sum(stop - start for found in parts.values() for start, stop in found)


def _whole_files(plan: Plan) -> Iterator[str]:
    yield from (shard.source for shard in plan.shards if shard.linked and shard.source)
    yield from (item.name for item in plan.sidecars if item.text is None)


def provenance(plan: Plan, source: Source, records: Mapping[str, ShardRecord]) -> dict[str, Any]:
    """By file of a server, for the manifest: ``verified`` where all of it was read and is what the server recorded;
    else not, with the ``ranges`` that were read, or none where a cached file was only linked."""
    linked = {record["source"]: record["link"] for record in records.values() if record["source"]}
    told: dict[str, Any] = {}
    for name in _whole_files(plan):
        info = source.files[name]
        if info.tag is not None:
            was_read = linked.get(name, "copy") == "copy" or not info.here
            told[name] = {"verified": was_read and is_provable(info)}
    parts = parts_read(plan, source)
    return told | {name: {"verified": False, "ranges": [list(part) for part in found]} for name, found in parts.items()}


def fetched(source: Source) -> dict[str, int]:
    """Bytes of content that came from servers since the source was opened, and the answers that brought them."""
    traffic = [store.traffic for store in source.stores]
    return {"bytes": sum(nbytes for nbytes, _ in traffic), "requests": sum(requests for _, requests in traffic)}


def linkable(source: Source, file: str, folder: Path, mode: str) -> Path | None:
    """The file ``file`` of the source to make links to: itself where it is here, or once it was fetched into a cache.

    None where it is better streamed into the output: the cache would hold it a second time.
    """
    info = source.files[file]
    if info.here:
        return info.path
    if mode == "copy" or not any(_links_from(info.path, folder, way) for way in link_modes(info, mode)):
        return None
    return source.whole(file)


def link_modes(info: FileInfo, mode: str) -> tuple[str, ...]:
    """The ways to try of ``--link mode``, in their order.

    A server's file lies in a cache, which nobody edits and whose own folders are links into it: ``auto`` is a hard link there
    where extents cannot be shared.
    """
    return ("reflink", "hard") if mode == "auto" and info.tag is not None else (mode,)


def _links_from(cached: Path, folder: Path, mode: str) -> bool:
    """Whether what lies beside ``cached`` can be linked into ``folder``."""
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=cached.parent, prefix=".ckptkit-") as probe:
            return links_without_bytes(Path(probe.name), folder, mode)
    return False


def evict(held: list[tuple[Path, int]], limit: int | None) -> None:
    """Remove the first of the files that the run put into the cache, until the rest takes ``limit`` bytes at most."""
    while limit is not None and held and sum(size for _, size in held) > limit:
        path, _ = held.pop(0)
        with contextlib.suppress(OSError):
            blob = path.resolve()
            path.unlink()
            blob.unlink(missing_ok=True)
