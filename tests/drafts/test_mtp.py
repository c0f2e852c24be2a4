"""The table of MTP families against a header fixture of each: what is found is what belongs, what is gone is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from headers import config as published_config
from headers import specs

from ckptkit.drafts.mtp import find, has_stages
from ckptkit.drafts.mtp_config import NONE_KNOWN, launch, with_layers
from ckptkit.drafts.mtp_families import ENGINES, Family, families
from ckptkit.drafts.mtp_tensors import missing

from .mtp_fixtures import FIXTURES, everything, load, names

SCALES = ("_scale_inv", ".scale")


def test_every_family_has_a_fixture_and_every_fixture_a_family() -> None:
    assert {load(fixture)["family"] for fixture in FIXTURES} == {family.id for family in families()}


def test_ids_are_unique() -> None:
    ids = [family.id for family in families()]
    assert len(ids) == len(set(ids))


def test_the_documented_families_are_those_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mtp.md").read_text()
    lines = [line for line in page.partition("## The families")[2].splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:3] for row in rows] == [[f"`{family.id}`", family.name, _lies(family)] for family in families()]
    engines = [[cell.replace("`", "") for cell in row[3:]] for row in rows]
    assert engines == [[family.sglang or "", family.vllm or ""] for family in families()]


def _lies(family: Family) -> str:
    layers = family.layers.replace("{n}", "N").replace("{i}", "i")
    return " or ".join(f"`{at}{layers}`" for at in family.at)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_what_is_found_is_what_belongs(fixture: str) -> None:
    found = find(everything(fixture), load(fixture)["config"])
    assert found is not None
    assert found.family.id == load(fixture)["family"]
    assert sorted(found.names) == sorted(names(fixture, "draft", "optional"))
    assert sorted(found.reads) == sorted(names(fixture, "reads"))
    assert not missing(found, load(fixture)["config"])


@pytest.mark.parametrize("fixture", FIXTURES)
def test_each_required_tensor_that_is_gone_is_named(fixture: str) -> None:
    tensors, config = everything(fixture), load(fixture)["config"]
    required = [name for name in names(fixture, "draft") if not name.endswith(SCALES)]
    for gone in required:
        found = find({name: spec for name, spec in tensors.items() if name != gone}, config)
        assert found is not None, gone
        assert found.family.id == load(fixture)["family"], gone
        assert missing(found, config) == [gone]


@pytest.mark.parametrize("fixture", FIXTURES)
def test_what_may_be_absent_is_not_missed(fixture: str) -> None:
    tensors, config = everything(fixture), load(fixture)["config"]
    optional = set(names(fixture, "optional"))
    found = find({name: spec for name, spec in tensors.items() if name not in optional}, config)
    assert found is not None
    assert sorted(found.names) == sorted(names(fixture, "draft"))
    assert not missing(found, config)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_target_without_its_layers_has_none(fixture: str) -> None:
    tensors = {name: everything(fixture)[name] for name in names(fixture, "target", "shared", "reads")}
    assert find(tensors, load(fixture)["config"]) is None


# Tensors of the layers in the header fixtures of published checkpoints (fixtures/headers).
PUBLISHED = {
    "deepseek-v3": ("deepseek-v3", 1_564),
    "deepseek-v4-flash": ("deepseek-v4", 1_575),
    "glm-4.5-air": ("glm-4-moe", 404),
    "mimo-7b": ("mimo", 16),
    "qwen3-next-80b-a3b": ("qwen3-next", 1_553),
    "qwen3.5-35b-a3b": ("qwen3.5-moe", 19),
    "qwen3.6-27b": ("qwen3.5", 15),
}


@pytest.mark.parametrize("fixture", PUBLISHED)
def test_layers_of_published_checkpoints_are_found_whole(fixture: str) -> None:
    config = published_config(fixture)
    found = find({spec.name: spec for spec in specs(fixture)}, config)
    assert found is not None
    assert (found.family.id, len(found.names)) == PUBLISHED[fixture]
    assert not found.unknown
    assert not missing(found, config)


@pytest.mark.parametrize("fixture", ["qwen3-30b-a3b", "llama-3.2-1b", "gpt-oss-20b"])
def test_models_without_such_layers_have_none(fixture: str) -> None:
    assert find({spec.name: spec for spec in specs(fixture)}, published_config(fixture)) is None


def test_a_dspark_draft_is_told_by_its_first_projection() -> None:
    assert has_stages(spec.name for spec in specs("deepseek-v4-flash-dspark"))
    assert not has_stages(spec.name for spec in specs("deepseek-v4-flash"))


# --- which family ------------------------------------------------------------------------------------------


def test_tensors_decide_before_the_config() -> None:
    """DeepSeek-V4's layer lies where Qwen3-Next's does, and is not one because a config says so."""
    config = {**load("deepseek-v4")["config"], "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    found = find(everything("deepseek-v4"), config)
    assert found is not None
    assert found.family.id == "deepseek-v4"


@pytest.mark.parametrize(
    ("fixture", "family"),
    [("deepseek-v3", "nextn"), ("qwen3-next", "fc"), ("mimo", "mimo"), ("ernie-4.5", "ernie-4.5")],
)
def test_a_model_that_the_config_does_not_name_is_told_by_its_tensors(fixture: str, family: str) -> None:
    config = {**load(fixture)["config"], "model_type": "someones_own", "architectures": ["SomeonesOwn"]}
    found = find(everything(fixture), config)
    assert found is not None
    assert found.family.id == family
    assert sorted(found.names) == sorted(names(fixture, "draft", "optional"))


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"num_hidden_layers": "2"}, {"text_config": 3}])
def test_a_config_that_says_nothing_is_no_fault(config: Mapping[str, Any]) -> None:
    found = find(everything("qwen3-next"), config)
    assert found is not None
    assert found.family.id == "fc"
    assert find(everything("deepseek-v3"), config) is None


def test_names_that_the_table_does_not_know_belong_and_are_listed() -> None:
    tensors = {**everything("qwen3-next"), "mtp.gate_of_tomorrow.weight": 0, "model.nextn_extra.0.scale": 0}
    found = find(tensors, load("qwen3-next")["config"])
    assert found is not None
    assert set(found.names) - set(names("qwen3-next", "draft")) == set(found.unknown)
    assert set(found.unknown) == {"mtp.gate_of_tomorrow.weight", "model.nextn_extra.0.scale"}


def test_a_number_of_experts_that_no_model_has_is_not_believed() -> None:
    config = {**load("glm-4-moe")["config"], "n_routed_experts": 10**12}
    found = find(everything("glm-4-moe"), config)
    assert found is not None
    assert not missing(found, config)


def test_experts_are_counted_by_the_config() -> None:
    config = {**load("glm-4-moe")["config"], "n_routed_experts": 3}
    found = find(everything("glm-4-moe"), config)
    assert found is not None
    parts = ("gate_proj", "up_proj", "down_proj")
    assert sorted(missing(found, config)) == sorted(f"model.layers.2.mlp.experts.2.{part}.weight" for part in parts)


def test_a_weight_is_there_in_any_quantized_form() -> None:
    tensors: dict[str, Any] = dict(everything("qwen3-next"))
    for module in [name.removesuffix(".weight") for name in names("qwen3-next", "draft") if "_proj." in name]:
        del tensors[f"{module}.weight"]
        tensors |= {f"{module}.weight_packed": 0, f"{module}.weight_scale": 0}
    found = find(tensors, load("qwen3-next")["config"])
    assert found is not None
    assert not missing(found, load("qwen3-next")["config"])


# --- what engines do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", FIXTURES)
def test_every_family_says_who_loads_it(fixture: str) -> None:
    """With embedding and head at hand an engine of the table loads one step; what is bound to no model, none."""
    config = load(fixture)["config"]
    found = find(everything(fixture), config)
    assert found is not None
    one = found._replace(numbers=found.numbers[: 2 if found.family.steps else 1])
    lines = launch(one, config, quantized=True, was_quantized=True, renumber=False, vocabulary=True)
    known = {engine: getattr(found.family, engine) is not None for engine in ENGINES}
    assert {engine.lower(): not line.startswith(NONE_KNOWN) for engine, line in lines.items()} == known
    assert any(known.values()) is bool(found.family.models)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_config_declares_the_layers_that_are_there(fixture: str) -> None:
    config = load(fixture)["config"]
    found = find(everything(fixture), config)
    assert found is not None
    assert with_layers(config, found, renumber=False) == config


def test_layers_are_declared_beside_the_depth_where_nothing_declares_them() -> None:
    config = {key: value for key, value in load("deepseek-v3")["config"].items() if key != "num_nextn_predict_layers"}
    found = find(everything("deepseek-v3"), config)
    assert found is not None
    assert with_layers(config, found, renumber=False) == {**config, "num_nextn_predict_layers": 1}


def test_an_unquantized_draft_without_embedding_is_not_for_vllm() -> None:
    config = load("qwen3.5")["config"]
    found = find(everything("qwen3.5"), config)
    assert found is not None
    without = launch(found, config, quantized=False, was_quantized=False, renumber=False, vocabulary=False)
    beside = launch(found, config, quantized=False, was_quantized=False, renumber=False, vocabulary=True)
    assert without["vLLM"].startswith(NONE_KNOWN)
    assert not beside["vLLM"].startswith(NONE_KNOWN)
    assert without["SGLang"] == beside["SGLang"]


def test_an_engine_that_takes_one_layer_does_not_load_two() -> None:
    config = load("deepseek-v3")["config"]
    found = find(everything("deepseek-v3"), config)
    assert found is not None
    lines = launch(found._replace(numbers=(2, 3)), config, True, True, renumber=False, vocabulary=False)
    assert lines["SGLang"].startswith(NONE_KNOWN)
    assert '"num_speculative_tokens": 2' in lines["vLLM"]


@pytest.mark.parametrize(
    ("fixture", "quantized", "loaded"),
    [
        ("step-3.5", True, set()),
        ("mimo", True, {"SGLang", "vLLM"}),
        ("mimo", False, {"SGLang"}),
        ("nemotron-h", False, {"SGLang", "vLLM"}),
        ("glm-4-moe", False, {"SGLang", "vLLM"}),
    ],
)
def test_who_does_without_the_targets_embedding_and_head(fixture: str, quantized: bool, loaded: set[str]) -> None:
    """Step's loaders ask for them, vLLM in an unquantized draft, Nemotron's never; GLM's layer has copies."""
    config = load(fixture)["config"]
    found = find(everything(fixture), config)
    assert found is not None
    lines = launch(found, config, quantized, was_quantized=quantized, renumber=False, vocabulary=False)
    assert {engine for engine, line in lines.items() if not line.startswith(NONE_KNOWN)} == loaded


def test_copies_in_the_layers_are_what_vllm_fills_its_embedding_and_head_with() -> None:
    config = load("glm-4-moe")["config"]
    found = find(everything("glm-4-moe"), config)
    assert found is not None
    for copy in found.copies:
        without = found._replace(names=tuple(name for name in found.names if name != copy))
        lines = launch(without, config, False, False, renumber=False, vocabulary=False)
        assert lines["vLLM"].startswith(NONE_KNOWN), copy
