"""Declared against stored quantization: small checkpoints, each with one contradiction, and the exact ids it has."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import headers
import pytest
import torch
from make import checkpoint, llama, llama_config
from quantized_parts import (
    Tensors,
    awq,
    found,
    found_in,
    fp8,
    fp8_block,
    fp8_tensor,
    gptq,
    modelopt_nvfp4,
    nvfp4,
    packed,
    quantized,
    subject_of,
    zeros,
)

from ckptkit.checks import quantization, shapes
from ckptkit.cli import main
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.header import Spec
from ckptkit.files.source import open_source
from ckptkit.planners.quantize import plan_quantize
from ckptkit.recipe.recipe import builtin_names, load
from ckptkit.recipe.schemes import usable

HIDDEN, INTER = 128, 256
BODY = r".*layers\..*_proj$"
HEAD = "lm_head$"

Case = tuple[set[str], list[tuple[str, Any]], dict[str, Any] | None, dict[str, Any]]


def findings(folder: Path) -> list[Finding]:
    return found(folder, quantization, shapes)


def ids(folder: Path) -> set[str]:
    return {finding.id for finding in findings(folder)}


# --- declarations -------------------------------------------------------------------------------------------


def weights(bits: int = 4, group: int | None = 64, type: str = "int", **more: Any) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {"num_bits": bits, "type": type, "strategy": strategy, "group_size": group, "symmetric": True} | more


W4, W8 = weights(), weights(8, None)
FP8_CHANNEL = weights(8, None, "float")
NVFP4 = weights(4, 16, "float", strategy="tensor_group", scale_dtype="torch.float8_e4m3fn")


def ct(ignore: Any = ("lm_head",), /, _top: Any = None, **groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    """A compressed-tensors table; each group is (targets, weights)."""
    formats = {"int": "pack-quantized", "float": "float-quantized"}
    tables = {}
    for name, (targets, args) in groups.items():
        format = "nvfp4-pack-quantized" if args["strategy"] == "tensor_group" else formats[args["type"]]
        tables[name] = {"targets": targets, "weights": args, "input_activations": None, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": tables,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "version": "0.19.0",
    } | (_top or {})


def make(folder: Path, tensors: Tensors, table: dict[str, Any] | None, **config: Any) -> Path:
    if table is not None:
        config["quantization_config"] = table
    return checkpoint(folder, tensors, llama_config(**config))


# --- nothing is found on good ones -------------------------------------------------------------------------------


GOOD: dict[str, tuple[list[tuple[str, Any]], dict[str, Any] | None]] = {
    "dense": ([], None),
    "class target": ([(BODY, packed())], ct(body=(["Linear"], W4))),
    "head by name": (
        [(HEAD, packed(8, None)), (BODY, packed())],
        ct((), body=(["re:.*layers.*"], W4), head=(["re:.*lm_head$"], W8)),
    ),
    "one group a row": ([(BODY, packed(4, 128))], ct(body=([r"re:.*self_attn.*", r"re:.*mlp.*"], weights(4, 128)))),
    "asymmetric": ([(BODY, packed(zero=True))], ct(body=(["Linear"], weights(symmetric=False)))),
    "fp8 rows": ([(BODY, fp8)], ct(body=(["Linear"], FP8_CHANNEL))),
    "nvfp4": ([(BODY, nvfp4)], ct(body=(["Linear"], NVFP4))),
    "exact names": (
        [(r"model.layers.1.mlp.down_proj$", packed())],
        ct((), body=(["model.layers.1.mlp.down_proj"], W4)),
    ),
    "names as vLLM has them": (
        [(BODY, packed())],
        ct((), body=(["re:^model.language_model.layers.*"], W4)),
    ),
    "fp8 blocks": (
        [(BODY, fp8_block())],
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8 a tensor, one layer dense": (
        [(r".*layers\.0.*_proj$", fp8_tensor)],
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["model.layers.1", "lm_head"]},
    ),
    "gptq": ([(BODY, gptq())], {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True}),
    "gptq with its head": (
        [(f"{BODY}|{HEAD}", gptq(8, -1))],
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True, "lm_head": True},
    ),
    "gptq with rules": (
        [(r".*layers\.0.*_proj$", gptq(8)), (r".*layers\.1\.mlp.*", gptq())],
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
        | {"dynamic": {r"+:.*\.0\..*": {"bits": 8}, r"-:.*\.1\.self_attn.*": {}}},
    ),
    "awq": ([(BODY, awq)], {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}),
    "modelopt": (
        [(BODY, modelopt_nvfp4)],
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "modelopt, a layer left out by glob": (
        [(r".*layers\.0.*_proj$", fp8_tensor)],
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1*"]},
    ),
    "an unknown method": ([(BODY, fp8_tensor)], {"quant_method": "quanto"}),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_nothing_is_found_on_good_ones(case: str, tmp_path: Path) -> None:
    changes, table = GOOD[case]
    assert findings(make(tmp_path / "c", quantized(llama(), *changes), table)) == []


def test_the_declaration_may_stand_in_the_text_config(tmp_path: Path) -> None:
    text = {"quantization_config": ct(body=(["Linear"], W4))}
    tensors = quantized(llama(), (BODY, packed()))
    assert ids(checkpoint(tmp_path / "good", tensors, llama_config(text_config=text))) == set()
    text["quantization_config"]["config_groups"]["body"]["weights"] = W8
    assert ids(checkpoint(tmp_path / "bad", tensors, llama_config(text_config=text))) == {"config.quant-bits"}


def test_nothing_is_found_on_a_tied_head_left_out(tmp_path: Path) -> None:
    tensors = quantized(llama(lm_head__weight=None), (BODY, packed()))
    assert findings(make(tmp_path / "c", tensors, ct(body=(["Linear"], W4)), tie_word_embeddings=True)) == []


@pytest.mark.parametrize("fixture", headers.FIXTURES)
def test_nothing_is_found_on_real_headers(fixture: str) -> None:
    assert found_in(subject_of(headers.specs(fixture), headers.config(fixture)), quantization, shapes) == []


@pytest.mark.parametrize("scheme", usable())
def test_nothing_is_found_on_what_is_planned_of_any_scheme(scheme: str, tmp_path: Path) -> None:
    """Headers and config as planned; that what is written is as planned is tested elsewhere."""
    with open_source(str(checkpoint(tmp_path / "c", llama(), llama_config()))) as source:
        plan = plan_quantize(open_checkpoint(source), load("w4a16", [f"groups.body.scheme={scheme}"])).plan
    config = next(item.text for item in plan.sidecars if item.name == "config.json")
    specs = [spec for step in plan.steps() for spec in step.outputs]
    assert found_in(subject_of(specs, json.loads(config or "")), quantization, shapes) == []


@pytest.mark.parametrize("recipe", builtin_names())
def test_nothing_is_found_on_what_quantize_makes(recipe: str, tmp_path: Path, capsys: Any) -> None:
    source = checkpoint(tmp_path / "src", llama(), llama_config())
    out = tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--recipe", recipe, "--json", "--no-progress"]) == 0
    capsys.readouterr()
    assert "quantization_config" in json.loads((out / "config.json").read_text())
    assert findings(out) == []


# --- the silent failures of data-free quantizers ---------------------------------------------------------------------


def case(expected: set[str], changes: list[tuple[str, Any]], table: dict[str, Any] | None, **config: Any) -> Case:
    return {f"config.quant-{name}" for name in expected}, changes, table, config


def without_format(table: dict[str, Any]) -> dict[str, Any]:
    for group in table["config_groups"].values():
        del group["format"]
    return table


ALL = [(r"model.embed_tokens$", packed()), (HEAD, packed()), (BODY, packed())]
LINEAR = (["Linear"], W4)

BAD = {
    # an embedding quantized in passing, and the ignore list does not help
    "embedding and head under Linear": case({"embedding", "class-head"}, ALL, ct((), body=LINEAR)),
    "ignores that name nothing": case(
        {"embedding", "class-head", "ignore-unmatched"}, ALL, ct(("lm_haed", "embed_tokens", "lm_head.weight"), body=LINEAR)
    ),
    "embedding by name": case(
        {"embedding"}, ALL[:1], ct((), table=([r"re:.*embed_tokens$"], W4))
    ),
    # the first group in the recipe won, consumers take the more specific one
    "head packed by the group before": case(
        {"bits"}, [(HEAD, packed()), (BODY, packed())], ct((), body=LINEAR, head=(["re:.*lm_head"], W8))
    ),
    "bits that only the width shows": case(
        {"bits"}, [(HEAD, packed(4, None))], ct((), head=(["re:.*lm_head"], W8))
    ),
    "overlapping regexes": case(
        {"consumers", "fused"},
        [(r".*layers\.0.*q_proj$", packed(8, None)), (BODY, packed())],
        ct(attention=([r"re:.*layers\.0.*q_proj"], W8), body=([r"re:.*_proj"], W4)),
    ),
    "overlapping regexes, in an order in which both take the general one": case(
        {"bits", "fused"},
        [(r".*layers\.0.*q_proj$", packed(8, None)), (BODY, packed())],
        ct(body=([r"re:.*_proj"], W4), special=([r"re:.*layers\.0.*q_proj"], W8)),
    ),
    "names for the parts of a fused layer beside Linear": case(
        {"consumers"},
        [(r".*[qkv]_proj$", packed(8, None)), (BODY, packed())],
        ct(rest=LINEAR, qkv=([r"re:.*\.[qkv]_proj$"], W8)),
    ),
    "a tied head that is not stored": case(
        {"target-unmatched", "status"}, [(HEAD, None)], ct((), {"format": "dense"}, head=(["re:.*lm_head$"], W8)),
        tie_word_embeddings=True,
    ),
    "a target with a typo": case(
        {"target-unmatched", "status"}, [], ct((), {"format": "dense"}, head=(["lm_haed"], W8))
    ),
    "everything ignored": case({"status"}, [], ct(("re:.*",), {"format": "dense"}, body=LINEAR)),
    "FP8 under a config for the head only": case(
        {"undeclared"}, [(BODY, fp8_block()), (HEAD, packed(8, None))], ct((), head=(["re:.*lm_head$"], W8))
    ),
    "GPTQ under compressed-tensors": case({"format"}, [(BODY, gptq())], ct(body=LINEAR)),
    "a second run: the head is still ignored": case(
        {"undeclared"}, [(BODY, packed()), (HEAD, packed())], ct(("lm_head",), body=LINEAR, again=LINEAR)
    ),
    "one target in two groups": case(
        {"target-unmatched", "bits"}, [(BODY, packed())], ct(body=LINEAR, again=(["Linear"], W8))
    ),
    "the head targeted and ignored": case(
        {"both"}, [(BODY, packed()), (HEAD, packed(8, None))], ct(body=LINEAR, head=(["re:.*lm_head$"], W8))
    ),
    "a position embedding": case(
        {"embedding"}, [(BODY, packed()), (r"model.pos_embed$", packed())], ct(body=LINEAR)
    ),
    "q in other bits than k and v": case(
        {"fused"},
        [(r".*q_proj$", packed(8, None)), (BODY, packed())],
        ct(q=([r"re:.*\.q_proj$"], W8), body=([r"re:.*\.(?:[kvo]|gate|up|down)_proj$"], W4)),
    ),
    "q left dense under NVFP4": case(
        {"fused"},
        [(r".*\.(?!q_)\w+_proj$", nvfp4)],
        ct(("lm_head", r"re:.*\.q_proj$"), body=(["Linear"], NVFP4)),
    ),
    "no declaration at all": case({"undeclared"}, [(BODY, packed())], None),
    # directions and details
    "declared, stored dense": case({"dense"}, [(r".*layers\.0.*_proj$", packed())], ct(body=LINEAR)),
    "a head declared by Linear, stored dense": case({"dense"}, [(BODY, packed())], ct((), body=LINEAR)),
    "groups of another size": case({"bits"}, [(BODY, packed(4, 32))], ct(body=LINEAR)),
    "asymmetric without zero points": case({"bits"}, [(BODY, packed())], ct(body=(["Linear"], weights(symmetric=False)))),
    "symmetric with zero points": case({"bits"}, [(BODY, packed(zero=True))], ct(body=LINEAR)),
    "int8 as packed": case(
        {"format"}, [(BODY, fp8)], ct(body=LINEAR)
    ),
    "FP8 a row declared as blocks": case(
        {"bits"}, [(BODY, fp8)], ct(body=(["Linear"], weights(8, None, "float", strategy="block", block_structure=[128, 128])))
    ),
    "a format of dense beside packed modules": case({"status"}, [(BODY, packed())], ct(("lm_head",), {"format": "dense"}, body=LINEAR)),
    "a status of before compression": case(
        {"status"}, [(BODY, packed())], ct(("lm_head",), {"quantization_status": "frozen"}, body=LINEAR)
    ),
    "one of two targets": case({"target-unmatched"}, [(BODY, packed())], ct(body=(["re:.*_proj$", "re:.*visual.*"], W4))),
    "a field that there is not": case({"version"}, [(BODY, packed())], ct(body=(["Linear"], weights(groupsize=64)))),
    "a dtype that there is not": case({"version"}, [(BODY, packed())], ct(body=(["Linear"], weights(scale_dtype="bf16")))),
    "activation ordering by groups": case({"version"}, [(BODY, packed())], ct(body=(["Linear"], weights(actorder="group")))),
    "no groups": case({"version"}, [(BODY, packed())], {"quant_method": "compressed-tensors", "config_groups": 1}),
    "a regex that is none": case({"version"}, [(BODY, packed())], ct(("re:(",), body=LINEAR)),
    "a group without a format": case({"format"}, [(BODY, packed())], without_format(ct(body=LINEAR))),
    "NVFP4 by an ordinary group": case({"format"}, [(BODY, nvfp4)], ct(body=(["Linear"], NVFP4 | {"strategy": "group"}))),
    "no status": case({"status"}, [(BODY, packed())], ct(("lm_head",), {"quantization_status": None}, body=LINEAR)),
    "a KV cache without scales": case(
        {"kv"}, [(BODY, packed())], ct(("lm_head",), {"kv_cache_scheme": weights(8, None, "float", strategy="tensor")}, body=LINEAR)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_contradictions(name: str, tmp_path: Path) -> None:
    expected, changes, table, config = BAD[name]
    tensors = llama(model__pos_embed__weight=zeros(64, HIDDEN)) if "position" in name else llama()
    if changes and changes[0][1] is None:
        tensors, changes = (
            {key: value for key, value in tensors.items() if not re.match(changes[0][0], key.removesuffix(".weight"))},
            [],
        )
    result = findings(make(tmp_path / "c", quantized(tensors, *changes), table, **config))
    assert {finding.id for finding in result} == expected
    assert all(finding.exit_code == 3 for finding in result)
    assert all(finding.hint for finding in result)


# --- other methods --------------------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4_OPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

OTHERS = {
    "gptq: bits": case({"bits"}, [(BODY, gptq(8))], GPTQ),
    "gptq: groups": case({"bits"}, [(BODY, gptq(4, 32))], GPTQ),
    "gptq: the head is quantized, the flag says no": case({"undeclared"}, [(f"{BODY}|{HEAD}", gptq())], GPTQ),
    "gptq: the flag says yes, the head is dense": case({"dense"}, [(BODY, gptq())], GPTQ | {"lm_head": True}),
    "gptq: AWQ on disk": case({"format"}, [(BODY, awq)], GPTQ),
    "gptq: dense in one layer": case({"dense"}, [(r".*layers\.0.*_proj$", gptq())], GPTQ),
    "gptq: excluded by a rule, quantized": case({"undeclared"}, [(BODY, gptq())], GPTQ | {"dynamic": {r"-:.*down_proj": {}}}),
    "awq: groups": case({"bits"}, [(BODY, awq)], AWQ | {"group_size": 32}),
    "awq: listed, quantized": case(
        {"undeclared"}, [(BODY, awq)], AWQ | {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}
    ),
    "awq: listed by what vLLM finds in other names": case(
        {"consumers"}, [(BODY, awq)], AWQ | {"modules_to_not_convert": ["lm_head", "q"]}
    ),
    "fp8: blocks": case({"bits"}, [(BODY, fp8_block(64))], FP8_BLOCKS),
    "fp8: one scale a row": case({"bits"}, [(BODY, fp8)], {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8: packed on disk": case({"format"}, [(BODY, packed())], FP8_BLOCKS),
    "fp8: a dense projection that is not listed": case({"dense", "fused"}, [(r".*\.(?!up_)\w+_proj$", fp8_block())], FP8_BLOCKS),
    "fp8: listed, quantized": case(
        {"undeclared"}, [(BODY, fp8_block())], FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}
    ),
    "fp8: a head": case({"class-head"}, [(f"{BODY}|{HEAD}", fp8_block())], FP8_BLOCKS),
    "fp8: nothing is quantized": case({"dense"}, [], FP8_BLOCKS),
    "fp8: an entry that names nothing": case(
        {"ignore-unmatched"}, [(BODY, fp8_block())], FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "vision_tower"]}
    ),
    "modelopt: the head is quantized and excluded": case(
        {"undeclared"}, [(f"{BODY}|{HEAD}", modelopt_nvfp4)], NVFP4_OPT
    ),
    "modelopt: a dense layer that is not excluded": case({"dense"}, [(r".*layers\.0.*_proj$", modelopt_nvfp4)], NVFP4_OPT),
    "modelopt: excluded by a glob, quantized": case(
        {"undeclared"}, [(BODY, modelopt_nvfp4)], NVFP4_OPT | {"ignore": ["lm_head", "model.layers.*.mlp*"]}
    ),
    "modelopt: another algorithm": case({"format"}, [(BODY, fp8_tensor)], NVFP4_OPT),
    "modelopt: what vLLM finds in other names": case(
        {"consumers"}, [(BODY, modelopt_nvfp4)], NVFP4_OPT | {"ignore": ["lm_head", "layers.0.mlp.gate"]}
    ),
    "no method": case({"version"}, [(BODY, awq)], {key: value for key, value in AWQ.items() if key != "quant_method"}),
    "a method that no engine has": case({"version"}, [(BODY, awq)], AWQ | {"quant_method": "aqm"}),
    "awq: a field that is missing": case({"version"}, [(BODY, awq)], {"quant_method": "awq", "bits": 4, "group_size": 64}),
    "fp8: a scheme that there is not": case({"version"}, [(BODY, fp8_block())], FP8_BLOCKS | {"activation_scheme": "token"}),
    "modelopt: no algorithm": case({"version"}, [(BODY, modelopt_nvfp4)], NVFP4_OPT | {"quant_algo": None}),
    "modelopt: an algorithm that there is not": case({"version"}, [(BODY, modelopt_nvfp4)], NVFP4_OPT | {"quant_algo": "FP4"}),
    "mxfp4: dense experts": case({"dense"}, [], {"quant_method": "mxfp4"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_contradictions_under_other_methods(name: str, tmp_path: Path) -> None:
    expected, changes, table, config = OTHERS[name]
    result = findings(make(tmp_path / "c", quantized(llama(), *changes), table, **config))
    assert {finding.id for finding in result} == expected


# --- experts, routers, drafts -------------------------------------------------------------------------------------------


def moe(layers: int = 2, experts: int = 4) -> Tensors:
    """A Llama whose layers have a router and experts instead of an MLP, and an MTP layer."""
    tensors = {name: value for name, value in llama(layers).items() if ".mlp." not in name}
    for prefix in (*(f"model.layers.{layer}." for layer in range(layers)), "mtp.0."):
        tensors[f"{prefix}mlp.gate.weight"] = zeros(experts, HIDDEN)
        for expert in range(experts):
            for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = zeros(*shape)
    return tensors


EXPERTS = r"model\.layers.*(?:experts|self_attn).*_proj$"
DENSE = ("lm_head", r"re:mtp.*", r"re:.*mlp\.gate$")

MOE = {
    "good": case(set(), [(EXPERTS, packed())], ct(DENSE, body=LINEAR)),
    "routers are no Linear": case(set(), [(EXPERTS, packed())], ct(DENSE[:2], body=LINEAR)),
    "a router in passing": case({"router"}, [(EXPERTS, packed()), (r"model.*mlp\.gate$", packed())], ct(DENSE[:2], body=LINEAR)),
    "a router by name": case(
        {"router"},
        [(EXPERTS, packed()), (r"model.*mlp\.gate$", packed())],
        ct(DENSE[:2], body=([r"re:model\.layers\..*"], W4)),
    ),
    "drafts in passing": case(
        {"draft"}, [(EXPERTS, packed()), (r"mtp.*_proj$", packed())], ct((DENSE[0], DENSE[2]), body=LINEAR)
    ),
    "drafts dense and not ignored": case({"dense"}, [(EXPERTS, packed())], ct((DENSE[0], DENSE[2]), body=LINEAR)),
    "one expert dense": case(
        {"dense"}, [(r".*experts\.2\.down_proj$", None), (EXPERTS, packed())], ct(DENSE, body=LINEAR)
    ),
    "one expert ignored by its name, and quantized": case(
        {"undeclared", "fused"},
        [(EXPERTS, packed())],
        ct((*DENSE, "model.layers.1.mlp.experts.3.up_proj"), body=LINEAR),
    ),
    "one expert ignored by a regex, and dense": case(
        {"fused"},
        [(r".*1\.mlp\.experts\.3\.", None), (EXPERTS, packed())],
        ct((*DENSE, r"re:.*layers\.1\.mlp\.experts\.3\..*"), body=LINEAR),
    ),
    "experts in two schemes": case(
        {"fused"},
        [(r"model.*experts.*down_proj$", packed(8, None)), (EXPERTS, packed())],
        ct(DENSE, body=([r"re:.*self_attn.*", r"re:.*experts\.\d+\.(?:gate|up)_proj$"], W4), down=([r"re:.*down_proj$"], W8)),
    ),
    "FP8 routers": case(
        {"router"}, [(EXPERTS, fp8_block()), (r"model.*mlp\.gate$", fp8_block())], FP8_BLOCKS
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOE)
def test_experts_routers_and_drafts(name: str, tmp_path: Path) -> None:
    expected, changes, table, config = MOE[name]
    plain = [
        (pattern, lambda rows, columns: {"weight": zeros(rows, columns)}) for pattern, make in changes if make is None
    ]
    changes = [*plain, *((pattern, make) for pattern, make in changes if make is not None)]
    result = findings(make(tmp_path / "c", quantized(moe(), *changes), table, **config))
    assert {finding.id for finding in result} == expected
    severities = {finding.severity for finding in result}
    assert severities <= ({"warning"} if name in ("a router by name", "drafts in passing") else {"error"})


def test_deepseek_v4_experts_are_fp4_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    def fp4(rows: int, columns: int) -> Tensors:
        scale = zeros(rows, columns // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight": zeros(rows, columns // 2, dtype=torch.int8), "scale": scale}

    def v4_fp8(rows: int, columns: int) -> Tensors:
        scale = zeros(-(-rows // 128), -(-columns // 128), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return {"weight": zeros(rows, columns, dtype=torch.float8_e4m3fn), "scale": scale}

    rest = (r".*self_attn.*_proj$", v4_fp8)
    in_fp4 = quantized(moe(), (r".*experts.*", fp4), rest)
    in_fp8 = quantized(moe(), (r".*experts.*", v4_fp8), rest)
    v4 = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    assert ids(make(tmp_path / "a", in_fp4, FP8_BLOCKS, **v4)) == set()
    assert ids(make(tmp_path / "b", in_fp8, FP8_BLOCKS, **v4, expert_dtype="fp8")) == set()
    assert ids(make(tmp_path / "c", in_fp8, FP8_BLOCKS, **v4)) == {"config.quant-format"}
    assert ids(make(tmp_path / "d", in_fp4, FP8_BLOCKS, **v4, expert_dtype="fp8")) == {"config.quant-format"}


# --- declarations in other files ------------------------------------------------------------------------------------------


def modelopt_file(**quantization: Any) -> str:
    return json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})


def test_declarations_beside_a_silent_config(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", quantized(llama(), (BODY, modelopt_nvfp4)), None)
    assert ids(folder) == {"config.quant-undeclared"}
    (folder / "hf_quant_config.json").write_text(modelopt_file(quant_algo="NVFP4", exclude_modules=["lm_head"]))
    assert ids(folder) == set()
    (folder / "hf_quant_config.json").write_text(modelopt_file(quant_algo="FP8", exclude_modules=["lm_head"]))
    assert ids(folder) == {"config.quant-format"}
    (folder / "hf_quant_config.json").write_text(modelopt_file(quant_algo="NVFP4", exclude_modules=["model.layers.0*"]))
    assert ids(folder) == {"config.quant-undeclared", "config.quant-dense"}  # the layer, the head
    (folder / "hf_quant_config.json").write_text("{")
    assert ids(folder) == {"config.quant-undeclared", "config.quant-version"}

    folder = make(tmp_path / "b", quantized(llama(), (BODY, gptq(8))), None)
    (folder / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 64, "desc_act": False, "sym": True})
    )
    assert ids(folder) == {"config.quant-bits"}


def test_mixed_precision_says_it_layer_by_layer(tmp_path: Path) -> None:
    tensors = quantized(llama(), (r".*self_attn.*_proj$", fp8_tensor), (r".*mlp.*_proj$", modelopt_nvfp4))
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "FP8" if "attn" in name else "NVFP4"}
        for name in tensors
        if name.endswith("_proj.weight")
    }
    table = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert ids(make(tmp_path / "a", tensors, table)) == set()
    layers["model.layers.1.mlp.down_proj"] = {"quant_algo": "FP8"}
    assert ids(make(tmp_path / "b", tensors, table)) == {"config.quant-format"}


def test_two_declarations_that_disagree(tmp_path: Path) -> None:
    folder = make(tmp_path / "c", quantized(llama(), (BODY, modelopt_nvfp4)), NVFP4_OPT)
    (folder / "hf_quant_config.json").write_text(modelopt_file(quant_algo="NVFP4", exclude_modules=["lm_head"]))
    assert ids(folder) == set()
    (folder / "hf_quant_config.json").write_text(modelopt_file(quant_algo="FP8", exclude_modules=["lm_head"]))
    assert [(f.id, f.file) for f in findings(folder)] == [("config.quant-consumers", "hf_quant_config.json")]
    (folder / "hf_quant_config.json").write_text(
        modelopt_file(quant_algo="NVFP4", exclude_modules=["lm_head", "model.norm"])
    )
    assert ids(folder) == {"config.quant-consumers"}


# --- how they are told ----------------------------------------------------------------------------------------------------


def test_modules_of_one_template_are_one_finding(tmp_path: Path) -> None:
    result = findings(make(tmp_path / "c", quantized(llama(layers=8), (BODY, packed())), None, num_hidden_layers=8))
    assert len(result) == 7
    assert {finding.data["count"] for finding in result} == {8}
    first = next(finding for finding in result if finding.tensor == "model.layers.0.mlp.up_proj.weight_packed")
    assert first.file == "model.safetensors"
    assert first.data["examples"][:2] == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]


def test_every_id_has_a_page() -> None:
    for module in (quantization, shapes):
        named = {id for probe in module.PROBES for id in probe.ids}
        assert named == {page.id for page in module.PAGES}
        assert all(page.meaning and page.example and page.repair for page in module.PAGES)


@pytest.mark.slow
def test_a_long_ignore_list_and_many_experts_take_no_time() -> None:
    experts = [f"model.layers.{layer}.mlp.experts.{e}" for layer in range(60) for e in range(426)]
    specs = [
        Spec(f"{expert}.{name}_proj.{part}", dtype, shape)
        for expert in experts
        for name in ("gate", "up", "down")
        for part, dtype, shape in (
            ("weight_packed", "I32", (64, 16)),
            ("weight_scale", "BF16", (64, 2)),
            ("weight_shape", "I64", (2,)),
        )
    ]
    ignore = [f"{expert}.gate_proj" for expert in experts[::9]] + [r"re:.*layers\.7\..*experts\.1\..*", "re:.*visual.*"]
    subject = subject_of(specs, llama_config(quantization_config=ct(ignore, body=LINEAR)))
    assert len(subject.survey.tensors) > 230_000
    began = time.process_time()
    result = found_in(subject, quantization, shapes)
    assert time.process_time() - began < 2
    ignored = next(f for f in result if f.id == "config.quant-undeclared" and "gate" in str(f.tensor))
    assert ignored.data["count"] == len({*experts[::9], "model.layers.7.mlp.experts.1"})
