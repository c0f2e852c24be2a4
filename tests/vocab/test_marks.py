"""What config.json says of a head in an order of its own."""

from __future__ import annotations

import pytest

from ckptkit.vocab.marks import is_declared, marked, unmarked

CONFIGS = [
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "rope_theta": 1e4},
    {"model_type": "gemma3", "architectures": ["A"], "text_config": {"model_type": "gemma3_text", "hidden_size": 8}},
    {"model_type": "x", "thinker_config": {"text_config": {"vocab_size": 9, "dtype": "float16"}}},
    {"vocab_size": None},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_the_marks_took_the_place_of_comes_back(config: dict[str, object]) -> None:
    made = marked(config, {"slices": 2})
    assert is_declared(made)
    assert not is_declared(config)
    assert unmarked(made, config) == config


def test_what_was_changed_besides_is_kept() -> None:
    made = marked(CONFIGS[0], {}) | {"rope_theta": 5e5}
    assert unmarked(made, CONFIGS[0]) == CONFIGS[0] | {"rope_theta": 5e5}


def test_no_config_of_the_language_model_has_a_size() -> None:
    made = marked({"text_config": {}, "thinker_config": {"text_config": {"vocab_size": 9}}, "vision_config": {}}, {})
    assert made["text_config"] == {"vocab_size": None}
    assert made["thinker_config"] == {"text_config": {"vocab_size": None}, "vocab_size": None}
    assert (made["vocab_size"], made["vision_config"]) == (None, {})
