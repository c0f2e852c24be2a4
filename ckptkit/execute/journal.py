"""The journal of a run: JSON lines that say what was begun, which shards are finished, and that publishing began.

A line counts once its newline is there; a torn last line is cut off by the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..manifest import ShardRecord
from ..plan import Plan
from .staging import JOURNAL

SCHEMA = 1


class Publishing(NamedTuple):
    """Which process began to publish, and the entries that stood in OUT then."""

    owner: int
    old: list[str]


class Journal(NamedTuple):
    """What a journal says. ``sources`` maps the files read to their identity (size, mtime in ns, inode; or size, tag).

    ``overwrite``: the run may replace what stands in OUT. ``size`` counts the bytes of whole lines.
    """

    command: str
    plan: str
    overwrite: bool
    sources: dict[str, list[int | str]]
    shards: dict[str, ShardRecord]
    publishing: Publishing | None
    size: int


def read_journal(folder: Path) -> Journal | None:
    """The journal in ``folder``; None where there is none, or its first line is not whole."""
    try:
        text = (folder / JOURNAL).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    lines, size = _whole_lines(text)
    if not lines or lines[0].get("schema") != SCHEMA:
        return None
    head = {key: lines[0][key] for key in ("command", "plan", "overwrite", "sources")}
    shards = {line["shard"]["name"]: line["shard"] for line in lines if "shard" in line}
    publishing = next((Publishing(*line["publishing"]) for line in lines if "publishing" in line), None)
    return Journal(**head, shards=shards, publishing=publishing, size=size)


def _whole_lines(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines up to the first torn one, and the bytes they take."""
    lines, size = [], 0
    for line in text.splitlines(keepends=True):
        try:
            content = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(content, dict):
            break
        lines.append(content)
        size += len(line)
    return lines, size


def finished(plan: Plan, folder: Path, journal: Journal | None) -> dict[str, ShardRecord]:
    """The shards in ``folder`` that the journal calls finished, that ``plan`` wants so, and that still are so."""
    records = journal.shards if journal else {}
    return {
        shard.name: record
        for shard in plan.shards
        if (record := records.get(shard.name)) and record["plan"] == shard.digest and _is_intact(folder, record)
    }


def _is_intact(folder: Path, record: ShardRecord) -> bool:
    try:
        stat = (folder / record["name"]).stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (record["size"], record["mtime_ns"])


def begin(folder: Path, plan: Plan, overwrite: bool, sources: dict[str, list[int | str]]) -> Journal:
    """Start a journal, in place of one that may be there."""
    (folder / JOURNAL).unlink(missing_ok=True)
    head = {"command": plan.command, "plan": plan.digest, "overwrite": overwrite, "sources": sources}
    append(folder, {"schema": SCHEMA} | head)
    return Journal(plan.command, plan.digest, overwrite, sources, {}, None, 0)


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line and flush it to disk."""
    with open(folder / JOURNAL, "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
