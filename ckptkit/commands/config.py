"""``ckptkit config``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ..console import Console
from ..errors import fail
from ..files.checkpoint import open_checkpoint
from ..files.source import open_source
from ..options import command
from ..planners.repair_config import PRESETS, plan_config, removal, setting
from .making import How, make, make_options, output_problems_too


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option("--set", "sets", multiple=True, metavar="[FILE:]KEY=VALUE", help="Set a key; VALUE is JSON or a string.")
@click.option("--unset", "unsets", multiple=True, metavar="[FILE:]KEY", help="Remove a key.")
@click.option("--preset", "presets", multiple=True, type=click.Choice(list(PRESETS)), help="State what tensors show.")
@make_options
def config(
    console: Console,
    src: str,
    out: str | None,
    sets: tuple[str, ...],
    unsets: tuple[str, ...],
    presets: tuple[str, ...],
    how: How,
) -> None:
    """Repair config.json, or another JSON file; every shard is linked and no tensor is written.

    KEY is a key of config.json, or of FILE.json:; dots lead into tables. Presets state what the tensors show:
    dspark-serving the sizes, taps, stages and storage of a DSpark draft; mtp-serving how many layers predict further
    tokens; tie whether the head is the embedding. What would be wrong with the result and is not with SRC is refused.

    Shards are hard links unless --link says otherwise: SRC and OUT share their bytes, --link copy parts them.

    \b
    Examples:
      ckptkit config ./model ./mended --preset mtp-serving
      ckptkit config ./draft ./draft-mended --preset dspark-serving --dry-run
      ckptkit config ./model ./mended --set tie_word_embeddings=false --unset quantization_config
      ckptkit config ./model ./mended --set 'generation_config.json:eos_token_id=[1, 2]'
    """
    changes = [*map(setting, sets), *map(removal, unsets)]
    if not changes and not presets:
        raise fail("usage.arguments", "nothing is to be changed", hint="--set KEY=VALUE, --unset KEY or --preset NAME")
    link = "hard" if how.options.link == "auto" else how.options.link
    how = how._replace(options=replace(how.options, link=link))
    with open_source(src) as source:
        with output_problems_too(source, out, how.options):
            checkpoint = open_checkpoint(source)
            planned = plan_config(checkpoint, changes, presets, how.include, how.allow)
        make(console, checkpoint, planned.plan, Path(out) if out else None, how, planned.warnings)
