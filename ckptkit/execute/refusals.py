"""What can be known to go wrong before anything is done. Reads; a link is tried and undone; else nothing changes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..errors import Finding, UserError
from ..files.digests import SUMS
from ..files.source import Source, is_plain
from ..manifest import NAME as MANIFEST
from ..ops import operation
from ..plan import COPY, Plan
from .files import output_faults
from .footprint import too_large
from .journal import Journal, read_journal
from .options import Options
from .publish import published
from .sizes import copied, nearest, space
from .staging import JOURNAL, LOCK, PARTIAL, PROBE, Place, beside, entries, held, is_held, locate, writable


def preflight(plan: Plan | None, source: Source, out: Path, options: Options, *, mine: bool = False) -> list[Finding]:
    """All that keeps ``plan`` from being run into ``out``: ``output.*``, ``plan.name``, ``source.changed``, ``usage.*``.

    Without a plan, because it was refused, all that can be said of ``out`` and ``options`` alone. ``mine`` says that
    this process holds the staging folder.
    """
    try:
        with output_faults(out):
            return _found(plan, source, out, options, mine)
    except UserError as error:
        return list(error.findings)


def _found(plan: Plan | None, source: Source, out: Path, options: Options, mine: bool) -> list[Finding]:
    place = locate(out)
    if _overlaps(source, place):
        message = f"{out} and the source {source.uri} lie in each other"
        return [Finding("output.same", message, file=str(out), hint="name an output beside the source")]
    if not mine and is_held(place):
        return [held(place)]
    if plan and options.resume and published(plan, source, place):
        return []
    journal = read_journal(place.folder)
    begun = list(_begun(plan, source, place, journal, options))
    if options.resume and journal and journal.publishing:
        return begun
    found = [*begun, *occupied(place, journal, options), *_unwritable(place), *_backend(options)]
    if plan is None:
        return found
    room = [*_space(plan, source, out, options), *too_large(plan, options)]
    return [*found, *_names(plan), *room, *_device(plan, options)]


def _overlaps(source: Source, place: Place) -> bool:
    roots = {root.resolve() for root in source.roots}
    homes = roots | {*(info.path.parent for info in source.files.values())}
    holding = homes | {parent for home in homes for parent in home.parents}
    return any(mine in holding or not roots.isdisjoint(mine.parents) for mine in (place.out, place.folder))


def _names(plan: Plan) -> Iterator[Finding]:
    """Names that cannot be told apart, would leave OUT, or are the executor's own."""
    names = Counter(_planned(plan))
    own = {MANIFEST, SUMS, JOURNAL, LOCK, *map(_partial, names)}
    for name, count in names.items():
        if count > 1 or name in own or not is_plain(name):
            what = "is planned twice" if count > 1 else "is no name that a file of the output may have"
            yield Finding("plan.name", f"{name!r} {what}", file=name, hint=f"move {name!r} out of the source")


def _planned(plan: Plan) -> list[str]:
    return [shard.name for shard in plan.shards] + [item.name for item in plan.sidecars]


def _partial(name: str) -> str:
    """Where the file of that name is while it is not whole."""
    path = Path(name)
    return beside(path, PARTIAL).as_posix() if path.name else name


def foreign(plan: Plan, folder: Path) -> Iterator[Finding]:
    """Findings for what another put into the staging folder: it would be published with the rest."""
    own = {MANIFEST, SUMS, *_planned(plan)}
    own |= {JOURNAL, LOCK, PROBE, *map(_partial, own)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in own and (path.is_symlink() or not path.is_dir()):
            message = f"{path} is none of the files that this run makes"
            yield Finding("output.exists", message, file=str(path), hint="move it away, then --resume")


def _begun(
    plan: Plan | None, source: Source, place: Place, journal: Journal | None, options: Options
) -> Iterator[Finding]:
    """What an earlier run left, where this one may neither carry on nor begin anew."""
    folder = str(place.folder)
    if journal is None:
        if os.path.lexists(folder) and not (place.folder.is_dir() and {*entries(place.folder)} <= {JOURNAL, LOCK}):
            hint = f"move {folder} away, or name another output"
            yield Finding("output.exists", f"{folder} stands where the output is to be made", file=folder, hint=hint)
        return
    same = plan is not None and journal.plan == plan.digest
    left = (
        f"{folder} holds {journal.command} begun with plan {journal.plan[:12]}, {len(journal.shards)} shards finished"
    )
    if plan and options.resume and not same:
        message = f"{left}; this is plan {plan.digest[:12]}"
        yield Finding("output.plan-differs", message, file=folder, hint="--overwrite instead of --resume begins anew")
    elif options.resume:
        yield from changed(source.changed(journal.sources))
        if plan and not journal.publishing:
            yield from foreign(plan, place.folder)
    elif not options.overwrite:
        anew = "--overwrite begins anew"
        hint = f"{options.resume_command or '--resume'} carries on; {anew}" if same else anew
        yield Finding("output.exists", left, file=folder, hint=hint)


def changed(files: Iterable[str]) -> Iterator[Finding]:
    """Findings for files of the source that are not what they were when the run began."""
    for file in files:
        message = f"{file} is not what it was when the run began"
        yield Finding("source.changed", message, file=file, hint="--overwrite instead of --resume begins anew")


def occupied(place: Place, journal: Journal | None, options: Options) -> Iterator[Finding]:
    """What stands at OUT and may not be replaced: asked before a run, and again before it publishes."""
    out = str(place.out)
    if place.out.is_symlink() or not place.out.is_dir():
        if os.path.lexists(out):  # OUT's own symlinks were resolved: one that is there now has come since
            what = "a symlink" if place.out.is_symlink() else "a file"
            yield Finding("output.exists", f"{out} is {what}", file=out, hint="move it away, or name another output")
        return
    found = entries(place.out)
    if not found:
        return
    if not options.overwrite and not (options.resume and journal and journal.overwrite):
        message = f"{out} holds {len(found)} entries already"
        yield Finding("output.exists", message, file=out, hint="--overwrite replaces it, once the new one is whole")
    elif not any(name in {MANIFEST, "config.json"} or name.endswith(".safetensors") for name in found):
        message = f"{out} holds {found[0]} and no checkpoint: it is not overwritten"
        yield Finding("output.exists", message, file=out, hint=f"empty {out}, or name another output")


def _unwritable(place: Place) -> Iterator[Finding]:
    folder = nearest(place.folder)
    if not folder.is_dir() or not writable(folder):
        message = f"{place.folder} cannot be made: {folder} is {'not writable' if folder.is_dir() else 'a file'}"
        yield Finding("output.write", message, file=str(folder), hint="name an output where you may write")


def _space(plan: Plan, source: Source, out: Path, options: Options) -> Iterator[Finding]:
    needed, free = space(plan, source, out, options)
    if needed > free:
        message = f"{out} needs {needed:,} bytes, and {free:,} are free there"
        data = {"needed": needed, "free": free}
        hard = space(plan, source, out, replace(options, link="hard")).needed
        hint = f"--link hard needs {hard:,} bytes" if hard < needed else f"free {needed - free:,} bytes"
        yield Finding("output.space", message, file=str(out), hint=hint, data=data)


def not_linked(plan: Plan, source: Source, out: Path, options: Options) -> Iterator[Finding]:
    """A warning, ``output.link``, where shards have to be copied though a link was asked for. Raises OSError."""
    sizes = copied(plan, source, out, options.link) if options.link not in {"auto", "copy"} else []
    if sizes:
        count, total = len(sizes), sum(sizes)
        what = f"untouched shards that are copied: {count:,}, {total:,} bytes"
        message = f"--link {options.link} does not work from {source.uri} to {out}; {what}"
        hint = "name an output on the source's filesystem, in the same mount" if options.link != "reflink" else None
        yield Finding("output.link", message, str(out), None, hint, "warning", {"shards": count, "bytes": total})


def _backend(options: Options) -> Iterator[Finding]:
    if options.backend != "native" and find_spec(options.backend) is None:
        hint = f"pip install 'ckptkit[{options.backend}]'"
        yield Finding("usage.backend", f"{options.backend} is not installed here", hint=hint)


def _device(plan: Plan, options: Options) -> Iterator[Finding]:
    """A device that is not there, or on which an operation is not known to make the same bytes."""
    if options.device == "cpu":
        return
    hint = "--device cpu"
    for id in sorted({step.op for step in plan.steps()} - {COPY}):
        if not operation(id).bits_on_cuda:
            yield Finding("usage.device", f"{id} is not known to make the same bytes on {options.device}", hint=hint)
    import torch

    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        message = f"torch {torch.__version__} has no device {options.device!r}: {str(error).splitlines()[0]}"
        yield Finding("usage.device", message, hint=hint)
