"""Consumer rules: compressed-tensors' against the library itself, vLLM's against worked examples of its source."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.consumers import Declared, by_compressed_tensors, by_vllm, declared

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.10.mlp.gate",
    "m.lm_head",
]
TARGETS = [
    "Linear",
    "lm_head",
    r"re:.*lm_head",
    r"re:.*layers\.0.*q_proj",
    r"re:.*_proj",
    r"re:^model.*",
    r"re:.*",
    "Embedding",
    NAMES[1],
]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(TARGETS)), unique_by=lambda item: item[1]),
    st.lists(st.sampled_from(TARGETS), max_size=2),
    st.sampled_from(NAMES),
)
def test_compressed_tensors_rules_are_the_library_s(
    targets: list[tuple[str, str]], ignore: list[str], name: str
) -> None:
    import torch
    from compressed_tensors.utils.match import is_match, match_targets

    module = torch.nn.Linear(1, 1)
    group_of = {target: group for group, target in targets}
    expected = None
    if is_match(name, module, list(group_of), ignore):
        expected = group_of[match_targets(name, module, list(group_of))[0]]
    assert by_compressed_tensors(Declared(tuple(targets), tuple(ignore)), name) == expected


def test_overlapping_patterns_are_read_differently() -> None:
    config = Declared((("attention", r"re:.*layers\.0.*q_proj"), ("body", r"re:.*_proj")), ())
    name = "model.layers.0.self_attn.q_proj"
    assert by_vllm(config, name, "LinearBase") == "attention"
    assert by_compressed_tensors(config, name) == "body"


@pytest.mark.parametrize(
    ("targets", "ignore", "name", "class_name", "parts", "group"),
    [
        ([("g", "Linear")], [], "model.layers.0.mlp.down_proj", "RowParallelLinear", (), "g"),
        ([("g", "Linear")], [], "lm_head", "ParallelLMHead", (), None),
        ([("g", "Linear"), ("h", r"re:.*lm_head$")], [], "lm_head", "ParallelLMHead", (), "h"),
        ([("g", "Linear"), ("h", r"re:.*lm_head$")], ["lm_head"], "lm_head", "ParallelLMHead", (), None),
        ([("g", r"re:.*q_proj"), ("g", r"re:.*k_proj")], [], "a.qk_proj", "QKVParallelLinear", ("a.q_proj", "a.k_proj"), "g"),
        ([("g", r"re:.*q_proj")], [], "a.qk_proj", "QKVParallelLinear", ("a.q_proj", "a.k_proj"), None),
        ([("g", "Linear")], [r"re:.*[qk]_proj"], "a.qk_proj", "QKVParallelLinear", ("a.q_proj", "a.k_proj"), None),
    ],
)  # fmt: skip
def test_vllm_rules(
    targets: list[tuple[str, str]],
    ignore: list[str],
    name: str,
    class_name: str,
    parts: tuple[str, ...],
    group: str | None,
) -> None:
    assert by_vllm(Declared(tuple(targets), tuple(ignore)), name, class_name, parts) == group


def test_vllm_refuses_a_fused_layer_ignored_in_part() -> None:
    config = Declared((("g", "Linear"),), ("a.q_proj",))
    with pytest.raises(ValueError, match="some"):
        by_vllm(config, "a.qkv_proj", "QKVParallelLinear", ("a.q_proj", "a.k_proj", "a.v_proj"))


def test_declared_reads_groups_of_both_spellings() -> None:
    config = {"config_groups": {"W8A16": ["lm_head"], "g": {"targets": ["Linear"], "weights": {}}}, "ignore": None}
    assert declared(config) == Declared((("W8A16", "lm_head"), ("g", "Linear")), ())


def test_parts_of_a_fused_layer_come_before_its_class_in_newer_vllm() -> None:
    config = Declared((("rest", "Linear"), ("q", r"re:.*\.[qk]_proj$")), ())
    layer, parts = "a.qk_proj", ("a.q_proj", "a.k_proj")
    assert by_vllm(config, layer, "QKVParallelLinear", parts) == "rest"
    assert by_vllm(config, layer, "QKVParallelLinear", parts, parts_first=True) == "q"
    assert by_vllm(config, layer, "QKVParallelLinear", ("a.q_proj", "a.v_proj"), parts_first=True) == "rest"


def test_a_target_in_two_groups_belongs_to_the_later_one() -> None:
    config = declared({"config_groups": {"a": {"targets": ["Linear", "x.y"]}, "b": {"targets": ["Linear"]}}})
    assert config.targets == (("b", "Linear"), ("a", "x.y"))
