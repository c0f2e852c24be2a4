"""What ``ckptkit dequantize`` makes, against its source: every bit is the source's value rounded once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands.test_dequantize import EXPERTS, OTHERS, PROJECTION, WORDS, deepseek, side_by_side, write
from commands.test_unpack import INTER, gpt_oss
from decode.samples import sample_of
from make import checkpoint
from safetensors.torch import load_file

from ckptkit.cli import main
from ckptkit.errors import Finding

from .subjects import edit, findings, flip, outcome, results, stored

STACKS = "model.layers.0.mlp.experts"


def dequantize(source: Path, *options: str) -> Path:
    out = source.parent / f"{source.name}-out"
    assert main(["dequantize", str(source), str(out), *options, "--no-verify", "-q", "--no-progress"]) == 0
    return out


def assert_sound(out: Path, source: Path, compared: int) -> None:
    found = outcome(out, source)
    assert found.findings == []
    assert {results(found)[id] for id in ("numeric.exact", "numeric.error", "numeric.missing")} == {"ok"}
    assert len(found.figures["numeric"]["tensors"]) == compared


def told(found: Sequence[Finding]) -> dict[str, int]:
    """How many tensors the findings of each id are about."""
    counts: dict[str, int] = {}
    for finding in found:
        counts[finding.id] = counts.get(finding.id, 0) + finding.data.get("count", 1)
    return counts


def flip_each(folder: Path, names: Sequence[str], width: int) -> None:
    """The last bit of a number in each tensor."""
    chance = random.Random(0)
    for name in names:
        flip(folder, name, chance.randrange(len(stored(folder, name)) // width) * width, 0)


# --- every format ------------------------------------------------------------------------------------------


def of_compressed_tensors(folder: Path) -> tuple[Path, list[str]]:
    return side_by_side(folder), OTHERS


def of_gptq(folder: Path, version: str) -> tuple[Path, list[str]]:
    names = [name for name in WORDS if name != "AWQ" and ("v2" in name) == (version == "gptq_v2")]
    rules = {rf"+:layers\.{number}\.": {"bits": sample_of(name).known["bits"]} for number, name in enumerate(names)}
    declared = {"quant_method": "gptq", "bits": 4, "dynamic": rules, "checkpoint_format": version}
    return write(folder, names, {"quantization_config": declared}), names


def of_awq(folder: Path) -> tuple[Path, list[str]]:
    return write(folder, ["AWQ"], {"quantization_config": {"quant_method": "awq", "w_bit": 4}}), ["AWQ"]


FORMATS = {
    "compressed-tensors": of_compressed_tensors,
    "gptq": lambda folder: of_gptq(folder, "gptq"),
    "gptq_v2": lambda folder: of_gptq(folder, "gptq_v2"),
    "awq": of_awq,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("method", FORMATS)
def test_every_format(method: str, dtype: str, tmp_path: Path) -> None:
    source, formats = FORMATS[method](tmp_path / "source")
    out = dequantize(source, "--dtype", dtype)
    assert_sound(out, source, len(formats))
    names = list(load_file(out / "model.safetensors"))
    assert len(names) == len(formats)
    flip_each(out, names, 2 if dtype == "bf16" else 4)
    assert told(findings(out, source)) == {"numeric.exact": len(names)}


@pytest.mark.parametrize("method", FORMATS)
def test_every_format_by_another_tool(method: str, tmp_path: Path) -> None:
    """Without a manifest a value may be off by two roundings, and scales are not missed either."""
    source, formats = FORMATS[method](tmp_path / "source")
    out = dequantize(source)
    (out / "ckptkit.json").unlink()
    assert_sound(out, source, len(formats))
    names = list(load_file(out / "model.safetensors"))
    for name in names:
        content = np.frombuffer(stored(out, name), np.uint16).copy()
        content[np.argmax(content & 0x7FFF)] ^= 0x8000
        edit(out, name, 0, content.tobytes())
    assert told(findings(out, source)) == {"numeric.error": len(names)}


# --- what a weight's place is ------------------------------------------------------------------------------


def test_stacked_experts_are_transposed(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path)
    out = dequantize(source)
    assert_sound(out, source, 2)
    weight = load_file(out / "model.safetensors")[f"{STACKS}.gate_up_proj"]
    for changed in (weight[[1, 0, 2]], weight.view(3, -1, INTER, 2).flip(3).flatten(2)):
        edit(out, f"{STACKS}.gate_up_proj", 0, changed.contiguous().view(torch.uint8).numpy().tobytes())
        assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.exact", f"{STACKS}.gate_up_proj")]


def test_the_place_of_a_damage_is_that_in_the_stack(tmp_path: Path) -> None:
    source = gpt_oss(tmp_path)
    out = dequantize(source)
    weight = load_file(out / "model.safetensors")[f"{STACKS}.down_proj"]
    row, column = weight.shape[1] + 7, 11
    flip(out, f"{STACKS}.down_proj", 2 * (row * weight.shape[2] + column), 0)
    (found,) = findings(out, source)
    assert (found.data["worst"]["row"], found.data["worst"]["column"]) == (row, column)


def test_layouts_and_dtypes_in_two_steps(tmp_path: Path) -> None:
    """gpt-oss' blocks, each projection by itself and dense, against the blocks."""
    source = gpt_oss(tmp_path)
    alone = tmp_path / "alone"
    assert main(["unpack", str(source), str(alone), "--layout", "mxfp4-ct", "-q", "--no-progress"]) == 0
    out = dequantize(alone)
    assert_sound(out, alone, 9)
    assert_sound(out, source, 18)
    name = f"{STACKS}.2.up_proj.weight"
    flip(out, name, 20, 0)
    assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.exact", name)]


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "compared"), [([], 5), (["--experts"], 4), (["--only", "mtp.*"], 2), (["--dtype", "fp8"], 4)]
)
def test_what_stays_is_a_copy(options: list[str], compared: int, tmp_path: Path) -> None:
    source = deepseek(tmp_path / "source")
    out = dequantize(source, *options, "--allow", "plan.config")
    assert_sound(out, source, compared)
    flip(out, f"{EXPERTS[3]}.weight", 30, 0)
    flip(out, f"{PROJECTION}.weight", 30, 0)
    assert {(f.id, f.tensor) for f in findings(out, source)} == {
        ("numeric.exact", f"{EXPERTS[3]}.weight"),
        ("numeric.exact", f"{PROJECTION}.weight"),
    }


def test_what_block_fp8_rounds_is_within_a_bound(tmp_path: Path) -> None:
    source = deepseek(tmp_path / "source", low=109)
    out = dequantize(source, "--dtype", "fp8", "--inexact", "round")
    assert_sound(out, source, 4)
    name = f"{EXPERTS[1]}.weight"
    codes = np.frombuffer(stored(out, name), np.uint8)
    flip(out, name, int((codes & 0x7F).argmax()), 5)
    assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.error", name)]


def test_a_scale_of_block_fp8(tmp_path: Path) -> None:
    source = deepseek(tmp_path / "source")
    out = dequantize(source, "--dtype", "fp8")
    flip(out, f"{EXPERTS[0]}.scale", 1, 0)
    assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.exact", f"{EXPERTS[0]}.weight")]


def test_a_scale_taken_for_one(tmp_path: Path) -> None:
    weight = (torch.arange(256) % 120).to(torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    source = checkpoint(tmp_path / "source", {"a.weight": weight}, {"model_type": "x"})
    out = dequantize(source, "--missing-scale", "one")
    assert_sound(out, source, 1)
    flip(out, "a.weight", 100, 0)
    assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.exact", "a.weight")]


def test_what_says_how_activations_are_quantized_is_not_missed(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(()),
        "a.input_scale": torch.ones(()), "layers.0.self_attn.k_scale": torch.ones(()),
    }  # fmt: skip
    source = checkpoint(tmp_path / "source", tensors, {"model_type": "x"})
    assert_sound(dequantize(source), source, 1)


# --- words along the inputs, as a source and as a result ---------------------------------------------------


def gptq(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Each number to the nearest of 16 by AutoGPTQ's rule, in its layout (v1): the test's own packing."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 16 - 1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15).int().view(outputs, inputs)
    return {
        "qweight": along_rows(codes.T),
        "qzeros": along_rows(zero.int() - 1).T.contiguous(),
        "scales": scale.T.half().contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // group,
    }


def along_rows(codes: torch.Tensor) -> torch.Tensor:
    """Eight numbers of a column in a word, [rows / 8, columns]."""
    eight = codes.long().reshape(-1, 8, codes.shape[1])
    words = (eight << torch.arange(0, 32, 4)[None, :, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def write_gptq(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    tensors = {f"{module}.{part}": t for module, weight in weights.items() for part, t in gptq(weight, 32).items()}
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
    return checkpoint(folder, tensors, {"model_type": "x", "quantization_config": declared})


@pytest.fixture
def weight() -> torch.Tensor:
    return (torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * 0.02).half()


def test_gptq_against_what_it_was_made_of(weight: torch.Tensor, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "dense", {"a.weight": weight, "b.weight": weight[:64].clone()}, {"model_type": "x"})
    made = write_gptq(tmp_path / "gptq", {"a": weight, "b": weight[:64]})
    assert_sound(made, source, 2)
    flip(made, "b.qweight", 200, 7)
    assert [(f.id, f.tensor) for f in findings(made, source)] == [("numeric.error", "b.qweight")]


def test_words_along_the_columns_against_gptq(weight: torch.Tensor, tmp_path: Path) -> None:
    """The same codes as compressed-tensors packs them; a word of the source holds eight of its columns."""
    source = write_gptq(tmp_path / "gptq", {"a": weight})
    parts: dict[str, Any] = gptq(weight, 32)
    codes = torch.stack([parts["qweight"] >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1).T
    zeros = torch.stack([parts["qzeros"] >> shift & 15 for shift in range(0, 32, 4)], 2).flatten(1, 2).T + 1
    tensors = {
        "a.weight_packed": along_rows(codes.T).T.contiguous(),
        "a.weight_zero_point": along_rows(zeros),
        "a.weight_scale": parts["scales"].T.contiguous(),
        "a.weight_shape": torch.tensor(weight.shape),
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    table = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    made = checkpoint(tmp_path / "made", tensors, {"model_type": "x", "quantization_config": table | groups})
    found = outcome(made, source)
    assert found.findings == []
    (line,) = found.figures["numeric"]["tensors"]
    assert line["max_abs"] == 0
    flip(made, "a.weight_packed", 201, 7)
    assert [(f.id, f.tensor) for f in findings(made, source)] == [("numeric.error", "a.weight_packed")]


def test_what_lies_transposed_without_a_way_to_read_it_is_not_run(weight: torch.Tensor, tmp_path: Path) -> None:
    """GPTQ made of FP8: neither can be read by the other's rows."""
    made = write_gptq(tmp_path / "gptq", {"a": weight})
    tensors = {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(96, 1)}
    source = checkpoint(tmp_path / "fp8", tensors, {"model_type": "x"})
    found = outcome(made, source)
    assert found.findings == []
    assert results(found)["numeric.error"] == "skip"
