"""``ckptkit extract-mtp``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from ..checks.part import misdeclared
from ..console import Console, fmt_count
from ..files.checkpoint import open_checkpoint
from ..files.source import open_source
from ..options import command
from ..planners.allowing import passed_over
from ..planners.extract_mtp import Extracted, Wanted, plan_extract_mtp
from .making import How, make, make_options, output_problems_too
from .places import beside, here

_EXAMPLE = "ckptkit extract-mtp ./GLM-4.5-Air ./draft"


@command
@click.argument("src", required=False)
@click.argument("out", required=False)
@click.option("--renumber", is_flag=True, help="Number the layers from 0.")
@click.option("--embeddings", type=click.Choice(["none", "copy"]), default="none", help="copy: embedding and head too.")
@make_options
def extract_mtp(console: Console, src: str | None, out: str | None, renumber: bool, embeddings: str, how: How) -> None:
    """Cut the layers that predict further tokens (MTP, NextN) out of a target, byte for byte.

    The family is told by the tensors and config.json: DeepSeek, GLM, Qwen, MiMo, Step, Ling, ERNIE, Nemotron and others.
    Every tensor that it must have is looked for first: engines do not check. Names and numbers stay, and so does what
    config.json says of quantization, where these layers are quantized. Embedding and head are the target's; layers that
    hold copies keep them.

    What loads the result is told, and stands in ckptkit.json. SRC is the current folder if left out, OUT ./<SRC>-mtp, or
    beside SRC if that is the current folder.

    \b
    Examples:
      ckptkit extract-mtp ./DeepSeek-V3 ./draft
      ckptkit extract-mtp ./Qwen3.6-27B ./draft --embeddings copy
      ckptkit extract-mtp ./GLM-4.5-Air ./draft --renumber --dry-run
    """
    src = src or here(_EXAMPLE)
    target = Path(out) if out else beside(src, "mtp")
    wanted = Wanted(renumber, embeddings == "copy")
    with open_source(src) as source:
        with output_problems_too(source, str(target), how.options):
            checkpoint = open_checkpoint(source)
            extracted = plan_extract_mtp(checkpoint, wanted, how.include, how.allow)
            misread = passed_over(misdeclared(checkpoint, extracted.layers.names), how.allow, lambda id: False)
        warnings = [*extracted.warnings, *(misread if how.dry_run else ())]  # the check of a result tells it, too
        lines = {engine: line.replace("{out}", str(target)) for engine, line in extracted.launch.items()}
        plan = replace(extracted.plan, settings={**extracted.plan.settings, "launch": lines})
        make(console, checkpoint, plan, target, how, warnings, list(_told(extracted, lines)))


def _told(extracted: Extracted, lines: dict[str, str]) -> Iterator[str]:
    """Whose the layers are, and how engines are started with them."""
    family, numbers = extracted.layers.family, extracted.layers.numbers
    yield f"draft  {family.name}: {fmt_count(len(numbers), 'layer')}, {fmt_count(len(extracted.layers.names), 'tensor')}"
    yield from (f"{engine}  {line}" for engine, line in lines.items())
