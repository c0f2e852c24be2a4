"""What a draft's config says, in every layout that carries one."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.errors import SOURCE, UserError
from ckptkit.features.draft import Algorithm, Draft, draft_of

SIZES = {"hidden_size": 4096, "vocab_size": 129280}
TEXT = {"hidden_size": 5120, "vocab_size": 1000}
CONFIGS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "V4, serving": (
        {**SIZES, "architectures": ["DeepseekV4ForCausalLM"], "hc_mult": 4, "dspark_markov_rank": 256,
         "dspark_target_layer_ids": [40, 41, 42], "dspark_noise_token_id": 128799},
        ("dspark", 4096, 3, (40, 41, 42), 129280, 128799, 4),
    ),
    "V4.1": (
        {"model_type": "deepseek_v41",
         "text_config": {**TEXT, "hc_mult": 4, "dspark_target_layer_ids": [37, 38, 39], "dspark_noise_token_id": 5}},
        ("dspark", 5120, 3, (37, 38, 39), 1000, 5, 4),
    ),
    "SpecForge": (
        {**SIZES, "architectures": ["DSparkDraftModel"], "block_size": 7,
         "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669, "markov_rank": 256}},
        ("dspark", 4096, 5, (1, 9, 17, 25, 33), 129280, 151669, 1),
    ),
    "SpecForge, DFlash": (
        {**SIZES, "architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 9]}},
        ("dflash", 4096, 2, (1, 9), 129280, None, 1),
    ),
    "DeepSpec": (
        {**SIZES, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 9], "mask_token_id": 0},
        ("dspark", 4096, 2, (-1, 9), 129280, 0, 1),
    ),
    "speculators": (
        {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "mask_token_id": 7,
         "aux_hidden_state_layer_ids": [2, 10, 18], "transformer_layer_config": SIZES, "draft_vocab_size": 32000},
        ("dspark", 4096, 3, (1, 9, 17), 129280, 7, 1),
    ),
    "MiniMax": (
        {"text_config": {**TEXT, "dspark_config": {"markov_rank": 64, "mask_token_id": 3},
                         "dflash_config": {"target_layer_ids": [3, 4]}}},
        ("dspark", 5120, 2, (3, 4), 1000, 3, 1),
    ),
    "EAGLE-3": (
        {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
        ("eagle3", 4096, 3, None, 129280, None, 1),
    ),
    "EAGLE-3 of a wider target": (
        {**SIZES, "target_hidden_size": 7168, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30]}},
        ("eagle3", 7168, 2, (2, 30), 129280, None, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_says(name: str) -> None:
    config, (algorithm, *rest) = CONFIGS[name]
    assert draft_of(config, "config.json") == Draft(Algorithm(algorithm), *rest)


@pytest.mark.parametrize(
    "config",
    [
        {},
        SIZES,
        {**SIZES, "markov_rank": 8},
        {**SIZES, "dspark_target_layer_ids": "all"},
        {**SIZES, "dspark_target_layer_ids": []},
        {**SIZES, "dspark_target_layer_ids": [1, "2"]},
        {"hidden_size": 8, "dspark_target_layer_ids": [1]},
        {"vocab_size": 8, "dspark_target_layer_ids": [1]},
        {**SIZES, "dspark_target_layer_ids": [1], "mask_token_id": "x"},
    ],
    ids=str,
)
def test_what_it_must_say(config: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        draft_of(config, "config.json")
    assert (caught.value.findings[0].id, caught.value.exit_code) == ("config.draft", SOURCE)
