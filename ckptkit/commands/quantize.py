"""``ckptkit quantize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ..console import Console
from ..errors import fail
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.source import open_source, same_bytes
from ..options import command
from ..planners.quantize import plan_quantize
from ..planners.selection import tied_head
from ..recipe.recipe import Recipe, load
from .making import How, make, make_options, output_problems_too


@command
@click.argument("src", required=False)
@click.argument("out", required=False)
@click.option(
    "-r", "--recipe", "recipe_name", required=True, metavar="FILE|NAME", help="A recipe, or a built-in's name."
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe: tie=untie.")
@click.option("--backend", type=click.Choice(["native", "llmcompressor"]), default="native", help="Who computes.")
@make_options
def quantize(
    console: Console, src: str | None, out: str | None, recipe_name: str, sets: tuple[str, ...], backend: str, how: How
) -> None:
    """Quantize a checkpoint by recipe, without calibration data.

    SRC is a folder with a config.json; OUT is made whole or not at all. Both may stand in the recipe, as paths from
    where the command is run. The plan is checked against headers and config first, and everything that is wrong is
    told at once.

    What a recipe decides beside its groups has no options of its own: --set tie=untie makes a tied head a tensor,
    --set existing=merge adds to a checkpoint that is quantized already, --set nonfinite=keep lets NaN pass.

    \b
    Examples:
      ckptkit quantize ./model ./model-w8 --recipe lm_head-w8a16 --dry-run
      ckptkit quantize ./model ./model-w8 --recipe lm_head-w8a16 --set tie=untie
      ckptkit quantize ./model-w4 ./model-w4-w8 --recipe lm_head-w8a16 --set existing=merge
      ckptkit quantize ./model ./model-w4 --recipe my.yaml --set groups.body.scheme=W4A16 --link hard
      ckptkit quantize ./model ./model-w4 --recipe w4a16 --resume
    """
    recipe = load(recipe_name, sets)
    src = src or recipe.source
    out = out or recipe.output
    if src is None:
        hint = f"ckptkit quantize ./model ./out --recipe {recipe_name}"
        raise fail("usage.arguments", "SRC is missing, and the recipe names no source", hint=hint)
    with open_source(src) as source:
        options = replace(how.options, backend=backend, nonfinite_error=recipe.nonfinite == "error")
        with output_problems_too(source, out, options):
            checkpoint = open_checkpoint(source)
            planned = plan_quantize(checkpoint, recipe, how.include, how.allow)
            if not how.dry_run:
                check_stored_head(checkpoint, recipe)
        place = Path(out) if out else None
        make(console, checkpoint, planned.plan, place, how._replace(options=options), planned.warnings)


def check_stored_head(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """``plan.tie`` where a head that is to be untied is stored too, and is not the embedding's bytes."""
    head = tied_head(checkpoint)
    stored = checkpoint.tensors.get(f"{head[0]}.weight") if head else None
    if recipe.tie != "untie" or head is None or stored is None:
        return
    embedding = head[1]
    same = (stored.dtype, stored.shape) == (embedding.dtype, embedding.shape)
    if not same or not same_bytes(checkpoint.source, stored, embedding):
        message = f"the config ties {stored.name} to {embedding.name}, yet both are stored and they differ"
        hint = "decide which one is meant: set tie_word_embeddings to false in config.json if it is the stored head"
        raise fail("plan.tie", message, file=stored.file, tensor=stored.name, hint=hint)
