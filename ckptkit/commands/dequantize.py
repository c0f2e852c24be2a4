"""``ckptkit dequantize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ..console import Console
from ..errors import Finding, UserError
from ..exactness import inexact as roundings
from ..files.checkpoint import open_checkpoint
from ..files.source import Source, open_source
from ..options import command
from ..plan import Plan
from ..planners.dequantize import Wanted, plan_dequantize
from .making import How, make, make_options, output_problems_too


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp8"]),
    default="bf16",
    help="What weights become (default: bf16).",
)
@click.option("--only", multiple=True, metavar="PATTERN", help="Only weights that a pattern matches.")
@click.option("--experts", is_flag=True, help="Only routed experts; with --only, these too.")
@click.option(
    "--missing-scale",
    type=click.Choice(["error", "one"]),
    default="error",
    help="one: take FP8 without a scale as it is.",
)
@click.option(
    "--inexact",
    type=click.Choice(["error", "round"]),
    default="error",
    help="round: fp8 may lose the least numbers.",
)
@make_options
def dequantize(
    console: Console,
    src: str,
    out: str | None,
    dtype: str,
    only: tuple[str, ...],
    experts: bool,
    missing_scale: str,
    inexact: str,
    how: How,
) -> None:
    """Make quantized weights dense, or FP4 block FP8.

    Each tensor is read by its own format, so formats may be mixed. Scales go; what the config says of quantization goes
    with them, or is narrowed to what stays quantized. Without --only and --experts all weights are meant.

    --dtype fp8 makes FP8 with a scale for each block of 128 x 128 of FP4 with power-of-two scales, and leaves all else
    as it is. Where numbers of a block are too far apart for that, it says so for each tensor: --inexact.

    A PATTERN is a tensor's name, a glob, or re: and a regex; a weight is meant if the name of any of its tensors matches.

    \b
    Examples:
      ckptkit dequantize ./model-nvfp4 ./model-bf16
      ckptkit dequantize ./DeepSeek-V4-Flash ./V4-fp8 --dtype fp8 --dry-run
      ckptkit dequantize ./DeepSeek-V4-Flash ./V4 --experts --link hard
      ckptkit dequantize ./model ./out --only 'lm_head.*' --only 're:.*self_attn'
    """
    wanted = Wanted(dtype, only, experts, missing_scale, inexact)
    with open_source(src) as source:
        with output_problems_too(source, out, how.options):
            checkpoint = open_checkpoint(source)
            planned = plan_dequantize(checkpoint, wanted, how.include, how.allow)
            warnings = [*planned.warnings, *_roundings(planned.plan, checkpoint.source, wanted, how)]
        options = replace(how.options, nonfinite_error=planned.plan.settings["nonfinite"] == "error")
        target = Path(out) if out else None
        make(console, checkpoint, planned.plan, target, how._replace(options=options), warnings)


def _roundings(plan: Plan, source: Source, wanted: Wanted, how: How) -> list[Finding]:
    """Warnings of what ``--inexact round`` rounds. Raises UserError with what it does not allow."""
    found = [
        finding.as_warning() if finding.id == "dequantize.inexact" and wanted.inexact == "round" else finding
        for finding in roundings(plan, source, how.options.jobs)
    ]
    if any(finding.severity == "error" for finding in found):
        raise UserError(found)
    return found
