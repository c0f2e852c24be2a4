"""What every command that makes files shares: its options, the dry run, the run, and how the result is told."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from .. import plan_file
from ..checkpoint import CONFIG, Checkpoint
from ..console import Console, Table, fmt_bytes, fmt_count, fmt_duration
from ..errors import Finding, UserError, fail
from ..execute import Options, Result, execute, peak_memory, preflight, space
from ..options import resume_command
from ..plan import Plan
from ..source import Source

LINKS = click.Choice(["auto", "hard", "reflink", "symlink", "copy"])


class How(NamedTuple):
    """The common options of a command that makes files."""

    dry_run: bool
    plan_path: str | None
    include: tuple[str, ...]
    allow: frozenset[str]
    options: Options


def make_options(function: Callable[..., None]) -> Callable[..., None]:
    """Declare the common options; the command gets them as one argument, ``how``."""

    def collected(*args: Any, dry_run: bool, plan_path: str | None, include: Any, allow: Any, **rest: Any) -> None:
        run = {key: rest.pop(key) for key in ("jobs", "device", "link", "hash", "resume", "overwrite", "verify")}
        options = Options(**run, resume_command=resume_command(sys.argv[1:]))
        ids = frozenset(id.strip() for item in allow for id in item.split(",") if id.strip())
        function(*args, how=How(dry_run, plan_path, include, ids, options), **rest)

    collected.__name__, collected.__doc__ = function.__name__, function.__doc__
    collected.__dict__.update(function.__dict__)
    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected


_OPTIONS: Sequence[Callable[[Callable[..., None]], Callable[..., None]]] = (
    click.option("-n", "--dry-run", is_flag=True, help="Print the plan; write nothing."),
    click.option("--plan", "plan_path", metavar="FILE", help="Write the plan as JSON lines, for `ckptkit apply`."),
    click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped."),
    click.option("--overwrite", is_flag=True, help="Replace OUT, once the new result is complete."),
    click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4)."),
    click.option("--device", default="cpu", metavar="cpu|cuda[:N]", help="Where to compute (default: cpu)."),
    click.option("--link", type=LINKS, default="auto", help="How untouched shards get to OUT (default: auto)."),
    click.option("--hash", type=click.Choice(["xxh3", "sha256"]), default="xxh3", help="sha256: SHA256SUMS too."),
    click.option("--include", multiple=True, metavar="PATTERN", help="Take along a file that would be left out."),
    click.option("--allow", multiple=True, metavar="ID[,ID]", help="Pass over refusals of these ids."),
    click.option("--no-verify", "verify", flag_value=False, default=True, help="Skip the check of what was written."),
)


@contextlib.contextmanager
def output_problems_too(source: Source, out: str | None, options: Options) -> Iterator[None]:
    """Let what is wrong with source and plan be told together with what is wrong with OUT."""
    try:
        yield
    except UserError as error:
        more = preflight(None, source, Path(out), options) if out else []
        raise UserError([*error.findings, *more]) from None


def make(
    console: Console, checkpoint: Checkpoint, plan: Plan, out: Path | None, how: How, warnings: Sequence[Finding] = ()
) -> None:
    """Run ``plan``, or print it for a dry run. Raises UserError with everything that stands in the way of OUT."""
    if how.plan_path:
        _write_plan(plan, checkpoint.source.uri, how.plan_path)
    if how.dry_run:
        findings = preflight(plan, checkpoint.source, out, how.options) if out else []
        if findings:
            raise UserError(findings)
        human = plan_text(plan, checkpoint, out, how)
        console.result(
            {"output": None, "dry_run": True, "plan": _plan_data(plan, checkpoint)}, human, [plan.digest], warnings
        )
        return
    if out is None:
        raise fail("usage.arguments", "OUT is missing", hint=f"ckptkit {plan.command} SRC OUT …")
    console.warn(warnings)
    extra = {"allowed": sorted(how.allow)}
    found: list[Finding] = []
    options = replace(how.options, check=partial(_problems, checkpoint, how, found))
    with console.progress(plan.command) as progress:
        result = execute(plan, checkpoint.source, out, options, progress, extra)
    data = {"output": str(result.path), "plan": _plan_data(plan, checkpoint)}
    told = [*warnings, *found] if console.settings.json else found
    console.result(data, _result_text(result, plan), [str(result.path)], told)
    if result.bytes_copied and how.options.link == "auto":
        console.note(f"hint: --link hard would have saved writing {fmt_bytes(result.bytes_copied)} of untouched shards")


def _problems(checkpoint: Checkpoint, how: How, others: list[Finding], folder: Path) -> list[Finding]:
    """``output.verify`` findings: what is wrong with the result in ``folder`` and was not with its source.

    What does not forbid to publish it joins ``others``.
    """
    from ..checks.inherited import check_result

    told = check_result(folder, checkpoint, how.allow)
    others += told.others
    return [_blocking(finding, how.options.resume_command) for finding in told.new]


def _blocking(finding: Finding, again: str) -> Finding:
    hint = f"{again} --allow {finding.id} publishes it all the same; ckptkit checks {finding.id} explains it"
    details: dict[str, Any] = {"file": finding.file, "tensor": finding.tensor, "data": {"finding": finding.as_dict()}}
    return Finding("output.verify", f"{finding.message} ({finding.id})", hint=hint, **details)


def _write_plan(plan: Plan, uri: str, path: str) -> None:
    text = "".join(f"{line}\n" for line in plan_file.lines(plan, uri))
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=path) from None


# --- telling -----------------------------------------------------------------------------------------------


def _plan_data(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "rules": [total._asdict() for total in plan.summary()],
        "shards": len(plan.shards),
        "shards_written": sum(not shard.linked for shard in plan.shards),
        "bytes": output_bytes(plan, checkpoint),
        "left_out": [{"name": item.name, "reason": item.reason} for item in plan.left_out],
        "dropped": [{"name": item.name, "reason": item.reason} for item in plan.dropped],
    }


def plan_text(plan: Plan, checkpoint: Checkpoint, out: Path | None, how: How) -> Iterator[str | Table]:
    """The plan for people: rules, sizes, memory, config diff, what is left out."""
    yield f"plan  {checkpoint.source.uri} → {out or '(no OUT given)'}  sha256 {plan.digest[:16]}"
    yield Table(("rule", "operation", "tensors", "read", "made", "write"), list(_rule_rows(plan)), "<<>>>>")
    yield from _size_lines(plan, checkpoint, out, how)
    yield from _config_diff(plan, checkpoint.config)
    yield from (f"left out  {item.name}: {item.reason}" for item in (*plan.left_out, *plan.dropped))
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


def _size_lines(plan: Plan, checkpoint: Checkpoint, out: Path | None, how: How) -> Iterator[str]:
    size = output_bytes(plan, checkpoint)
    written = sum(not shard.linked for shard in plan.shards)
    yield f"shards  {written:,} written anew, {len(plan.shards) - written:,} taken over as they are (--link {how.options.link})"
    yield f"output  {fmt_bytes(size)} ({size:,} bytes)"
    if out is not None:
        needed, free = space(plan, checkpoint.source, out, how.options)
        yield f"space   {fmt_bytes(needed)} ({needed:,} bytes) to write, {fmt_bytes(free)} free"
    yield f"memory  about {fmt_bytes(peak_memory(plan, how.options))} at the peak"


def _config_diff(plan: Plan, before: Mapping[str, Any] | None) -> Iterator[str]:
    after = next((item.text for item in plan.sidecars if item.name == CONFIG), None)
    if after is not None:
        old = json.dumps(before, indent=2, ensure_ascii=False).splitlines()
        diff = difflib.unified_diff(old, after.splitlines(), f"{CONFIG} (source)", f"{CONFIG} (written)", "", "", 1, "")
        yield from diff


def _result_text(result: Result, plan: Plan) -> Iterator[str]:
    how = ", ".join(f"{count:,} {link}" for link, count in result.links.items())
    shards, clock = fmt_count(result.shards, "shard"), fmt_duration(result.seconds)
    yield f"{result.path}  {shards} ({how}) in {clock}  plan sha256 {plan.digest[:16]}"
    yield f"wrote {fmt_bytes(result.bytes_written)}, took over {fmt_bytes(result.bytes_linked)}"
    if result.resumed:
        yield f"{fmt_count(result.resumed, 'shard')} finished by an earlier run"
