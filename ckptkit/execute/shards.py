"""Making one shard: a link to the source's file, a copy of it, or its steps carried out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from ..files.header import Entry
from ..manifest import ShardRecord
from ..ops import operation
from ..plan import COPY, Shard, Step
from ..remote.proof import proving
from .copies import Run, copy, runs
from .fetching import evict, link_modes, linkable
from .files import appearing, created
from .links import link
from .streaming import can_stream, stream
from .target import Target
from .tasks import row_numbers, step_tasks
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
            kind = _link(shard.source, path, work)
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


def _link(file: str, path: Path, work: Work) -> str | None:
    here = work.source.files[file].here
    found = linkable(work.source, file, path.parent, work.options.link)
    modes = link_modes(work.source.files[file], work.options.link) if found else ()
    kind = next((kind for mode in modes if found and (kind := link(found, path, mode))), None)
    if found and not here:
        work.cached.append((work.source.files[file].path, work.source.files[file].size))
        evict(work.cached, work.options.cache_limit)
    return kind


def _copy(shard: Shard, file: str, path: Path, work: Work) -> dict[str, str]:
    info = work.source.files[file]
    with created(path, info.mode) as descriptor, proving(info, file) as digest:
        target = Target(descriptor, planned_entries(shard))
        copy([Run(file, 0, 0, info.size)], target, work, digest)
    return target.digests()


def _write(shard: Shard, path: Path, work: Work) -> dict[str, str]:
    header, layout = shard.layout
    places = {entry.name: entry for entry in layout.entries}
    mode = work.source.files[shard.source].mode if shard.source else None
    work.source.expect(ref for step in shard.steps if step.op != COPY for ref in step.inputs)
    # Computed tensors come first: a weight that cannot be converted is found before bytes are copied.
    steps = [step for step in shard.steps if step.op != COPY]
    computed = (task for step in steps if not _only_moves(step) for task in step_tasks(step, places, work))
    streamed = [step for step in steps if can_stream(step, work)]
    moving = [step for step in steps if _only_moves(step) and step not in streamed]
    moved = (task() for step in moving for task in step_tasks(step, places, work))
    copied = runs((step for step in shard.steps if step.op == COPY), places)
    with created(path, mode) as descriptor:
        target = Target(descriptor, layout.entries)
        target.write(0, memoryview(header))
        work.progress.advance(len(header))
        for parts in chain(work.in_order(computed), moved):
            work.check()
            for offset, view in parts:
                target.write(offset, view)
                work.progress.advance(len(view))
        for step in streamed:
            stream(step, row_numbers(step, work), places[step.outputs[0].name], target, work)
        copy(copied, target, work)
    return target.digests()


def _only_moves(step: Step) -> bool:
    """Whether this thread makes it, as it copies: see :mod:`.copies`."""
    return operation(step.op).only_moves
