from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headers
import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.inspecting.inspection import GROUPS, Summary, Total, grouped, summarize


def summary_of(folder: Path) -> Summary:
    with open_source(str(folder)) as source:
        found = open_checkpoint(source)
    return summarize(found, list(found.tensors.values()))


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    """The summary of a header fixture."""
    return lambda name: summary_of(headers.materialize(name, tmp_path_factory.mktemp("fixture") / name))


# --- totals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-4b", "glm-4.5-air", "qwen3.6-27b", "gpt2"])
def test_totals_of_a_dense_checkpoint_are_sums_over_its_specs(fixture: Callable[[str], Summary], name: str) -> None:
    specs = headers.specs(name)
    elements = sum(math.prod(spec.shape) for spec in specs)
    expected = Total("total", len(specs), elements, sum(spec.nbytes for spec in specs))
    found = fixture(name)
    assert found.total == expected
    assert {row.key for row in found.dtypes} == {spec.dtype for spec in specs}
    assert tuple(map(sum, zip(*(row[1:] for row in found.dtypes), strict=True))) == expected[1:]


def test_quantizing_does_not_change_the_number_of_parameters(fixture: Callable[[str], Summary]) -> None:
    assert fixture("gpt-oss-20b").total.parameters == fixture("gpt-oss-20b-bf16").total.parameters
    # 8,190,735,360: the published Qwen3-8B.
    assert fixture("qwen3-8b-w4a16").total.parameters == 8_190_735_360
    assert fixture("qwen3-8b-fp8").total.parameters == 8_190_735_360


def test_groups_sum_up_to_the_whole(tmp_path: Path) -> None:
    with open_source(str(headers.materialize("qwen3-30b-a3b", tmp_path))) as source:
        found = open_checkpoint(source)
    tensors = list(found.tensors.values())
    whole = summarize(found, tensors).total
    rows = {by: grouped(found, tensors, by) for by in GROUPS}
    for totals in rows.values():
        assert tuple(map(sum, zip(*(row[1:] for row in totals), strict=True))) == whole[1:]
    assert {row.key for row in rows["shard"]} == found.shards.keys()
    experts = [row for row in rows["module"] if row.key == "model.layers.#.mlp.experts.#.up_proj"]
    assert [row.tensors for row in experts] == [48 * 128]
    layers = [f"model.layers.{number}" for number in range(48)]
    assert [row.key for row in rows["layer"]] == ["lm_head", "model.embed_tokens", *layers, "model.norm"]
    assert {row.tensors for row in rows["layer"] if row.key in layers} == {128 * 3 + 9}


# --- formats, heads, drafts --------------------------------------------------------------------------------


def test_a_compressed_tensors_checkpoint(fixture: Callable[[str], Summary]) -> None:
    found = fixture("qwen3-8b-w4a16")
    rows = {row.module: row for row in found.modules}
    body = rows["model.layers.#.mlp.down_proj"]
    assert (body.modules, body.stored, body.declared) == (36, "int4 group 128", "int4 group 128")
    assert (rows["lm_head"].stored, rows["lm_head"].declared) == ("BF16", None)
    assert found.warnings == ()


def test_formats_can_differ_inside_one_checkpoint(fixture: Callable[[str], Summary]) -> None:
    found = fixture("deepseek-v4-flash-dspark")
    rows = {row.module: (row.kind, row.stored) for row in found.modules}
    assert rows["layers.#.ffn.experts.#.w1"] == ("linear", "mxfp4")
    assert rows["layers.#.attn.wkv"] == ("linear", "fp8 block 128x128")
    assert rows["mtp.#.ffn.experts.#.w1"] == ("draft", "mxfp4")
    assert [part.key for part in found.drafts] == ["mtp.0", "mtp.1", "mtp.2"]
    assert sum(part.tensors for part in found.drafts) == sum(
        spec.name.startswith("mtp.") for spec in headers.specs("deepseek-v4-flash-dspark")
    )


@pytest.mark.parametrize(
    ("name", "embedding", "heads", "tied", "drafts"),
    [
        ("qwen3-4b", "model.embed_tokens", [], True, []),
        ("llama-3.1-8b", "model.embed_tokens", ["lm_head"], False, []),
        ("gemma-3-4b", "language_model.model.embed_tokens", [], True, []),
        ("glm-4.5-air", "model.embed_tokens", ["lm_head"], False, ["model.layers.46"]),
        ("qwen3.6-27b", "model.language_model.embed_tokens", ["lm_head"], False, ["mtp", "mtp.layers.0"]),
    ],
)
def test_heads_ties_and_drafts(
    fixture: Callable[[str], Summary], name: str, embedding: str, heads: list[str], tied: bool, drafts: list[str]
) -> None:
    found = fixture(name)
    assert (found.embedding, [head.module for head in found.heads], found.tied) == (embedding, heads, tied)
    assert sorted(part.key for part in found.drafts) == drafts
    assert found.warnings == ()


# --- warnings ----------------------------------------------------------------------------------------------

PACKED = {
    "lm_head__weight": None,
    "lm_head__weight_packed": torch.zeros(512, 32, dtype=torch.int32),
    "lm_head__weight_scale": torch.ones(512, 1, dtype=torch.bfloat16),
    "lm_head__weight_shape": torch.tensor([512, 128]),
}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def quantized(*targets: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A config whose one group is 8-bit integers."""
    groups = {"head": {"targets": list(targets), "weights": INT8}}
    table = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignore)}
    return llama_config(quantization_config=table)


@pytest.mark.parametrize(
    ("tensors", "config", "ids"),
    [
        (PACKED, quantized("re:.*lm_head$"), []),
        (PACKED, llama_config(), ["config.quant-undeclared"]),
        (PACKED, quantized("re:.*nothing$"), ["config.quant-undeclared"]),
        (PACKED, quantized("Linear", ignore=("re:.*mlp.*", "re:.*self_attn.*")), []),
        (PACKED, quantized("Linear", ignore=("re:.*mlp.*",)), ["config.quant-dense"] * 4),
        ({}, quantized("re:.*lm_head$"), ["config.quant-dense"]),
        (PACKED | {"lm_head__weight_scale": None}, quantized("re:.*lm_head$"), ["names.weight-without-scale"]),
        ({"model__extra__weight_scale": torch.ones(1)}, llama_config(), ["names.scale-without-weight"]),
        ({"model__norm2__scale": torch.ones(1)}, llama_config(), []),
        ({}, llama_config(tie_word_embeddings=True), ["config.tie"]),
        ({"lm_head__weight": None}, llama_config(), ["config.tie"]),
        ({"lm_head__weight": None}, llama_config(tie_word_embeddings=True), []),
        ({}, llama_config(num_nextn_predict_layers=1), ["names.draft-missing"]),
        ({"mtp__0__up__weight": torch.zeros(4, 4)}, llama_config(num_nextn_predict_layers=1), []),
    ],
)
def test_warnings(tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], ids: list[str]) -> None:
    found = summary_of(checkpoint(tmp_path, llama(**tensors), config))
    assert [finding.id for finding in found.warnings] == ids
    assert {finding.severity for finding in found.warnings} <= {"warning"}


def test_the_one_expert_without_a_scale_is_named(tmp_path: Path) -> None:
    experts = {f"model__layers__0__mlp__experts__{i}__up_proj__weight": _fp8() for i in range(4)}
    scales = {f"model__layers__0__mlp__experts__{i}__up_proj__weight_scale": torch.ones(4, 1) for i in (0, 1, 3)}
    stray = {"model__layers__1__mlp__extra__weight_scale": torch.ones(4, 1)}
    config = llama_config(quantization_config={"quant_method": "fp8"})
    found = summary_of(checkpoint(tmp_path, llama(**experts, **scales, **stray), config))
    assert {(finding.id, finding.tensor) for finding in found.warnings if finding.id.startswith("names.")} == {
        ("names.weight-without-scale", "model.layers.0.mlp.experts.2.up_proj.weight"),
        ("names.scale-without-weight", "model.layers.1.mlp.extra.weight_scale"),
    }


def _fp8() -> torch.Tensor:
    return torch.zeros(4, 4, dtype=torch.float8_e4m3fn)


def test_part_of_a_checkpoint_is_not_warned_about(tmp_path: Path) -> None:
    with open_source(str(checkpoint(tmp_path, llama(), llama_config(tie_word_embeddings=True)))) as source:
        found = open_checkpoint(source)
    assert summarize(found, [found.tensors["lm_head.weight"]]).warnings == ()


@pytest.mark.parametrize("config", [None, {}, {"architectures": "x", "model_type": 3, "quantization_config": [1]}])
def test_a_config_that_says_nothing_useful(tmp_path: Path, config: dict[str, Any] | None) -> None:
    found = summary_of(checkpoint(tmp_path, llama(), config))
    assert (found.architectures, found.quantization) == ((), None)
    json.dumps(found.model_type)
