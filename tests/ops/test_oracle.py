"""Kernels against a second implementation of every format: both arithmetics, every dtype, hard values, any cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.ops.select import select
from ops import oracle
from ops.runner import NAMES, run
from ops.samples import SOURCES, difficult, from_bits, normal
from ops.schemes import bytes_of

INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
NV = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MX = {**FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def made(
    w: Tensor, weights: dict[str, Any], format: str, arithmetic: str = "compat", budget: int = 5000
) -> dict[str, Tensor]:
    """What the chosen operation makes of a weight, by suffix."""
    id, args = select(weights, format, NAMES[w.dtype], arithmetic)
    found = run(id, {**args, "modules": ["m"]}, {"m.weight": w}, budget)
    return {name.removeprefix("m."): tensor for name, tensor in found.items()}


def integer_scheme(bits: int, group: int | None) -> dict[str, Any]:
    return {**INT, "num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}


def assert_packed(w: Tensor, bits: int, group: int | None, arithmetic: str, budget: int) -> None:
    found = made(w, integer_scheme(bits, group), "pack-quantized", arithmetic, budget)
    codes, scale = oracle.integers(w.double().numpy(), NAMES[w.dtype], bits, group, arithmetic)
    assert bytes_of(found["weight_packed"]) == oracle.packed_words(codes, bits)
    assert found["weight_scale"].dtype == w.dtype
    assert np.array_equal(found["weight_scale"].double().numpy(), scale)
    assert found["weight_shape"].tolist() == list(w.shape)


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("make", [lambda dtype: normal(50, 256, dtype), difficult], ids=["normal", "difficult"])
class TestFormats:
    @pytest.mark.parametrize("arithmetic", ["compat", "float32"])
    @pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 128), (4, None), (4, 32)])
    def test_pack_int(
        self, make: Callable[[str], Tensor], dtype: str, bits: int, group: int | None, arithmetic: str
    ) -> None:
        assert_packed(make(dtype), bits, group, arithmetic, 5000)

    @pytest.mark.parametrize("arithmetic", ["compat", "float32"])
    @pytest.mark.parametrize("bits", [8, 5, 2])
    def test_int8(self, make: Callable[[str], Tensor], dtype: str, bits: int, arithmetic: str) -> None:
        w = make(dtype)
        found = made(w, integer_scheme(bits, None), "int-quantized", arithmetic)
        codes, scale = oracle.integers(w.double().numpy(), dtype, bits, None, arithmetic)
        assert np.array_equal(found["weight"].numpy(), codes)
        assert np.array_equal(found["weight_scale"].double().numpy(), scale)

    def test_fp8_channel(self, make: Callable[[str], Tensor], dtype: str) -> None:
        w = make(dtype)
        found = made(w, {**FLOAT, "num_bits": 8, "strategy": "channel"}, "float-quantized")
        codes, scale = oracle.fp8_channel(w.double().numpy(), dtype)
        assert bytes_of(found["weight"]) == codes
        assert np.array_equal(found["weight_scale"].double().numpy(), scale)

    @pytest.mark.parametrize("block", [[128, 128], [16, 24]])
    def test_fp8_block(self, make: Callable[[str], Tensor], dtype: str, block: list[int]) -> None:
        w = make(dtype)
        scheme = {**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": block}
        found = made(w, scheme, "float-quantized")
        codes, scale = oracle.fp8_block(w.double().numpy(), dtype, *block)
        assert bytes_of(found["weight"]) == codes
        assert np.array_equal(found["weight_scale"].double().numpy(), scale)

    def test_nvfp4(self, make: Callable[[str], Tensor], dtype: str) -> None:
        w = make(dtype)
        found = made(w, NV, "nvfp4-pack-quantized")
        overall = oracle.global_scale(w.abs().max().item(), dtype)
        codes, scale = oracle.nvfp4(w.double().numpy(), dtype, overall)
        assert found["weight_global_scale"].tolist() == [overall]
        assert bytes_of(found["weight_scale"]) == scale
        assert bytes_of(found["weight_packed"]) == codes

    def test_mxfp4(self, make: Callable[[str], Tensor], dtype: str) -> None:
        w = make(dtype)
        found = made(w, {**MX, "num_bits": 4}, "mxfp4-pack-quantized")
        codes, scale = oracle.mxfp4(w.double().numpy(), dtype)
        assert bytes_of(found["weight_scale"]) == scale
        assert bytes_of(found["weight_packed"]) == codes

    def test_mxfp8(self, make: Callable[[str], Tensor], dtype: str) -> None:
        w = make(dtype)
        found = made(w, {**MX, "num_bits": 8}, "mxfp8-quantized")
        codes, scale = oracle.mxfp8(w.double().numpy(), dtype)
        assert bytes_of(found["weight_scale"]) == scale
        assert bytes_of(found["weight"]) == codes


@pytest.mark.parametrize("arithmetic", ["compat", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_unusual_widths(bits: int, arithmetic: str) -> None:
    """The generic operation: both arithmetics there too."""
    assert_packed(normal(50, 128, "BF16"), bits, 32, arithmetic, 5000)


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-3, 1e-5])
def test_nvfp4_of_small_float16(scale: float) -> None:
    w = normal(20, 128, "F16") * scale
    found = made(w, NV, "nvfp4-pack-quantized")
    overall = oracle.global_scale(w.abs().max().item(), "F16")
    codes, local = oracle.nvfp4(w.double().numpy(), "F16", overall)
    assert found["weight_global_scale"].tolist() == [overall]
    assert (bytes_of(found["weight_scale"]), bytes_of(found["weight_packed"])) == (local, codes)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, int, int | None]:
    """Any finite values in any dtype, bits and a group that fit the width."""
    bits, group = draw(st.sampled_from([4, 8])), draw(st.sampled_from([None, 8, 24, 32]))
    rows, groups = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    cols = (group or 8) * groups
    count = rows * cols
    raw = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=count, max_size=count))
    bits_of_all = np.array(raw, dtype=np.int64).reshape(rows, cols)
    return from_bits(bits_of_all, draw(st.sampled_from(SOURCES))), bits, group


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from(["compat", "float32"]), st.integers(1, 2000))
def test_pack_int_of_anything(drawn: tuple[Tensor, int, int | None], arithmetic: str, budget: int) -> None:
    w, bits, group = drawn
    assert_packed(w, bits, group, arithmetic, budget)


def test_float32_arithmetic_is_no_worse() -> None:
    """The same scales, and codes never farther from the weight than those divided in its dtype."""
    w = normal(64, 256, "BF16")
    scheme = integer_scheme(8, None)
    compat, wide = (made(w, scheme, "int-quantized", arithmetic) for arithmetic in ("compat", "float32"))
    assert torch.equal(compat["weight_scale"], wide["weight_scale"])
    scale = compat["weight_scale"].double()
    errors = [(found["weight"].double() * scale - w.double()).abs() for found in (compat, wide)]
    assert (errors[1] <= errors[0] + 1e-12).all()
    assert errors[1].square().mean() < 0.95 * errors[0].square().mean()


def test_float32_arithmetic_of_asymmetric_schemes() -> None:
    """Codes of w / scale + zero point in float32, under the scales and zero points of the other arithmetic."""
    w = normal(64, 256, "BF16") + 0.01
    scheme = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": False}
    compat, wide = (made(w, scheme, "int-quantized", arithmetic) for arithmetic in ("compat", "float32"))
    assert torch.equal(compat["weight_scale"], wide["weight_scale"])
    assert torch.equal(compat["weight_zero_point"], wide["weight_zero_point"])
    ratio = w.float().numpy() / wide["weight_scale"].float().numpy() + wide["weight_zero_point"].float().numpy()
    assert np.array_equal(wide["weight"].numpy(), np.rint(ratio.clip(-128, 127)))
    assert not torch.equal(compat["weight"], wide["weight"])
