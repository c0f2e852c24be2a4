"""Families: kinds of tensors, fused sets, ties and stacked experts, on the names of published checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ckptkit.errors import UserError
from ckptkit.families import (
    LINEAR_LIKE,
    TIED_BY_DEFAULT,
    Columns,
    Kind,
    classifier,
    classify,
    config_value,
    declared_drafts,
    draft_part,
    embedding_of,
    expert_projections,
    experts_of,
    fused_set,
    head_of,
    is_expert_tensor,
    is_tied,
    kinds,
    module_of,
    shares_global_scale,
    tie_locations,
)
from headers import FIXTURES, FOLDER, config, expand, materialize, specs

# --- the fixtures ------------------------------------------------------------------------------------------

# Elements by dtype as the Hub's safetensors metadata gives them (a total, where only that is published).
PUBLISHED: dict[str, dict[str, int] | int] = {
    "deepseek-v3": {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600},
    "deepseek-v4-flash-dspark": 165_265_454_782,
    "gemma-3-4b": 4_300_079_472,
    "glm-4.5-air": 110_468_824_832,
    "gpt-oss-20b-bf16": 20_914_757_184,
    "gpt2": {"F32": 137_022_720},
    "llama-3.1-8b": {"BF16": 8_030_261_248},
    "llama-3.2-1b": {"BF16": 1_235_814_400},
    "llama-4-scout": 108_641_793_536,
    "mimo-7b": 7_833_409_536,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-next-80b-a3b": 81_324_862_720,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3.5-35b-a3b": 35_951_822_704,
    "qwen3.6-27b": 27_781_427_952,
    "smollm2-135m": {"BF16": 134_515_008},
}


@pytest.mark.parametrize("fixture", PUBLISHED)
def test_fixture_has_the_published_number_of_parameters(fixture: str) -> None:
    elements: Counter[str] = Counter()
    for spec in specs(fixture):
        elements[spec.dtype] += prod(spec.shape)
    published = PUBLISHED[fixture]
    assert (dict(elements) if isinstance(published, dict) else elements.total()) == published


@pytest.mark.parametrize(
    ("fixture", "tensors"),
    [("deepseek-v3", 91_991), ("deepseek-v4-flash-dspark", 67_612 + 1568 + 1565 + 1572), ("gpt2", 160)],
)
def test_fixture_has_the_published_number_of_tensors(fixture: str, tensors: int) -> None:
    names = [spec.name for spec in specs(fixture)]
    assert len(names) == len(set(names)) == tensors


def test_fixture_files_are_as_the_script_writes_them() -> None:
    script = FOLDER.parent / "make_headers.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_templates_expand_to_every_combination() -> None:
    assert list(expand("a.{0..2,7}.b.{1,2}.c")) == [f"a.{i}.b.{j}.c" for i in (0, 1, 2, 7) for j in (1, 2)]


def test_materialized_fixture_is_a_checkpoint_without_data(tmp_path: Path) -> None:
    folder = materialize("llama-3.2-1b", tmp_path / "checkpoint")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(folder / "model.safetensors", framework="numpy") as reader:
        stored = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    assert stored == {spec.name: spec.shape for spec in specs("llama-3.2-1b")}
    assert os.stat(folder / "model.safetensors").st_blocks * 512 < 1_000_000


# --- kinds -------------------------------------------------------------------------------------------------

# What these tensors are, by hand.
KINDS: dict[str, dict[Kind, list[str]]] = {
    "deepseek-v3": {
        Kind.HEAD: ["lm_head.weight"],
        Kind.EMBEDDING: ["model.embed_tokens.weight", "model.layers.61.embed_tokens.weight"],
        Kind.ROUTER: ["model.layers.3.mlp.gate.weight", "model.layers.60.mlp.gate.weight"],
        Kind.LINEAR: [
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.60.mlp.experts.255.down_proj.weight",
            "model.layers.5.mlp.shared_experts.up_proj.weight",
            "model.layers.60.self_attn.kv_a_proj_with_mqa.weight",
        ],
        Kind.MTP: [
            "model.layers.61.eh_proj.weight",
            "model.layers.61.shared_head.head.weight",
            "model.layers.61.mlp.gate.weight",
            "model.layers.61.mlp.experts.0.up_proj.weight",
            "model.layers.61.self_attn.q_a_proj.weight",
        ],
        Kind.NORM: ["model.layers.61.enorm.weight", "model.layers.0.self_attn.q_a_layernorm.weight"],
        Kind.OTHER: ["model.layers.3.mlp.gate.e_score_correction_bias", "model.layers.0.mlp.up_proj.weight_scale_inv"],
    },
    "deepseek-v4-flash-dspark": {
        Kind.HEAD: ["head.weight"],
        Kind.EMBEDDING: ["embed.weight"],
        Kind.ROUTER: ["layers.0.ffn.gate.weight"],
        Kind.LINEAR: [
            "layers.0.attn.wq_a.weight",
            "layers.42.attn.indexer.wq_b.weight",
            "layers.3.attn.compressor.wgate.weight",
            "layers.42.ffn.experts.255.w2.weight",
            "layers.7.ffn.shared_experts.w1.weight",
        ],
        Kind.DRAFT: [
            "mtp.0.main_proj.weight",
            "mtp.1.attn.wkv.weight",
            "mtp.2.markov_head.markov_w1.weight",
            "mtp.2.confidence_head.proj.weight",
            "mtp.2.ffn.gate.weight",
            "mtp.0.ffn.experts.9.w3.weight",
        ],
        Kind.NORM: ["norm.weight", "mtp.2.norm.weight", "layers.2.attn.indexer.compressor.norm.weight"],
        Kind.OTHER: [
            "hc_head_fn",
            "layers.0.hc_attn_scale",
            "layers.0.ffn.gate.tid2eid",
            "layers.4.attn.compressor.ape",
            "layers.0.attn.wq_a.scale",
        ],
    },
    "gemma-3-4b": {
        Kind.EMBEDDING: ["language_model.model.embed_tokens.weight"],
        Kind.LINEAR: [
            "language_model.model.layers.33.mlp.down_proj.weight",
            "vision_tower.vision_model.encoder.layers.26.self_attn.out_proj.weight",
        ],
        Kind.NORM: [
            "language_model.model.layers.0.pre_feedforward_layernorm.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
            "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight",
        ],
        Kind.POSITION: ["vision_tower.vision_model.embeddings.position_embedding.weight"],
        Kind.CONV: ["vision_tower.vision_model.embeddings.patch_embedding.weight"],
        Kind.OTHER: ["multi_modal_projector.mm_input_projection_weight"],
    },
    "glm-4.5-air": {
        Kind.ROUTER: ["model.layers.45.mlp.gate.weight"],
        Kind.LINEAR: ["model.layers.45.mlp.experts.127.up_proj.weight", "model.layers.0.mlp.down_proj.weight"],
        Kind.MTP: ["model.layers.46.mlp.gate.weight", "model.layers.46.shared_head.head.weight"],
        Kind.EMBEDDING: ["model.layers.46.embed_tokens.weight"],
        Kind.NORM: ["model.layers.46.shared_head.norm.weight"],
    },
    "gpt-oss-20b": {
        Kind.EXPERTS: [
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            "model.layers.0.mlp.experts.down_proj_scales",
            "model.layers.0.mlp.experts.gate_up_proj_bias",
        ],
        Kind.ROUTER: ["model.layers.0.mlp.router.weight"],
        Kind.OTHER: ["model.layers.0.self_attn.sinks", "model.layers.0.mlp.router.bias"],
        Kind.HEAD: ["lm_head.weight"],
    },
    "gpt-oss-20b-bf16": {
        Kind.EXPERTS: ["model.layers.23.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"],
        Kind.LINEAR: ["model.layers.0.self_attn.o_proj.weight"],
    },
    "gpt2": {
        Kind.EMBEDDING: ["wte.weight"],
        Kind.POSITION: ["wpe.weight"],
        Kind.CONV: ["h.0.attn.c_attn.weight", "h.11.mlp.c_proj.weight", "h.0.mlp.c_fc.weight"],
        Kind.NORM: ["ln_f.weight", "h.0.ln_1.bias"],
        Kind.OTHER: ["h.0.attn.bias"],
    },
    "llama-3.1-8b": {
        Kind.HEAD: ["lm_head.weight"],
        Kind.EMBEDDING: ["model.embed_tokens.weight"],
        Kind.LINEAR: ["model.layers.31.self_attn.q_proj.weight"],
        Kind.NORM: ["model.norm.weight"],
    },
    "llama-3.2-1b": {Kind.LINEAR: ["model.layers.15.mlp.gate_proj.weight"]},
    "llama-4-scout": {
        Kind.HEAD: ["language_model.lm_head.weight"],
        Kind.EMBEDDING: ["language_model.model.embed_tokens.weight", "vision_model.class_embedding"],
        Kind.POSITION: ["vision_model.positional_embedding_vlm"],
        Kind.EXPERTS: ["language_model.model.layers.47.feed_forward.experts.gate_up_proj"],
        Kind.ROUTER: ["language_model.model.layers.0.feed_forward.router.weight"],
        Kind.LINEAR: [
            "language_model.model.layers.0.feed_forward.shared_expert.gate_proj.weight",
            "multi_modal_projector.linear_1.weight",
            "vision_model.patch_embedding.linear.weight",
            "vision_model.model.layers.33.mlp.fc1.weight",
        ],
        Kind.NORM: ["vision_model.layernorm_pre.weight"],
    },
    "mimo-7b": {
        Kind.MTP: ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"],
        Kind.NORM: ["model.mtp_layers.0.token_layernorm.weight"],
        Kind.LINEAR: ["model.layers.35.self_attn.k_proj.weight"],
        Kind.OTHER: ["model.mtp_layers.0.self_attn.k_proj.bias"],
    },
    "mixtral-8x7b": {
        Kind.ROUTER: ["model.layers.0.block_sparse_moe.gate.weight"],
        Kind.LINEAR: ["model.layers.31.block_sparse_moe.experts.7.w2.weight"],
    },
    "qwen2.5-vl-7b": {
        Kind.CONV: ["visual.patch_embed.proj.weight"],
        Kind.LINEAR: ["visual.blocks.31.attn.qkv.weight", "visual.merger.mlp.0.weight"],
        Kind.NORM: ["visual.merger.ln_q.weight", "visual.blocks.0.norm1.weight"],
        Kind.HEAD: ["lm_head.weight"],
    },
    "qwen3-30b-a3b": {
        Kind.ROUTER: ["model.layers.47.mlp.gate.weight"],
        Kind.LINEAR: ["model.layers.0.mlp.experts.127.gate_proj.weight"],
    },
    "qwen3-4b": {
        Kind.EMBEDDING: ["model.embed_tokens.weight"],
        Kind.NORM: ["model.layers.0.self_attn.q_norm.weight"],
        Kind.LINEAR: ["model.layers.35.mlp.down_proj.weight"],
    },
    "qwen3-8b-fp8": {
        Kind.LINEAR: ["model.layers.0.mlp.down_proj.weight"],
        Kind.OTHER: ["model.layers.0.mlp.down_proj.weight_scale_inv"],
        Kind.HEAD: ["lm_head.weight"],
    },
    "qwen3-8b-w4a16": {
        Kind.OTHER: ["model.layers.0.mlp.down_proj.weight_packed", "model.layers.0.mlp.down_proj.weight_shape"],
        Kind.HEAD: ["lm_head.weight"],
    },
    "qwen3-next-80b-a3b": {
        Kind.LINEAR: [
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            "model.layers.0.linear_attn.in_proj_ba.weight",
            "model.layers.46.mlp.experts.511.up_proj.weight",
        ],
        Kind.CONV: ["model.layers.0.linear_attn.conv1d.weight"],
        Kind.OTHER: ["model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"],
        Kind.ROUTER: ["model.layers.0.mlp.gate.weight", "model.layers.3.mlp.shared_expert_gate.weight"],
        Kind.MTP: ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"],
        Kind.NORM: ["mtp.pre_fc_norm_embedding.weight", "model.layers.0.linear_attn.norm.weight"],
    },
    "qwen3-vl-30b-a3b": {
        Kind.EXPERTS: ["model.language_model.layers.0.mlp.experts.down_proj"],
        Kind.POSITION: ["model.visual.pos_embed.weight"],
        Kind.CONV: ["model.visual.patch_embed.proj.weight"],
        Kind.NORM: ["model.visual.deepstack_merger_list.2.norm.weight"],
        Kind.LINEAR: ["model.visual.deepstack_merger_list.0.linear_fc2.weight"],
    },
    "qwen3.5-35b-a3b": {
        Kind.EXPERTS: [
            "model.language_model.layers.39.mlp.experts.gate_up_proj",
            "mtp.layers.0.mlp.experts.down_proj",
        ],
        Kind.ROUTER: ["model.language_model.layers.0.mlp.shared_expert_gate.weight"],
        Kind.MTP: ["mtp.layers.0.mlp.shared_expert_gate.weight", "mtp.layers.0.mlp.shared_expert.up_proj.weight"],
    },
    "qwen3.6-27b": {
        Kind.LINEAR: [
            "model.language_model.layers.62.linear_attn.in_proj_a.weight",
            "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
            "model.language_model.layers.63.self_attn.q_proj.weight",
            "model.visual.blocks.26.mlp.linear_fc1.weight",
        ],
        Kind.CONV: ["model.language_model.layers.0.linear_attn.conv1d.weight"],
        Kind.OTHER: ["model.language_model.layers.0.linear_attn.A_log"],
        Kind.MTP: ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
        Kind.HEAD: ["lm_head.weight"],
        Kind.EMBEDDING: ["model.language_model.embed_tokens.weight"],
    },
    "smollm2-135m": {Kind.EMBEDDING: ["model.embed_tokens.weight"], Kind.NORM: ["model.norm.weight"]},
}


@pytest.mark.parametrize("fixture", FIXTURES)
def test_kinds_of_published_tensors(fixture: str) -> None:
    shapes = {spec.name: spec.shape for spec in specs(fixture)}
    kind_of = classifier(config(fixture))
    expected = {name: kind for kind, names in KINDS[fixture].items() for name in names}
    assert {name: kind_of(name, shapes[name]) for name in expected} == expected


@pytest.mark.parametrize("fixture", FIXTURES)
def test_only_matrices_named_weight_are_linear_like(fixture: str) -> None:
    kind_of = classifier(config(fixture))
    for spec in specs(fixture):
        if kind_of(spec.name, spec.shape) in LINEAR_LIKE:
            assert spec.name.endswith(".weight")
            assert len(spec.shape) == 2


# Names of families without a fixture.
@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("gpt_neox.embed_in.weight", (50304, 512), Kind.EMBEDDING),
        ("embed_out.weight", (50304, 512), Kind.HEAD),
        ("output.weight", (32000, 4096), Kind.HEAD),
        ("layers.0.attention.wq.weight", (4096, 4096), Kind.LINEAR),
        ("tok_embeddings.weight", (32000, 4096), Kind.EMBEDDING),
        ("backbone.embeddings.weight", (131072, 4096), Kind.EMBEDDING),
        ("backbone.layers.3.mixer.conv1d.weight", (8192, 1, 4), Kind.CONV),
        ("backbone.layers.3.mixer.gate.weight", (128, 2688), Kind.ROUTER),
        ("model.layers.0.self_attn.q_conv1d.weight", (4096, 4), Kind.CONV),
        ("model.layers.0.conv.in_proj.weight", (6144, 2048), Kind.LINEAR),
        ("model.layers.0.self_attn.q_norm.weight", (64, 128), Kind.NORM),
        ("model.layers.0.mlp.router.classifier.weight", (512, 4096), Kind.ROUTER),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (32, 1024, 1536), Kind.EXPERTS),
        ("model.layers.0.moe.gate_proj.weight", (288, 1280, 4096), Kind.EXPERTS),
        ("model.embed_tokens_per_layer.weight", (262144, 8960), Kind.EMBEDDING),
        ("model.language_model.ngram_embedding.shard_3.weight", (1024, 640), Kind.EMBEDDING),
        ("model.decoder.embed_positions.weight", (2050, 768), Kind.POSITION),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1152), Kind.POSITION),
        ("mlp1.0.weight", (4096,), Kind.NORM),
        ("mlp1.1.weight", (4096, 4096), Kind.LINEAR),
        ("thinker.lm_head.weight", (152064, 3584), Kind.HEAD),
        ("lm_head.rows.weight", (152064, 3584), Kind.HEAD),
        ("score.weight", (1, 4096), Kind.HEAD),
        ("model.mtp.layers.0.eh_proj.weight", (4096, 8192), Kind.MTP),
        ("mtp_linear_proj.0.weight", (4096, 8192), Kind.MTP),
        ("mtp_emb_norm.0.weight", (4096,), Kind.NORM),
        ("mtp.0.e_proj.weight", (4096, 4096), Kind.MTP),
        ("mtp.0.head.weight", (129280, 4096), Kind.MTP),
        ("model.dspark.layers.0.mlp.up_proj.weight", (4096, 4096), Kind.DRAFT),
        ("markov_head.markov_w1.weight", (151936, 256), Kind.DRAFT),
        ("medusa_head.0.0.linear.weight", (4096, 4096), Kind.DRAFT),
    ],
)
def test_kinds_of_other_names(name: str, shape: tuple[int, ...], kind: Kind) -> None:
    assert classify(name, shape, None) is kind


def test_gpt_bigcode_has_linears_where_gpt2_has_not() -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    assert classify(name, (2304, 2048), {"model_type": "gpt_bigcode"}) is Kind.LINEAR
    assert classify(name, (2048, 2304), {"model_type": "gpt2"}) is Kind.CONV


def test_layers_past_the_last_are_mtp_in_text_models_only() -> None:
    nested = {"text_config": {"num_hidden_layers": 2}}
    assert classify("model.language_model.layers.2.mlp.up_proj.weight", (8, 8), nested) is Kind.MTP
    assert classify("model.language_model.layers.1.mlp.up_proj.weight", (8, 8), nested) is Kind.LINEAR
    assert classify("vision_tower.encoder.layers.9.mlp.fc1.weight", (8, 8), nested) is Kind.LINEAR
    assert classify(f"model.layers.{'9' * 5000}.mlp.up_proj.weight", (8, 8), nested) is Kind.LINEAR


def test_draft_parts_hold_more_than_matrices() -> None:
    part_of = draft_part(config("deepseek-v3"))
    assert part_of("model.layers.61.enorm.weight") is Kind.MTP
    assert part_of("model.layers.61.mlp.gate.e_score_correction_bias") is Kind.MTP
    assert part_of("model.layers.60.input_layernorm.weight") is None
    stages = draft_part(config("deepseek-v4-flash-dspark"))
    held = Counter(stages(spec.name) for spec in specs("deepseek-v4-flash-dspark"))
    assert held == {None: 67_612, Kind.DRAFT: 1568 + 1565 + 1572}


def test_a_name_form_is_looked_at_once() -> None:
    kinds._by_form.cache_clear()
    tensors = specs("deepseek-v3")
    kind_of = classifier(config("deepseek-v3"))
    for spec in tensors:
        kind_of(spec.name, spec.shape)
    forms = {re.sub(r"\.\d+\.", ".#.", re.sub(r"\.\d+\.", ".#.", spec.name)) for spec in tensors}
    assert kinds._by_form.cache_info().misses <= len(forms) < 100


def test_module_of() -> None:
    assert module_of("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj"
    assert module_of("model.layers.0.mlp.experts.gate_up_proj") == "model.layers.0.mlp.experts.gate_up_proj"


# --- configs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ({"hidden_size": 1, "text_config": {"hidden_size": 2}}, 1),
        ({"hidden_size": None, "text_config": {"hidden_size": 2}}, 2),
        ({"thinker_config": {"text_config": {"hidden_size": 3}}}, 3),
        ({"llm_config": {"hidden_size": 4}, "vision_config": {"hidden_size": 5}}, 4),
        ({"text_config": [1], "vision_config": {"hidden_size": 5}}, None),
        (None, None),
    ],
)
def test_config_value_prefers_the_outermost(found: dict[str, Any] | None, value: int | None) -> None:
    assert config_value(found, "hidden_size") == value


@pytest.mark.parametrize(
    ("fixture", "declared"),
    [
        ("deepseek-v3", {"num_nextn_predict_layers": 1}),
        ("qwen3.6-27b", {"text_config.mtp_num_hidden_layers": 1}),
        ("qwen3-4b", {}),
        (
            "deepseek-v4-flash-dspark",
            {
                "num_nextn_predict_layers": 1,
                "dspark_block_size": 5,
                "dspark_noise_token_id": 128799,
                "dspark_markov_rank": 256,
                "dspark_target_layer_ids": [40, 41, 42],
            },
        ),
    ],
)
def test_declared_drafts(fixture: str, declared: dict[str, Any]) -> None:
    assert declared_drafts(config(fixture)) == declared


# --- ties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", FIXTURES)
def test_published_checkpoints_are_tied_exactly_where_they_store_no_head(fixture: str) -> None:
    names = [spec.name for spec in specs(fixture)]
    embedding = embedding_of(names, config(fixture))
    assert embedding is not None
    assert is_tied(config(fixture)) == (f"{head_of(embedding)}.weight" not in names)


@pytest.mark.parametrize(
    ("found", "tied"),
    [
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
        ({"model_type": "gemma3", "tie_word_embeddings": False}, False),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, False),
        ({"model_type": ["gemma"]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_is_tied(found: dict[str, Any] | None, tied: bool) -> None:
    assert is_tied(found) is tied


def test_tie_locations_are_all_places_a_reader_looks() -> None:
    assert tie_locations({}) == [("tie_word_embeddings",)]
    nested = {"thinker_config": {"text_config": {}}, "talker_config": {"tie_word_embeddings": False}}
    assert tie_locations(nested) == [
        ("tie_word_embeddings",),
        ("thinker_config", "tie_word_embeddings"),
        ("thinker_config", "text_config", "tie_word_embeddings"),
    ]


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens", "lm_head"),
        ("language_model.model.embed_tokens", "language_model.lm_head"),
        ("model.language_model.embed_tokens", "lm_head"),
        ("thinker.model.embed_tokens", "thinker.lm_head"),
        ("model.decoder.embed_tokens", "lm_head"),
        ("transformer.wte", "lm_head"),
        ("wte", "lm_head"),
        ("word_embeddings", "lm_head"),
        ("transformer.embedding.word_embeddings", "transformer.output_layer"),
        ("gpt_neox.embed_in", "embed_out"),
        ("backbone.embeddings", "lm_head"),
        ("tok_embeddings", "output"),
        ("embed", "head"),
        ("model.visual.embed_tokens", None),
        ("audio_tower.embed_tokens", None),
        ("talker.model.embed_tokens", None),
        ("model.layers.61.embed_tokens", None),
        ("mtp.0.embed", None),
        ("model.embed_tokens_per_layer", None),
    ],
)
def test_head_of(embedding: str, head: str | None) -> None:
    assert head_of(embedding) == head


def test_an_encoder_decoder_has_no_embedding_of_a_head() -> None:
    names = ["model.decoder.embed_tokens.weight"]
    assert embedding_of(names, {"is_encoder_decoder": True}) is None
    assert embedding_of(names, {"model_type": "opt"}) == "model.decoder.embed_tokens"


def _library() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_heads_are_those_that_transformers_ties() -> None:
    """Every pair a decoder model of transformers ties is ours too, or its embedding is not known at all."""
    pattern = re.compile(r'_tied_weights_keys = \{"([\w.]*lm_head)\.weight": "([\w.]+)\.weight"\}')
    pairs = Counter()
    for path in _library().glob("models/*/modeling_*.py"):
        pairs.update((embedding, head) for head, embedding in pattern.findall(path.read_text()))
    # transformers renames GPT-NeoX's published embed_out while loading.
    del pairs["gpt_neox.embed_in", "lm_head"]
    known = {(embedding, head): count for (embedding, head), count in pairs.items() if head_of(embedding) is not None}
    assert {embedding: head_of(embedding) for embedding, _ in known} == dict(known.keys())
    assert sum(known.values()) > 0.95 * pairs.total()


@pytest.mark.slow
def test_ties_by_default_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    tied = set()
    types = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    for model_type in types - {"musicgen", "musicgen_melody", "vision-encoder-decoder"}:  # no default config
        found = CONFIG_MAPPING[model_type]()
        text = getattr(found, "text_config", None)
        if getattr(found, "tie_word_embeddings", False) and getattr(text, "tie_word_embeddings", None) is not False:
            tied.add(model_type)
    assert tied == TIED_BY_DEFAULT


# Fixtures that are, MTP layers apart, what transformers loads and writes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture",
    [
        "glm-4.5-air", "gpt-oss-20b-bf16", "llama-3.1-8b", "llama-3.2-1b", "llama-4-scout", "mixtral-8x7b",
        "qwen2.5-vl-7b", "qwen3-30b-a3b", "qwen3-4b", "qwen3-next-80b-a3b", "qwen3.6-27b", "smollm2-135m",
    ],
)  # fmt: skip
def test_fixture_is_what_transformers_writes(fixture: str) -> None:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    keys = config(fixture)
    with torch.device("meta"):
        model = getattr(transformers, keys["architectures"][0])(transformers.AutoConfig.for_model(**keys))
    tensors = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    written = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, tensors).items()}
    part_of = draft_part(keys)
    assert {spec.name: spec.shape for spec in specs(fixture) if part_of(spec.name) is None} == written


# --- fused sets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "layer", "members", "one_scale"),
    [
        ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj", "q_proj k_proj v_proj", True),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj", "gate_proj up_proj", True),
        ("m.mlp.experts.7.gate_proj", "m.mlp.experts.7.gate_up_proj", "gate_proj up_proj", True),
        ("m.block_sparse_moe.experts.7.w3", "m.block_sparse_moe.experts.7.w13", "w1 w3", True),
        ("m.self_attn.q_a_proj", "m.self_attn.fused_qkv_a_proj", "q_a_proj kv_a_proj_with_mqa", True),
        ("layers.0.attn.wkv", "layers.0.attn.fused_wqa_wkv", "wq_a wkv", True),
        ("layers.0.attn.wq_a", "layers.0.attn.fused_wqa_wkv", "wq_a wkv", True),
        ("layers.0.attention.wq_a", "layers.0.attention.fused_wqa_wkva", "wq_a wkv_a_with_mqa", True),
        ("layers.2.attn.compressor.wkv", "layers.2.attn.compressor.fused_wkv_wgate", "wkv wgate", False),
        ("m.linear_attn.in_proj_z", "m.linear_attn.in_proj_qkvz", "in_proj_qkv in_proj_z", False),
        ("m.linear_attn.in_proj_a", "m.linear_attn.in_proj_ba", "in_proj_b in_proj_a", False),
        ("q_proj", "qkv_proj", "q_proj k_proj v_proj", True),
    ],
)
def test_fused_sets(module: str, layer: str, members: str, one_scale: bool) -> None:
    parent = module.rpartition(".")[0]
    assert fused_set(module) == (layer, tuple(f"{parent}.{m}" if parent else m for m in members.split()))
    assert shares_global_scale(module) is one_scale


@pytest.mark.parametrize("module", ["lm_head", "m.mlp.down_proj", "m.self_attn.o_proj", "m.attn.qkv", "m.experts.0.w2"])
def test_modules_that_are_loaded_alone(module: str) -> None:
    assert fused_set(module) is None
    assert not shares_global_scale(module)


def test_experts_of() -> None:
    assert experts_of("model.layers.0.mlp.experts.12.down_proj") == "model.layers.0.mlp.experts"
    assert experts_of("model.layers.0.mlp.shared_experts.down_proj") is None
    assert experts_of("model.layers.0.mlp.experts.gate_up_proj") is None


# --- stacked experts ---------------------------------------------------------------------------------------

EXPERTS, INTER, HIDDEN = 3, 4, 6


def taken(tensor: np.ndarray, layout: str, model_type: str, name: str) -> dict[str, np.ndarray]:
    """The pieces of a stacked tensor, by tensor name, read as :class:`Piece` says they are to be read."""
    found = {}
    keys = {"model_type": model_type, "hidden_size": HIDDEN}
    for piece in expert_projections(name, tensor.shape, layout, keys):
        part = tensor.reshape(-1)[slice(*piece.span)].reshape(piece.view)
        if piece.columns is not None:
            part = part[..., piece.columns.start :: piece.columns.step][..., : piece.columns.count]
            part = part.T
        assert part.shape == piece.shape
        found[f"{piece.module}.{piece.kind}"] = part
    return found


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, name)


def numbered(*shape: int) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def test_experts_in_rows() -> None:
    gate_up, down = numbered(EXPERTS, 2 * INTER, HIDDEN), numbered(EXPERTS, HIDDEN, INTER)
    expected = {}
    for e in range(EXPERTS):
        expected[f"mlp.experts.{e}.gate_proj.weight"] = gate_up[e, :INTER]
        expected[f"mlp.experts.{e}.up_proj.weight"] = gate_up[e, INTER:]
    same(taken(gate_up, "rows", "qwen3_5_moe", "mlp.experts.gate_up_proj"), expected)
    expected = {f"mlp.experts.{e}.down_proj.weight": down[e] for e in range(EXPERTS)}
    same(taken(down, "rows", "qwen3_5_moe", "mlp.experts.down_proj"), expected)


def test_experts_in_columns() -> None:
    gate_up, down = numbered(EXPERTS, HIDDEN, 2 * INTER), numbered(EXPERTS, INTER, HIDDEN)
    expected = {}
    for e in range(EXPERTS):
        expected[f"feed_forward.experts.{e}.gate_proj.weight"] = gate_up[e].T[:INTER]
        expected[f"feed_forward.experts.{e}.up_proj.weight"] = gate_up[e].T[INTER:]
    same(taken(gate_up, "columns", "llama4", "feed_forward.experts.gate_up_proj"), expected)
    expected = {f"feed_forward.experts.{e}.down_proj.weight": down[e].T for e in range(EXPERTS)}
    same(taken(down, "columns", "llama4", "feed_forward.experts.down_proj"), expected)


def test_gpt_oss_alternates_gate_and_up() -> None:
    gate_up, bias = numbered(EXPERTS, HIDDEN, 2 * INTER), numbered(EXPERTS, 2 * INTER)
    weights, biases = {}, {}
    for e in range(EXPERTS):
        for start, part in enumerate(("gate_proj", "up_proj")):
            weights[f"mlp.experts.{e}.{part}.weight"] = gate_up[e, :, start::2].T
            biases[f"mlp.experts.{e}.{part}.bias"] = bias[e, start::2]
    same(taken(gate_up, "columns", "gpt_oss", "mlp.experts.gate_up_proj"), weights)
    same(taken(bias, "columns", "gpt_oss", "mlp.experts.gate_up_proj_bias"), biases)
    down_bias = numbered(EXPERTS, HIDDEN)
    expected = {f"mlp.experts.{e}.down_proj.bias": down_bias[e] for e in range(EXPERTS)}
    same(taken(down_bias, "columns", "gpt_oss", "mlp.experts.down_proj_bias"), expected)


def test_biases_of_rows_are_halves() -> None:
    bias = numbered(EXPERTS, 2 * INTER)
    expected = {}
    for e in range(EXPERTS):
        expected[f"experts.{e}.gate_proj.bias"] = bias[e, :INTER]
        expected[f"experts.{e}.up_proj.bias"] = bias[e, INTER:]
    same(taken(bias, "rows", "other", "experts.gate_up_proj_bias"), expected)


def test_published_experts_are_read_in_their_own_layout_only() -> None:
    layouts = {"llama-4-scout": "columns", "qwen3-vl-30b-a3b": "columns", "gpt-oss-20b-bf16": "columns"}
    layouts["qwen3.5-35b-a3b"] = "rows"
    for fixture, layout in layouts.items():
        stacked = [spec for spec in specs(fixture) if is_expert_tensor(spec.name, spec.shape)][:2]
        assert len(stacked) == 2
        for spec in stacked:
            assert expert_projections(spec.name, spec.shape, layout, config(fixture))
        other = "rows" if layout == "columns" else "columns"
        gate_up = next(spec for spec in stacked if spec.name.endswith("gate_up_proj"))
        with pytest.raises(UserError) as caught:
            expert_projections(gate_up.name, gate_up.shape, other, config(fixture))
        assert [finding.id for finding in caught.value.findings] == ["plan.experts-3d"]
        assert caught.value.exit_code == 2


def test_a_gate_up_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        expert_projections("mlp.experts.gate_up_proj", (2, 5, 6), "rows", None)
    assert caught.value.findings[0].id == "plan.experts-3d"


@pytest.mark.parametrize(
    ("name", "shape", "stacked"),
    [
        ("mlp.experts.gate_up_proj", (2, 8, 6), True),
        ("mlp.experts.down_proj.weight", (2, 8, 6), True),
        ("mlp.experts.gate_up_proj_bias", (2, 8), False),
        ("mlp.experts.0.gate_proj.weight", (8, 6), False),
        ("mlp.experts.gate_up_proj_blocks", (2, 8, 6, 16), False),
        ("visual.patch_embed.proj.weight", (8, 3, 2), False),
    ],
)
def test_is_expert_tensor(name: str, shape: tuple[int, ...], stacked: bool) -> None:
    assert is_expert_tensor(name, shape) is stacked


def test_what_is_no_stacked_expert_has_no_pieces() -> None:
    assert expert_projections("mlp.experts.0.gate_proj.weight", (8, 6), "rows", None) == []
    assert Columns(0, 2, 4) == Columns(start=0, step=2, count=4)
