"""Accounting against published figures, and against the bytes of checkpoints made in the forms it speaks of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dsv4 import make
from headers import config, specs

from ckptkit.drafts.accounting import (
    Part,
    Size,
    active_share,
    by_stage_and_part,
    is_scale,
    part_of,
    serving,
    size_of,
    stage_of,
    total,
    training,
)
from ckptkit.files.header import Spec

Sizes = dict[tuple[int | None, Part], Size]


@pytest.fixture(scope="module")
def flash() -> Sizes:
    draft = [spec for spec in specs("deepseek-v4-flash-dspark") if spec.name.startswith("mtp.")]
    return by_stage_and_part(draft, share=active_share(config("deepseek-v4-flash-dspark")))


def routed(sizes: Sizes) -> Size:
    return total(size for (_, part), size in sizes.items() if part is Part.ROUTED)


def test_the_official_flash_draft(flash: Sizes) -> None:
    whole = total(flash.values())
    assert whole.tensors == 4705
    assert whole.parameters == 19_845_850_983
    assert whole.stored == whole.fp4 == 10_862_838_300
    assert whole.bf16 == 39_696_553_884


def test_its_routed_experts(flash: Sizes) -> None:
    found = routed(flash)
    assert found.parameters == 19_327_352_832
    assert found.fp4 == 9_663_676_416 + 603_979_776
    assert found.fp8 == 19_327_352_832 + 1_179_648
    assert found.bf16 == 38_654_705_664


def test_parameters_that_a_token_uses(flash: Sizes) -> None:
    per_expert = 3 * 4096 * 2048
    assert routed(flash).active == 3 * 6 * per_expert
    assert total(flash.values()).active == 19_845_850_983 - 3 * 250 * per_expert  # 0.971 billion


def test_v41_drafts_have_their_own_experts() -> None:
    keys = {"n_routed_experts": 384, "num_experts_per_tok": 6}
    assert active_share(keys) == 6 / 384
    text = keys | {"dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3}
    assert active_share({"text_config": text}) == 3 / 128


def test_stages_are_kept_apart(flash: Sizes) -> None:
    stored = [total(size for key, size in flash.items() if key[0] == stage).stored for stage in range(3)]
    assert stored == [3_610_287_448, 3_559_944_536, 3_692_606_316]
    assert {stage for stage, part in flash if part in (Part.MARKOV, Part.CONFIDENCE)} == {2}
    assert {stage for stage, part in flash if part is Part.PROJECTION} == {0}


@pytest.mark.parametrize(("form", "column"), [("bf16", "bf16"), ("fp8", "fp8"), ("official", "fp4")])
def test_bytes_in_a_form_are_those_of_a_checkpoint_stored_in_it(form: str, column: str, tmp_path: Path) -> None:
    stored = {name: make(tmp_path / name, form=name).shapes for name in {"official", "bf16", form}}
    drafts = {
        name: [Spec(tensor, *spec) for tensor, spec in shapes.items() if tensor.startswith("mtp.")]
        for name, shapes in stored.items()
    }
    there = sum(spec.nbytes for spec in drafts[form])
    for draft in drafts.values():
        assert getattr(total(map(size_of, draft)), column) == there


def test_fp8_blocks_count(tmp_path: Path) -> None:
    draft = [Spec(name, *s) for name, s in make(tmp_path / "v41", v41=True).shapes.items() if name.startswith("mtp.")]
    whole = total(size_of(spec, (32, 32)) for spec in draft)
    assert whole.fp4 == whole.stored == sum(spec.nbytes for spec in draft)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mtp.0.ffn.experts.3.w1.weight", Part.ROUTED),
        ("mtp.0.ffn.experts.3.w1.scale", Part.ROUTED),
        ("layers.0.mlp.experts.gate_up_proj", Part.ROUTED),
        ("model.layers.61.mlp.experts.3.up_proj.weight_scale_inv", Part.ROUTED),
        ("mtp.0.ffn.shared_experts.w2.weight", Part.SHARED),
        ("mtp.0.ffn.gate.weight", Part.ROUTER),
        ("mtp.0.ffn.gate.bias", Part.ROUTER),
        ("layers.0.mlp.gate.e_score_correction_bias", Part.ROUTER),
        ("mtp.0.attn.attn_sink", Part.ATTENTION),
        ("layers.0.self_attn.sinks", Part.ATTENTION),
        ("layers.0.self_attn.q_proj.weight", Part.ATTENTION),
        ("layers.0.mlp.gate_proj.weight", Part.MLP),
        ("mtp.0.attn.q_norm.weight", Part.NORM),
        ("mtp.0.main_norm.weight", Part.NORM),
        ("mtp.0.enorm.weight", Part.NORM),
        ("layers.0.post_attention_layernorm.weight", Part.NORM),
        ("mtp.2.hc_head_scale", Part.MIXING),
        ("layers.0.attn_hc.fn", Part.MIXING),
        ("fold_module.hc_base", Part.MIXING),
        ("mtp.0.main_proj.scale", Part.PROJECTION),
        ("mtp.0.e_proj.weight", Part.PROJECTION),
        ("model.layers.61.eh_proj.weight", Part.PROJECTION),
        ("fc.weight", Part.PROJECTION),
        ("mtp.2.markov_head.markov_w1.weight", Part.MARKOV),
        ("markov_head.gate_proj.weight", Part.MARKOV),
        ("confidence_head.proj.bias", Part.CONFIDENCE),
        ("embed_tokens.weight", Part.VOCABULARY),
        ("mtp.2.head.weight", Part.VOCABULARY),
        ("d2t", Part.OTHER),
    ],
)
def test_parts(name: str, part: Part) -> None:
    assert part_of(name) is part


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("mtp.0.attn.wq_a.scale", True),
        ("layers.61.mlp.up_proj.weight_scale_inv", True),
        ("fc.weight_scale", True),
        ("fc.weight_scale_2", True),
        ("mtp.0.hc_attn_scale", False),
        ("mtp.2.hc_head_scale", False),
        ("layers.0.ffn_hc.scale", False),
        ("fold_module.hc_scale", False),
        ("mtp.0.attn.wq_a.weight", False),
    ],
)
def test_scales_are_no_parameters_but_those_of_hyper_connections_are(name: str, scale: bool) -> None:
    assert is_scale(name) is scale
    assert size_of(Spec(name, "F32", (3,))).parameters == (0 if scale else 3)


@pytest.mark.parametrize(
    ("name", "stage"), [("mtp.2.norm.weight", 2), ("layers.1.mlp.gate.weight", 1), ("fc.weight", None)]
)
def test_stages(name: str, stage: int | None) -> None:
    assert stage_of(name) == stage


def test_experts_in_one_tensor_are_sized_as_one_by_one() -> None:
    """[E, 2I, H] in BF16 against E × (w1, w3) of [I, H]."""
    fused = size_of(Spec("layers.0.mlp.experts.gate_up_proj", "BF16", (4, 256, 256)), share=0.5)
    apart = [
        size_of(Spec(f"mtp.0.ffn.experts.{e}.{w}.weight", "BF16", (128, 256)), share=0.5)
        for e in range(4)
        for w in ("w1", "w3")
    ]
    assert fused._replace(tensors=8) == total(apart)


def test_memory_to_serve_and_to_train(flash: Sizes) -> None:
    alone, beside = serving(flash, target_bytes=156_015_698_140)
    assert (alone.bytes, beside.bytes) == (10_862_838_300, 166_878_536_440)
    one, sharded, gathered, expert_parallel = training(flash, cards=8)
    assert one.bytes == 16 * 19_845_850_983
    assert sharded.bytes == 39_691_701_966  # 39.7 GB a card
    assert gathered.bytes == 4 * 6_642_681_979  # the last stage is the largest
    assert expert_parallel.bytes == 16 * 518_498_151 + 2 * 19_327_352_832
    assert all(str(figure.formula) for figure in (alone, beside, one, sharded, gathered, expert_parallel))


def test_nothing_costs_nothing() -> None:
    assert total([]) == Size()
    sizes: dict[Any, Size] = {}
    assert [figure.bytes for figure in training(sizes, 1)] == [0, 0, 0, 0]
