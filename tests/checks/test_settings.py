"""config.json against the source's: what changes the model is found, what a conversion changes is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make import llama_config
from quantized_parts import found_in, subject_of

from ckptkit.checks import Subject, settings
from ckptkit.errors import Finding
from ckptkit.layout_config import Change, Facts, changed

QUANTIZED = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}


def differences(source: dict[str, Any], made: dict[str, Any]) -> list[Finding]:
    subject: Subject = replace(subject_of([], made), against=subject_of([], source).checkpoint)
    return found_in(subject, settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e6),
        ("rms_norm_eps", 1e-5),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 2),
        ("max_position_embeddings", 512),
        ("architectures", ["MistralForCausalLM"]),
        ("head_dim", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_what_changes_the_model(key: str, value: Any) -> None:
    source = llama_config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    for before, after in (
        (source, source | {key: value}),
        ({"text_config": source}, {"text_config": source | {key: value}}),
    ):
        found = differences(before, after | QUANTIZED)
        assert {(finding.id, finding.severity) for finding in found} == {("config.differs", "error")}
        changed = value if isinstance(value, dict) else {key: value}
        assert [finding.data["key"].rpartition(".")[2] for finding in found] == list(changed)


def test_a_key_that_is_gone_is_a_warning() -> None:
    source = llama_config()
    del (made := dict(source))["rms_norm_eps"]
    assert [(f.id, f.severity, f.data["key"]) for f in differences(source, made)] == [
        ("config.differs", "warning", "rms_norm_eps")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        QUANTIZED,
        {"torch_dtype": "float16", "dtype": "float16"},
        {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
        {"transformers_version": "5.17.0", "_name_or_path": "/tmp/x", "use_cache": False},
        {"rope_theta": 10000},
        {"something_new": 3},
    ],
)
def test_what_a_conversion_may_change(changes: dict[str, Any]) -> None:
    source = llama_config(transformers_version="4.50.0", _name_or_path="a/b", use_cache=True)
    assert differences(source, source | changes) == []


def test_another_layout_is_the_same_model() -> None:
    source = llama_config(auto_map={"AutoConfig": "a.B"})
    made, _ = changed(source, Change("fused", "codes", "fused", Facts()._asdict(), None, loadable=False))
    assert made["model_type"] != source["model_type"]
    assert differences(source, made) == []
    assert [finding.data["key"] for finding in differences(source, made | {"rope_theta": 5.0})] == ["rope_theta"]


def test_without_a_source_or_its_config_it_cannot_be_run() -> None:
    (probe,) = settings.PROBES
    alone = subject_of([], llama_config())
    assert probe.unfit(alone)
    assert probe.unfit(replace(alone, against=subject_of([], {}).checkpoint))


@pytest.mark.slow
def test_a_config_that_transformers_wrote_anew_is_the_same(tmp_path: Path) -> None:
    """llmcompressor saves by transformers 5, which moves rope_theta into rope_parameters and writes every default."""
    transformers = pytest.importorskip("transformers")
    source = llama_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, eos_token_id=2, hidden_act="silu")
    transformers.AutoConfig.for_model(**source).save_pretrained(tmp_path)
    made = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in made
    made["architectures"] = source["architectures"]
    assert differences(source, made) == []
