"""Names as regexes: exact on what they were made from, by brute force over random subsets."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.naming.names import PREFIX, template_of, unwrapped
from ckptkit.planners.generalise import by_template, patterns

LAYERS = [f"model.layers.{i}.{rest}" for i in range(12) for rest in ("self_attn.q_proj", "mlp.up_proj")]
EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(4) for e in range(5)]
OTHERS = ["lm_head", "model.embed_tokens", "mtp.layers.0.self_attn.q_proj"]
ALL = LAYERS + EXPERTS + OTHERS
# Names that no other name ends with, once wrappers are taken off.
PLAIN = [*EXPERTS, "lm_head"]


def matched(found: list[str], names: list[str]) -> set[str]:
    return {name for name in names if any(re.match(text.removeprefix("re:"), name) for text in found)}


@settings(max_examples=200, deadline=None)
@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_patterns_match_exactly_what_was_chosen(chosen: set[str]) -> None:
    among, meant = by_template(ALL), by_template(chosen)
    found = patterns(meant, among)
    assert found == sorted(found)
    kept_apart = patterns(meant, among, among.keys() - meant.keys())
    assert matched(kept_apart, ALL) & set(PLAIN) == chosen & set(PLAIN)
    for spelled in ("language_model.{}", "x.y.{}"):
        behind = [spelled.format(name) for name in chosen]
        assert matched(found, behind) == set(behind)
    assert matched(found, ALL) >= chosen
    for text in found:
        assert template_of(text) in {unwrapped(template) for template in among}


def test_wrappers_may_be_swapped() -> None:
    names = [f"model.language_model.layers.{i}.mlp.up_proj" for i in range(3)]
    found = by_template(names)
    (text,) = patterns(found, found)
    assert matched([text], ["language_model.model.layers.2.mlp.up_proj"])
    (whole,) = patterns(found, found, ["mtp.layers.#.mlp.up_proj"])
    assert not matched([whole], ["mtp.layers.0.mlp.up_proj"])
    assert matched([whole], names) == set(names)


@pytest.mark.parametrize(
    ("chosen", "written"),
    [
        (LAYERS[::2], [r"layers\.\d+\.self_attn\.q_proj$"]),
        (["lm_head"], ["lm_head$"]),
        (LAYERS[0:6:2], [r"layers\.(?:0|1|2)\.self_attn\.q_proj$"]),
        (EXPERTS, [r"layers\.\d+\.mlp\.experts\.\d+\.up_proj$"]),
        (EXPERTS[:5], [r"layers\.0\.mlp\.experts\.\d+\.up_proj$"]),
        (EXPERTS[:7], [r"layers\.0\.mlp\.experts\.\d+\.up_proj$", r"layers\.1\.mlp\.experts\.(?:0|1)\.up_proj$"]),
    ],
)  # fmt: skip
def test_indices_are_free_when_all_are_meant(chosen: list[str], written: list[str]) -> None:
    assert patterns(by_template(chosen), by_template(ALL)) == [PREFIX + text for text in written]


def test_a_longer_index_is_not_taken_for_a_shorter() -> None:
    names = ["layers.1.x", "layers.11.x", "layers.2.x"]
    found = patterns(by_template(names[:1]), by_template(names))
    assert matched(found, names) == {"layers.1.x"}
