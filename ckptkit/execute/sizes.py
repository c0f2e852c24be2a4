"""How many bytes a run is going to write, and where they could go."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ..files.source import Source
from ..plan import Plan, Shard
from .fetching import link_modes
from .journal import finished, read_journal
from .links import links_without_bytes
from .options import Options
from .staging import Place, locate


class Space(NamedTuple):
    """Bytes to write, and bytes there are for them: free ones, and those of a staging folder's unfinished files."""

    needed: int
    free: int


def space(plan: Plan, source: Source, out: Path, options: Options) -> Space:
    """Exact in file sizes; manifest, journal and the filesystem's own needs are not counted."""
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
    links: dict[tuple[int, int] | None, bool] = {}
    for shard in plan.shards:
        if shard.name in done:
            continue
        if not shard.linked or shard.source is None:
            yield shard, shard.layout[1].file_size
            continue
        info = source.files[shard.source]
        if not info.here:
            yield shard, info.size  # in OUT, or in the cache that OUT is linked to
            continue
        home = _home(info.path)
        if home not in links:
            links[home] = any(links_without_bytes(info.path, folder, mode) for mode in link_modes(info, options.link))
        yield shard, 0 if links[home] else info.size


def _home(path: Path) -> tuple[int, int] | None:
    """A file's filesystem and owner; None once it is gone, which is for the check of the source to say."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_uid


def copied(plan: Plan, source: Source, out: Path, link: str) -> list[int]:
    """Bytes of each untouched shard that is here and has to be copied because ``link`` does not work from there to ``out``."""
    sizes = to_write(plan, source, locate(out), Options(link=link), ())
    return [size for shard, size in sizes if size and shard.linked and shard.source and source.files[shard.source].here]


def nearest(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
