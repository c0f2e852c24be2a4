"""The loop: preflight, lock, shards, what follows them, publication."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import Finding, UserError, fail
from ..manifest import NAME as MANIFEST
from ..manifest import ShardRecord, encode, environment, files_read, known_digests, manifest, parse, read_manifest
from ..plan import COPY, Plan, Shard
from ..source import Source
from .files import output_faults, write_file
from .finish import OWN_BYTES, check_written, sha256_sums, write_sidecars
from .journal import Journal, Publishing, append, begin, finished, read_journal
from .options import Options, Progress, Result
from .preflight import preflight
from .publish import is_published, publish, tidy
from .shards import make_shard
from .space import to_write
from .staging import JOURNAL, LOCK, SUMS, Place, entries, locate, locked
from .work import Work, working


def execute(
    plan: Plan, source: Source, out: Path, options: Options, progress: Progress, manifest_extra: Mapping[str, Any]
) -> Result:
    """Make what ``plan`` says of ``source`` and publish it as ``out``: whole, or not at all.

    ``manifest_extra`` joins the manifest's fields. Raises UserError: what :func:`preflight` finds, ``data.*`` and
    ``source.*`` for the source (exit 3), ``output.*`` (exit 5); and Interrupted. What was finished is kept for a
    run with ``options.resume``.
    """
    began = time.monotonic()
    place = locate(out)
    _refuse(preflight(plan, source, out, options))
    with output_faults(place, options.resume_command):
        if options.resume and is_published(plan, source, place):
            return _already(plan, place, began)
        with locked(place, plan.command):
            _refuse(preflight(plan, source, out, options, mine=True))
            journal = _begin(plan, source, place, options)
            if journal.publishing:
                publish(place, journal.publishing)
                return _result(plan, place, list(journal.shards.values()), len(journal.shards), began)
            with working(source, options, progress) as work:
                records, resumed = _make_shards(plan, place, journal, work)
                _finish(plan, place, records, manifest_extra, began, work)
            old = entries(place.out) if place.out.is_dir() else []
            begun = Publishing(os.getpid(), old)
            append(place.folder, {"publishing": begun})
            publish(place, begun)
    progress.done()
    return _result(plan, place, list(records.values()), resumed, began)


def _refuse(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        raise UserError(found)


def _begin(plan: Plan, source: Source, place: Place, options: Options) -> Journal:
    """Take up the journal that is there, or clear the folder and start one."""
    journal = read_journal(place.folder)
    if options.resume and journal:
        os.truncate(place.folder / JOURNAL, journal.size)
        return journal
    for path in place.folder.iterdir():
        if path.name not in {JOURNAL, LOCK}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    begin(place.folder, plan, options.overwrite, {name: source.files[name].identity for name in files_read(plan)})
    ...
