"""``ckptkit apply``."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from .. import plan_file
from ..console import Console
from ..errors import UserError, fail
from ..files.checkpoint import joined
from ..files.mending import open_mended
from ..files.source import Source, open_source
from ..files.torch_file import open_draft
from ..options import command
from .making import How, make, make_options, output_problems_too


@command
@click.argument("plan_name", metavar="PLAN.jsonl")
@click.argument("out", required=False)
@click.option("--source", metavar="SRC", help="Where the source lies now (default: where the plan says).")
@make_options
def apply(console: Console, plan_name: str, out: str | None, source: str | None, how: How) -> None:
    """Run a plan that was written with --plan.

    Every spec is derived anew from the source's headers. If the source is not what the plan was made for (the
    header of a shard, the index, config.json or another small file has changed, one is gone or new), or if the plan
    was edited, nothing is written. Tensor bytes are not part of a plan: the result is computed from the bytes that
    are there when it runs.

    \b
    Examples:
      ckptkit quantize ./model --recipe lm_head-w8a16 --dry-run --plan plan.jsonl
      ckptkit apply plan.jsonl --dry-run
      ckptkit apply plan.jsonl ./model-w8
      ckptkit apply plan.jsonl ./model-w8 --source /mnt/model --link hard
    """
    if out is None and not how.dry_run:
        raise fail("usage.arguments", "OUT is missing", hint=f"ckptkit apply {shlex.quote(plan_name)} OUT")
    if how.include:
        message = "--include decides what a plan takes along, and this plan is made"
        raise fail("usage.arguments", message, hint="give --include to the command that writes the plan")
    file = plan_file.read(plan_name)
    with ExitStack() as stack:
        src = stack.enter_context(_opened(source, file))
        with output_problems_too(src, out, how.options):
            checkpoint = (open_mended if file.header["command"] == "reshard" else open_draft)(src)
            others = file.header.get("others", {})
            if others:
                opened = {key: stack.enter_context(open_source(path)) for key, path in others.items()}
                checkpoint = joined(checkpoint, {key: open_draft(other) for key, other in opened.items()})
            plan = plan_file.derive(file, checkpoint)
        options = replace(how.options, nonfinite_error=plan.settings.get("nonfinite") != "keep")
        make(console, checkpoint, plan, Path(out) if out else None, how._replace(options=options))


def _opened(named: str | None, file: plan_file.PlanFile) -> Source:
    """The source as it was ``named``, or where the plan found it."""
    try:
        return open_source(named or file.header["source"])
    except UserError as error:
        if named:
            raise
        hint = "--source SRC says where the source lies now"
        raise UserError(replace(finding, hint=hint) for finding in error.findings) from None
