"""Many names against many patterns: the fast matcher says what trying each pattern says."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import UserError
from ckptkit.naming.names import Matcher, layered, split, uniform

PATTERNS = [
    r"re:.*lm_head$", r"re:.*visual.*", r"re:.*in_proj_(a|b)$", r"re:.*layers\.1\..*", r"re:.*layers\.\d\.mlp.*",
    r"re:.*layers\.[0-9]+\.mlp\.gate$", r"re:model.layers.*", r"re:.*layers..\.mlp", "*.mlp.*", "model.layers.?.mlp.gate",
    "model.layers.11.mlp.gate", "lm_head", "model.layers.[12].*", r"re:.*\.\d+\.mlp", r"re:(?!.*mlp).*", r"re:.*?gate",
]  # fmt: skip
NAMES = [f"model.layers.{i}.mlp.{p}" for i in (0, 1, 2, 9, 11, 100) for p in ("gate", "up_proj")]
NAMES += ["lm_head", "model.visual.blocks.3.attn", "model.layers.3.linear_attn.in_proj_a", "model.lm_head"]


def slow(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.lists(st.sampled_from(NAMES)))
def test_matcher_agrees_with_trying_each(patterns: list[str], names: list[str]) -> None:
    matcher = Matcher(patterns)
    for name in names:
        assert matcher.all(name) == tuple(text for text in patterns if slow(text, name))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_uniform_pattern_tells_no_indices_apart(pattern: str) -> None:
    if uniform(pattern):
        for name in NAMES:
            template, _ = split(name)
            answers = {slow(pattern, template.replace("#", index)) for index in ("0", "7", "12", "4096")}
            assert len(answers) == 1


def test_common_patterns_are_uniform() -> None:
    assert all(
        map(
            uniform,
            [r"re:.*lm_head$", r"re:.*mlp\.gate$", "*.mlp.*", "lm_head", r"re:.*in_proj_(a|b)$", r"re:.*\.\d+\.mlp"],
        )
    )
    assert not any(
        map(uniform, [r"re:.*layers\.1\..*", "a.?", "a.[bc]", r"re:.*layers\.\d\.mlp", "model.layers.1.mlp"])
    )


def test_split_takes_whole_parts_only() -> None:
    assert split("model.layers.3.mlp.experts.12.w1") == ("model.layers.#.mlp.experts.#.w1", ("3", "12"))
    assert split("h0.conv1d") == ("h0.conv1d", ())
    assert split("0.w1.2a.3") == ("#.w1.2a.#", ("0", "3"))


@pytest.mark.parametrize(
    ("name", "layer"), [("model.layers.31.mlp.experts.7.w1", "31"), ("blocks.12", "12"), ("5.w", "5"), ("lm_head", "")]
)
def test_the_first_index_is_the_layer(name: str, layer: str) -> None:
    assert layered(name) == (split(name)[0], layer)


def test_a_pattern_given_twice_counts_once() -> None:
    assert Matcher(["a.1", "*", "a.1"]).all("a.1") == ("a.1", "*")


def test_a_bad_pattern_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        Matcher(["re:(("])
    assert caught.value.findings[0].id == "recipe.pattern"
