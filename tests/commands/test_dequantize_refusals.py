"""What ``ckptkit dequantize`` does not take for granted: declarations that tensors contradict, parts that lack, odd parts.

Each case changes one thing of a checkpoint that is dequantized without a word.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint
from safetensors.torch import load_file
from told import Told, teller

from ckptkit.cli import main
from ckptkit.errors import OK, SOURCE, USAGE

Tensors = dict[str, torch.Tensor]
Table = dict[str, Any]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "dequantize")


# --- small checkpoints of one weight -----------------------------------------------------------------------


def fp8() -> tuple[Tensors, Table]:
    """[8, 16] in blocks of 4 x 8."""
    tensors = {"a.weight": torch.full((8, 16), 2.0).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 2)}
    return tensors, {"quant_method": "fp8", "weight_block_size": [4, 8]}


def group(**weights: Any) -> Table:
    groups = {"group_0": {"targets": ["re:.*"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def packed() -> tuple[Tensors, Table]:
    """[4, 64] with four bits, groups of 32."""
    tensors = {
        "a.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
        "a.weight_scale": torch.ones(4, 2),
        "a.weight_shape": torch.tensor([4, 64]),
    }
    return tensors, group(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)


def int8() -> tuple[Tensors, Table]:
    tensors = {"a.weight": torch.ones(4, 64, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    return tensors, group(num_bits=8, type="int", strategy="channel")


def nvfp4() -> tuple[Tensors, Table]:
    """[4, 32]."""
    tensors = {
        "a.weight_packed": torch.full((4, 16), 0x22, dtype=torch.uint8),
        "a.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.tensor([2.0]),
    }
    return tensors, group(num_bits=4, type="float", strategy="tensor_group", group_size=16)


def gptq() -> tuple[Tensors, Table]:
    """[8, 64] with four bits, groups of 16 inputs."""
    tensors = {
        "a.qweight": torch.zeros(8, 8, dtype=torch.int32),
        "a.qzeros": torch.zeros(4, 1, dtype=torch.int32),
        "a.scales": torch.ones(4, 8).half(),
        "a.g_idx": (torch.arange(64) // 16).int(),
    }
    return tensors, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}


def awq() -> tuple[Tensors, Table]:
    """[8, 32], groups of 16 inputs."""
    tensors = {
        "a.qweight": torch.zeros(32, 1, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "a.scales": torch.ones(2, 8).half(),
    }
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}


SOUND = {"fp8": fp8, "packed": packed, "int8": int8, "nvfp4": nvfp4, "gptq": gptq, "awq": awq}
Made = Callable[[], tuple[Tensors, Table]]


def write(folder: Path, tensors: Tensors, table: Table, **config: Any) -> Path:
    return checkpoint(folder, tensors, {"model_type": "x", "quantization_config": table, **config})


def changed(folder: Path, made: Made, tensors: Mapping[str, torch.Tensor | None], table: Table) -> Path:
    """The checkpoint with tensors set, or for None left out; the table's weights or the table itself with ``table``."""
    found, declared = made()
    found |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    groups = declared.get("config_groups")
    (groups["group_0"]["weights"] if groups else declared).update(table)
    return write(folder, {name: found[name] for name in found if tensors.get(name, 0) is not None}, declared)


def only(document: Mapping[str, Any]) -> tuple[str, str | None]:
    [finding] = document["findings"]
    return finding["id"], finding["tensor"]


@pytest.mark.parametrize("name", SOUND)
def test_the_sound_ones_are_taken(name: str, tmp_path: Path, told: Told) -> None:
    told(write(tmp_path / "src", *SOUND[name]()), tmp_path / "out", "--no-verify")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a.weight"}


FP8 = torch.float8_e4m3fn
CONTRADICTED: dict[str, tuple[Made, dict[str, torch.Tensor | None], Table]] = {
    "blocks, one scale": (fp8, {"a.weight_scale_inv": torch.ones(1, 1)}, {}),
    "blocks, one number": (fp8, {"a.weight_scale_inv": torch.ones(1)}, {}),
    "blocks, a scalar": (fp8, {"a.weight_scale_inv": torch.tensor(1.0)}, {}),
    "blocks, a scale for a row": (fp8, {"a.weight_scale_inv": torch.ones(8, 1)}, {}),
    "fp8, stored as integers": (fp8, {"a.weight": torch.ones(8, 16, dtype=torch.int8)}, {}),
    "groups of 16, stored as 32": (packed, {}, {"group_size": 16}),
    "channel, stored as groups": (packed, {}, {"strategy": "channel", "group_size": None}),
    "group, stored by channel": (packed, {"a.weight_scale": torch.ones(4, 1)}, {}),
    "floats, stored in words": (packed, {}, {"type": "float"}),
    "tensor, stored by channel": (int8, {}, {"strategy": "tensor"}),
    "channel, stored for the tensor": (int8, {"a.weight_scale": torch.ones(1)}, {}),
    "nvfp4 in words": (nvfp4, {"a.weight_packed": torch.zeros(4, 4, dtype=torch.int32)}, {}),
    "act-order without an order": (packed, {}, {"actorder": "group"}),
    "GPTQ, groups of 32": (gptq, {}, {"group_size": 32}),
    "GPTQ, whole columns": (gptq, {}, {"group_size": -1}),
    "GPTQ, act-order without an order": (gptq, {"a.g_idx": None}, {}),
    "GPTQ, another way to pack": (gptq, {}, {"checkpoint_format": "marlin"}),
    "GPTQ, an unheard-of way to pack": (gptq, {}, {"checkpoint_format": "foo"}),
    "GPTQ, Marlin's": (gptq, {}, {"is_marlin_format": True}),
    "AWQ, groups of 32": (awq, {}, {"group_size": 32}),
    "AWQ, another way to pack": (awq, {}, {"version": "gemv"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTED)
def test_what_contradicts_its_declaration_is_refused(case: str, tmp_path: Path, told: Told) -> None:
    src, out = changed(tmp_path / "src", *CONTRADICTED[case]), tmp_path / "out"
    id, tensor = only(told(src, out, code=USAGE))
    assert id == "decode.format"
    assert tensor in {"a.weight", "a.weight_packed", "a.qweight", "a.weight_scale"}
    assert list(tmp_path.iterdir()) == [src]


ODD: dict[str, tuple[Made, dict[str, torch.Tensor | None]]] = {
    "an integer scale": (fp8, {"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
    "a boolean scale": (fp8, {"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.bool)}),
    "an FP8 scale of FP8": (fp8, {"a.weight_scale_inv": torch.ones(2, 2).to(FP8)}),
    "an integer scale of scales": (nvfp4, {"a.weight_global_scale": torch.ones(1, dtype=torch.int32)}),
    "NVFP4 with BF16 scales": (nvfp4, {"a.weight_scale": torch.ones(4, 2).bfloat16()}),
    "unsigned zero points": (int8, {"a.weight_zero_point": torch.zeros(4, 1, dtype=torch.uint8)}),
    "an order of floats": (gptq, {"a.g_idx": torch.zeros(64)}),
    "a short order": (gptq, {"a.g_idx": torch.zeros(63, dtype=torch.int32)}),
    "a long order": (gptq, {"a.g_idx": torch.zeros(128, dtype=torch.int32)}),
    "wide zero points": (gptq, {"a.qzeros": torch.zeros(4, 1, dtype=torch.int64)}),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_companions_of_no_such_dtype_or_shape_are_refused_before_the_run(case: str, tmp_path: Path, told: Told) -> None:
    made, tensors = ODD[case]
    src = changed(tmp_path / "src", made, tensors, {})
    assert only(told(src, tmp_path / "out", code=USAGE))[0] == "decode.format"
    assert list(tmp_path.iterdir()) == [src]


@pytest.mark.parametrize("gone", ["a.weight_scale", "a.weight_global_scale"])
def test_nvfp4_without_a_scale(gone: str, tmp_path: Path, told: Told) -> None:
    src = changed(tmp_path / "src", nvfp4, {gone: None}, {})
    assert only(told(src, tmp_path / "out", code=SOURCE)) == ("names.weight-without-scale", "a.weight_packed")


def test_an_order_of_one_group_need_not_be_told(tmp_path: Path, told: Told) -> None:
    whole = {"a.g_idx": None, "a.scales": torch.ones(1, 8).half(), "a.qzeros": torch.zeros(1, 1, dtype=torch.int32)}
    told(changed(tmp_path / "src", gptq, whole, {"group_size": -1}), tmp_path / "out", "--no-verify")


def test_order_by_weight_needs_no_tensor(tmp_path: Path, told: Told) -> None:
    told(changed(tmp_path / "src", packed, {}, {"actorder": "weight"}), tmp_path / "out", "--no-verify")


# --- one thing said twice ----------------------------------------------------------------------------------

TWICE = {
    "scales": (fp8, {"a.weight_scale": torch.ones(2, 2) * 2}),
    "equal scales": (fp8, {"a.weight_scale": torch.ones(2, 2)}),
    "scales of scales": (nvfp4, {"a.weight_scale_2": torch.tensor(0.5)}),
    "a weight": (nvfp4, {"a.weight": torch.zeros(4, 32)}),
}  # fmt: skip


@pytest.mark.parametrize("case", TWICE)
def test_what_is_there_twice_is_refused_and_the_hint_can_be_followed(
    case: str, tmp_path: Path, told: Told, capsys: Any
) -> None:
    made, more = TWICE[case]
    src, out = write(tmp_path / "src", {**made()[0], **more}, made()[1]), tmp_path / "out"
    document = told(src, out, code=USAGE)
    assert only(document)[0] == "dequantize.collision"
    follow(document, capsys)
    told(out, tmp_path / "dense", "--no-verify")


def follow(document: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command that the hint names, up to words that are none of its arguments."""
    words = shlex.split(document["findings"][0]["hint"].partition(" leaves it out")[0])
    teller(capsys, *words[1:])("--no-verify")


@pytest.mark.parametrize("beside", [{}, {"b.weight": torch.ones(4, 4)}])
def test_a_scale_that_is_left_over_can_be_dropped(beside: Tensors, tmp_path: Path, told: Told, capsys: Any) -> None:
    tensors, table = fp8()
    src = write(tmp_path / "src", {**tensors, "b.weight_scale_inv": torch.ones(1, 1), **beside}, table)
    document = told(src, tmp_path / "out", code=SOURCE)
    assert only(document) == ("names.scale-without-weight", "b.weight_scale_inv")
    follow(document, capsys)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*tensors, *beside}


@pytest.mark.parametrize("part", ["a.weight_packed", "a.weight_scale", "a.weight_global_scale"])
def test_half_a_weight_is_still_not_dropped(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = write(tmp_path / "src", *nvfp4())
    document = teller(capsys, "reshard")(src, tmp_path / "out", "--drop", part, code=USAGE)
    assert [finding["id"] for finding in document["findings"]] == ["plan.drop-partial"]


def test_the_hint_leaves_out_what_cannot_be_read(tmp_path: Path, told: Told) -> None:
    tensors, table = fp8()
    odd = {"b.weight": tensors["a.weight"].clone(), "b.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}
    src, out = write(tmp_path / "src", {**tensors, **odd}, table), tmp_path / "out"
    [finding] = told(src, out, code=USAGE)["findings"]
    option, pattern, *_ = shlex.split(finding["hint"])
    told(src, out, option, pattern, "--no-verify")
    dtypes = {name: tensor.dtype for name, tensor in load_file(out / "model.safetensors").items()}
    assert dtypes == {"a.weight": torch.bfloat16, "b.weight": FP8, "b.weight_scale_inv": torch.int32}


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.inf, 0.0])
def test_a_scale_of_scales_that_makes_nothing_or_everything(value: float, tmp_path: Path, told: Told) -> None:
    src = changed(tmp_path / "src", nvfp4, {"a.weight_global_scale": torch.tensor([value])}, {})
    assert only(told(src, tmp_path / "out", "--no-verify", code=SOURCE)) == ("data.inf", "a.weight_global_scale")
    told(src, tmp_path / "kept", "--no-verify", "--allow", "data.inf")
    weight = load_file(tmp_path / "kept" / "model.safetensors")["a.weight"]
    assert torch.equal(weight, torch.full((4, 32), 0.0 if value else torch.inf).bfloat16())


def test_a_weight_without_numbers(tmp_path: Path, told: Told) -> None:
    tensors, table = fp8()
    empty = {"b.weight": torch.empty(0, 16, dtype=FP8), "b.weight_scale_inv": torch.empty(0, 2)}
    told(write(tmp_path / "src", {**tensors, **empty}, table), tmp_path / "out", "--no-verify")
    weight = load_file(tmp_path / "out" / "model.safetensors")["b.weight"]
    assert (weight.shape, weight.dtype) == ((0, 16), torch.bfloat16)


# --- what the config says ----------------------------------------------------------------------------------


def test_transforms_are_not_dropped_without_a_word(tmp_path: Path, told: Told) -> None:
    tensors, table = packed()
    turned = {"R4": {"type": "hadamard", "apply": [{"location": "weight_input", "targets": ["Linear"]}]}}
    src = write(tmp_path / "src", tensors, {**table, "transform_config": {"config_groups": turned}})
    assert only(told(src, tmp_path / "out", code=USAGE))[0] == "dequantize.transform"
    told(src, tmp_path / "out", "--no-verify", "--allow", "dequantize.transform")
    none = write(tmp_path / "none", tensors, {**table, "transform_config": {"config_groups": {}}})
    told(none, tmp_path / "dense", "--no-verify")


@pytest.mark.parametrize(
    ("option", "stated", "written"),
    [
        ("fp16", {"dtype": "bfloat16"}, {"dtype": "float16"}),
        ("fp32", {"torch_dtype": "torch.bfloat16"}, {"torch_dtype": "torch.float32"}),
        ("bf16", {"dtype": "float16"}, {"dtype": "bfloat16"}),
        ("bf16", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ("fp16", {"dtype": "auto"}, {"dtype": "auto"}),
        ("fp16", {}, {}),
    ],
)
def test_the_dtype_that_is_stated(option: str, stated: Table, written: Table, tmp_path: Path, told: Told) -> None:
    src = write(tmp_path / "src", *fp8(), **stated)
    document = told(src, tmp_path / "out", "--dtype", option)
    assert "config.dtype" not in {finding["id"] for finding in document["findings"]}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x", **written}


def test_the_dtype_of_what_stays_is_left_as_stated(tmp_path: Path, told: Told) -> None:
    tensors, table = fp8()
    src = write(tmp_path / "src", {**tensors, "b.weight": torch.ones(64, 64).bfloat16()}, table, dtype="bfloat16")
    told(src, tmp_path / "out", "--dtype", "fp32", "--no-verify")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_one_allow_is_enough_for_half_a_fused_layer(tmp_path: Path, told: Told) -> None:
    tensors, table = fp8()
    both = {
        name.replace("a.", f"model.layers.0.self_attn.{part}_proj."): tensor.clone()
        for part in "qkv"
        for name, tensor in tensors.items()
    }
    src = write(tmp_path / "src", both, table)
    chosen = ("--only", "model.layers.0.self_attn.q_proj.weight")
    assert only(told(src, tmp_path / "out", *chosen, code=USAGE))[0] == "plan.config"
    document = told(src, tmp_path / "out", *chosen, "--allow", "plan.config")
    warned = {finding["id"]: finding["severity"] for finding in document["findings"]}
    assert (warned["plan.config"], warned["config.quant-fused"]) == ("warning", "warning")


def test_a_rule_that_leaves_out_many_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, table = fp8()
    many = {f"{number}.{name}": tensor.clone() for number in range(5) for name, tensor in tensors.items()}
    many |= {f"{number}.a.input_scale": torch.ones(1) for number in range(5)}
    src = write(tmp_path / "src", many, table)
    for option, lines in (((), 1), (("-v",), 5)):
        assert (
            main(["dequantize", str(src), str(tmp_path / f"out{lines}"), "--no-progress", "--no-verify", *option]) == OK
        )
        out = capsys.readouterr().out.splitlines()
        assert sum("input_scale" in line for line in out) == lines
