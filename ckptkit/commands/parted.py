"""Commands that make files, on several machines: a part of the work, or all of it on a Ray cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

import click

from .. import plan_file
from ..console import Console, fmt_bytes, fmt_count, fmt_duration
from ..errors import Finding, UserError, fail
from ..execute import Options
from ..execute.parts import announce, clear_unbegun, execute_part, gather, share, unmade
from ..execute.publish import published
from ..execute.staging import locate
from ..files.checkpoint import Checkpoint
from ..plan import Plan
from ..scheduling import Part, part_of

# More tasks than that would only be more files to open: each takes some shards.
_MOST_TASKS = 1024

PART_OPTIONS = (
    click.option("--part", metavar="i/n|auto", help="Make part i of n; `ckptkit apply --finish OUT` joins them."),
    click.option("--executor", type=click.Choice(["local", "ray"]), default="local", help="ray: on a Ray cluster."),
    click.option("--address", metavar="HOST:PORT", help="The Ray cluster (default: the one this machine is of)."),
)


def part_asked(console: Console, text: str) -> Part:
    """The part that ``--part`` names. Raises UserError ``usage.part``."""
    if text != "auto":
        return part_of(text)
    if console.settings.part is None:
        message = "--part auto: no scheduler says which of several workers this is"
        hint = "srun, sbatch --array, torchrun and indexed jobs do; or --part 1/8"
        raise fail("usage.part", message, hint=hint)
    return console.settings.part


def make_part(
    console: Console,
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path,
    part: Part,
    options: Options,
    allowed: Collection[str],
    blocked: Sequence[Finding],
) -> None:
    """Make the shards that fall to ``part``, and tell of them.

    ``blocked`` is what keeps the whole plan from being run: room for all of it is not this worker's to have.
    """
    firm = [finding for finding in blocked if finding.id not in {"output.space", "output.memory"}]
    if firm:
        raise UserError(firm)
    lines = plan_file.lines(plan, checkpoint)
    with console.progress(plan.command) as progress:
        result = execute_part(plan, lines, checkpoint.source, out, part, options, progress, allowed)
    data = {"output": str(result.path), "part": str(part), "shards": result.shards, "bytes": result.bytes_written}
    human = [
        f"part {part} of {out}  {fmt_count(result.shards, 'shard')} in {fmt_duration(result.seconds)}",
        f"wrote {fmt_bytes(result.bytes_written)}, took over {fmt_bytes(result.bytes_linked)}",
        f"once all parts are made: {_finishing(out, options, allowed)}",
    ]
    console.result(data, human, [str(result.path)])


def _finishing(out: Path, options: Options, allowed: Collection[str]) -> str:
    """The command that joins the parts, with the options that are about the whole result."""
    more = ["--overwrite"] if options.overwrite else []
    more += ["--hash", options.hash] if options.hash == "sha256" else []
    more += [] if options.verify else ["--no-verify"]
    if allowed:
        from ..checks import pages

        ids = sorted(pages().keys() & set(allowed))  # those of planners were heeded by now
        more += ["--allow", ",".join(ids)] if ids else []
    return join(["ckptkit", "apply", "--finish", str(out), *more])


def told_of_part(plan: Plan, part: Part) -> str:
    """A line for a dry run."""
    mine = share(plan, part)
    size = sum(shard.nbytes for shard in mine.shards)
    return f"part    {part}: {fmt_count(len(mine.shards), 'shard')}, {fmt_bytes(size)} of tensors"


def make_on_ray(
    console: Console, checkpoint: Checkpoint, plan: Plan, out: Path, options: Options, address: str | None
) -> Mapping[str, Any]:
    """Make all parts on a cluster and gather them; a resumed run finishes. Gives what joins the manifest."""
    from ..execute.ray_cluster import run_parts

    if options.resume and published(plan, checkpoint.source, locate(out)):
        return {}
    out = out.resolve()
    count = min(len(plan.shards), _MOST_TASKS)
    path = announce(out, plan, plan_file.lines(plan, checkpoint), count, options)
    fields = ("jobs", "device", "link", "backend", "cache_limit", "overwrite")
    given = {field: getattr(options, field) for field in fields}
    source = checkpoint.source.location
    with console.progress(plan.command) as progress:
        waiting = list(unmade(out, count))
        progress.start(len(waiting), sum(shard.nbytes for part in waiting for shard in share(plan, part).shards))

        def told(part: Part) -> None:
            progress.advance(sum(shard.nbytes for shard in share(plan, part).shards))
            progress.shard(f"part {part}")

        try:
            run_parts(path, source, out, waiting, given, address, told)
        except UserError:
            clear_unbegun(out)
            raise
        progress.done()
    return gather(plan, checkpoint.source, out, count, options.overwrite)
