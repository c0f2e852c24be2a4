"""``ckptkit reshard``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ..console import Console
from ..files.mending import open_mended
from ..files.source import open_source
from ..naming.renaming import rename_rule
from ..options import command, size
from ..planners.reshard import Changes, cast_rule, plan_reshard
from .making import How, make, make_options, output_problems_too


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option("--max-shard-size", metavar="SIZE", help="Split larger shards, join small ones: 5GB, 5GiB.")
@click.option("--rename", "renames", multiple=True, metavar="RULE", help="OLD=NEW, or re:REGEX=NEW.")
@click.option("--drop", "drops", multiple=True, metavar="PATTERN", help="Leave out the tensors it matches.")
@click.option("--cast", "casts", multiple=True, metavar="PATTERN=DTYPE", help="Make floats bf16, f16, f32 or f64.")
@make_options
def reshard(
    console: Console,
    src: str,
    out: str | None,
    max_shard_size: str | None,
    renames: tuple[str, ...],
    drops: tuple[str, ...],
    casts: tuple[str, ...],
    how: How,
) -> None:
    """Repair an index, split or join shards, rename, drop and cast tensors.

    SRC may have a wrong index: OUT gets one that its headers show. Without --max-shard-size each tensor stays in the
    file where it is, and files in which nothing changes are linked. With it shards that are larger are split,
    and neighbours that fit into one file are joined; no file is larger, unless a single tensor is.

    A PATTERN is a tensor's name, a glob, or re: and a regex, on names as they are in SRC; the first --cast that
    matches counts. The OLD of a --rename is whole parts of a name from its beginning; re:REGEX matches anywhere, and
    \\1 in NEW is its first group. Rename rules work one after another.

    \b
    Examples:
      ckptkit reshard ./model ./mended --link hard
      ckptkit reshard ./model ./small --max-shard-size 5GB
      ckptkit reshard ./model ./text --rename model.language_model.=model. --drop 'model.visual.*'
      ckptkit reshard ./model ./half --cast '*=bf16' --dry-run
    """
    limit = None if max_shard_size is None else size(max_shard_size)
    changes = Changes([*map(rename_rule, renames)], drops, [*map(cast_rule, casts)], limit)
    options = replace(how.options, nonfinite_error="data.overflow" not in how.allow)
    with open_source(src) as source:
        with output_problems_too(source, out, options):
            checkpoint = open_mended(source)
            planned = plan_reshard(checkpoint, changes, how.include, how.allow)
        target = Path(out) if out else None
        make(console, checkpoint, planned.plan, target, how._replace(options=options), planned.warnings)
