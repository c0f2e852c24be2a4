"""Lists in declarations, for layers cut out and renumbered: what they say of a module stays said under its new name."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.utils.match import match_name

from ckptkit.planners.narrowed_lists import restated

LAYER, NEW = "model.layers.61", "model.layers.0"
PARTS = (
    "eh_proj",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.gate",
    "mlp.experts.0.up_proj",
    "mlp.experts.1.up_proj",
)
SAME = {f"{LAYER}.{part}": f"{LAYER}.{part}" for part in PARTS} | {"lm_head": "lm_head"}
MOVED = {f"{LAYER}.{part}": f"{NEW}.{part}" for part in PARTS} | {"lm_head": "lm_head"}
ENTRIES = [
    "lm_head",
    "Linear",
    "model.layers.60.mlp.gate",
    "model.layers.0.mlp.gate",
    f"{LAYER}.mlp.gate",
    "re:.*self_attn.*",
    r"re:model\.layers\.(?:3|61)\.eh_proj$",
    r"re:.*layers\.0\..*",
    r"re:.*\.experts\.1\..*",
]


@pytest.mark.parametrize("modules", [SAME, MOVED], ids=["same", "renumbered"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_means_the_same_modules_under_their_new_names(entry: str, modules: dict[str, str]) -> None:
    """By compressed-tensors' own matching; of the layers left behind nothing is said any more."""
    left = restated({"ignore": [entry]}, modules)["ignore"]
    before = {new for old, new in modules.items() if match_name(old, entry)}
    after = {new for new in modules.values() if any(match_name(new, text) for text in left)}
    assert after == before
    assert left == [] or before or entry == "Linear"


def test_what_is_not_renamed_stays_as_it_is_written() -> None:
    ignore = ["lm_head", r"re:model\.layers\.(?:3|61)\.eh_proj$", f"{LAYER}.mlp.gate"]
    assert restated({"ignore": [*ignore, "model.layers.3.mlp.gate"]}, SAME) == {"ignore": ignore}


@pytest.mark.parametrize(
    ("table", "made"),
    [
        ({"modules_to_not_convert": [LAYER, "model.layers.6"]}, {"modules_to_not_convert": [NEW]}),
        ({"ignored_layers": [f"{LAYER}.mlp"]}, {"ignored_layers": [f"{NEW}.mlp"]}),
        (
            {"exclude_modules": [f"{LAYER}.mlp.experts*", "lm_head"]},
            {"exclude_modules": [f"{NEW}.mlp.experts.0.up_proj", f"{NEW}.mlp.experts.1.up_proj", "lm_head"]},
        ),
        (
            {"quantized_layers": {f"{LAYER}.eh_proj": {"bits": 4}, "model.layers.0.eh_proj": {"bits": 8}}},
            {"quantized_layers": {f"{NEW}.eh_proj": {"bits": 4}}},
        ),
        (
            {"config_groups": {"a": {"targets": ["Linear", f"{LAYER}.eh_proj"], "weights": None}}},
            {"config_groups": {"a": {"targets": ["Linear", f"{NEW}.eh_proj"], "weights": None}}},
        ),
        (
            {"dynamic": {r"-:.*\.61\.mlp\.gate": {}, r"+:.*eh_proj": {"bits": 8}, r"-:.*\.3\.mlp\.gate": {}}},
            {"dynamic": {r"-:^model\.layers\.0\.mlp\.gate$": {}, r"+:.*eh_proj": {"bits": 8}}},
        ),
        ({"ignore": ["", "re:[6", r"re:(.*)+6$"]}, {"ignore": ["", "re:[6", r"re:(.*)+6$"]}),
        ({"quant_method": "fp8", "ignore": None}, {"quant_method": "fp8", "ignore": None}),
    ],
)
def test_lists_of_every_method(table: dict[str, Any], made: dict[str, Any]) -> None:
    assert restated(table, MOVED) == made


def test_the_table_given_is_not_changed() -> None:
    table = {"ignore": ["model.layers.0.eh_proj"], "config_groups": {"a": {"targets": ["model.layers.0.eh_proj"]}}}
    restated(table, MOVED)
    assert table == {
        "ignore": ["model.layers.0.eh_proj"],
        "config_groups": {"a": {"targets": ["model.layers.0.eh_proj"]}},
    }
