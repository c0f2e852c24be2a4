"""Values: counts against obvious loops, thresholds against distributions, and what is not looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file, save_file

from ckptkit.checks.roles import Role, What
from ckptkit.checks.values import most_at_ends
from ckptkit.families import Kind

from .subjects import findings, ids, quantize

UP = "model.layers.0.mlp.up_proj"


def model(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    return checkpoint(folder, llama(**tensors), llama_config(**(config or {})))


def change(folder: Path, name: str, made: Any) -> None:
    """Replace a tensor by what ``made`` gives for it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = made(tensors[name]).to(tensors[name].dtype).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


# --- numbers that cannot be meant ----------------------------------------------------------------------------

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_nan_and_inf_is_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    """In a tensor of several pieces, with both signs."""
    weight = torch.randn(1500, 512, generator=torch.Generator().manual_seed(0))
    for at in range(0, weight.numel(), 70_001):
        weight.view(-1)[at] = (math.nan, -math.nan, math.inf, -math.inf)[at % 4]
    weight = weight.to(dtype)
    folder = checkpoint(tmp_path / "model", {"model.layers.0.mlp.up_proj.weight": weight})
    counts = {f.id: f.data[f.id.removeprefix("data.")] for f in findings(folder)}
    assert counts == {"data.nan": int(weight.isnan().sum()), "data.inf": int(weight.isinf().sum())}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_number_is_none(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.full((64, 64), -torch.finfo(dtype).max, dtype=dtype)
    weight[::2] *= -1
    assert ids(checkpoint(tmp_path / "model", {"model.layers.0.mlp.up_proj.weight": weight})) == []


def test_zeros(tmp_path: Path) -> None:
    """A bias, a single number and a negative zero beside others are no matter; a norm of zeros is a warning."""
    zeros = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64),
        "model.layers.0.mlp.down_proj.weight": torch.full((64, 64), -0.0),
        "model.layers.0.mlp.up_proj.bias": torch.zeros(64),
        "model.layers.0.mlp.experts.gate_up_proj_bias": torch.zeros(4, 128),
        "model.layers.0.mlp.experts.down_proj.bias": torch.zeros(4, 64),
        "model.norm.weight": torch.zeros(64),
        "model.gate.weight": torch.zeros(1),
        "model.layers.0.mlp.gate_proj.weight": torch.eye(64),
    }
    found = findings(checkpoint(tmp_path / "model", zeros))
    assert {(f.id, f.tensor, f.severity) for f in found} == {
        ("data.all-zero", "model.layers.0.mlp.up_proj.weight", "error"),
        ("data.all-zero", "model.layers.0.mlp.down_proj.weight", "error"),
        ("data.all-zero", "model.norm.weight", "warning"),
    }


# --- scales and codes ----------------------------------------------------------------------------------------

RECIPES = ["w4a16-lm_head-w8a16", "fp8-dynamic", "fp8-block", "nvfp4a16", "mxfp4"]


def distributions() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (256, 128)
    normal = torch.randn(*shape, generator=generator)
    uniform = torch.rand(*shape, generator=generator) - 0.5
    return {
        "normal": normal * 0.02,
        "uniform": uniform * 0.1,
        "heavy tails": torch.tan(uniform * 3) * 0.01,
        "laplace": uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.4999)) * 0.02,
        "one-sided": normal.abs() * 0.02,
    }


@pytest.mark.parametrize("name", distributions())
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_found_in_sound_weights(tmp_path: Path, recipe: str, name: str) -> None:
    weight = distributions()[name].to(torch.bfloat16)
    folder = checkpoint(tmp_path / "model", llama() | {f"{UP}.weight": weight}, llama_config())
    assert ids(quantize(folder, tmp_path / "out", recipe)) == []


@pytest.mark.parametrize("recipe", ["w4a16-lm_head-w8a16", "nvfp4a16"])
def test_scales_that_are_far_too_small_saturate_the_codes(tmp_path: Path, recipe: str) -> None:
    """Weights that all lie at the ends, whatever made them so."""
    out = quantize(model(tmp_path / "model"), tmp_path / "out", recipe)
    (out / "ckptkit.json").unlink()
    ends = {"w4a16-lm_head-w8a16": 0x0F0F0F0F, "nvfp4a16": 0x7F}[recipe]
    change(out, f"{UP}.weight_packed", lambda t: torch.where(torch.arange(t.shape[1]) % 2 == 0, t, ends))
    found = findings(out)
    assert [(f.id, f.severity, f.tensor) for f in found] == [("data.saturated", "warning", f"{UP}.weight_packed")]


@pytest.mark.parametrize(
    ("label", "bits", "share", "most"),
    [
        ("int4 group 128", 4, 128, 2 * 2 / 16 + 2 / 128),
        ("int8 channel", 8, math.inf, 2 * 2 / 256),
        ("nvfp4", 0, 16, 2 / 6 + 2 / 16),
        ("int2 group 32", 2, 32, 1 + 2 / 32),
    ],
)
def test_how_much_is_too_much(label: str, bits: int, share: float, most: float) -> None:
    assert most_at_ends(Role(What.CODES, Kind.LINEAR, label, bits, share)) == pytest.approx(most)


@pytest.mark.parametrize(
    ("recipe", "part", "made", "id"),
    [
        ("w4a16", "weight_scale", lambda t: t * torch.tensor([0.0] + [1.0] * 255).reshape(256, 1), "data.scale-zero"),
        ("w4a16", "weight_scale", lambda t: torch.where(torch.arange(256).reshape(256, 1) == 7, torch.nan, t), "data.scale-nonfinite"),
        ("fp8-dynamic", "weight_scale", lambda t: torch.where(torch.arange(256).reshape(256, 1) == 7, -t, t), "data.scale-negative"),
        ("mxfp4", "weight_scale", lambda t: torch.full_like(t, 255), "data.scale-nonfinite"),
        ("nvfp4a16", "weight_scale", lambda t: torch.full(t.shape, 2.0**-9).to(t.dtype), "data.scale-range"),
        ("nvfp4a16", "weight_scale", lambda t: torch.full(t.shape, torch.nan), "data.scale-nonfinite"),
        ("nvfp4a16", "weight_global_scale", lambda t: t * 0, "data.scale-zero"),
        ("w4a16", "weight_shape", lambda t: t + torch.tensor([0, 8]), "data.weight-shape"),
        ("w4a16", "weight_shape", lambda t: t + torch.tensor([1, 0]), "data.weight-shape"),
        ("fp8-dynamic", "weight", lambda t: torch.full(t.shape, torch.nan), "data.nan"),
        ("fp8-dynamic", "weight", lambda t: t.float() * 0, "data.all-zero"),
        ("nvfp4a16", "weight_packed", lambda t: t * 0 + 0x80, "data.all-zero"),
        ("w4a16", "weight_packed", lambda t: t * 0 - 0x77777778, "data.all-zero"),
        ("w4a16", "weight_packed", lambda t: t * 0 + 0x33333333, "data.saturated"),
    ],
)  # fmt: skip
def test_one_damaged_part(tmp_path: Path, recipe: str, part: str, made: Any, id: str) -> None:
    out = quantize(model(tmp_path / "model"), tmp_path / "out", recipe)
    (out / "ckptkit.json").unlink()
    change(out, f"{UP}.{part}", made)
    assert [(f.id, f.tensor) for f in findings(out)] == [(id, f"{UP}.{part}")]


def test_the_global_scale_that_the_peer_library_lets_overflow(tmp_path: Path) -> None:
    """llmcompressor's NVFP4 of small float16 weights: every block's scale is subnormal."""
    small = {name: (t * 0.1).to(torch.float16) for name, t in llama().items()}
    folder = checkpoint(tmp_path / "model", small, llama_config(torch_dtype="float16"))
    assert ids(quantize(folder, tmp_path / "native", "nvfp4a16")) == []
    theirs = quantize(folder, tmp_path / "theirs", "nvfp4a16", "--backend", "llmcompressor")
    assert set(ids(theirs)) == {"data.scale-range"}


# --- rows ----------------------------------------------------------------------------------------------------


def table(odd: int, made: Any, rows: int = 1000) -> torch.Tensor:
    """A table of several pieces whose last ``odd`` rows are what ``made`` gives for them."""
    weight = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.02
    weight[rows - odd :] = made(weight[rows - odd :])
    return weight


ODD = {
    "data.near-zero-rows": lambda t: t * 1e-4,
    "data.repeated-rows": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("id", ODD)
@pytest.mark.parametrize(
    ("odd", "vocab", "tokens", "is_found"),
    [
        (40, 1000, None, False),  # reserved tokens
        (80, 1000, None, True),
        (80, 920, None, False),  # padding behind the config's vocabulary
        (80, 1000, 920, False),  # padding behind the tokenizer's
        (80, 1000, 990, True),
    ],
)
def test_rows_that_nobody_trained(
    tmp_path: Path, id: str, odd: int, vocab: int, tokens: int | None, is_found: bool
) -> None:
    folder = checkpoint(tmp_path / "model", {"model.embed_tokens.weight": table(odd, ODD[id])}, {"vocab_size": vocab})
    if tokens:
        vocabulary = {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(tokens)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    found = [(f.id, f.severity, f.data["first"]) for f in findings(folder)]
    first = 1000 - odd + (id == "data.repeated-rows")
    assert found == ([(id, "warning", first)] if is_found else [])


def test_rows_of_zeros_are_near_zero_and_not_repeated(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", {"lm_head.weight": table(100, torch.zeros_like)}, {"vocab_size": 1000})
    assert [(f.id, f.data["rows"]) for f in findings(folder)] == [("data.near-zero-rows", 100)]
