"""What ``dequantize`` plans from headers and declarations: which weights, what is refused, what the configs then say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from quantized_parts import (
    Make,
    awq,
    fp8,
    fp8_block,
    fp8_tensor,
    gptq,
    modelopt_nvfp4,
    nvfp4,
    packed,
    quantized,
    zeros,
)

from ckptkit.consumers import by_compressed_tensors, declared
from ckptkit.errors import SOURCE, USAGE, Finding, UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.plan import Plan
from ckptkit.planners.dequantize import Wanted, plan_dequantize

Tensors = dict[str, torch.Tensor]
Table = dict[str, Any]


def plan_of(folder: Path, allow: tuple[str, ...] = (), **wanted: Any) -> Plan:
    with open_source(str(folder)) as source:
        return plan_dequantize(open_checkpoint(source), Wanted(**wanted), allow=allow).plan


def refused(folder: Path, **wanted: Any) -> list[Finding]:
    with pytest.raises(UserError) as error:
        plan_of(folder, **wanted)
    return list(error.value.findings)


def text_of(plan: Plan, file: str = "config.json") -> Table:
    """A file as the plan writes it."""
    found = next(item.text for item in plan.sidecars if item.name == file)
    assert found is not None
    table: Table = json.loads(found)
    return table


def made(plan: Plan) -> set[str]:
    """Names of the dense weights that are made."""
    return {spec.name for step in plan.steps() if step.op == "dequantize@1" for spec in step.outputs}


def names_below(*modules: str) -> set[str]:
    return {f"model.layers.{layer}.{module}.weight" for layer in (0, 1) for module in modules}


MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = r"model\.layers\..*_proj"
FP8_TABLE = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantized_llama(folder: Path, make: Make, table: Table, pattern: str = LAYERS) -> Path:
    return checkpoint(folder, quantized(llama(), (pattern, make)), llama_config(quantization_config=table))


# --- which weights -----------------------------------------------------------------------------------------


def test_everything_by_default(tmp_path: Path) -> None:
    plan = plan_of(quantized_llama(tmp_path, fp8_block(), FP8_TABLE))
    assert made(plan) == names_below(*MLP, *(f"self_attn.{name}_proj" for name in "qkvo"))
    assert text_of(plan) == llama_config()


@pytest.mark.parametrize(
    "pattern", ["*.mlp.*", "re:.*mlp", "*.mlp.*_proj.weight", "*.mlp.*.weight_packed", "*.mlp.*.weight_scale"]
)
def test_patterns_are_on_tensor_names(pattern: str, tmp_path: Path) -> None:
    table = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": {}}}}
    plan = plan_of(quantized_llama(tmp_path, nvfp4, table), only=(pattern,))
    assert made(plan) == names_below(*MLP)
    assert {step.rule.split(":")[0] for step in plan.steps() if step.op == "dequantize@1"} <= {
        f"--only {pattern}",
        pattern.split(":")[0],
    }


def test_only_what_is_quantized_counts(tmp_path: Path) -> None:
    found = refused(
        quantized_llama(tmp_path, fp8_block(), FP8_TABLE), only=("lm_head.*", "*.mlp.*", "*.mpl.*"), experts=True
    )
    assert [finding.id for finding in found] == ["usage.pattern-unmatched"] * 3
    assert {finding.data["option"] for finding in found} == {"lm_head.*", "*.mpl.*", "--experts"}
    assert {finding.exit_code for finding in found} == {USAGE}


def test_shared_experts_are_not_routed(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for module in ("a.experts.0.w1", "a.experts.1.w1", "a.shared_experts.w1", "a.attn.wq"):
        tensors |= {f"{module}.{part}": tensor for part, tensor in fp8(32, 64).items()}
    plan = plan_of(checkpoint(tmp_path, tensors), experts=True)
    assert made(plan) == {"a.experts.0.w1.weight", "a.experts.1.w1.weight"}


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    assert [f.id for f in refused(checkpoint(tmp_path / "a", llama(), llama_config()))] == ["dequantize.nothing"]
    stored = quantized_llama(tmp_path / "b", fp8_block(), FP8_TABLE)
    assert [f.id for f in refused(stored, dtype="fp8")] == ["dequantize.nothing"]


def test_an_empty_declaration_can_be_taken_away(tmp_path: Path) -> None:
    plan = plan_of(checkpoint(tmp_path, llama(), llama_config(quantization_config=FP8_TABLE)))
    assert all(shard.linked for shard in plan.shards)
    assert text_of(plan) == llama_config()


# --- what is refused ---------------------------------------------------------------------------------------

E8M0 = torch.float8_e8m0fnu


def f8(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.float8_e4m3fn)


def u8(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.uint8)


ASYMMETRIC = {"num_bits": 4, "symmetric": False}
# A module's tensors and its group's weights, the id of what is wrong with it, and the part that is named.
FAULTS: dict[str, tuple[Tensors, Mapping[str, Any], str, str, int]] = {
    "fp8 without a scale": ({"weight": f8(32, 64)}, {}, "names.weight-without-scale", "weight", SOURCE),
    "int8 without a scale": (
        {"weight": zeros(32, 64, dtype=torch.int8)}, {}, "names.weight-without-scale", "weight", SOURCE),
    "nvfp4 without its second scale": (
        {"weight_packed": u8(32, 32), "weight_scale": f8(32, 4)}, {}, "names.weight-without-scale", "weight_packed", SOURCE),
    "asymmetric without zero points": (packed()(32, 64), ASYMMETRIC, "names.weight-without-scale", "weight_packed", SOURCE),
    "a scale alone": ({"weight_scale": zeros(32, 1)}, {}, "names.scale-without-weight", "weight_scale", SOURCE),
    "exponents alone": ({"scale": u8(2, 2).view(E8M0)}, {}, "names.scale-without-weight", "scale", SOURCE),
    "a scale beside a dense weight": (
        {"weight": zeros(32, 64), "weight_scale_inv": zeros(1, 1)}, {}, "names.scale-without-weight", "weight_scale_inv", SOURCE),
    "a scale too short": ({"weight": f8(32, 64), "weight_scale": zeros(31, 1)}, {}, "decode.format", "weight_scale", USAGE),
    "a block that is not declared": (
        {"weight": f8(256, 256), "weight_scale": zeros(2, 2)}, {}, "config.quant-block", "weight", SOURCE),
    "blocks other than declared": (
        {"weight": f8(256, 256), "weight_scale": zeros(2, 2)}, {"block_structure": [64, 64]}, "decode.format", "weight_scale", USAGE),
    "words of no known width": (packed()(32, 64), {"num_bits": None}, "decode.format", "weight_packed", USAGE),
    "words of another width": (packed(8)(32, 64), {"num_bits": 4}, "data.weight-shape", "weight_shape", SOURCE),
    "bitsandbytes": ({"weight": u8(1024, 1), "weight.absmax": zeros(16)}, {}, "decode.format", "weight", USAGE),
    "scaled inputs": (
        {**modelopt_nvfp4(32, 64), "pre_quant_scale": zeros(64)}, {}, "names.unknown-scale", "pre_quant_scale", SOURCE),
    "one code a byte": ({"weight_codes": u8(32, 64), "weight_scale": u8(32, 2)}, {}, "decode.format", "weight_codes", USAGE),
    "two weights": ({**nvfp4(32, 64), "weight": zeros(32, 64)}, {}, "dequantize.collision", "weight_packed", USAGE),
}  # fmt: skip


def faulty(folder: Path, *faults: str) -> Path:
    tensors: Tensors = {"layers.0.hc_attn_scale": zeros(3), "layers.0.hc.scale": zeros(3)}
    groups = {}
    for number, fault in enumerate(faults):
        parts, weights, *_ = FAULTS[fault]
        tensors |= {f"m.{number}.{part}": tensor for part, tensor in parts.items()}
        groups[f"g{number}"] = {"targets": [f"m.{number}"], "weights": dict(weights)}
    table = {"quant_method": "compressed-tensors", "config_groups": groups}
    return checkpoint(folder, tensors, {"model_type": "x", "quantization_config": table})


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_names_its_tensor(fault: str, tmp_path: Path) -> None:
    *_, id, part, code = FAULTS[fault]
    found = [finding for finding in refused(faulty(tmp_path, fault)) if finding.id != "dequantize.nothing"]
    assert [(f.id, f.tensor, f.exit_code) for f in found] == [(id, f"m.0.{part}", code)]


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    found = refused(faulty(tmp_path, *FAULTS))
    named = [f"m.{number}.{FAULTS[fault][3]}" for number, fault in enumerate(FAULTS)]
    assert sorted(str(finding.tensor) for finding in found) == sorted(named)


def test_faults_of_what_is_not_meant_are_none(tmp_path: Path) -> None:
    src = faulty(tmp_path, *FAULTS)
    found = refused(src, only=("m.0.*",))
    assert [finding.tensor for finding in found] == ["m.0.weight"]


def test_a_missing_scale_can_be_taken_for_one(tmp_path: Path) -> None:
    src = faulty(tmp_path, "fp8 without a scale", "int8 without a scale")
    assert [finding.tensor for finding in refused(src, missing_scale="one")] == ["m.1.weight"]


CONTAINERS: dict[str, tuple[Tensors, Table]] = {
    "gpt-oss": ({"a.experts.w_blocks": u8(2, 4, 2, 16), "a.experts.w_scales": u8(2, 4, 2)}, {"quant_method": "mxfp4"}),
    "of no method": ({"a.weight_packed": u8(4, 32), "a.weight_scale": u8(4, 2)}, FP8_TABLE),
    "of other blocks": (
        {"a.weight": u8(4, 32).view(torch.int8), "a.scale": u8(4, 2).view(E8M0)}, {**FP8_TABLE, "weight_block_size": [32, 32]}),
    "of ModelOpt": ({"a.weight": u8(4, 32), "a.weight_scale": u8(4, 2)}, {"quant_method": "modelopt", "quant_algo": "MXFP4"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTAINERS)
def test_fp4_that_no_format_holds_as_block_fp8(case: str, tmp_path: Path) -> None:
    tensors, table = CONTAINERS[case]
    src = checkpoint(tmp_path, tensors, {"model_type": "x", "quantization_config": table})
    assert [(f.id, f.exit_code) for f in refused(src, dtype="fp8")] == [("dequantize.container", USAGE)]
    assert made(plan_of(src))


# --- how weights are read ----------------------------------------------------------------------------------


def shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for step in plan.steps() if step.op == "dequantize@1" for spec in step.outputs}


def test_shapes_of_what_is_made(tmp_path: Path) -> None:
    """Packed codes unpacked, what is stored transposed turned round, stacks of experts under their own names."""
    tensors: Tensors = {
        "m.experts.down_proj_blocks": u8(3, 8, 2, 16),
        "m.experts.down_proj_scales": u8(3, 8, 2),
        "m.experts.gate_up_proj": f8(3, 64, 16),
        "m.experts.gate_up_proj_weight_scale": zeros(3, 1, 16),
        "m.experts.gate_up_proj_input_scale": zeros(3),
        "m.experts.gate_up_proj_bias": zeros(3, 16),
    }
    for module, make in {"a": gptq(), "b": awq, "c": modelopt_nvfp4}.items():
        tensors |= {f"{module}.{part}": tensor for part, tensor in make(32, 128).items()}
    src = checkpoint(tmp_path, tensors, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    plan = plan_of(src)
    assert shapes(plan) == {
        "a.weight": (32, 128), "b.weight": (32, 128), "c.weight": (32, 128),
        "m.experts.down_proj": (3, 64, 8), "m.experts.gate_up_proj": (3, 64, 16),
    }  # fmt: skip
    assert shapes(plan_of(src, experts=True)).keys() == {"m.experts.down_proj", "m.experts.gate_up_proj"}
    assert {item.name for item in plan.dropped} == {"m.experts.gate_up_proj_input_scale", "c.input_scale"}


def test_formats_beside_each_other(tmp_path: Path) -> None:
    """NVFP4 experts beside MXFP4 experts of an MTP layer beside block FP8 attention, as ModelOpt declares them."""
    tensors: Tensors = {"mtp.0.experts.0.w1.weight": u8(32, 64), "mtp.0.experts.0.w1.weight_scale": u8(32, 4)}
    tensors |= {f"a.experts.0.w1.{part}": tensor for part, tensor in modelopt_nvfp4(32, 128).items()}
    tensors |= {"a.attn.wq.weight": f8(130, 200), "a.attn.wq.weight_scale": zeros(2, 1, 2, 1, dtype=torch.float32)}
    layers = {"a.experts.0.w1": {"quant_algo": "NVFP4"}, "a.attn.wq": {"quant_algo": "FP8_PB_WO"}}
    table = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    src = checkpoint(tmp_path, tensors, {"quantization_config": table})
    plan = plan_of(src)
    assert shapes(plan) == {
        "a.attn.wq.weight": (130, 200), "a.experts.0.w1.weight": (32, 128), "mtp.0.experts.0.w1.weight": (32, 128),
    }  # fmt: skip
    args = {step.outputs[0].name: step.args for step in plan.steps()}
    assert args["a.attn.wq.weight"]["block"] == [128, 128]
    experts = text_of(plan_of(src, experts=True))["quantization_config"]
    assert experts["quantized_layers"] == {"a.attn.wq": layers["a.attn.wq"]}
    assert experts["ignore"] == ["a.experts", "mtp.0.experts"]


def test_a_gptq_rule_that_is_no_regex(tmp_path: Path) -> None:
    src = quantized_llama(tmp_path, gptq(), {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {"bits": 8}}})
    assert [(finding.id, finding.exit_code) for finding in refused(src)] == [("config.quant", SOURCE)]


# --- what is dropped ---------------------------------------------------------------------------------------


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.1.self_attn.k_proj.k_scale": torch.ones(1),
    }
    tensors = quantized(llama(**extra), (LAYERS, modelopt_nvfp4))
    src = checkpoint(tmp_path, tensors, llama_config(quantization_config={"quant_method": "modelopt"}))
    plan, part = plan_of(src), plan_of(src, only=("*.mlp.*",))
    for found in (plan, part):
        read = {ref.name for step in found.steps() for ref in step.inputs}
        assert read | {item.name for item in found.dropped} == tensors.keys()
        assert not read & {item.name for item in found.dropped}
    gone = {name for name in tensors if name.endswith("input_scale")}
    assert {item.name for item in plan.dropped} == gone | extra.keys()
    assert {item.name for item in part.dropped} == {name for name in gone if ".mlp." in name}


# --- what the declarations then say ------------------------------------------------------------------------

ATTENTION = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
LEFT_OUT = sorted(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in MLP)
LISTS: dict[str, tuple[Make, Table, str]] = {
    "fp8": (fp8_block(), FP8_TABLE, "modules_to_not_convert"),
    "fp8, the other name": (fp8_block(), {**FP8_TABLE, "ignored_layers": ["lm_head"]}, "ignored_layers"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}, "modules_to_not_convert"),
    "modelopt": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "ignore"),
    "modelopt, older": (fp8_tensor, {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}, "exclude_modules"),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_what_is_left_dense(case: str, tmp_path: Path) -> None:
    make, table, key = LISTS[case]
    plan = plan_of(quantized_llama(tmp_path, make, table), only=("*.mlp.*",))
    found = text_of(plan)["quantization_config"]
    before = list(table.get(key) or ())
    assert found == {**table, key: [*before, *sorted(found[key][len(before) :], key=found[key].index)]}
    assert sorted(found[key][len(before) :]) == LEFT_OUT


@pytest.mark.parametrize("case", LISTS)
def test_half_a_fused_layer_on_a_list(case: str, tmp_path: Path) -> None:
    make, table, _ = LISTS[case]
    found = refused(quantized_llama(tmp_path, make, table), only=("*.up_proj.*", "*.o_proj.*"))
    assert [(f.id, f.tensor) for f in found] == [
        ("plan.config", f"model.layers.{layer}.mlp.up_proj") for layer in (0, 1)
    ]


def test_gptq_rules(tmp_path: Path) -> None:
    rules = {"+:.*down_proj": {"bits": 4}}
    table = {"quant_method": "gptq", "bits": 4, "group_size": 64, "lm_head": True, "dynamic": rules}
    src = quantized_llama(tmp_path, gptq(), table, rf"{LAYERS}|lm_head")
    found = text_of(plan_of(src, only=("*.mlp.*", "lm_head.*")))["quantization_config"]
    assert found["lm_head"] is False
    assert list(found["dynamic"].items())[-1] == ("+:.*down_proj", {"bits": 4})
    excluding = [text[2:] for text in found["dynamic"] if text.startswith("-:")]
    for module in {*ATTENTION, *LEFT_OUT, "lm_head"}:
        assert any(re.match(text, module) for text in excluding) == (module not in ATTENTION), module


def test_modelopt_says_it_in_two_files(tmp_path: Path) -> None:
    layers = {name: {"quant_algo": "NVFP4"} for name in (*ATTENTION, *LEFT_OUT)}
    table = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    src = quantized_llama(tmp_path, modelopt_nvfp4, table)
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt"}, "quantization": inner}
    (src / "hf_quant_config.json").write_text(json.dumps(own))
    plan = plan_of(src, only=("*.mlp.*",))
    assert text_of(plan)["quantization_config"]["quantized_layers"].keys() == ATTENTION
    found = text_of(plan, "hf_quant_config.json")
    assert found["producer"] == own["producer"]
    assert found["quantization"]["quantized_layers"].keys() == ATTENTION
    assert sorted(found["quantization"]["exclude_modules"]) == sorted(["lm_head", *LEFT_OUT])
    assert [item.name for item in plan_of(src).left_out] == ["hf_quant_config.json"]


def test_a_declaration_in_the_text_config(tmp_path: Path) -> None:
    tensors = quantized(llama(), (LAYERS, fp8_block()))
    src = checkpoint(tmp_path, tensors, {"model_type": "x", "text_config": llama_config(quantization_config=FP8_TABLE)})
    assert text_of(plan_of(src)) == {"model_type": "x", "text_config": llama_config()}
    table = text_of(plan_of(src, only=("*.mlp.*",)))["text_config"]["quantization_config"]
    assert sorted(table["modules_to_not_convert"]) == LEFT_OUT


def test_methods_without_a_list_are_all_or_nothing(tmp_path: Path) -> None:
    src = quantized_llama(tmp_path, fp8, {"quant_method": "fbgemm_fp8"})
    assert [finding.id for finding in refused(src, only=("*.mlp.*",))] == ["plan.config"]
    assert text_of(plan_of(src)) == llama_config()


def test_a_listed_name_must_not_reach_what_stays(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for module in ("a.wq", "b.a.wq", "a.wq_b", "a.wo"):
        tensors |= {f"{module}.{part}": tensor for part, tensor in fp8_tensor(32, 64).items()}
    table = {"quant_method": "fp8"}
    found = refused(checkpoint(tmp_path, tensors, {"quantization_config": table}), only=("a.wq.weight",))
    assert {(f.id, f.tensor) for f in found} == {("plan.config", "b.a.wq"), ("plan.config", "a.wq_b")}


# --- compressed-tensors ------------------------------------------------------------------------------------

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def grouped(folder: Path, **changes: Any) -> Path:
    """NVFP4 layers and a W8A16 head."""
    groups = {
        "body": {"targets": ["Linear"], "weights": NVFP4, "format": "nvfp4-pack-quantized"},
        "head": {"targets": ["re:.*lm_head$"], "weights": W8, "format": "pack-quantized"},
    }
    table = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}
    tensors = quantized(llama(), (LAYERS, nvfp4), ("lm_head", packed(8, None)))
    for name, value in tensors.items():
        if name == "lm_head.weight_shape":
            assert value.tolist() == [512, 128]
    return checkpoint(folder, tensors, llama_config(quantization_config={**table, **changes}))


def test_a_group_that_nothing_is_left_of_is_gone(tmp_path: Path) -> None:
    table = text_of(plan_of(grouped(tmp_path), only=("lm_head.*",)))["quantization_config"]
    assert table["config_groups"].keys() == {"body"}
    assert table["format"] == "nvfp4-pack-quantized"
    assert table["ignore"] == [r"re:^(?:.*\.)?lm_head$"]


def test_some_layers_are_ignored(tmp_path: Path) -> None:
    table = text_of(plan_of(grouped(tmp_path), only=("model.layers.1.*",)))["quantization_config"]
    assert table["config_groups"].keys() == {"body", "head"}
    config = declared(table)
    for layer, group in ((0, "body"), (1, None)):
        for module in (*MLP, "self_attn.q_proj"):
            assert by_compressed_tensors(config, f"model.layers.{layer}.{module}") == group
    assert by_compressed_tensors(config, "lm_head") == "head"


def test_half_a_fused_layer_is_refused(tmp_path: Path) -> None:
    src = grouped(tmp_path)
    found = refused(src, only=("*.up_proj.*",))
    assert {finding.id for finding in found} == {"plan.config"}
    assert made(plan_of(src, allow=("plan.config",), only=("*.up_proj.*",))) == names_below("mlp.up_proj")


def test_mxfp4_as_block_fp8_has_a_group_of_its_own(tmp_path: Path) -> None:
    def mxfp4(rows: int, columns: int) -> Tensors:
        return {"weight_packed": u8(rows, columns // 2), "weight_scale": u8(rows, columns // 32)}

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"body": {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}}
    table = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    src = quantized_llama(tmp_path, mxfp4, table)
    everything, some = (plan_of(src, dtype="fp8", only=only) for only in ((), ("*.mlp.*",)))
    found = text_of(everything)["quantization_config"]
    assert found["config_groups"].keys() == {"fp8_block"}
    assert found["config_groups"]["fp8_block"]["weights"]["block_structure"] == [128, 128]
    assert (found["format"], found["ignore"]) == ("float-quantized", ["lm_head"])
    assert text_of(some)["quantization_config"]["config_groups"].keys() == {"body", "fp8_block"}
    specs = {spec.name: spec for step in everything.steps() for spec in step.outputs}
    assert specs["model.layers.0.mlp.down_proj.weight"][1:] == ("F8_E4M3", (128, 256))
    assert specs["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 2)
