"""Defects of quantization: declarations that are not what is stored, parts of weights that are lost or do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from corrupt import edit
from corrupt.broken_config import Q, drop_all
from corrupt.broken_files import both
from corrupt.defects import defect
from corrupt.edit import Damage, config, drop, put, quantization, rename, tensors
from corrupt.goods import bf16

Table = dict[str, Any]
O_PROJ = "model.layers.1.self_attn.o_proj"
MODELOPT = "hf_quant_config.json"
PACKED, SHAPE, SCALE = "weight_packed", "weight_shape", "weight_scale"
HEAD_ALONE = r"re:^(?:.*\.)?lm_head$"


def group(name: str, change: Callable[[Table], object]) -> Damage:
    return quantization(lambda table: change(table["config_groups"][name]))


def weights(name: str, **changes: Any) -> Damage:
    return group(name, lambda table: table["weights"].update(changes))


def targets(name: str, *found: str) -> Damage:
    return group(name, lambda table: table.update(targets=list(found)))


def ignore(*entries: str) -> Damage:
    return quantization(lambda table: table["ignore"].extend(entries))


def stated(**changes: Any) -> Damage:
    return quantization(lambda table: table.update(changes))


def dequantized(module: str, rows: int, cols: int) -> Damage:
    """A module stored dense among quantized ones."""
    parts = tuple(f"{module}.{part}" for part in ("weight", PACKED, SCALE, SHAPE, "weight_zero_point"))

    def change(held: dict[str, torch.Tensor]) -> None:
        for part in parts:
            held.pop(part, None)
        held[f"{module}.weight"] = bf16(rows, cols)

    return lambda folder: tensors(change, next(name for name in parts if _holds(folder, name)))(folder)


def _holds(folder: Path, tensor: str) -> bool:
    return any(tensor == entry.name for path in edit.shards(folder) for entry in edit.header_of(path).entries)


def packed(module: str, rows: int, cols: int) -> Damage:
    """A dense module stored as 4-bit integers in groups of 128 (as in S1, S15)."""

    def change(held: dict[str, torch.Tensor]) -> None:
        del held[f"{module}.weight"]
        held[f"{module}.{PACKED}"] = torch.full((rows, cols // 8), 0x789A7B68, dtype=torch.int32)
        held[f"{module}.{SCALE}"] = bf16(rows, max(cols // 128, 1)).abs() + 0.01
        held[f"{module}.{SHAPE}"] = torch.tensor([rows, cols])

    return tensors(change, f"{module}.weight")


def packed_anew(module: str, rows: int, cols: int) -> Damage:
    """A packed module stored as 8-bit integers, one scale a row."""

    def change(held: dict[str, torch.Tensor]) -> None:
        held[f"{module}.{PACKED}"] = torch.full((rows, cols // 4), 0x789A7B68, dtype=torch.int32)
        held[f"{module}.{SCALE}"] = bf16(rows, 1).abs() + 0.01

    return tensors(change, f"{module}.{PACKED}")


overlap = both(
    *(packed_anew(f"model.layers.0.self_attn.{x}_proj", 128, 128) for x in "qkv"),
    targets("head", r"re:.*layers\.0.*[qkv]_proj", HEAD_ALONE),
    targets("body", "re:.*_proj"),
)


def declare(table: Table) -> Damage:
    return config(quantization_config=table)


def beside(name: str, change: Callable[[Table], object]) -> Damage:
    return edit.json_file(name, change)


W4: Table = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}},
}  # fmt: skip
GPTQ: Table = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}

PARTS = [
    defect("scale dropped, packed", "w4w8", drop(f"{Q}.{SCALE}"), "names.weight-without-scale"),
    defect("scale dropped, FP8 blocks", "fp8", drop(f"{Q}.weight_scale_inv"), "names.weight-without-scale"),
    defect("scale dropped, FP8 rows", "fp8-dynamic", drop(f"{Q}.{SCALE}"), "names.weight-without-scale"),
    defect("scale dropped, INT8", "w8a8", drop(f"{Q}.{SCALE}"), "names.weight-without-scale"),
    defect("scales dropped, GPTQ", "gptq", drop(f"{Q}.scales"), "names.weight-without-scale"),
    defect("scale dropped, quantized head", "w8head", drop("lm_head.weight_scale"), "names.weight-without-scale"),
    defect("exponents dropped, gpt-oss", "gpt_oss", drop("model.layers.1.mlp.experts.down_proj_scales"),
           "names.weight-without-scale"),
    defect("all scales dropped", "fp8-dynamic", both(*(drop(f"model.layers.{i}.{name}.{SCALE}") for i in (0, 1) for name in
           (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))))),
           "names.weight-without-scale"),
    defect("scale under a name of its own", "fp8",
           both(*(rename(f"{q}.weight_scale_inv", f"{q}.dequant_scale") for q in (Q, Q.replace("1", "0")))),
           "names.unknown-scale"),
    defect("codes dropped", "w4w8", drop(f"{Q}.{PACKED}"), "names.scale-without-weight"),
    defect("global scale dropped", "nvfp4", drop(f"{Q}.weight_global_scale"), "shapes.scale"),
    defect("scale cut short", "w4w8", put(f"{Q}.{SCALE}", lambda t: t[:100]), "shapes.scale"),
    defect("block scale transposed", "fp8", put("model.layers.1.mlp.down_proj.weight_scale_inv", lambda t: t.T),
           "config.quant-bits"),
    defect("MXFP4 exponents cut", "mxfp4", put(f"{Q}.{SCALE}", lambda t: t[:, :3]), "shapes.scale"),
    defect("exponents of MXFP4 as numbers", "mxfp4", put(f"{Q}.{SCALE}", lambda t: t.to(torch.bfloat16)), "shapes.dtype"),
    defect("NVFP4 scales cast to bf16", "nvfp4", put(f"{Q}.{SCALE}", lambda t: t.to(torch.bfloat16)), "shapes.dtype"),
    defect("codes of another width", "w4w8", put(f"{Q}.{PACKED}", lambda t: t[:, :12]),
           "config.quant-bits config.quant-fused"),
    defect("codes flattened", "w4w8", put(f"{Q}.{PACKED}", lambda t: t.flatten()), "shapes.packed"),
    defect("weight_shape of three numbers", "w4w8", put(f"{Q}.{SHAPE}", lambda t: torch.tensor([1, 128, 128])),
           "shapes.weight-shape"),
    defect("weight_shape dropped", "w4w8", drop(f"{Q}.{SHAPE}"), "shapes.weight-shape"),
    defect("zero points dropped", "asymmetric", drop(f"{Q}.weight_zero_point"), "config.quant-bits config.quant-fused"),
    defect("zero points not packed", "asymmetric", put(f"{Q}.weight_zero_point", lambda t: t.repeat(8, 1)), "shapes.zero-point"),
    defect("qzeros of another width", "gptq", put(f"{Q}.qzeros", lambda t: t[:, :10]), "shapes.zero-point"),
    defect("g_idx of other inputs", "gptq", put(f"{Q}.g_idx", lambda t: t[:100]), "shapes.packed"),
    defect("blocks of another size", "gpt_oss", put("model.layers.1.mlp.experts.down_proj_blocks",
           lambda t: t.reshape(4, 128, 4, 8)), "shapes.packed"),
]  # fmt: skip

DECLARED = [
    defect("quantized, nothing declared", "w4w8", config(quantization_config=None), "config.quant-undeclared"),
    defect("FP8, nothing declared", "fp8", config(quantization_config=None), "config.quant-undeclared"),
    defect("declared, all dense", "dense", declare(W4), "config.quant-status config.quant-dense"),
    defect("declared GPTQ, all dense", "dense", declare(GPTQ), "config.quant-dense"),
    defect("declared for the body, head alone quantized (S11)", "fp8", declare({**W4, "ignore": []}),
           "config.quant-format config.quant-dense"),
    defect("one module dense", "w4w8", dequantized(O_PROJ, 128, 128), "config.quant-dense"),
    defect("head dense, declared", "w8head", dequantized("lm_head", 512, 128), "config.quant-dense config.quant-status"),
    defect("one of three fused halves dense", "w4w8", dequantized(Q, 128, 128), "config.quant-dense config.quant-fused"),
    defect("embedding quantized (S1)", "w4w8", packed("model.embed_tokens", 512, 128), "config.quant-embedding"),
    defect("router quantized (S15)", "moe", both(declare(W4), *(packed(f"model.layers.{i}.mlp.gate", 4, 128) for i in (0, 1))),
           "config.quant-router config.quant-dense"),
    defect("target misspelt (S7)", "w8head", targets("head", "lm_haed"),
           "config.quant-target-unmatched config.quant-undeclared"),
    defect("target in the vision model's spelling (S7)", "w8head", targets("head", "model.language_model.lm_head"),
           "config.quant-target-unmatched config.quant-undeclared"),
    defect("ignore misspelt (S8)", "w4w8", ignore("lm_haed"), "config.quant-ignore-unmatched"),
    defect("ignore names a tensor (S8)", "w4w8", ignore("model.norm.weight"), "config.quant-ignore-unmatched"),
    defect("ignore that is no regex without re: (S8)", "w4w8", ignore(r"backbone\.embeddings"), "config.quant-ignore-unmatched"),
    defect("ignore of everything (S7)", "w4w8", ignore("re:.*"), "config.quant-both"),
    defect("head quantized and ignored (S13)", "w4w8", ignore("lm_head"), "config.quant-both"),
    defect("head reached by its class alone (S18)", "w4w8", targets("head", "Linear"), "config.quant-class-head"),
    defect("regexes that overlap, the special one last (S3)", "w4w8", overlap, "config.quant-bits"),
    defect("regexes that overlap, the special one first (S3)", "w4w8", both(overlap, quantization(lambda table:
           table.update(config_groups=dict(reversed(table["config_groups"].items()))))), "config.quant-consumers"),
    defect("head declared as the body (S2)", "w4w8", both(targets("body", "re:.*_proj$", HEAD_ALONE),
           quantization(lambda table: table["config_groups"].pop("head"))), "config.quant-bits"),
    defect("siblings of two schemes (S17)", "w4w8", both(packed_anew(Q, 128, 128), targets("head", f"re:.*{Q}$", HEAD_ALONE),
           targets("body", r"re:.*\.0\..*_proj$", r"re:.*1\..*\.(?:[kvo]|gate|up|down)_proj$")), "config.quant-fused"),
    defect("bits of another model", "w4w8", weights("body", num_bits=8), "config.quant-bits"),
    defect("group size of another model", "w4w8", weights("body", group_size=32), "config.quant-bits"),
    defect("channel for groups", "nvfp4", weights("body", strategy="channel", group_size=None), "config.quant-bits"),
    defect("symmetric, with zero points", "asymmetric", weights("body", symmetric=True), "config.quant-bits"),
    defect("asymmetric, without zero points", "w4w8", weights("body", symmetric=False), "config.quant-bits"),
    defect("FP8 declared integer", "fp8-dynamic", weights("body", type="int"), "config.quant-format"),
    defect("blocks of 64", "fp8-block", weights("body", block_structure=[64, 64]), "config.quant-bits"),
    defect("format of another scheme", "w4w8", group("head", lambda table: table.update(format="int-quantized")),
           "config.quant-format"),
    defect("format dense (S4)", "w4w8", stated(format="dense"), "config.quant-status"),
    defect("status frozen", "w4w8", stated(quantization_status="frozen"), "config.quant-status"),
    defect("scheme that no version parses", "w4w8", weights("body", num_bits="four"), "config.quant-version"),
    defect("KV cache declared, no scales", "w4w8", stated(kv_cache_scheme={"num_bits": 8, "type": "float",
           "strategy": "tensor", "dynamic": False, "symmetric": True}), "config.quant-kv"),
    defect("draft layers quantized in passing (S16)", "mtp", both(declare({**W4, "ignore": ["lm_head"]}), *(
           packed(f"{stem}.self_attn.{x}_proj", 128, 128) for stem in ("model.layers.0", "model.layers.1", "model.mtp_layers.0")
           for x in "qkvo")), "config.quant-draft config.quant-dense"),
]  # fmt: skip

OTHERS = [
    defect("GPTQ bits of another model", "gptq", stated(bits=8), "config.quant-bits"),
    defect("GPTQ group size of another model", "gptq", stated(group_size=32), "config.quant-bits"),
    defect("GPTQ declared for AWQ", "awq", stated(quant_method="gptq", desc_act=False, sym=False), "config.quant-format"),
    defect("AWQ group size of another model", "awq", stated(group_size=64), "config.quant-bits"),
    defect("AWQ list that vLLM reads as substrings", "awq", stated(modules_to_not_convert=["proj"]), "config.quant-consumers"),
    defect("GPTQ head declared, dense", "gptq", stated(lm_head=True), "config.quant-dense"),
    defect("FP8 blocks of another model", "fp8", stated(weight_block_size=[64, 64]), "config.quant-bits"),
    defect("FP8 with one scale a tensor", "fp8", stated(weight_block_size=None), "config.quant-bits"),
    defect("FP8 list of what is quantized", "fp8", stated(modules_to_not_convert=["lm_head", Q]), "config.quant-undeclared"),
    defect("scale of gate_proj dropped, FP8 blocks", "fp8", drop_all("model.layers.1.mlp.gate_proj.weight_scale_inv"), "names.weight-without-scale"),
    defect("ModelOpt's two files disagree", "modelopt", beside(MODELOPT, lambda table:
           table["quantization"].update(quant_algo="FP8")), "config.quant-consumers"),
    defect("ModelOpt algorithm of another model", "modelopt", both(stated(quant_algo="FP8"), beside(MODELOPT, lambda table:
           table["quantization"].update(quant_algo="FP8"))), "config.quant-format"),
    defect("ModelOpt excludes what is quantized", "modelopt", both(stated(ignore=["lm_head", "*o_proj"]), beside(MODELOPT,
           lambda table: table["quantization"].update(exclude_modules=["lm_head", "*o_proj"]))), "config.quant-undeclared"),
    defect("ModelOpt head not excluded", "modelopt", both(stated(ignore=[]), beside(MODELOPT,
           lambda table: table["quantization"].update(exclude_modules=[]))), "config.quant-dense"),
    defect("ModelOpt file that is no JSON", "modelopt", edit.file(MODELOPT, b"{"), "config.quant-version"),
    defect("MXFP4 experts listed as dense", "gpt_oss", quantization(lambda table:
           table["modules_to_not_convert"].append("model.layers.*.mlp.experts")), "config.quant-undeclared"),
    defect("MXFP4 declared, all dense", "moe", declare({"quant_method": "mxfp4"}), "config.quant-dense"),
    defect("foreign declaration left beside (S12)", "w4w8", edit.file("quantize_config.json", json.dumps(GPTQ).encode()),
           "config.quant-consumers"),
]  # fmt: skip
