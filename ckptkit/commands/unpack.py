"""``ckptkit unpack``."""

from __future__ import annotations

from pathlib import Path

import click

from ..console import Console
from ..files.checkpoint import open_checkpoint
from ..files.source import open_source
from ..options import command
from ..planners.unpack import LAYOUTS, plan_unpack
from .making import How, make, make_options, output_problems_too


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option("--layout", type=click.Choice(LAYOUTS), default="codes", help="What to make (default: codes).")
@make_options
def unpack(console: Console, src: str, out: str | None, layout: str, how: How) -> None:
    """Arrange the same values otherwise: FP4 codes and experts. Nothing is computed, and everything can be undone.

    \b
    codes       FP4 codes one a byte, scales as they are; packed is the way back
    packed      codes back in the container that their scales show
    per-expert  experts stacked in one tensor (floats, FP8) as gate_proj, up_proj, down_proj of each
    fused       experts one by one, stacked as the model's type has them
    mxfp4-ct    MXFP4 weights as compressed-tensors has them
    gpt-oss     MXFP4 experts as gpt-oss has them: a layer's in one tensor
    dsv4        MXFP4 weights as DeepSeek-V4 has them

    Where no engine reads the result, config.json says so; ckptkit_layout in it is what the way back needs.

    \b
    Examples:
      ckptkit unpack ./gpt-oss-20b ./per-expert --layout mxfp4-ct --dry-run
      ckptkit unpack ./DeepSeek-V4-Flash ./codes --layout codes --link hard
      ckptkit unpack ./codes ./DeepSeek-V4-Flash-again --layout packed
      ckptkit unpack ./Qwen3.5-MoE ./experts --layout per-expert
    """
    with open_source(src) as source:
        with output_problems_too(source, out, how.options):
            checkpoint = open_checkpoint(source)
            planned = plan_unpack(checkpoint, layout, how.include)
        make(console, checkpoint, planned.plan, Path(out) if out else None, how, planned.warnings)
