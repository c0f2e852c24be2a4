"""The kinds of tensors, by hand, for every header fixture and for names of other families."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from headers import FIXTURES, config, specs

from ckptkit.families import LINEAR_LIKE, Kind, classifier, classify, draft_part, kinds, module_of

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
    "deepseek-v4-flash": {
        Kind.LINEAR: ["layers.42.attn.wkv.weight"],
        Kind.MTP: ["mtp.0.e_proj.weight", "mtp.0.ffn.gate.weight", "mtp.0.ffn.experts.255.w1.weight"],
        Kind.NORM: ["mtp.0.enorm.weight", "mtp.0.norm.weight"],
        Kind.OTHER: ["mtp.0.hc_head_fn", "mtp.0.h_proj.scale"],
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
    "deepseek-v4-pro": {Kind.LINEAR: ["layers.60.ffn.experts.383.w1.weight"], Kind.MTP: ["mtp.0.h_proj.weight"]},
    "deepseek-v4-pro-dspark": {Kind.DRAFT: ["mtp.0.main_proj.weight", "mtp.2.ffn.experts.383.w3.weight"]},
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
