"""How a command that makes one GGUF file runs: what it tells, what stands in its way, the file and its check."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from ..console import Console, Table, fmt_bytes, fmt_duration
from ..errors import OK, Finding, UserError, fail
from ..execute.one_file import blocked, make_file, mapped
from ..files.gguf import parse, scalar
from ..planners.gguf_plan import ARCHITECTURE, GgufPlan
from .making import How


class Job(NamedTuple):
    """What is to be made, and how it is told."""

    plan: GgufPlan
    data: dict[str, Any]
    told: list[str | Table]
    warnings: tuple[Finding, ...] = ()
    expected: str | None = None  # the digest that the result must have


def check_options(how: How, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raises UserError (``usage.arguments``) for options that are about folders; ``more`` of them, if they were given."""
    sums = how.options.hash == "sha256"
    given = {"--plan": how.plan_path, "--include": how.include, "--hash sha256": sums, "--push": how.push}
    given |= {"--part": how.cluster.part, "--executor": how.cluster.executor != "local", **more}
    for option in (option for option, is_given in given.items() if is_given):
        raise fail("usage.arguments", f"{option} is not for GGUF files", hint=f"leave out {option}")


def make_gguf(
    console: Console,
    command: str,
    src: str,
    out: str | None,
    how: How,
    job: Job,
    buffer: memoryview,
    before: os.stat_result,
) -> None:
    """Make the file or, for a dry run, tell of it. Raises UserError with all that stands in the way."""
    found = blocked(Path(src), Path(out), job.plan.nbytes, how.options.overwrite) if out else []
    if how.dry_run:
        _show(console, src, out, job, found)
        return
    if out is None:
        raise fail("usage.arguments", "OUT is missing", hint=f"ckptkit {command} {quote(src)} OUT.gguf …")
    if found:
        raise UserError(found)
    console.warn(job.warnings)
    began = time.monotonic()
    check = partial(_check, src, before, job, how.options.verify)
    with console.progress(command) as progress:
        digest = make_file(job.plan.pieces, buffer, Path(out), how.options.overwrite, progress, check)
    data = {"output": out, "bytes": job.plan.nbytes, "xxh3": digest, **job.data}
    line = f"{out}  {fmt_bytes(job.plan.nbytes)} in {fmt_duration(time.monotonic() - began)}  xxh3 {digest}"
    console.result(data, [*job.told, line], [out], job.warnings if console.settings.json else [])


def _show(console: Console, src: str, out: str | None, job: Job, found: Sequence[Finding]) -> None:
    code = UserError(found).exit_code if found else OK
    data = {"output": None, "dry_run": True, "bytes": job.plan.nbytes, **job.data}
    lines = [
        f"plan  {src} → {out or '(no OUT given)'}",
        *job.told,
        f"architecture  {scalar(job.plan.gguf.fields[ARCHITECTURE])}",
        f"output  {fmt_bytes(job.plan.nbytes)} ({job.plan.nbytes:,} bytes)",
        "nothing was written (dry run)",
    ]
    told = [*job.warnings, *found] if console.settings.json else job.warnings
    console.result(data, lines, [str(job.plan.nbytes)], told, code)
    if found:
        if not console.settings.json:
            console.failure(found, code)
        raise click.exceptions.Exit(code)


def _check(src: str, before: os.stat_result, job: Job, verify: bool, path: Path, digest: str) -> None:
    """Raises UserError: ``source.changed``, ``output.verify``."""
    now = os.stat(src)
    if (now.st_size, now.st_mtime_ns, now.st_ino) != (before.st_size, before.st_mtime_ns, before.st_ino):
        raise fail("source.changed", f"{src} was changed while it was read", file=src, hint="run the command again")
    if job.expected is not None and digest != job.expected:
        message = f"{src} does not give back the file that it was made of: it was changed since"
        hint = "--no-verify makes it all the same"
        raise fail("output.verify", message, file=src, hint=hint)
    if verify and parse(mapped(path), str(path)) != job.plan.gguf:
        message = f"{path}: its header does not say what was planned"
        raise fail("output.verify", message, file=str(path), hint="run the command again, on another disk")
