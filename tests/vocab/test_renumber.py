"""Which fields of JSON files hold ids: against the configuration classes of transformers, and case by case."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ckptkit.vocab.renumber import numbering, renumbered

SIZE = 100
NEW = np.random.default_rng(0).permutation(SIZE).astype(np.int32)
N = NEW.tolist()


def changed(document: Any) -> Any:
    found = renumbered(document, numbering(NEW), [SIZE])
    assert found.unknown == ()
    return found.content


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": N[3]}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": [N[3], N[4]]}),
        ({"pad_token_id": -1, "bos_token_id": None}, {"pad_token_id": -1, "bos_token_id": None}),
        ({"image_token_index": SIZE}, {"image_token_index": SIZE}),
        ({"forced_decoder_ids": [[1, 5], [2, None]]}, {"forced_decoder_ids": [[1, N[5]], [2, None]]}),
        ({"sequence_bias": [[[5, 6], -1.5]]}, {"sequence_bias": [[[N[5], N[6]], -1.5]]}),
        ({"bad_words_ids": [[5], [6, 7]]}, {"bad_words_ids": [[N[5]], [N[6], N[7]]]}),
        ({"lang_to_id": {"<|en|>": 5}}, {"lang_to_id": {"<|en|>": N[5]}}),
        ({"text_config": {"vocab_size": SIZE, "im_end_id": 2}}, {"text_config": {"vocab_size": SIZE, "im_end_id": N[2]}}),
        ({"token": {"content": "<s>", "id": 4}}, {"token": {"content": "<s>", "id": N[4]}}),
        ({"label2id": {"a": 1}, "id2label": {"1": "a"}}, {"label2id": {"a": 1}, "id2label": {"1": "a"}}),
        ({"trainable_token_indices": {"embed_tokens": [4]}}, {"trainable_token_indices": {"embed_tokens": [N[4]]}}),
    ],
)  # fmt: skip
def test_fields(before: Any, after: Any) -> None:
    assert changed(before) == after


@pytest.mark.parametrize(
    "kept",
    [
        {"layer_types": ["a"], "target_layer_ids": [1, 2], "mrope_section": [1, 2], "hidden_sizes": [3, 4]},
        {"quantization_config": {"group_size": 4, "block_structure": [8, 8]}},
        {"use_cache": True, "flag_id": False, "image_token": "<image>"},
        {"codec_eos_token_id": 4, "codebook_pad_token_id": 5},
        {"token_type_ids": [0, 1]},
    ],
)
def test_fields_without_ids(kept: Any) -> None:
    assert changed(kept) == kept


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"numbers": [3, 4]}, "numbers"),
        ({"a": {"b": [{"odd_id": 4}]}}, "a.b[0].odd_id"),
        ({"sequence_bias": {"(1, 2)": 0.5}}, "sequence_bias"),
        ({"talker": {"vocab_size": 7, "bos_token_id": 2}}, "talker.bos_token_id"),
    ],
)
def test_what_may_be_ids_is_told_and_kept(document: Any, path: str) -> None:
    found = renumbered(document, numbering(NEW), [SIZE])
    assert found.unknown == (path,)
    assert found.content == document


@pytest.mark.slow
def test_every_configuration_class() -> None:
    """Of all that transformers has, fields that its own classes call token ids are found, and few others are doubted."""
    from transformers import CONFIG_MAPPING

    doubted = set()
    for model_type, kind in CONFIG_MAPPING.items():
        try:
            document = json.loads(kind().to_json_string(use_diff=False))
        except Exception:  # a few cannot be made without arguments
            continue
        sizes = set(_values(document, "vocab_size"))
        found = renumbered(document, lambda id: id + 1_000_000 if id >= 0 else id, sizes)
        pairs = zip(_walk(document), _walk(found.content), strict=True)
        for (path, before), (_, after) in pairs:
            last = path.rpartition(".")[2]
            ours = last.endswith("_token_id") and not any(word in last for word in ("codec", "codebook", "t2u"))
            if ours and type(before) is int and before >= 0:
                assert after == before + 1_000_000, (model_type, path)
        doubted |= {(model_type, path) for path in found.unknown}
    assert len({model_type for model_type, _ in doubted}) < 5, doubted


def _values(document: Any, key: str) -> list[int]:
    return [value for path, value in _walk(document) if path.rpartition(".")[2] == key and type(value) is int]


def _walk(document: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(document, dict):
        return [found for key, value in document.items() for found in _walk(value, f"{path}.{key}")]
    if isinstance(document, list):
        return [found for value in document for found in _walk(value, path)]
    return [(path, document)]
