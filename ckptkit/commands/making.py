"""What every command that makes files shares: its options, the dry run, the run, and how the result is told."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import click

from .. import plan_file
from ..console import Console, Table, fmt_bytes
from ..errors import OK, Finding, UserError, fail
from ..execute import Options, copied, execute, not_linked, preflight
from ..execute.parts import clear
from ..files.checkpoint import Checkpoint
from ..files.source import DANGLING, Source
from ..naming.names import Matcher
from ..naming.patterns import nearest
from ..options import listed, resume_command, size
from ..plan import Plan
from ..planners.ordered import not_carried
from ..remote.push import Destination, destination
from .parted import PART_OPTIONS, make_on_ray, make_part, part_asked, told_of_part
from .plan_text import left_out_text, plan_data, plan_text, result_text
from .push import in_the_way, push_made, pushed_data, pushed_text

LINKS = click.Choice(["auto", "hard", "reflink", "symlink", "copy"])


class Cluster(NamedTuple):
    """How the work is divided: a ``part`` as it was asked for, the executor, and where its cluster is."""

    part: str | None = None
    executor: str = "local"
    address: str | None = None


class How(NamedTuple):
    """The common options of a command that makes files; ``made`` is what joins the manifest if parts were gathered,
    ``push`` where the result is published."""

    dry_run: bool
    plan_path: str | None
    include: tuple[str, ...]
    allow: frozenset[str]
    options: Options
    cluster: Cluster = Cluster()
    made: Mapping[str, Any] | None = None
    push: Destination | None = None


def make_options(function: Callable[..., None]) -> Callable[..., None]:
    """Declare the common options; the command gets them as one argument, ``how``."""

    def collected(*args: Any, dry_run: bool, plan_path: str | None, include: Any, allow: Any, **rest: Any) -> None:
        run = {key: rest.pop(key) for key in ("jobs", "device", "link", "hash", "resume", "overwrite")}
        limit = rest.pop("cache_limit")
        cluster = Cluster(*(rest.pop(key) for key in Cluster._fields))
        push = rest.pop("push")
        _check_cluster(cluster, push)
        _check_options(plan_path, **run)
        _check_out(rest.get("out"))
        allowed = frozenset(listed(allow))
        _check_allow(allowed)
        run["cache_limit"] = None if limit is None else _cache_limit(limit, run["link"])
        options = Options(**run, verify=not rest.pop("no_verify"), resume_command=resume_command(sys.argv[1:]))
        how = How(dry_run, plan_path, include, allowed, options, cluster, push=destination(push) if push else None)
        function(*args, how=how, **rest)

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
    click.option(
        "--cache-limit", metavar="SIZE", help="Leave at most SIZE of fetched shards in the Hub cache: 50GB, 0."
    ),
    click.option("--hash", type=click.Choice(["xxh3", "sha256"]), default="xxh3", help="sha256: SHA256SUMS too."),
    click.option("--include", multiple=True, metavar="PATTERN", help="Take along a file that would be left out."),
    click.option("--allow", multiple=True, metavar="ID[,ID]", help="Pass over refusals of these ids."),
    click.option("--no-verify", is_flag=True, help="Skip the check of what was written."),
    click.option("--push", metavar="DESTINATION", help="Then publish it, as `ckptkit push` does."),
    *PART_OPTIONS,
)


def _check_options(plan_path: str | None, *, device: str, resume: bool, overwrite: bool, **others: Any) -> None:
    """Raises UserError (``usage.arguments``, ``usage.device``) for options that make no sense, whatever the plan."""
    if plan_path == "-":
        message = "--plan - names no file, and stdout is where the result goes"
        raise fail("usage.arguments", message, hint="--plan plan.jsonl")
    if resume and overwrite:
        message = "--resume carries on with what --overwrite would throw away"
        raise fail("usage.arguments", message, hint="--resume alone; it replaces OUT if the run it carries on may")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise fail("usage.device", f"--device {device}: neither cpu nor cuda", hint="--device cpu, --device cuda:0")


def _check_out(out: str | None) -> None:
    """Raises UserError (``usage.arguments``) for a URL, which would be a folder of that name."""
    if out and "://" in out:
        message = f"{out} is no folder, and results are made in one"
        raise fail("usage.arguments", message, hint=f"a folder, and --push {quote(out)} publishes what is in it")


def _check_cluster(cluster: Cluster, push: str | None) -> None:
    """Raises UserError (``usage.arguments``) for options of which one makes the other pointless."""
    if cluster.part and cluster.executor != "local":
        message = "--part is a share of the work for this worker, --executor ray gives out all of it"
        raise fail("usage.arguments", message, hint="one of them")
    if cluster.part and push:
        message = "--push is for the whole result, and --part makes a part of it"
        raise fail("usage.arguments", message, hint=f"ckptkit apply --finish OUT --push {push}")
    if cluster.address and cluster.executor == "local":
        raise fail("usage.arguments", "--address is about a Ray cluster", hint="--executor ray")


def _cache_limit(text: str, link: str) -> int:
    """Raises UserError (``usage.arguments``) for what is no size, and where links would lead nowhere."""
    if link == "symlink":
        message = "--cache-limit removes files from the cache, and --link symlink makes links to them"
        raise fail("usage.arguments", message, hint="--link hard")
    return 0 if text == "0" else size(text)


# What ids begin with that are of no check, or all of such an id.
_OTHERS = frozenset({
    "plan", "recipe", "decode", "dequantize", "unpack", "draft", "extract", "attach", "source", "output", "usage", "data",
    "vocab", "confidence-head-missing", "target-mismatch",
})  # fmt: skip


def _check_allow(allow: frozenset[str]) -> None:
    """Raises UserError (``usage.pattern-unmatched``) for ids that nothing has: of no planner, and of no check."""
    if not allow:
        return
    from ..checks import pages

    checks = pages()
    for id in sorted(allow - checks.keys()):
        if id.partition(".")[0] not in _OTHERS:
            like = nearest(id, checks)
            hint = f"--allow {like}" if like else "a refusal tells how to pass it over; ckptkit checks lists other ids"
            raise fail("usage.pattern-unmatched", f"--allow {id}: nothing has that id", hint=hint)


@contextlib.contextmanager
def output_problems_too(source: Source, out: str | None, options: Options) -> Iterator[None]:
    """Let what is wrong with source and plan be told together with what is wrong with OUT."""
    try:
        yield
    except UserError as error:
        more = preflight(None, source, Path(out), options) if out else []
        found = [*error.findings, *(finding for finding in more if finding not in error.findings)]
        raise UserError([_filled_in(finding, source, out) for finding in found]) from None


def _filled_in(finding: Finding, source: Source, out: str | None) -> Finding:
    """The finding with source and result by name where its hint says SRC and OUT."""
    if finding.hint is None:
        return finding
    named = {"SRC": quote(source.uri), "OUT": quote(out or "OUT")}
    return replace(finding, hint=re.sub(r"(?<= )(?:SRC|OUT)\b", lambda found: named[found[0]], finding.hint))


def make(
    console: Console,
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path | None,
    how: How,
    warnings: Sequence[Finding] = (),
    told: Sequence[str | Table] = (),
) -> None:
    """Run ``plan``, or print it for a dry run; ``told`` is printed for people before what was made or would be.

    Raises UserError with everything that stands in the way of OUT.
    """
    source = checkpoint.source
    _check_include(source, how.include)
    if disordered := list(not_carried(checkpoint, plan)):
        raise UserError(disordered)
    if how.plan_path:
        _write_plan(plan, checkpoint, how.plan_path)
    blocked = preflight(plan, source, out, how.options) if out else []
    blocked += in_the_way(how.push, out) if out and how.push else []
    told_of = [_filled_in(finding, source, str(out) if out else None) for finding in warnings]
    warnings = [*told_of, *_dangling(source), *_unused(how.allow, warnings)]
    if out and not blocked:
        warnings += not_linked(plan, source, out, how.options)
    if how.dry_run:
        mine = [told_of_part(plan, part_asked(console, how.cluster.part))] if how.cluster.part else []
        mine += [f"push    {how.push.uri}"] if how.push else []
        _show_plan(console, checkpoint, plan, out, how, warnings, blocked, [*told, *mine])
        return
    if out is None:
        raise fail("usage.arguments", "OUT is missing", hint=f"ckptkit {plan.command} {quote(source.uri)} OUT …")
    if how.cluster.part:
        part = part_asked(console, how.cluster.part)
        make_part(console, checkpoint, plan, out, part, how.options, how.allow, blocked)
        return
    if blocked:
        raise UserError(blocked)
    console.warn(warnings)
    _run(console, checkpoint, plan, out, how, warnings, told)


def _run(
    console: Console, checkpoint: Checkpoint, plan: Plan, out: Path, how: How, warnings: list[Finding],
    told: Sequence[str | Table],
) -> None:  # fmt: skip
    """Make OUT, here or on a cluster, publish it where that was asked for, and tell of it."""
    source = checkpoint.source
    if how.cluster.executor == "ray":
        gathered = make_on_ray(console, checkpoint, plan, out, how.options, how.cluster.address)
        how = how._replace(options=replace(how.options, resume=True), made=gathered)
    extra = dict(how.made or {})
    extra["allowed"] = sorted({*how.allow, *extra.get("allowed", ())})
    found: list[Finding] = []
    options = replace(how.options, check=partial(_problems, checkpoint, plan, how, found))
    with console.progress(plan.command) as progress:
        result = execute(plan, source, out, options, progress, extra)
    if how.made is not None:
        clear(out)
    data = {"output": str(result.path), "plan": plan_data(plan, checkpoint), "fetched": result.fetched}
    findings = [*warnings, *found] if console.settings.json else found
    human = [*told, *result_text(result, plan), *left_out_text(plan, console.settings.verbose)]
    if how.push:
        pushed = push_made(console, out, how.push, how.options.jobs)
        data["pushed"] = pushed_data(pushed)
        human += pushed_text(pushed)
    console.result(data, human, [str(result.path)], findings)
    if how.options.link == "auto" and not source.stores:
        _hint_at_links(console, result.bytes_copied - sum(copied(plan, source, out, "hard")))


def _hint_at_links(console: Console, saved: int) -> None:
    if saved > 0:
        console.note(f"hint: --link hard would have saved writing {fmt_bytes(saved)} of untouched shards")


def _show_plan(
    console: Console,
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path | None,
    how: How,
    warnings: Sequence[Finding],
    blocked: Sequence[Finding],
    more: Sequence[str | Table],
) -> None:
    """Print the plan, and then what keeps it from being run; with that the exit code is not 0."""
    data = {"output": None, "dry_run": True, "plan": plan_data(plan, checkpoint)}
    code = UserError(blocked).exit_code if blocked else OK
    told = [*warnings, *blocked] if console.settings.json else warnings
    text = plan_text(plan, checkpoint, out, how.options, console.settings.verbose)
    console.result(data, [*more, *text], [plan.digest], told, code)
    if blocked:
        if not console.settings.json:
            console.failure(blocked, code)
        raise click.exceptions.Exit(code)


def _check_include(source: Source, patterns: Sequence[str]) -> None:
    """Raises UserError (``usage.pattern-unmatched``) for an --include that matches no file."""
    matcher = Matcher(list(patterns))
    met = {pattern for name in source.files for pattern in matcher.all(name)}
    unmet = [pattern for pattern in patterns if pattern not in met]
    if unmet:
        hint = "a file's name in SRC, a glob, or re: and a regex; --dry-run lists the files that are left out"
        raise UserError(
            Finding("usage.pattern-unmatched", f"--include {pattern} matches no file of {source.uri}", hint=hint)
            for pattern in unmet
        )


def _unused(allow: Collection[str], warnings: Sequence[Finding]) -> Iterator[Finding]:
    """Warnings, ``usage.allow-unused``, for ids of planners that passed over nothing.

    Whether ids of checks will is for the check of the result to show.
    """
    unmet = sorted(set(allow) - {finding.id for finding in warnings})
    if not unmet:
        return
    from ..checks import pages

    families = {id.partition(".")[0] for id in pages()}
    for id in (id for id in unmet if id.partition(".")[0] not in families):
        message = f"--allow {id} passed over nothing"
        yield Finding("usage.allow-unused", message, severity="warning", hint="leave it out")


def _dangling(source: Source) -> Iterator[Finding]:
    for name in (name for name, reason in source.no_files.items() if reason == DANGLING):
        message = f"{name} is {DANGLING}: what it should be is not in the result"
        yield Finding("source.dangling", message, file=name, severity="warning", hint="fetch the checkpoint again")


def _problems(checkpoint: Checkpoint, plan: Plan, how: How, others: list[Finding], folder: Path) -> list[Finding]:
    """``output.verify`` findings: what is wrong with the result in ``folder`` and was not with its source.

    What does not forbid to publish it joins ``others``.
    """
    from ..checks.inherited import check_result

    told = check_result(folder, checkpoint, plan, _also_allowed(how.allow))
    others += told.others
    return [_blocking(finding, how.options.resume_command) for finding in told.new]


def _also_allowed(allow: Collection[str]) -> Collection[str]:
    """``allow`` with the checks that say of a config what ``plan.config`` said of it before it was written."""
    if "plan.config" not in allow:
        return allow
    from ..checks import pages

    return {*allow, *(id for id in pages() if id.startswith("config.quant-"))}


def _blocking(finding: Finding, again: str) -> Finding:
    hint = f"{again} --allow {finding.id} publishes it all the same; ckptkit checks {finding.id} explains it"
    details: dict[str, Any] = {"file": finding.file, "tensor": finding.tensor, "data": {"finding": finding.as_dict()}}
    return Finding("output.verify", f"{finding.message} ({finding.id})", hint=hint, **details)


def _write_plan(plan: Plan, checkpoint: Checkpoint, path: str) -> None:
    """Raises UserError: ``output.same`` where the file would be one of the source's, ``output.write``."""
    root = checkpoint.source.root.resolve()
    if root in Path(path).resolve().parents:
        message = f"{path} lies in the source, which would not be the same with a plan in it"
        raise fail("output.same", message, file=path, hint="name a file beside the source")
    text = "".join(f"{line}\n" for line in plan_file.lines(plan, checkpoint))
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=path) from None
