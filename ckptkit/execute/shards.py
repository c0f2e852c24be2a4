"""Making one shard: a link to the source's file, or bytes put in place and hashed in order."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from ..header import Entry
from ..manifest import ShardRecord
from ..plan import COPY, Shard, Step
from .files import appearing, created, write_at
from .links import link
from .tasks import Part, Run, Task, copy_tasks, step_tasks
from .work import Work

# ``link`` of a shard whose bytes this run wrote; otherwise it is the source's file under another name.
OWN_BYTES = ("written", "copy")


def make_shard(shard: Shard, folder: Path, known: Mapping[str, dict[str, str]], work: Work) -> ShardRecord:
    """Make ``shard`` in ``folder``, where it appears whole or not at all.

    ``known`` holds, by source file, tensor digests that need not be computed: those of a file that is linked.
    Raises UserError (``data.*``, ``source.*``), OSError where the output cannot be written, and Interrupted.
    """
    with appearing(folder / shard.name) as path:
        if shard.linked:
            assert shard.source is not None
            kind = link(work.source.files[shard.source].path, path, work.options.link)
            tensors = known.get(shard.source) if kind else _copy(shard, shard.source, path, work)
        else:
            kind, tensors = "written", _write(shard, path, work)
        stat = path.stat()
    source = shard.source if shard.linked else None
    return ShardRecord(
        name=shard.name, plan=shard.digest, link=kind or "copy", source=source,
        size=stat.st_size, mtime_ns=stat.st_mtime_ns, tensors=tensors,
    )  # fmt: skip


def planned_entries(shard: Shard) -> list[Entry]:
    """Where the tensors of a shard that is the source's file lie in it, in that order."""
    refs = sorted((ref for step in shard.steps for ref in step.inputs), key=lambda ref: (ref.start, ref.stop, ref.name))
    return [Entry(*ref.spec, ref.start, ref.stop) for ref in refs]


def _copy(shard: Shard, file: str, path: Path, work: Work) -> dict[str, str]:
    info = work.source.files[file]
    with created(path, info.mode) as descriptor:
        target = _Target(descriptor, planned_entries(shard))
        _copy_runs([Run(file, 0, 0, info.size)], target, work)
    return target.digests()


def _write(shard: Shard, path: Path, work: Work) -> dict[str, str]:
    header, layout = shard.layout
    places = {entry.name: entry for entry in layout.entries}
    mode = work.source.files[shard.source].mode if shard.source else None
    with created(path, mode) as descriptor:
        target = _Target(descriptor, layout.entries)
        target.write(0, memoryview(header))
        # Computed tensors come first: a weight that cannot be converted is found before bytes are copied.
        computed = (task for step in shard.steps if step.op != COPY for task in step_tasks(step, places, work))
        for parts in work.in_order(computed):
            for offset, view in parts:
                target.write(offset, view)
        _copy_runs(...)
    return target.digests()


def _runs(copies: Iterable[Step], places: Mapping[str, Entry]) -> list[Run]:
    """The copies as runs by rising target, neighbours joined that lie side by side in the source too."""
    pairs = ((step.inputs[0], places[step.outputs[0].name]) for step in copies)
    runs: list[Run] = []
    for ref, place in sorted(pairs, key=lambda pair: (pair[1].start, pair[1].stop)):
        last = runs[-1] if runs else None
        if last and (last.file, last.start + last.size, last.target + last.size) == (ref.file, ref.start, place.start):
            runs[-1] = last._replace(size=last.size + ref.nbytes)
        else:
            runs.append(Run(ref.file, ref.start, place.start, ref.nbytes))
    return runs


class _Digests:
    """The xxh3-128 of each tensor of a file, fed with the file's bytes as they are written.

    A tensor's bytes must come once, in order and without a gap: whatever else an operation does is a bug of it.
    """

    def __init__(self, entries: Sequence[Entry]):
        self._entries = entries
        self._starts = [entry.start for entry in entries]
        self._open: dict[str, tuple[int, xxhash.xxh3_128]] = {}
        self._done: dict[str, str] = {}

    def add(self, view: memoryview, offset: int) -> None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            header = (self._starts[0] if self._starts else offset + len(view)) - offset
            view, offset, index = view[header:], offset + header, 0
        while view:
            entry = self._entries[index]
            piece = view[: entry.stop - offset]
            self._feed(entry, piece, offset)
            view, offset, index = view[len(piece) :], offset + len(piece), index + 1

    def _feed(self, entry: Entry, piece: memoryview, offset: int) -> None:
        position, digest = self._open.pop(entry.name) if entry.name in self._open else (entry.start, xxhash.xxh3_128())
        if position != offset or entry.name in self._done:
            raise RuntimeError(f"{entry.name}: bytes for {offset:,} came where those for {position:,} were due")
        digest.update(piece)
        if offset + len(piece) == entry.stop:
            self._done[entry.name] = digest.hexdigest()
        else:
            self._open[entry.name] = (offset + len(piece), digest)

    def whole(self) -> dict[str, str]:
        """The digests (hex) by name, once every tensor is filled."""
        empty = xxhash.xxh3_128_hexdigest(b"")
        found = {e.name: self._done.get(e.name, "" if e.nbytes else empty) for e in self._entries}
        unfilled = [name for name, digest in found.items() if not digest]
        if unfilled:
            raise RuntimeError(f"{unfilled[0]} was not filled")
        return found
