"""Families: what configs say, ties, fused sets and stacked experts, on the names of published checkpoints."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headers import FIXTURES, config, specs

from ckptkit.errors import UserError
from ckptkit.families import (
    TIED_BY_DEFAULT,
    config_value,
    declared_drafts,
    embedding_of,
    expert_projections,
    experts_of,
    fused_set,
    head_of,
    is_expert_tensor,
    is_tied,
    shares_global_scale,
    tie_locations,
)

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
    assert expert_projections("mlp.experts.gate_up_proj", (2, 8), "rows", None) == []
