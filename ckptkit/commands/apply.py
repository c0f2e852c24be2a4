"""``ckptkit apply``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from .. import plan_file
from ..checkpoint import open_checkpoint
from ..console import Console
from ..mending import open_mended
from ..options import command
from ..source import open_source
from .making import How, make, make_options, output_problems_too


@command
@click.argument("plan_name", metavar="PLAN.jsonl")
@click.argument("out")
@click.option("--source", "src", metavar="SRC", help="Where the source lies now (default: where the plan says).")
@make_options
def apply(console: Console, plan_name: str, out: str, src: str | None, how: How) -> None:
    """Run a plan that was written with --plan.

    Every spec is derived anew from the source's headers; if the source is not what the plan was made for, nothing
    is written.

    \b
    Examples:
      ckptkit quantize ./model --recipe lm_head-w8a16 --dry-run --plan plan.jsonl
      ckptkit apply plan.jsonl ./model-w8
      ckptkit apply plan.jsonl ./model-w8 --source /mnt/model --link hard
    """
    file = plan_file.read(plan_name)
    with open_source(src or str(file.header.get("source"))) as source:
        with output_problems_too(source, out, how.options):
            checkpoint = (open_mended if file.header.get("command") == "reshard" else open_checkpoint)(source)
            plan = plan_file.derive(file, checkpoint)
        options = replace(how.options, nonfinite_error=plan.settings.get("nonfinite") != "keep")
        make(console, checkpoint, plan, Path(out), how._replace(options=options))
