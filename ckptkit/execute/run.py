"""The loop: refuse or lock, make the shards that are not there yet, finish, publish."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import Finding, UserError
from ..files.digests import SUMS, sums_text
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import ShardRecord, encode, environment, files_read, known_digests, manifest, read_manifest
from ..ops import operation
from ..plan import COPY, Plan, Shard
from .fetching import fetched, provenance
from .files import output_faults, write_file
from .finish import check_written, sha256_sums, write_sidecars
from .journal import Journal, Publishing, append, begin, finished, read_journal
from .options import Options, Progress, Result
from .publish import publish, published, tidy
from .refusals import changed, foreign, occupied, preflight
from .shards import OWN_BYTES, make_shard
from .sizes import to_write
from .staging import JOURNAL, LOCK, PROBE, Place, entries, locate, locked
from .work import Work, working

Records = dict[str, ShardRecord]


def execute(
    plan: Plan, source: Source, out: Path, options: Options, progress: Progress, manifest_extra: Mapping[str, Any]
) -> Result:
    """Make what ``plan`` says of ``source`` and publish it as ``out``: whole, or not at all.

    ``manifest_extra`` joins the manifest's fields. Raises UserError: what :func:`preflight` finds, ``data.*`` and
    ``source.*`` where the source is at fault (exit 3), ``output.*`` where the output is (exit 5); and Interrupted.
    Finished shards are kept for a run with ``options.resume``.
    """
    began = time.monotonic()
    _refuse(preflight(plan, source, out, options))
    with output_faults(out, options.resume_command):
        place = locate(out)
        if options.resume and (content := published(plan, source, place)):
            records = _carried_over(place, content)
            resumed = len(records)
            if options.hash == "sha256" and not (place.out / SUMS).exists():
                with locked(place, plan.command), working(source, options, progress) as work:
                    _write_sums(place.out, [*records, *content["sidecars"]], work)
        else:
            with locked(place, plan.command), working(source, options, progress) as work:
                _refuse(preflight(plan, source, out, options, mine=True))
                records, resumed = _run(plan, place, manifest_extra, work)
    progress.done()
    result = _result(plan, place, records, resumed, time.monotonic() - began)
    return result._replace(fetched=fetched(source)) if source.stores else result


def _refuse(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        raise UserError(found)


def _run(plan: Plan, place: Place, extra: Mapping[str, Any], work: Work) -> tuple[Records, int]:
    """The records of all shards, and how many of them were there already."""
    journal = _begin(plan, place, work)
    try:
        return _carry_out(plan, place, journal, extra, work)
    except (UserError, OSError, MemoryError):
        _leave_nothing_unfinished(plan, place.folder)
        raise


def _carry_out(plan: Plan, place: Place, journal: Journal, extra: Mapping[str, Any], work: Work) -> tuple[Records, int]:
    began, started = time.monotonic(), datetime.now(UTC)
    if journal.publishing:
        publish(place, journal.publishing)
        return journal.shards, len(journal.shards)
    done = finished(plan, place.folder, journal)
    records = _make_shards(plan, place, done, work)
    content = _joined(_finish(plan, place.folder, records, work), extra)
    _refuse([*changed(work.source.changed(journal.sources)), *foreign(plan, place.folder)])
    content |= {"started": started.isoformat(timespec="seconds"), "seconds": round(time.monotonic() - began, 3)}
    write_file(place.folder / MANIFEST, encode(content))
    work.check()
    _refuse(occupied(place, journal, work.options))
    begun = Publishing(os.getpid(), entries(place.out) if place.out.is_dir() else [])
    append(place.folder, {"publishing": begun})
    publish(place, begun)
    return records, len(done)


def _joined(content: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's content with what the caller adds; what was fetched here comes to what was fetched elsewhere."""
    if "fetched" not in content or "fetched" not in extra:
        return {**content, **extra}
    fetched = {key: content["fetched"][key] + count for key, count in extra["fetched"].items()}
    return {**content, **extra, "fetched": fetched}


def _begin(plan: Plan, place: Place, work: Work) -> Journal:
    """The journal to carry on with, or a new one in a folder that is cleared."""
    folder, options = place.folder, work.options
    journal = read_journal(folder)
    if journal and options.resume:
        os.truncate(folder / JOURNAL, journal.size)
        if not journal.publishing:
            _remove_unfinished(folder)
        return journal
    _clear(folder)
    sources = {name: work.source.files[name].identity for name in files_read(plan)}
    return begin(folder, plan, options.overwrite, sources)


def _leave_nothing_unfinished(plan: Plan, folder: Path) -> None:
    """Take away what an error left of a run that finished no shard: nobody could go on with it, and it is in the way."""
    journal = read_journal(folder)
    if journal and not journal.shards and not journal.publishing and not list(foreign(plan, folder)):
        (folder / JOURNAL).unlink()
        _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in {JOURNAL, LOCK}:
            path.unlink()


def _remove_unfinished(folder: Path) -> None:
    """What is made last, perhaps with other options, and a probe that was not undone."""
    for name in os.listdir(folder):
        if name in {MANIFEST, SUMS, PROBE}:
            os.unlink(folder / name)


def _make_shards(plan: Plan, place: Place, done: Records, work: Work) -> Records:
    """Make the shards that are not ``done``, each with its line in the journal. Gives the records of all."""
    missing = list(to_write(plan, work.source, place, work.options, done))
    _limit_torch(work.options.backend, (shard for shard, _ in missing))
    known = known_digests(read_manifest(work.source) or {}, work.source.files)
    records = dict(done)
    work.progress.start(len(missing), sum(size for _, size in missing))
    for shard, _ in missing:
        work.check()
        try:
            record = make_shard(shard, place.folder, known, work)
        finally:
            # Said rather than what it led to: a link to a file that is gone, say.
            _refuse(changed(file for file in _files_of(shard) if not _is_unchanged(work.source, file)))
        append(place.folder, {"shard": record})
        records[shard.name] = record
        work.progress.shard(shard.name)
    return records


def _limit_torch(backend: str, shards: Iterable[Shard]) -> None:
    """One thread for each of torch's own calls: the executor's threads share the processors already."""
    ops = {step.op for shard in shards for step in shard.steps} - {COPY}
    if backend == "native" and any(operation(id).uses_torch for id in ops):
        import torch

        torch.set_num_threads(1)


def _files_of(shard: Shard) -> set[str]:
    return {ref.file for step in shard.steps for ref in step.inputs} | ({shard.source} if shard.source else set())


def _is_unchanged(source: Source, file: str) -> bool:
    info = source.files[file]
    if not info.here:  # the server is asked once, at the end
        return True
    try:
        stat = info.path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino) == (info.size, info.mtime_ns, info.inode)


def _finish(plan: Plan, folder: Path, records: Records, work: Work) -> dict[str, Any]:
    """Write and check all that follows the shards. Gives the manifest's content."""
    sidecars = write_sidecars(plan, folder, work)
    if work.options.verify:
        _refuse(check_written(plan, folder, records))
        _refuse(work.options.check(folder))
    content = manifest(plan, work.source, records.values(), sidecars)
    if work.source.stores:
        content["source"]["read"] = provenance(plan, work.source, records)
        content["fetched"] = fetched(work.source)
    content["environment"] = environment(work.options.backend, work.options.device)
    if work.options.hash == "sha256":
        content["sha256"] = _write_sums(folder, [*records, *sidecars], work)
    return content


def _write_sums(folder: Path, names: Iterable[str], work: Work) -> dict[str, str]:
    sums = sha256_sums(folder, names, work)
    write_file(folder / SUMS, sums_text(sums).encode("utf-8", "surrogateescape"))
    return sums


def _carried_over(place: Place, content: Mapping[str, Any]) -> Records:
    """The records of a published result, tidied up in case the run that made it could not."""
    journal = read_journal(place.folder if place.inside else place.out)
    tidy(place, journal.publishing if journal else None)
    return {record["name"]: record for record in content["shards"]}


def _result(plan: Plan, place: Place, records: Records, resumed: int, seconds: float) -> Result:
    sizes: Counter[str] = Counter()
    for record in records.values():
        sizes[record["link"]] += record["size"]
    written = sum(sizes[kind] for kind in OWN_BYTES)
    return Result(
        path=place.out, digest=plan.digest, links=Counter(record["link"] for record in records.values()),
        resumed=resumed, bytes_written=written, bytes_copied=sizes["copy"],
        bytes_linked=sizes.total() - written, seconds=seconds,
    )  # fmt: skip
