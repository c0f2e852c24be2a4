"""From staging folder to OUT. Whatever stops it, OUT is the old result or the new one, or holds no manifest.

Once the journal says that publishing began, everything is made and checked: a later run only carries on from where
this one stopped.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import parse, source_files
from ..plan import Plan
from .files import sync_folder
from .journal import Publishing, read_journal
from .staging import JOURNAL, LOCK, PROBE, Place


def publish(place: Place, begun: Publishing) -> None:
    """Make the staged files OUT; what stood there is gone at the end.

    Raises OSError, after putting back what stood in OUT.
    """
    for folder, _, _ in os.walk(place.folder):
        sync_folder(Path(folder))
    if place.inside:
        _move_in(place, begun)
    else:
        _replace(place, begun)
    tidy(place, begun)


def _replace(place: Place, begun: Publishing) -> None:
    """Rename the staging folder to OUT."""
    aside = place.aside(begun.owner)
    if begun.old and not aside.exists():
        os.rename(place.out, aside)
    try:
        os.rename(place.folder, place.out)
    except OSError:
        if begun.old:
            os.rename(aside, place.out)
        raise
    sync_folder(place.out.parent)


def _move_in(place: Place, begun: Publishing) -> None:
    """Rename the old entries aside, the manifest first, then the staged ones into OUT, the manifest last."""
    aside = place.aside(begun.owner)
    aside.mkdir(exist_ok=True)
    old = [name for name in begun.old if not os.path.lexists(aside / name)]
    new = [name for name in os.listdir(place.folder) if name not in {JOURNAL, LOCK}]
    moves = [(place.out / name, aside / name) for name in sorted(old, key=lambda name: name != MANIFEST)]
    moves += [(place.folder / name, place.out / name) for name in sorted(new, key=lambda name: name == MANIFEST)]
    done: list[tuple[Path, Path]] = []
    try:
        for here, there in moves:
            if os.path.lexists(there):  # a rename would take the place of a file in silence
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(there))
            os.rename(here, there)
            done.append((here, there))
    except OSError:
        for here, there in reversed(done):
            os.rename(there, here)
        raise
    sync_folder(place.out)


def tidy(place: Place, begun: Publishing | None) -> None:
    """Remove what a published run leaves behind: the result it replaced, its lock and its journal."""
    if begun:
        shutil.rmtree(place.aside(begun.owner), ignore_errors=True)
    home = place.folder if place.inside else place.out
    for leftover in (home / LOCK, home / JOURNAL, place.out / PROBE):
        leftover.unlink(missing_ok=True)
    if place.inside and home.is_dir():
        home.rmdir()


def published(plan: Plan, source: Source, place: Place) -> dict[str, Any] | None:
    """The manifest in OUT, if OUT is what ``plan`` makes of ``source``, whole and in place.

    None while a run that is to replace it is begun.
    """
    journal = read_journal(place.folder)
    if journal and journal.plan == plan.digest and journal.overwrite and not journal.publishing:
        return None
    try:
        content = parse((place.out / MANIFEST).read_bytes())
        if content is None or content["plan"] != plan.digest:
            return None
        whole = all((place.out / shard["name"]).stat().st_size == shard["size"] for shard in content["shards"])
        return content if whole and content["source"]["files"] == source_files(plan, source) else None
    except (OSError, KeyError, TypeError):
        return None
