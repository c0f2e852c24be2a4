"""Names against each other: nothing on what real models have; a tensor taken away or renamed is one finding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import headers
import pytest
from make import llama, llama_config
from quantized_parts import (
    Make,
    Tensors,
    awq,
    found_in,
    fp8,
    fp8_block,
    gptq,
    modelopt_nvfp4,
    nvfp4,
    packed,
    quantized,
    subject_of,
)

from ckptkit.checks import Subject, names
from ckptkit.errors import Finding
from ckptkit.families import Kind, classifier
from ckptkit.files.header import Spec

LAYERS = 6
LAYER = "model.layers.3."
UP = f"{LAYER}mlp.up_proj"
CONFIG = llama_config(layers=LAYERS)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "uint8": "U8",
          "float8_e4m3fn": "F8_E4M3"}  # fmt: skip
Held = dict[str, Spec]


def specs(tensors: Tensors) -> Held:
    return {n: Spec(n, DTYPES[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for n, t in tensors.items()}


LLAMA = specs(llama(layers=LAYERS))


def look(held: Iterable[Spec], config: dict[str, Any] = CONFIG) -> list[Finding]:
    return found_in(subject_of(held, config), names)


def told(held: Held, config: dict[str, Any] = CONFIG) -> list[tuple[str, str, str | None]]:
    return [(finding.id, finding.severity, finding.tensor) for finding in look(held.values(), config)]


def without(held: Held, *gone: str) -> Held:
    assert held.keys() >= {*gone}
    return {name: spec for name, spec in held.items() if name not in gone}


def without_all(held: Held, part: str) -> Held:
    return without(held, *(name for name in held if part in name))


def renamed(held: Held, change: Callable[[str], str]) -> Held:
    return {change(name): spec._replace(name=change(name)) for name, spec in held.items()}


def with_bf16(held: Held, *more: str) -> Held:
    return held | {name: Spec(name, "BF16", (8, 8)) for name in more}


# --- weights and scales ------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Make, str, str]] = {
    "packed": (packed(), "weight_packed", "weight_scale"),
    "asymmetric": (packed(zero=True), "weight_packed", "weight_scale"),
    "nvfp4": (nvfp4, "weight_packed", "weight_scale"),
    "modelopt": (modelopt_nvfp4, "weight", "weight_scale"),
    "fp8": (fp8, "weight", "weight_scale"),
    "blocks": (fp8_block(), "weight", "weight_scale_inv"),
    "gptq": (gptq(), "qweight", "scales"),
    "awq": (awq, "qweight", "scales"),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_scales_of_every_format(form: str) -> None:
    make, weight, scale = FORMS[form]
    held = specs(quantized(llama(layers=LAYERS), (r".*layers\.", make)))
    assert told(held) == []
    assert told(without(held, f"{UP}.{scale}")) == [("names.weight-without-scale", "error", f"{UP}.{weight}")]
    ((id, severity, tensor),) = told(without(held, f"{UP}.{weight}"))
    assert (id, severity) == ("names.scale-without-weight", "error")
    assert str(tensor).startswith(f"{UP}.")


@pytest.mark.parametrize("suffix", ["scale_weight", "weight_scales", "weight_amax", "qscale"])
def test_a_scale_under_another_name(suffix: str) -> None:
    held = specs(quantized(llama(layers=LAYERS), (r".*layers\.", fp8)))
    odd = renamed(held, lambda name: name.replace(f"{UP}.weight_scale", f"{UP}.{suffix}"))
    assert told(odd) == [("names.unknown-scale", "error", f"{UP}.{suffix}")]


def test_a_suffix_that_no_layer_has_right_is_one_finding() -> None:
    held = specs(quantized(llama(layers=LAYERS), (r".*up_proj", fp8)))
    (finding,) = look(renamed(held, lambda name: name.replace("weight_scale", "scale_weight")).values())
    assert (finding.id, finding.data["count"]) == ("names.unknown-scale", LAYERS)
    assert "--rename" in str(finding.hint)


def test_scales_of_something_else_are_left_alone() -> None:
    held = with_bf16(LLAMA, f"{LAYER}self_attn.k_scale", f"{LAYER}norm.scale", f"{LAYER}mlp.up_proj.input_scale")
    assert told(held) == []


def test_layers_of_different_precision() -> None:
    assert told(specs(quantized(llama(layers=LAYERS), (r".*layers\.[02]\.mlp", fp8), (r".*layers\.1", packed())))) == []


def test_codes_that_are_no_weights() -> None:
    assert told(LLAMA | {"tokens": Spec("tokens", "U8", (4, 4)), "map.weight": Spec("map.weight", "I64", (4,))}) == []


# --- layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "severity"),
    [
        ([f"{LAYER}self_attn.q_proj.weight"], "error"),
        ([f"{LAYER}input_layernorm.weight"], "error"),
        ([f"{LAYER}mlp.up_proj.weight", f"{LAYER}self_attn.o_proj.weight"], "error"),
        ([f"{LAYER}mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")], "warning"),
        (["model.layers.0.input_layernorm.weight"], "warning"),
        (["model.layers.0.self_attn.k_proj.weight"], "error"),
        (["model.layers.5.mlp.gate_proj.weight"], "error"),
    ],
)
def test_a_layer_that_lacks_what_its_siblings_have(gone: list[str], severity: str) -> None:
    (finding,) = look(without(LLAMA, *gone).values())
    assert (finding.id, finding.severity, set(finding.data["missing"])) == ("names.incomplete-layer", severity, {*gone})


@pytest.mark.parametrize("wrong", ["q_prj", "q_proj_", "Q_proj"])
def test_a_misspelt_name(wrong: str) -> None:
    (finding,) = look(
        renamed(LLAMA, lambda name: name.replace(f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.{wrong}")).values()
    )
    assert (finding.id, finding.tensor) == ("names.incomplete-layer", f"{LAYER}self_attn.q_proj.weight")
    assert f"{LAYER}self_attn.{wrong}.weight={finding.tensor}" in str(finding.hint)


def test_two_layers_show_it_too() -> None:
    small = specs(llama(layers=2))
    gone = "model.layers.1.mlp.up_proj.weight"
    assert told(without(small, gone), llama_config()) == [("names.incomplete-layer", "error", gone)]


def by_layer(*layers: Iterable[str]) -> Held:
    """Layers of BF16 weights, between an embedding and a norm."""
    found = [f"model.layers.{number}.{name}.weight" for number, held in enumerate(layers) for name in held]
    return with_bf16({}, "model.embed_tokens.weight", *found, "model.norm.weight", "lm_head.weight")


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
EXPERTS = [
    "mlp.gate",
    *(f"mlp.experts.{expert}.{name}" for expert in range(4) for name in ("gate_proj", "up_proj", "down_proj")),
]
LINEAR = ["linear_attn.in_proj", "linear_attn.out_proj"]
NO_V = [name for name in ATTENTION if "v_proj" not in name]
KINDS: dict[str, tuple[Held, dict[str, Any]]] = {
    "one dense layer before experts": (by_layer(ATTENTION + MLP, *[ATTENTION + EXPERTS] * 5), {}),
    "linear and full attention by turns": (by_layer(*[LINEAR + MLP, LINEAR + MLP, ATTENTION + MLP] * 2), {}),
    "a norm less in the first layer": (by_layer(MLP, *[[*MLP, "extra.norm.linear"]] * 2), {}),
    "values that are the keys in full attention": (by_layer(*[ATTENTION] * 5, NO_V), {"layer_types": ["s"] * 5 + ["f"]}),
    "an indexer in every second layer": (by_layer(*[ATTENTION, [*ATTENTION, "self_attn.indexer.wq"]] * 3), {}),
    "blocks without attention": (by_layer(*[ATTENTION + MLP] * 3, MLP), {"block_configs": [1, 1, 1, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_several_kinds(name: str) -> None:
    held, more = KINDS[name]
    assert told(held, CONFIG | more) == []


# --- experts -----------------------------------------------------------------------------------------------

MOE = by_layer(*[ATTENTION + EXPERTS] * 3)


@pytest.mark.parametrize(
    ("held", "config", "tensor"),
    [
        (MOE, {"num_experts": 4}, None),
        (MOE, {}, None),
        (MOE, {"moe_num_experts": [4, 4]}, None),
        (MOE, {"num_local_experts": 6}, "model.layers.0.mlp.experts.4.gate_proj.weight"),
        (MOE, {"n_routed_experts": 2}, "model.layers.0.mlp.experts.2"),
        (without(MOE, "model.layers.1.mlp.experts.2.up_proj.weight"), {}, "model.layers.1.mlp.experts.2.up_proj.weight"),
        (without_all(MOE, "layers.2.mlp.experts.0."), {"num_experts": 4}, "model.layers.2.mlp.experts.0.gate_proj.weight"),
        (LLAMA | {"model.layers.0.mlp.experts.gate_up_proj": Spec("model.layers.0.mlp.experts.gate_up_proj", "BF16", (4, 8, 8))},
         {"num_experts": 4}, None),
        (LLAMA | {"model.layers.0.mlp.experts.gate_up_proj": Spec("model.layers.0.mlp.experts.gate_up_proj", "BF16", (3, 8, 8))},
         {"num_experts": 4}, "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)  # fmt: skip
def test_experts(held: Held, config: dict[str, Any], tensor: str | None) -> None:
    found = told(held, CONFIG | config)
    assert found[:1] == ([("names.incomplete-experts", "error", tensor)] if tensor else [])
    assert len({id for id, _, _ in found}) <= 1


# --- the model's ends, drafts, leftovers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "config", "ids"),
    [
        ("model.embed_tokens.weight", {}, ["names.incomplete-model"]),
        ("model.norm.weight", {}, ["names.incomplete-model"]),
        ("model.norm.weight", {"architectures": ["LlamaDraftModel"]}, []),
        ("lm_head.weight", {}, []),
    ],
)
def test_the_ends_of_a_model(gone: str, config: dict[str, Any], ids: list[str]) -> None:
    assert [(id, tensor) for id, _, tensor in told(without(LLAMA, gone), CONFIG | config)] == [(id, gone) for id in ids]


def test_layers_that_end_with_their_own_norm() -> None:
    assert told(without(LLAMA, "model.norm.weight"), CONFIG | {"do_layer_norm_before": False}) == []


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"num_nextn_predict_layers": 1}, ["names.draft-missing"]),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, ["names.draft-missing"]),
        ({"num_nextn_predict_layers": 0}, []),
        ({"dflash_config": {"block_size": 8}, "architectures": ["DFlashDraftModel"]}, []),
        ({"dspark_block_size": 5, "architectures": ["DSparkDraftModel"]}, []),
    ],
)
def test_declared_drafts(config: dict[str, Any], ids: list[str]) -> None:
    assert [id for id, _, _ in told(LLAMA, CONFIG | config)] == ids


MTP = [
    "mtp.fc",
    "mtp.norm",
    "mtp.pre_fc_norm_hidden",
    "mtp.pre_fc_norm_embedding",
    *(f"mtp.layers.0.{n}" for n in ATTENTION + MLP),
]
DRAFTING = with_bf16(by_layer(*[ATTENTION + MLP] * 4), *(f"{name}.weight" for name in MTP))


@pytest.mark.parametrize("name", [f"{name}.weight" for name in MTP])
def test_a_draft_is_as_whole_as_the_model(name: str) -> None:
    config = CONFIG | {"num_nextn_predict_layers": 1}
    assert told(DRAFTING, config) == []
    assert told(without(DRAFTING, name), config) == [("names.incomplete-layer", "error", name)]


@pytest.mark.parametrize(
    ("held", "severity"),
    [
        (renamed(LLAMA, lambda name: f"_orig_mod.{name}"), "error"),
        (renamed(LLAMA, lambda name: f"module.{name}"), "error"),
        (renamed(LLAMA, lambda name: name.replace(".mlp.", "._fsdp_wrapped_module.mlp.")), "error"),
        (with_bf16(LLAMA, "optimizer.exp_avg"), "warning"),
        (with_bf16(LLAMA, *(f"model.layers.{n}.mlp.up_proj.lora_A.weight" for n in range(LAYERS))), "warning"),
    ],
)
def test_what_belongs_to_something_else(held: Held, severity: str) -> None:
    found = [finding for finding in look(held.values()) if finding.id == "names.orphan"]
    assert {finding.severity for finding in found} == {severity}
    assert 0 < len(found) < 40


def test_a_model_with_adapters_of_its_own() -> None:
    held = with_bf16(LLAMA, *(f"model.layers.{n}.mlp.up_proj.lora_A.speech.weight" for n in range(LAYERS)))
    assert told(held, CONFIG | {"speech_lora": {"r": 8}}) == []


# --- real models -------------------------------------------------------------------------------------------

LOST = {"names.incomplete-layer", "names.incomplete-experts", "names.scale-without-weight"}
SMALL = [name for name in headers.FIXTURES if len(headers.load(name)["tensors"]) and len(headers.specs(name)) < 2000]


@pytest.mark.parametrize("fixture", SMALL)
def test_a_lost_matrix_of_a_real_model_is_one_error(fixture: str) -> None:
    config, held = headers.config(fixture), {spec.name: spec for spec in headers.specs(fixture)}
    classify = classifier(config)
    linear = [name for name, spec in held.items() if classify(name, spec.shape) is Kind.LINEAR and "layers." in name]
    for name in random.Random(fixture).sample(linear, min(8, len(linear))):
        findings = look(without(held, name).values(), config)
        assert [finding.severity for finding in findings] == ["error"], name
        assert findings[0].id in LOST


def test_tensors_that_only_the_index_knows_are_not_lost_twice() -> None:
    gone = f"{LAYER}self_attn.q_proj.weight"
    subject = subject_of(without(LLAMA, gone).values(), CONFIG)
    lost = Finding("index.missing-tensor", "", tensor=gone)
    assert found_in(Subject(subject.checkpoint, (lost,)), names) == []
