"""``ckptkit extract-mtp``: of every family exactly its layers, byte for byte, under a config that is true of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dsv4
import pytest
from compressed_tensors.utils.match import match_name
from drafts.mtp_fixtures import FIXTURES, INDEX, config_of, everything, load, model, names, settings, stored, write
from told import Told, teller

from ckptkit.errors import OK, SOURCE, USAGE
from ckptkit.files.header import Spec, lay_out

# Embedding and head under all the names there are.
VOCABULARIES = ["bailing", "deepseek-v4", "ernie-4.5", "inkling", "kimi-k3", "nemotron-h", "nemotron-parse", "qwen3.5"]
PAST = ["deepseek-v3", "glm-4-moe", "glm-4-moe-lite", "glm-5", "gigachat-3.5", "bailing"]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "extract-mtp")


def ids(document: Mapping[str, Any]) -> list[str]:
    return [finding["id"] for finding in document["findings"]]


# --- every family ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", FIXTURES)
def test_exactly_the_layers_byte_for_byte(tmp_path: Path, told: Told, fixture: str) -> None:
    source = model(tmp_path / "model", fixture)
    told(source, tmp_path / "draft")
    before, after = stored(source), stored(tmp_path / "draft")
    assert after == {name: before[name] for name in names(fixture, "draft", "optional", "reads")}
    assert config_of(tmp_path / "draft") == config_of(source)
    assert (tmp_path / "draft" / "tokenizer.json").is_file()
    assert settings(tmp_path / "draft")["family"] == load(fixture)["family"]
    assert sorted(settings(tmp_path / "draft")["referenced"]) == sorted(names(fixture, "shared"))


@pytest.mark.parametrize("fixture", VOCABULARIES)
def test_embedding_and_head_come_along_on_demand(tmp_path: Path, told: Told, fixture: str) -> None:
    source = model(tmp_path / "model", fixture)
    told(source, tmp_path / "draft", "--embeddings", "copy")
    before, after = stored(source), stored(tmp_path / "draft")
    assert after == {name: before[name] for name in names(fixture, "draft", "optional", "reads", "shared")}


@pytest.mark.parametrize("fixture", ["deepseek-v4", "ernie-4.5", "nemotron-h", "step-3.5"])
def test_a_tensor_that_is_gone_is_refused_by_name(tmp_path: Path, told: Told, fixture: str) -> None:
    gone = names(fixture, "draft")[-1]
    gone = f"{gone.rpartition('.')[0]}.weight" if gone.endswith((".scale", "_scale_inv")) else gone
    source = model(tmp_path / "model", fixture, without=[gone])
    found = told(source, tmp_path / "draft", code=SOURCE)["findings"]
    assert ("draft.missing", gone) in [(finding["id"], finding["tensor"]) for finding in found]
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("fixture", ["deepseek-v3", "deepseek-v4"])
def test_each_scale_that_is_gone_is_refused_by_name(tmp_path: Path, told: Told, fixture: str) -> None:
    scales = [name for name in names(fixture, "draft") if name.endswith(("_scale_inv", ".scale"))]
    assert len(scales) > 10
    for number, gone in enumerate(scales):
        source = model(tmp_path / f"model{number}", fixture, without=[gone])
        found = told(source, tmp_path / "draft", "--dry-run", code=SOURCE)["findings"]
        assert [(item["id"], item["tensor"]) for item in found] == [("names.weight-without-scale", gone)]


def test_what_is_missing_can_be_passed_over(tmp_path: Path, told: Told) -> None:
    gone = "mtp.layers.0.mlp.shared_expert.up_proj.weight"
    source = model(tmp_path / "model", "qwen3-next", without=[gone])
    document = told(source, tmp_path / "draft", "--allow", "draft.missing,names.incomplete-layer")
    assert "draft.missing" in ids(document)
    assert set(stored(tmp_path / "draft")) == {*names("qwen3-next", "draft")} - {gone}


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", PAST)
def test_layers_can_be_numbered_from_0(tmp_path: Path, told: Told, fixture: str) -> None:
    source = model(tmp_path / "model", fixture)
    told(source, tmp_path / "draft", "--renumber")
    before, after = stored(source), stored(tmp_path / "draft")
    layers = names(fixture, "draft", "optional")
    assert after == {name.replace("model.layers.2.", "model.layers.0."): before[name] for name in layers}
    config = config_of(tmp_path / "draft")
    assert config["architectures"][0].endswith("NextN")
    assert config == {**config_of(source), "num_hidden_layers": 1, "architectures": config["architectures"]}
    launch = settings(tmp_path / "draft")["launch"]
    assert {engine: line.startswith("none known") for engine, line in launch.items()} == {"SGLang": False, "vLLM": True}


def test_several_layers_are_numbered_on(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "step-3.5", layer_types=["full", "full", "sliding", "sliding", "last"])
    told(source, tmp_path / "draft", "--renumber")
    numbers = {name.split(".")[2] for name in stored(tmp_path / "draft")}
    assert numbers == {"0", "1", "2"}
    config = config_of(tmp_path / "draft")
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == ["sliding", "sliding", "last"]
    assert config["num_nextn_predict_layers"] == 3


@pytest.mark.parametrize("fixture", ["qwen3-next", "ernie-4.5", "deepseek-v4", "mimo-v2"])
def test_layers_that_count_from_0_are_not_renumbered(tmp_path: Path, told: Told, fixture: str) -> None:
    source = model(tmp_path / "model", fixture)
    assert ids(told(source, tmp_path / "draft", "--renumber", code=USAGE)) == ["extract.renumber"]


def test_another_number_of_layers_than_declared_is_refused(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "mimo", num_nextn_predict_layers=2)
    assert ids(told(source, tmp_path / "draft", code=SOURCE)) == ["draft.config"]
    told(source, tmp_path / "draft", "--allow", "draft.config")
    assert config_of(tmp_path / "draft")["num_nextn_predict_layers"] == 1


# --- what it is not ----------------------------------------------------------------------------------------


def test_a_dspark_draft_is_refused_with_its_own_command(tmp_path: Path, told: Told) -> None:
    dsv4.make(tmp_path / "target")
    document = told(tmp_path / "target", tmp_path / "draft", code=SOURCE)
    assert ids(document) == ["draft.dspark"]
    assert document["findings"][0]["hint"] == f"ckptkit extract-dspark {tmp_path / 'target'} {tmp_path / 'draft'}"


@pytest.mark.parametrize(("layers", "code"), [("draft", OK), ("", SOURCE)])
def test_a_dspark_draft_elsewhere_is_no_part_of_the_layers(tmp_path: Path, told: Told, layers: str, code: int) -> None:
    """MiniMax-M3.1's lies beside the MTP layers of its target."""
    odd = Spec("language_model.model.dspark.layers.0.decoder_layer.self_attn.q_proj.weight", "BF16", (4, 4))
    target = [everything("minimax-m3")[name] for name in names("minimax-m3", "target", "shared", layers)]
    source = write(tmp_path / "model", [*target, odd], load("minimax-m3")["config"])
    document = told(source, tmp_path / "draft", code=code)
    assert ("draft.dspark" in ids(document)) is not bool(layers)
    if layers:
        assert set(stored(tmp_path / "draft")) == set(names("minimax-m3", "draft"))


def test_the_nextn_layer_of_a_v4_base_is_extracted(tmp_path: Path, told: Told) -> None:
    dsv4.make(tmp_path / "target", draft="nextn")
    told(tmp_path / "target", tmp_path / "draft")
    before, after = stored(tmp_path / "target"), stored(tmp_path / "draft")
    assert after == {name: tensor for name, tensor in before.items() if name.startswith("mtp.")}
    kept = ("quantization_config", "expert_dtype", "architectures", "model_type", "num_hidden_layers")
    source, result = config_of(tmp_path / "target"), config_of(tmp_path / "draft")
    assert {key: result[key] for key in kept} == {key: source[key] for key in kept}


@pytest.mark.parametrize("fixture", ["deepseek-v3", "qwen3.5", "minimax-m3"])
def test_layers_that_are_only_declared_are_told(tmp_path: Path, told: Told, fixture: str) -> None:
    source = model(tmp_path / "model", fixture, without=names(fixture, "draft", "optional"))
    assert ids(told(source, tmp_path / "draft", code=SOURCE)) == ["draft.declared-only"]


def test_a_model_without_such_layers_has_none(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "qwen3-moe", without=names("qwen3-moe", "draft"))
    assert ids(told(source, tmp_path / "draft", code=SOURCE)) == ["draft.none"]


def test_without_a_config_it_is_not_known_where_the_model_ends(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "deepseek-v3")
    (source / "config.json").unlink()
    assert ids(told(source, tmp_path / "draft", code=SOURCE)) == ["config.missing"]


def test_names_alike_of_no_known_family_are_listed_and_can_be_taken(tmp_path: Path, told: Told) -> None:
    odd = [Spec(f"model.mtp_heads.{number}.proj.weight", "BF16", (4, 4)) for number in range(2)]
    config = load("qwen3-moe")["config"]
    target = [everything("qwen3-moe")[name] for name in names("qwen3-moe", "target", "shared")]
    source = write(tmp_path / "model", [*target, *odd], config)
    document = told(source, tmp_path / "draft", code=SOURCE)
    assert ids(document) == ["draft.unknown-family"]
    told(source, tmp_path / "draft", "--allow", "draft.unknown-family")
    assert set(stored(tmp_path / "draft")) == {spec.name for spec in odd}
    assert settings(tmp_path / "draft")["launch"] == {"SGLang": "none known", "vLLM": "none known"}


def test_names_that_the_family_does_not_know_are_taken_and_listed(tmp_path: Path, told: Told) -> None:
    odd = Spec("mtp.something_new.weight", "BF16", (4, 4))
    source = write(tmp_path / "model", [*everything("qwen3-next").values(), odd], load("qwen3-next")["config"])
    document = told(source, tmp_path / "draft")
    assert [item["tensor"] for item in document["findings"] if item["id"] == "draft.unknown"] == [odd.name]
    assert odd.name in stored(tmp_path / "draft")
    assert settings(tmp_path / "draft")["unknown"] == [odd.name]


# --- quantization ------------------------------------------------------------------------------------------


def test_layers_that_are_quantized_keep_what_is_said_of_them(tmp_path: Path, told: Told) -> None:
    listed = ["lm_head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate", "model.layers.2.eh_proj"]
    table = load("deepseek-v3")["config"]["quantization_config"]
    source = model(tmp_path / "model", "deepseek-v3", quantization_config={**table, "modules_to_not_convert": listed})
    for options, layer in (((), 2), (("--renumber",), 0)):
        told(source, tmp_path / f"draft{layer}", *options)
        said = config_of(tmp_path / f"draft{layer}")["quantization_config"]
        left = ["lm_head", f"model.layers.{layer}.mlp.gate", f"model.layers.{layer}.eh_proj"]
        assert said == {**table, "modules_to_not_convert": left}


def packed(spec: Spec) -> list[Spec]:
    """A weight as compressed-tensors packs it: eight codes of four bits in a word."""
    rows, columns = spec.shape
    module = spec.name.removesuffix(".weight")
    return [
        Spec(f"{module}.weight_packed", "I32", (rows, columns // 8)),
        Spec(f"{module}.weight_scale", "BF16", (rows, 1)),
        Spec(f"{module}.weight_shape", "I64", (2,)),
    ]


@pytest.mark.parametrize(("options", "layer"), [((), 2), (("--renumber",), 0)])
def test_groups_and_ignores_reach_the_same_modules(
    tmp_path: Path, told: Told, options: tuple[str, ...], layer: int
) -> None:
    """By compressed-tensors' own matching: what is packed is in a group, what is dense is in none."""
    specs = everything("glm-4-moe").values()
    stored_specs = [item for spec in specs for item in (packed(spec) if ".experts." in spec.name else [spec])]
    others = [
        spec.name.removesuffix(".weight") for spec in specs if len(spec.shape) == 2 and ".experts." not in spec.name
    ]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    table = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": others,
    }
    source = write(tmp_path / "model", stored_specs, {**load("glm-4-moe")["config"], "quantization_config": table})
    told(source, tmp_path / "draft", *options)
    said = config_of(tmp_path / "draft")["quantization_config"]
    assert said["config_groups"] == table["config_groups"]
    tensors = stored(tmp_path / "draft")
    dense = {name.removesuffix(".weight") for name, (_, shape, _) in tensors.items() if len(shape) == 2} & {
        name.removesuffix(".weight") for name in tensors if name.endswith(".weight")
    }
    coded = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert len(coded) == 6
    assert all(f".{layer}." in module for module in coded | dense)
    assert {module for module in coded | dense if any(match_name(module, text) for text in said["ignore"])} == dense


def test_layers_that_are_not_quantized_declare_nothing(tmp_path: Path, told: Told) -> None:
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["mtp*", "lm_head"]}
    source = model(tmp_path / "model", "qwen3-next", quantization_config=quantized)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": quantized}))
    told(source, tmp_path / "draft", "--embeddings", "copy")
    assert "quantization_config" not in config_of(tmp_path / "draft")
    assert not (tmp_path / "draft" / "hf_quant_config.json").exists()
    launch = settings(tmp_path / "draft")["launch"]
    assert launch["SGLang"].endswith("--speculative-draft-model-quantization unquant")


def test_an_untouched_shard_of_layers_alone_is_linked(tmp_path: Path, told: Told) -> None:
    source = tmp_path / "model"
    source.mkdir()
    parts = {"a.safetensors": ("target", "shared"), "b.safetensors": ("draft",)}
    weight_map = {}
    for file, of in parts.items():
        specs = [everything("qwen3-next")[name] for name in names("qwen3-next", *of)]
        header, layout = lay_out(specs, {"format": "pt"})
        (source / file).write_bytes(header + bytes(layout.file_size - layout.data_start))
        weight_map |= {spec.name: file for spec in specs}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / "config.json").write_text(json.dumps(load("qwen3-next")["config"]))
    told(source, tmp_path / "draft", "--link", "hard")
    (made,) = (tmp_path / "draft").glob("*.safetensors")
    assert made.samefile(source / "b.safetensors")


def test_source_and_result_may_be_left_out(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ids(told(code=USAGE)) == ["usage.arguments"]
    model(tmp_path / "model", "mimo")
    monkeypatch.chdir(tmp_path / "model")
    told(".", tmp_path / "first")
    told()
    assert stored(tmp_path / "model-mtp") == stored(tmp_path / "first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told("../model")
    assert stored(tmp_path / "elsewhere" / "model-mtp") == stored(tmp_path / "first")


def test_an_embedding_or_head_that_is_not_there_cannot_be_copied(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "qwen3.5", without=["lm_head.weight"])
    assert ids(told(source, tmp_path / "draft", "--embeddings", "copy", code=USAGE)) == ["extract.embeddings"]
    tied = model(tmp_path / "tied", "qwen3.5", without=["lm_head.weight"], tie_word_embeddings=True)
    told(tied, tmp_path / "draft", "--embeddings", "copy")
    assert "model.language_model.embed_tokens.weight" in stored(tmp_path / "draft")


def test_the_plan_tells_layers_copies_and_what_comes_along_apart(tmp_path: Path, told: Told) -> None:
    counts = {}
    for fixture in ("deepseek-v3", "inkling"):
        source = model(tmp_path / fixture, fixture)
        plan = told(source, tmp_path / "draft", "--dry-run", "--embeddings", "copy")["plan"]
        counts[fixture] = sorted(rule["tensors_written"] for rule in plan["rules"])
    assert counts["deepseek-v3"] == sorted([2, 2, len(names("deepseek-v3", "draft"))])
    assert counts["inkling"] == sorted([1, 2, len(names("inkling", "draft"))])


def test_the_same_source_gives_the_same_plan(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "glm-4-moe")
    first = told(source, tmp_path / "draft", "--dry-run")["plan"]["digest"]
    assert told(source, tmp_path / "elsewhere", "--dry-run")["plan"]["digest"] == first
