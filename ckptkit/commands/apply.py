"""``ckptkit apply``."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from .. import plan_file
from ..console import Console
from ..errors import fail
from ..execute.parts import gather, plan_file_of
from ..options import command
from ..replay import derived, source_of
from .making import How, make, make_options, output_problems_too


@command
@click.argument("plan_name", metavar="PLAN.jsonl")
@click.argument("out", required=False)
@click.option("--source", metavar="SRC", help="Where the source lies now (default: where the plan says).")
@click.option("--finish", is_flag=True, help="Join what workers made with --part, check it and publish it.")
@make_options
def apply(console: Console, plan_name: str, out: str | None, source: str | None, finish: bool, how: How) -> None:
    """Run a plan that was written with --plan, or finish one whose parts were made with --part.

    Every spec is derived anew from the source's headers. If the source is not what the plan was made for (the
    header of a shard, the index, config.json or another small file has changed, one is gone or new), or if the plan
    was edited, nothing is written. Tensor bytes are not part of a plan: the result is computed from the bytes that
    are there when it runs.

    With --finish only OUT is given: the plan lies among the parts.

    \b
    Examples:
      ckptkit quantize ./model --recipe lm_head-w8a16 --dry-run --plan plan.jsonl
      ckptkit apply plan.jsonl --dry-run
      ckptkit apply plan.jsonl ./model-w8
      ckptkit apply plan.jsonl ./model-w8 --source /mnt/model --link hard
      ckptkit apply plan.jsonl ./model-w8 --part 1/8
      ckptkit apply --finish ./model-w8
    """
    plan_name, out = _named(plan_name, out, finish, how)
    file = plan_file.read(plan_name)
    with source_of(file, source) as src, ExitStack() as stack:
        with output_problems_too(src, out, replace(how.options, resume=how.options.resume or finish)):
            checkpoint, plan = stack.enter_context(derived(file, src))
        options = replace(how.options, nonfinite_error=plan.settings.get("nonfinite") != "keep")
        target = Path(out) if out else None
        if finish and target:
            made = gather(plan, checkpoint.source, target, plan_file_of(target)[1], options.overwrite)
            options = replace(options, resume=True)
            how = how._replace(made=made)
        make(console, checkpoint, plan, target, how._replace(options=options))


def _named(plan_name: str, out: str | None, finish: bool, how: How) -> tuple[str, str | None]:
    """The plan's file and OUT. Raises UserError ``usage.arguments``, ``output.parts``."""
    if finish:
        if out is not None:
            message = "--finish takes OUT alone: its plan lies among its parts"
            raise fail("usage.arguments", message, hint=f"ckptkit apply --finish {shlex.quote(out)}")
        if how.dry_run or how.cluster.part or how.cluster.executor != "local":
            hint = "leave --dry-run, --part and --executor out"
            raise fail("usage.arguments", "--finish joins what was made, and publishes it", hint=hint)
        return str(plan_file_of(Path(plan_name))[0]), plan_name
    if out is None and not how.dry_run:
        raise fail("usage.arguments", "OUT is missing", hint=f"ckptkit apply {shlex.quote(plan_name)} OUT")
    if how.include:
        message = "--include decides what a plan takes along, and this plan is made"
        raise fail("usage.arguments", message, hint="give --include to the command that writes the plan")
    return plan_name, out
