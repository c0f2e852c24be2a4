"""A plan and its result in words and figures, as commands that make files tell them."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..console import Table, fmt_bytes, fmt_count, fmt_duration
from ..execute import Options, Result, copied, peak_memory, space, to_fetch
from ..files.checkpoint import CONFIG, Checkpoint
from ..plan import Plan


def plan_data(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """A plan as it stands in ``--json`` output."""
    return {
        "digest": plan.digest,
        "settings": dict(plan.settings),
        "rules": [total._asdict() for total in plan.summary()],
        "shards": len(plan.shards),
        "shards_written": sum(not shard.linked for shard in plan.shards),
        "bytes": output_bytes(plan, checkpoint),
        "left_out": [{"name": item.name, "reason": item.reason} for item in plan.left_out],
        "dropped": [{"name": item.name, "reason": item.reason} for item in plan.dropped],
    }


def plan_text(
    plan: Plan, checkpoint: Checkpoint, out: Path | None, options: Options, verbose: bool = False
) -> Iterator[str | Table]:
    """The plan for people: rules, sizes, memory, config diff, what is left out."""
    yield f"plan  {checkpoint.source.uri} → {out or '(no OUT given)'}  sha256 {plan.digest[:16]}"
    yield Table(("rule", "operation", "tensors", "read", "made", "write"), list(_rule_rows(plan)), "<<>>>>")
    with contextlib.suppress(OSError):  # of an OUT that cannot even be looked at, which preflight says
        yield from _size_lines(plan, checkpoint, out, options)
    yield from _config_diff(plan, checkpoint.config)
    yield from left_out_text(plan, verbose)
    yield "nothing was written (dry run)"


def _rule_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for total in plan.summary():
        counts = (f"{total.tensors_read:,}", fmt_bytes(total.bytes_read), f"{total.tensors_written:,}")
        yield (total.rule, total.op, *counts, fmt_bytes(total.bytes_written))


def output_bytes(plan: Plan, checkpoint: Checkpoint) -> int:
    """Size of all files of the result but the manifest."""
    files = checkpoint.source.files
    shards = sum(files[s.source].size if s.linked and s.source else s.layout[1].file_size for s in plan.shards)
    return shards + sum(files[s.name].size if s.text is None else len(s.text.encode()) for s in plan.sidecars)


def _size_lines(plan: Plan, checkpoint: Checkpoint, out: Path | None, options: Options) -> Iterator[str]:
    size = output_bytes(plan, checkpoint)
    written = sum(not shard.linked for shard in plan.shards)
    link = options.link
    taken = f"shards  {written:,} written anew, {len(plan.shards) - written:,} taken over as they are (--link {link}"
    yield (
        f"{taken})" if out is None else f"{taken}, {len(copied(plan, checkpoint.source, out, link)):,} of them copied)"
    )
    yield f"output  {fmt_bytes(size)} ({size:,} bytes)"
    if out is not None:
        needed, free = space(plan, checkpoint.source, out, options)
        if checkpoint.source.stores:
            yield f"fetch   {fmt_bytes(to_fetch(plan, checkpoint.source))} from {checkpoint.source.uri}"
        yield f"space   {fmt_bytes(needed)} ({needed:,} bytes) to write, {fmt_bytes(free)} free"
    yield f"memory  about {fmt_bytes(peak_memory(plan, options))} at the peak"


def _config_diff(plan: Plan, before: Mapping[str, Any] | None) -> Iterator[str]:
    after = next((item.text for item in plan.sidecars if item.name == CONFIG), None)
    if after is not None:
        old = json.dumps(before, indent=2, ensure_ascii=False).splitlines()
        diff = difflib.unified_diff(old, after.splitlines(), f"{CONFIG} (source)", f"{CONFIG} (written)", "", "", 1, "")
        yield from diff


def left_out_text(plan: Plan, verbose: bool) -> Iterator[str]:
    """What the result does not have: a line for each file or tensor, or for all that one rule leaves out."""
    rules: dict[tuple[str, str], list[str]] = {}
    for what, items in (("files", plan.left_out), ("tensors", plan.dropped)):
        for item in items:
            rules.setdefault((what, item.reason), []).append(item.name)
    for (what, reason), names in rules.items():
        if verbose or len(names) == 1:
            yield from (f"left out  {name}: {reason}" for name in names)
        else:
            yield f"left out  {len(names):,} {what}: {reason} ({names[0]}, …; -v: all of them)"


def result_text(result: Result, plan: Plan) -> Iterator[str]:
    how = ", ".join(f"{count:,} {link}" for link, count in result.links.items())
    shards, clock = fmt_count(result.shards, "shard"), fmt_duration(result.seconds)
    yield f"{result.path}  {shards} ({how}) in {clock}  plan sha256 {plan.digest[:16]}"
    yield f"wrote {fmt_bytes(result.bytes_written)}, took over {fmt_bytes(result.bytes_linked)}"
    if result.fetched:
        yield f"fetched {fmt_bytes(result.fetched['bytes'])} in {fmt_count(result.fetched['requests'], 'request')}"
    if result.resumed:
        yield f"{fmt_count(result.resumed, 'shard')} finished by an earlier run"
