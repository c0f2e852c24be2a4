"""``ckptkit recipes``: the recipes that come with the package."""

from __future__ import annotations

import click

from ..console import Console, Table
from ..options import command
from ..recipe.recipe import builtin_names, builtin_text


@command
@click.argument("name", required=False)
def recipes(console: Console, name: str | None) -> None:
    """List the built-in recipes, or print the one of that NAME.

    \b
    Examples:
      ckptkit recipes
      ckptkit recipes lm_head-w8a16 > my-recipe.yaml
    """
    if name is not None:
        text = builtin_text(name)
        console.result({"name": name, "text": text}, [text.removesuffix("\n")], quiet=[text.removesuffix("\n")])
        return
    rows = [(each, _summary(builtin_text(each))) for each in builtin_names()]
    data = {"recipes": [{"name": each, "summary": summary} for each, summary in rows]}
    console.result(data, [Table(("recipe", "what it makes"), rows, "<<")], quiet=[each for each, _ in rows])


def _summary(text: str) -> str:
    """The recipe's first line, a comment that says what it makes."""
    return text.partition("\n")[0].lstrip("# ").rstrip()
