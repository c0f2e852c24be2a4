"""One plan on several machines: every worker makes a part of the shards, and one gathers them.

Every worker derives the same plan. Part ``i`` of ``n`` is a plan of its own with the shards that fall to it, and an
ordinary run makes it, in a folder beside OUT that all workers see: with that run's lock, journal, resumption and
publication. The plan file lies there too, so that whoever gathers the parts needs nothing else. Gathering moves
the shards into the staging folder of the whole plan and its journal, and then it is an ordinary run that is resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from ..errors import Finding, UserError, fail
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import files_read, parse
from ..plan import Plan, Shard
from ..scheduling import Part
from .files import output_faults
from .journal import append, begin, read_journal
from .options import Options, Progress, Result
from .publish import published
from .run import execute
from .staging import INSIDE, Place, beside, locate, locked

_PLAN = re.compile(r"plan-of-(\d+)\.jsonl")
# What runs leave in the folder of parts: the plan, one that is being written, parts and their staging folders.
TABLES = "tables"  # the folder among the parts of what the plan reads beside its source
_OURS = re.compile(rf"(\.[^/]*-)?plan-of-\d+\.jsonl|\d+-of-\d+(\.partial)?|{TABLES}")


def share(plan: Plan, part: Part) -> Plan:
    """The shards of ``plan`` that fall to ``part``, as a plan: the largest first, each to whoever has least."""
    loads = [0] * part.of
    mine = []
    for shard in sorted(plan.shards, key=lambda shard: (-_weight(shard), shard.name)):
        least = loads.index(min(loads))
        loads[least] += _weight(shard)
        if least == part.number - 1:
            mine.append(shard)
    names = {shard.name for shard in mine}
    shards = tuple(shard for shard in plan.shards if shard.name in names)
    return Plan(plan.command, shards, (), (), (), {"plan": plan.digest, "part": str(part)})


def _weight(shard: Shard) -> int:
    """Bytes read and written."""
    read = sum(ref.nbytes for step in shard.steps for ref in step.inputs)
    return read if shard.linked else read + shard.nbytes


def parts_folder(out: Path) -> Path:
    place = locate(out)
    return place.out / f"{INSIDE}parts" if place.inside else beside(place.out, ".parts")


def execute_part(
    plan: Plan,
    lines: Iterable[str],
    source: Source,
    out: Path,
    part: Part,
    options: Options,
    progress: Progress,
    allowed: Collection[str] = (),
) -> Result:
    """Make the shards of ``plan`` that fall to ``part``. One that is finished, or was begun, is carried on with.

    ``lines`` are those of the plan's file; ``allowed`` are ids of refusals that were passed over, for the manifest.
    Raises UserError as :func:`.run.execute` does, and ``output.plan-differs`` where the parts that are there are of another
    plan, or of another number of parts.
    """
    announce(out, plan, lines, part.of, options)
    folder = parts_folder(out)
    # An ordinary run, whose result is checked where the parts are gathered.
    mine = replace(options, resume=True, overwrite=False, hash="xxh3", check=lambda folder: ())
    return execute(share(plan, part), source, folder / _name(part), mine, progress, {"allowed": sorted(allowed)})


def _name(part: Part) -> str:
    return f"{part.number}-of-{part.of}"


def announce(out: Path, plan: Plan, lines: Iterable[str], count: int, options: Options) -> Path:
    """Leave the plan's file for whoever gathers, if no worker did yet; gives its path.

    Raises UserError: ``output.exists``, ``output.plan-differs``.
    """
    folder, home = parts_folder(out), locate(out).out
    with output_faults(out, options.resume_command):
        if (home / MANIFEST).exists() and not options.overwrite:
            raise _is_result(out)
        if os.path.lexists(folder) and not folder.is_dir():
            message, hint = f"{folder} stands where parts are to be made", f"move {folder} away, or name another output"
            raise fail("output.exists", message, file=str(folder), hint=hint)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"plan-of-{count}.jsonl"
        others = [name for name in os.listdir(folder) if _PLAN.fullmatch(name) and name != path.name]
        if others:
            raise _otherwise(folder, f"{others[0]} lies there")
        if not path.exists():
            _leave(path, lines)
        with open(path, encoding="utf-8") as file:
            digest = json.loads(file.readline())["digest"]
    if digest != plan.digest:
        raise _otherwise(folder, f"they are of plan {digest[:12]}, this is {plan.digest[:12]}")
    return path


def _leave(path: Path, lines: Iterable[str]) -> None:
    """Write the plan's file, whole or not at all: of the same plan it is the same file, whichever worker's stays."""
    temporary = path.with_name(f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        temporary.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        raise


def _is_result(out: Path) -> UserError:
    return fail("output.exists", f"{out} is a result already", file=str(out), hint="--overwrite replaces it")


def _otherwise(folder: Path, what: str) -> UserError:
    hint = f"finish those with ckptkit apply --finish, or remove {folder}"
    return fail("output.plan-differs", f"{folder} holds parts of another division: {what}", file=str(folder), hint=hint)


# --- gathering ---------------------------------------------------------------------------------------------


def plan_file_of(out: Path) -> tuple[Path, int]:
    """The plan file among the parts of ``out``, and the number of parts. Raises UserError ``output.parts``."""
    folder = parts_folder(out)
    found = sorted(path for path in folder.glob("plan-of-*.jsonl")) if folder.is_dir() else []
    if len(found) != 1:
        what = "holds no parts" if not found else f"holds parts of {len(found)} divisions"
        hint = "ckptkit … --part i/n makes them" if not found else f"remove those of one from {folder}"
        if not found and (locate(out).out / MANIFEST).exists():
            what, hint = f"{what}, and {out} is a result already", f"ckptkit verify {quote(str(out))}"
        raise fail("output.parts", f"{folder} {what}", file=str(folder), hint=hint)
    number = _PLAN.fullmatch(found[0].name)
    assert number
    return found[0], int(number[1])


def gather(plan: Plan, source: Source, out: Path, count: int, overwrite: bool) -> dict[str, Any]:
    """Put the shards of all parts into the staging folder, from where a resumed run finishes and publishes.

    Gives what joins the manifest: bytes that the parts fetched, and what they were allowed. A result that was published
    already stays, unless shards wait that are to replace it. Raises UserError: ``output.parts`` for each part that is
    not finished, or is none of this plan; ``output.exists``; ``output.locked``; ``output.plan-differs``.
    """
    place, folder = locate(out), parts_folder(out)
    with output_faults(out), ExitStack() as held:
        held.enter_context(locked(place, plan.command))
        if published(plan, source, place):
            if not any(folder.glob("*-of-*/**/*.safetensors")):
                return {}
            if not overwrite:
                raise _is_result(out)
        contents = {}
        missing = []
        for part in (Part(number, count) for number in range(1, count + 1)):
            content = _made(folder / _name(part), share(plan, part).digest)
            if content is None and not _is_gathered(place, share(plan, part)):
                missing.append(_missing(folder / _name(part), part, out))
            contents[part] = content or {}
        if missing:
            raise UserError(missing)
        journal = read_journal(place.folder)
        if journal and journal.plan != plan.digest:
            message = f"{place.folder} was begun with plan {journal.plan[:12]}; the parts are of {plan.digest[:12]}"
            raise fail("output.plan-differs", message, file=str(place.folder), hint=f"remove {place.folder}")
        if journal is None:
            sources = {name: source.files[name].identity for name in files_read(plan)}
            begin(place.folder, plan, overwrite, sources)
        for part, content in contents.items():
            _move(folder / _name(part), content.get("shards", ()), place)
    return _told_by(contents.values())


def _made(folder: Path, digest: str) -> dict[str, Any] | None:
    """The manifest of a part that is finished."""
    try:
        content = parse((folder / MANIFEST).read_bytes())
    except OSError:
        return None
    return content if content and content.get("plan") == digest else None


def _missing(folder: Path, part: Part, out: Path) -> Finding:
    begun = read_journal(beside(folder, ".partial"))
    what = "is another plan's" if folder.is_dir() else "was not begun"
    what = f"is not finished: {len(begun.shards):,} shards so far" if begun else what
    plan = quote(str(folder.with_name(f"plan-of-{part.of}.jsonl")))
    hint = f"ckptkit apply {plan} {quote(str(out))} --part {part}"
    return Finding("output.parts", f"part {part} {what}", file=str(folder), hint=hint)


def _is_gathered(place: Place, mine: Plan) -> bool:
    """Whether an earlier attempt moved all shards of a part already."""
    journal = read_journal(place.folder)
    there = journal.shards if journal else {}
    return all(shard.name in there and (place.folder / shard.name).exists() for shard in mine.shards)


def _move(folder: Path, records: Iterable[Mapping[str, Any]], place: Place) -> None:
    """Move a part's shards. The journal is told first: a shard that it names and that is not there counts as missing."""
    waiting = [record for record in records if os.path.lexists(folder / record["name"])]
    for record in waiting:
        append(place.folder, {"shard": dict(record)})
        (place.folder / record["name"]).parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / record["name"], place.folder / record["name"])


def _told_by(contents: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    found = [content["fetched"] for content in contents if content.get("fetched")]
    told = {"fetched": {key: sum(one[key] for one in found) for key in found[0]}} if found else {}
    return {**told, "allowed": {id for content in contents for id in content.get("allowed", ())}}


def clear(out: Path) -> None:
    """Remove what is left of the parts of a result that is published, the plan last; what others put there stays."""
    folder = parts_folder(out)
    for path in sorted(path for path in folder.glob("*") if _OURS.fullmatch(path.name)):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def clear_unbegun(out: Path) -> None:
    """Remove the parts' folder where no part was begun."""
    if all(_PLAN.fullmatch(name) or name == TABLES for name in os.listdir(parts_folder(out))):
        clear(out)


def unmade(out: Path, count: int) -> Iterator[Part]:
    """The parts that have no finished folder."""
    folder = parts_folder(out)
    parts = (Part(number, count) for number in range(1, count + 1))
    return (part for part in parts if not (folder / _name(part) / MANIFEST).exists())
