"""How many bytes a run is going to write, and where they could go."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ..plan import COPY, Plan, Shard
from ..source import Source
from .journal import finished, read_journal
from .links import links_without_bytes
from .options import Options
from .staging import Place, locate


class Space(NamedTuple):
    """Bytes to write, and bytes there are for them: free ones, and those of a staging folder's unfinished files."""

    needed: int
    free: int


def space(plan: Plan, source: Source, out: Path, options: Options) -> Space:
    """Exact in file sizes; manifest, journal and the filesystem's own needs are not counted. Changes nothing."""
    place = locate(out)
    done = finished(plan, place.folder, read_journal(place.folder)) if options.resume else {}
    sidecars = sum(source.files[s.name].size if s.text is None else len(s.text.encode()) for s in plan.sidecars)
    shards = sum(size for _, size in to_write(plan, source, place, options, done))
    kept = {place.folder / name for name in done}
    stale = [path.lstat() for path in place.folder.rglob("*") if path not in kept and path.is_file()]
    held = sum(stat.st_blocks * 512 for stat in stale if stat.st_nlink == 1)
    return Space(shards + sidecars, shutil.disk_usage(nearest(place.folder)).free + held)


def to_write(
    plan: Plan, source: Source, place: Place, options: Options, done: Collection[str]
) -> Iterator[tuple[Shard, int]]:
    """The shards that are not ``done``, each with the bytes it takes: none where a link is expected to do."""
    folder = nearest(place.folder)
    links: dict[int | None, bool] = {}
    for shard in plan.shards:
        if shard.name in done:
            continue
        if not shard.linked or shard.source is None:
            yield shard, shard.layout[1].file_size
            continue
        info = source.files[shard.source]
        device = _device(info.path)
        if device not in links:
            links[device] = links_without_bytes(info.path, folder, options.link)
        yield shard, 0 if links[device] else info.size


def _device(path: Path) -> int | None:
    """The filesystem that a file lies on; None once it is gone, which is for the check of the source to say."""
    try:
        return path.stat().st_dev
    except OSError:
        return None


def peak_memory(plan: Plan, options: Options) -> int:
    """About how many bytes of memory a run takes at its peak: the interpreter, torch, and the chunks in flight."""
    computes = any(step.op != COPY for step in plan.steps())
    if not computes:
        return 60_000_000 + 2 * options.chunk_bytes
    return 240_000_000 + 8 * options.threads * options.chunk_bytes


def nearest(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
