"""Regexes that could match for ever are refused, and those that people write for modules are not."""

from __future__ import annotations

import re
import time

import pytest

from ckptkit.errors import USAGE, UserError
from ckptkit.naming.patterns import pattern
from ckptkit.naming.regexes import compiled
from ckptkit.recipe.recipe import builtin_names, load

ENDLESS = [
    r"(a+)+$", r"(?:a*)*b", r"([a-z]+)*$", r".*(\w+\d*)+!", r"(.*\.)*x", r"(a|ab|b)+c", r"((x+x+)+y)*",
    r"(.|.)*z$", r"(a?){30}a{30}$", r"(.|..)*z$", r"((a|a)b)*$", r"(?:foo|f.o)*$", r"(?:(?:.|.)x)*$", r"(?:a?b?)*c", r"(a{1,30}){1,30}$", r"^(([a-z])+.)+[A-Z]", r"(?=(a+)+$)", r"(?:\S+\s*)+$", r"(?i)(a+A?)+$",
]  # fmt: skip
# Their borders can lie in too many places: the ways are 256 over 4 and more, or a power of 2.
LONG = [
    r".*.*.*.*.*.*.*.*.*.*x$", r".*.*.*.*x$", r"\w*.*\w*.*\w*x$", r"(a*)(a*)(a*)(a*)(a*)b", r"(.*)(.*)(.*)(.*)\1$",
    r"(.*|x)(.*|x)(.*|x)(.*|x)y", r"(.*.*){9}x", r"(a{1,9}){9}$", ".?" * 30 + "x$", r"(?:.*a){2,9}$",
    r"(?!.*.*.*.*x).*", r"(?=.*.*.*.*x)", r".*.*.*(?=.*.*.*x)", r"[a-m]*[g-z]*[a-m]*[g-z]*[a-m]*[g-z]*1$",
]  # fmt: skip
SOUND = [
    r".*lm_head$", r"^(?:.*\.)?layers\.(?:1|2|13)\.mlp\.up_proj$", r"(?:\w+\.)*lm_head", r"(?:(?:model|language_model)\.)*norm",
    r".*(visual|vision|audio).*", r"(abc)*$", r"(?:foo|bar)+x", r"[^.]+(?:\.[^.]+)*", r"(?:[a-z]+_)*proj", r"(\d{2}:)*x",
    r".*\.layers\.\d+\..*(q|k|v)_proj$", r".*model.*layers.*self_attn.*q_proj.*weight$", r".*.*x$", r"(\w|\d)+$",
    r"(?!.*a)(?!.*b)(?!.*c)(?!.*d)(?!.*e)(?!.*f).*", r"(?:.*\.)?(?:.*\.)?x", r"(?:\w+\.){2,5}weight", r".*\..*\..*$",
    r"\w+\.\w+\.\w+\.\w+\.\w+\.\w+\.\w+$", r"(.*\.q_proj|.*\.k_proj|.*\.v_proj|.*\.o_proj)$",
    r".*\.mlp\..*\.experts\..*\..*_proj$", r".*visual.*|.*vision.*|.*audio.*|.*mtp.*|.*lm_head.*",
    r".*\.(gate|up)_proj", r"(?>a+)+b", r"(?:a++)*b", r"([\w-]+\.){2,}weight", r"(.)\1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"), [(text, "exponential") for text in ENDLESS] + [(text, "too long") for text in LONG]
)
def test_what_would_hang_is_refused(text: str, why: str) -> None:
    with pytest.raises(re.error, match=why):
        compiled(text)
    with pytest.raises(UserError) as caught:
        pattern(f"re:{text}")
    assert [finding.id for finding in caught.value.findings] == ["recipe.pattern"]
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("name", ["a" * 120 + "!", "." * 120 + "!", "a." * 60 + "!", "ab_" * 40 + "!"])
@pytest.mark.parametrize("text", SOUND)
def test_what_is_let_through_ends_soon(text: str, name: str) -> None:
    began = time.process_time()
    compiled(text).match(name)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("text", SOUND)
def test_sound(text: str) -> None:
    assert compiled(text) == re.compile(text)


def test_what_is_no_regex_stays_none() -> None:
    with pytest.raises(re.error):
        compiled("((")


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_recipes(name: str) -> None:
    assert load(name).groups
