"""Regexes that could match for ever are refused, and those that people write for modules are not."""

from __future__ import annotations

import re

import pytest

from ckptkit.errors import USAGE, UserError
from ckptkit.patterns import pattern
from ckptkit.recipe import builtin_names, load
from ckptkit.regexes import compiled

ENDLESS = [
    r"(a+)+$", r"(?:a*)*b", r"([a-z]+)*$", r".*(\w+\d*)+!", r"(.*\.)*x", r"(a|ab|b)+c", r"((x+x+)+y)*",
    r"(?:a?b?)*c", r"(a{1,30}){1,30}$", r"^(([a-z])+.)+[A-Z]", r"(?=(a+)+$)", r"(?:\S+\s*)+$", r"(?i)(a+A?)+$",
]  # fmt: skip
SOUND = [
    r".*lm_head$", r"^(?:.*\.)?layers\.(?:1|2|13)\.mlp\.up_proj$", r"(?:\w+\.)*lm_head", r"(?:(?:model|language_model)\.)*norm",
    r".*(visual|vision|audio).*", r"(abc)*$", r"(?:foo|bar)+x", r"[^.]+(?:\.[^.]+)*", r"(?:[a-z]+_)*proj", r"(\d{2}:)*x",
    r".*\.(gate|up)_proj", r"(?>a+)+b", r"(?:a++)*b", r"([\w-]+\.){2,}weight", r"(.)\1",
]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS)
def test_endless(text: str) -> None:
    with pytest.raises(re.error, match="exponential"):
        compiled(text)
    with pytest.raises(UserError) as caught:
        pattern(f"re:{text}")
    assert [finding.id for finding in caught.value.findings] == ["recipe.pattern"]
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("text", SOUND)
def test_sound(text: str) -> None:
    assert compiled(text) == re.compile(text)


def test_what_is_no_regex_stays_none() -> None:
    with pytest.raises(re.error):
        compiled("((")


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_recipes(name: str) -> None:
    assert load(name).groups
