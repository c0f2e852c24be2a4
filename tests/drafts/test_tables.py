"""Expected tensors against the header fixtures and against made checkpoints, both of which state names by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dsv4 import Dims, configured, make
from headers import config, specs

from ckptkit.drafts.tables import BF16, Expected, Form, Table, dspark, dspark_parts, form_of, nextn, taps, target
from ckptkit.errors import UserError

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def official(table: Table) -> Shapes:
    return {name: (expected.dtypes[0], expected.shape) for name, expected in table.items()}


@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("drafting", ["", "-dspark"])
def test_tables_are_the_published_tensors(model: str, drafting: str) -> None:
    fixture = f"deepseek-v4-{model}{drafting}"
    keys = config(fixture)
    table = target(keys) | (dspark(keys, 3) if drafting else nextn(keys))
    assert official(table) == {spec.name: (spec.dtype, spec.shape) for spec in specs(fixture)}


@pytest.mark.parametrize(
    "variant",
    [{}, {"form": "bf16"}, {"form": "fp8"}, {"v41": True}, {"draft": "nextn"}, {"draft": "declared"}],
    ids=lambda variant: "-".join(map(str, variant.values())) or "official",
)
def test_tables_are_what_a_made_checkpoint_holds(variant: dict[str, Any], tmp_path: Path) -> None:
    made = make(tmp_path / "made", **variant)
    drafts = {"nextn": nextn, "declared": lambda _: {}}.get(variant.get("draft", ""), lambda keys: dspark(keys, 3))
    assert official(target(made.config) | drafts(made.config)) == made.shapes


def test_every_stage_has_its_block_and_only_the_ends_have_more() -> None:
    parts = dspark_parts(configured(Dims()))
    assert parts.first.keys() == {"main_proj.weight", "main_proj.scale", "main_norm.weight"}
    heads = {"norm", "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"}
    assert parts.last.keys() == {f"{name}.weight" for name in heads} | {
        f"hc_head_{name}" for name in ("fn", "base", "scale")
    }
    assert not (parts.every.keys() & parts.first.keys() | parts.every.keys() & parts.last.keys())
    single = dspark(configured(Dims(stages=1)), 1)
    assert single.keys() == {f"mtp.0.{name}" for part in parts for name in part}


def test_v41_has_an_optional_router_bias_and_no_head_mixer() -> None:
    parts = dspark_parts(configured(Dims(), v41=True))
    assert {name for part in parts for name, expected in part.items() if expected.optional} == {"ffn.gate.bias_vl"}
    assert not [name for name in parts.last if name.startswith("hc_head")]
    assert parts.last.keys() >= {"markov_head.embed.weight", "markov_head.head.weight"}
    assert parts.every["attn.wkv.scale"].shape == (128 / 32, 256 / 32)


def test_a_form_that_the_config_does_not_declare() -> None:
    keys = configured(Dims())
    assert official(dspark(keys, 3, BF16)) == official(dspark(configured(Dims(), form="bf16"), 3))
    assert form_of(keys) == Form("fp4", "fp8", (128, 128))
    assert form_of(keys | {"quantization_config": None, "expert_dtype": "fp4"}) == BF16


def test_blocks_at_the_edge_have_a_scale() -> None:
    keys = configured(Dims(hidden=320, vocab=500))
    assert dspark_parts(keys).first["main_proj.scale"].shape == (3, 8)  # [320, 960] in blocks of 128


@pytest.mark.parametrize(
    ("keys", "width", "optional"),
    [
        ({}, 288, False),
        ({"enable_confidence_head": True}, 288, False),
        ({"enable_confidence_head": False}, 288, True),
        ({"confidence_head_with_markov": False}, 256, False),
    ],
)
def test_confidence_head(keys: dict[str, Any], width: int, optional: bool) -> None:
    expected = dspark_parts(configured(Dims()) | keys).last["confidence_head.proj.weight"]
    assert (expected.shape, expected.optional) == ((1, width), optional)


@pytest.mark.parametrize(
    ("dtype", "shape", "fits"),
    [
        ("I8", (4, 16), True),
        ("U8", (4, 16), True),
        ("F4", (4, 32), True),
        ("F4", (4, 16), False),
        ("I8", (4, 32), False),
        ("BF16", (4, 16), False),
        ("F4", (), False),
    ],
)
def test_packed_codes_are_told_by_dtype_and_shape(dtype: str, shape: tuple[int, ...], fits: bool) -> None:
    assert Expected(("I8", "U8", "F4"), (4, 16)).fits(dtype, shape) is fits


NEEDED = (
    "hidden_size", "vocab_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "moe_intermediate_size", "n_routed_experts", "hc_mult", "dspark_markov_rank",
)  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", [None, 0, -1, "4", 2.0, True])
def test_sizes_that_are_none_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        dspark(configured(Dims()) | {key: value}, 3)
    finding = error.value.findings[0]
    assert (finding.id, error.value.exit_code, finding.data["field"]) == ("config.draft-field", 3, key)


@pytest.mark.parametrize("key", ["n_routed_experts", "dspark_n_routed_experts"])
def test_more_experts_than_names_can_be_made_for_are_refused(key: str) -> None:
    with pytest.raises(UserError) as error:
        dspark(configured(Dims()) | {key: 1 << 40}, 3)
    finding = error.value.findings[0]
    assert (finding.id, finding.data["field"]) == ("config.draft-field", key)


@pytest.mark.parametrize("ids", [None, [], "40", [1, "2"], [True], 3])
def test_taps_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(UserError) as error:
        taps(configured(Dims()) | {"dspark_target_layer_ids": ids})
    assert error.value.findings[0].id == "config.draft-field"


@pytest.mark.parametrize("ratios", [None, [0, 4], [0, 4, 128, 8], "0,4,128,4", [[], 4, 128, 4]])
def test_ratios_that_do_not_say_what_a_layer_has_are_refused(ratios: Any) -> None:
    with pytest.raises(UserError) as error:
        target(configured(Dims()) | {"compress_ratios": ratios})
    assert error.value.findings[0].id == "config.draft-field"


@pytest.mark.parametrize("block", [[128], "128", [128, 0], 128, {"rows": 128}])
def test_fp8_blocks_that_are_none_are_refused(block: Any) -> None:
    with pytest.raises(UserError) as error:
        form_of({"quantization_config": {"weight_block_size": block}})
    assert error.value.findings[0].id == "config.draft-field"


@pytest.mark.parametrize("dtype", ["nvfp4", 4, ["fp4"]])
def test_unknown_expert_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(UserError) as error:
        form_of(configured(Dims()) | {"expert_dtype": dtype})
    assert (error.value.findings[0].id, error.value.exit_code) == ("config.expert-dtype", 3)
