"""Patterns against compressed-tensors' own matching, a slow glob matcher, and tables."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import USAGE, UserError
from ckptkit.naming.patterns import looks_like_class, nearest, pattern

NAMES = ["lm_head", "language_model.lm_head", "model.layers.0.mlp.gate", "model.layers.10.mlp.gate_proj", "lm_head2"]


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ("lm_head", ["lm_head"]),
        ("LM_HEAD", []),
        ("*lm_head", ["lm_head", "language_model.lm_head"]),
        ("model.*.gate", ["model.layers.0.mlp.gate"]),
        ("model.layers.?.*", ["model.layers.0.mlp.gate"]),
        ("model.layers.[!0]*", ["model.layers.10.mlp.gate_proj"]),
        ("model", []),
        ("re:lm_head", ["lm_head", "lm_head2"]),
        ("re:.*lm_head$", ["lm_head", "language_model.lm_head"]),
        ("re:head", []),
    ],
)
def test_what_a_pattern_matches(text: str, matched: list[str]) -> None:
    found = pattern(text)
    assert [name for name in NAMES if found.matches(name)] == matched


def test_exact_and_regex_as_compressed_tensors_matches() -> None:
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    texts = [*NAMES, *(f"re:{end}" for end in ("", ".*", ".*gate", ".*gate$", "lm", r"model\.layers\.\d\.", "(?i)LM"))]
    for text in filter(lambda text: text != "re:", texts):
        for name in NAMES:
            assert pattern(text).matches(name) == match_name(name, text), (text, name)


def glob(text: str, name: str) -> bool:
    """``*`` and ``?`` by trying every way."""
    if not text:
        return not name
    if text[0] == "*":
        return any(glob(text[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and text[0] in ("?", name[0]) and glob(text[1:], name[1:])


@given(st.text("ab.*?", min_size=1, max_size=6), st.text("ab.", max_size=6))
def test_globs_match_the_whole_name_and_cross_dots(text: str, name: str) -> None:
    assert pattern(text).matches(name) == glob(text, name)


@pytest.mark.parametrize("text", ["", "  ", "re:", "re:(", "re:[a", "re:*x", r"re:\p{L}", "re:a{99999999999}"])
def test_no_pattern(text: str) -> None:
    with pytest.raises(UserError) as caught:
        pattern(text)
    assert [finding.id for finding in caught.value.findings] == ["recipe.pattern"]
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("text", "is_class"),
    [("Linear", True), ("Conv2d", True), ("LayerNorm", True), ("lm_head", False), ("L", False), ("re:Linear", False),
     ("Model.layer", False), ("*Linear", False)],
)  # fmt: skip
def test_what_looks_like_a_class(text: str, is_class: bool) -> None:
    assert looks_like_class(text) == is_class


@pytest.mark.parametrize(
    ("name", "candidates", "close"),
    [
        ("lm_haed", NAMES, "lm_head"),
        ("W4A17", ["W8A16", "W4A16", "W4A16_ASYM", "FP8_BLOCK"], "W4A16"),
        ("fp8_dynamc", ["FP8_BLOCK", "FP8_DYNAMIC"], "FP8_DYNAMIC"),
        ("zzz", NAMES, None),
        ("x", [], None),
    ],
)
def test_nearest(name: str, candidates: list[str], close: str | None) -> None:
    assert nearest(name, candidates) == close


def test_a_quarter_of_a_million_names() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj" for layer in range(60) for e in range(1280)
             for part in ("gate", "up", "down")]  # fmt: skip
    start = time.process_time()
    found = pattern("re:.*experts.*up_proj$")
    assert sum(map(found.matches, names)) == 60 * 1280
    assert nearest("model.layers.3.mlp.experts.7.upp_proj", names) in set(names)
    assert time.process_time() - start < 5  # a regex compiled per name, or a ratio taken per name, takes far longer
