"""Every byte as llmcompressor's model-free converter writes it, whatever way the rows are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckptkit.ops import Context
from ops.runner import run
from ops.samples import SOURCES, difficult, normal
from ops.schemes import EXPLICIT, PRESETS, chosen, differing, library, ours

pytest.importorskip("llmcompressor")

QUICK = [
    ("W4A16", "BF16"), ("w8-channel", "F32"), ("W8A8", "F16"), ("FP8_DYNAMIC", "BF16"), ("FP8_BLOCK", "F16"),
    ("NVFP4A16", "BF16"), ("MXFP4", "BF16"), ("MXFP8", "F32"), ("W4A16_ASYM", "BF16"), ("W3A16", "F16"),
    ("w8-tensor", "BF16"),
]  # fmt: skip
ALL = [(name, dtype) for name in (*PRESETS, *EXPLICIT) for dtype in SOURCES]
LAYER = "model.layers.0.self_attn.q_proj"


def samples(name: str, dtype: str) -> Iterator[Tensor]:
    yield normal(200, 256, dtype)
    hard = difficult(dtype)
    # The topmost binade is where microscaling differs on purpose: see test_differences.
    yield torch.where(hard.abs() > torch.finfo(hard.dtype).max / 2, hard / 2, hard) if name.startswith("MX") else hard


@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_bytes_are_the_librarys(name: str, dtype: str) -> None:
    for w in samples(name, dtype):
        assert differing(ours(name, {LAYER: w}), library(name, {LAYER: w})) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_bytes_are_the_librarys_for_every_scheme(name: str, dtype: str) -> None:
    shapes = [(1, 256), (130, 384), (33, 128)]
    for w in (*samples(name, dtype), *(normal(*shape, dtype) for shape in shapes)):
        wanted = library(name, {LAYER: w})
        for budget in (1, 20_000, 1 << 40):
            assert differing(ours(name, {LAYER: w}, budget), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W8A16", "W4A16_ASYM", "FP8_BLOCK", "NVFP4A16", "MXFP4"])
def test_bytes_are_the_librarys_for_float64(name: str) -> None:
    w = normal(200, 256, "F32").double() * 1.000000001
    assert differing(ours(name, {LAYER: w}), library(name, {LAYER: w})) == []


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in (*PRESETS, *EXPLICIT) for dtype in ("BF16", "F16")]
)
def test_what_is_not_finite_is_kept_as_the_library_keeps_it(name: str, dtype: str, bad: float) -> None:
    w = normal(200, 256, dtype)
    w[7, 3] = w[120, 200] = bad
    made = ours(name, {LAYER: w}, 20_000, Context(nonfinite_error=False))
    assert differing(any_nan(made), any_nan(library(name, {LAYER: w}))) == []


def any_nan(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """NaN made one NaN: which of them a conversion gives depends on where in a vector it is, in the library too."""
    return {name: t.double().nan_to_num_(nan=1e300) if t.is_floating_point() else t for name, t in made.items()}


FUSED = {
    "self_attn": ("q_proj", "k_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj"),
}


@pytest.mark.parametrize("parent", FUSED)
def test_a_fused_set_shares_its_global_scale(parent: str) -> None:
    weights = {
        f"model.layers.0.{parent}.{name}": normal(48 + 16 * i, 128, "BF16", i) for i, name in enumerate(FUSED[parent])
    }
    weights[f"model.layers.0.{parent}.{FUSED[parent][1]}"] *= 3
    wanted = library("NVFP4A16", weights)
    assert differing(ours("NVFP4A16", weights, 4096), wanted) == []
    # The same when the others lie in another shard.
    id, args = chosen("NVFP4A16", "BF16")
    for module in weights:
        others = [name for name in weights if name != module]
        inputs = {f"{name}.weight": weights[name] for name in (module, *others)}
        made = run(id, {**args, "modules": [module]}, inputs, 4096)
        assert differing(made, {name: tensor for name, tensor in wanted.items() if name.startswith(f"{module}.")}) == []


@pytest.mark.slow
def test_the_presets_are_all_there_are() -> None:
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert set(PRESETS) == PRESET_SCHEMES.keys() - {"FP8", "NVFP4", "UNQUANTIZED"}
