"""What headers tell of a weight, what they leave open, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from ckptkit.decode import Encoded
from ckptkit.errors import SOURCE, USAGE, UserError
from ckptkit.files.header import nbytes

from .memory import Module, Stored
from .samples import gptq, sample_of

Specs = dict[str, tuple[str, tuple[int, ...]]]


def told(last: str, specs: Specs, **known: Any) -> Encoded:
    """What is told of tensors of these dtypes and shapes."""
    tensors = {part: Stored(dtype, shape, bytes(nbytes(dtype, shape))) for part, (dtype, shape) in specs.items()}
    return Module(last, tensors, **known).weight


def fp8(scale: tuple[int, ...], shape: tuple[int, ...] = (256, 256), dtype: str = "F32") -> Specs:
    return {"weight": ("F8_E4M3", shape), "weight_scale_inv": (dtype, scale)}


def of_gptq(**changes: tuple[str, tuple[int, ...]]) -> Specs:
    """4 bits, 64 inputs, 32 outputs, groups of 32."""
    parts = {"qweight": ("I32", (8, 32)), "qzeros": ("I32", (2, 4)), "scales": ("F16", (2, 32))}
    return {**parts, **changes}


@pytest.mark.parametrize(
    ("scale", "shape", "block", "size", "inferred"),
    [
        ((2, 2), (256, 256), None, (128, 128), True),
        ((2, 2), (256, 256), (128, 128), (128, 128), False),
        ((2, 2), (130, 200), None, (128, 128), True),
        ((2, 2), (130, 200), (100, 120), (100, 120), False),
        ((1, 2), (100, 200), None, (128, 128), True),
        ((1, 2), (1, 200), (128, 128), (128, 128), False),
        ((1, 2), (1, 200), None, (1, 100), False),
        ((4, 7), (4, 100), (1, 16), (1, 16), False),
        ((4, 7), (4, 100), None, (1, 16), True),
        ((3, 2, 2), (3, 256, 256), None, (128, 128), True),
        ((3, 1, 1), (3, 256, 128), None, (256, 128), False),
        ((3, 1), (3, 256, 128), None, (256, 128), False),
        ((256, 2), (256, 256), (128, 128), (1, 128), False),  # of another module's config: here it is by row
    ],
)
def test_size_of_blocks(
    scale: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None, size: tuple[int, int], inferred: bool
) -> None:
    found = told("weight", fp8(scale, shape), block=block)
    assert ((found.height, found.width), found.inferred) == (size, inferred)


@pytest.mark.parametrize(
    ("groups", "block", "height", "inferred"),
    [(2, None, 40, False), (2, (1, 64), 64, False), (3, None, 32, True), (3, (1, 30), 30, False)],
)
def test_size_of_groups_of_gptq(groups: int, block: tuple[int, int] | None, height: int, inferred: bool) -> None:
    specs = of_gptq(qweight=("I32", (10, 32)), qzeros=("I32", (groups, 4)), scales=("F16", (groups, 32)))
    found = told("qweight", specs, bits=4, block=block, gptq="v1")
    assert (found.rows, found.cols, found.height, found.inferred) == (80, 32, height, inferred)
    assert not told("qweight", specs | {"g_idx": ("I32", (80,))}, bits=4, gptq="v2").inferred


FP4 = {"weight": ("U8", (8, 32)), "weight_scale": ("U8", (8, 2))}
NVFP4 = {"weight": ("U8", (8, 32)), "weight_scale": ("F8_E4M3", (8, 4)), "weight_scale_2": ("F32", ())}
PACKED = {"weight_packed": ("I32", (8, 8)), "weight_scale": ("BF16", (8, 2))}
AWQ = {"qweight": ("I32", (64, 4)), "qzeros": ("I32", (2, 4)), "scales": ("F16", (2, 32))}


@pytest.mark.parametrize(
    ("last", "specs", "known"),
    [
        ("weight", fp8((3, 2)), {"block": (128, 128)}),
        ("weight", fp8((2, 2)), {"block": (64, 64)}),
        ("weight", fp8((300, 2)), {}),
        ("weight", fp8((2, 2, 2)), {}),
        ("weight", fp8((3, 2, 2), (2, 256, 256)), {}),
        ("weight", fp8((0, 2)), {}),
        ("weight", fp8((256, 3), dtype="U8"), {}),
        ("weight", FP4 | {"weight_scale": ("U8", (8, 1))}, {}),
        ("weight", FP4 | {"weight_scale": ("F8_E8M0", (4, 2))}, {}),
        ("weight", FP4 | {"weight_scale": ("F8_E8M0", ())}, {}),
        ("weight", {"weight": ("U8", (1, 32)), "weight_scale": ("U8", (1, 1))}, {}),
        ("weight", FP4 | {"weight_scale": ("F32", (8, 2))}, {}),
        ("weight", NVFP4 | {"weight_scale": ("F8_E4M3", (8, 2))}, {}),
        ("weight", NVFP4 | {"weight_scale_2": ("F32", (2,))}, {}),
        ("weight", {"weight": ("I64", (8, 8)), "weight_scale": ("F32", (8, 1))}, {}),
        ("weight", {"weight": ("I8", (8, 8)), "SCB": ("F32", (8,))}, {"bits": 8}),
        ("weight_packed", PACKED, {}),
        ("weight_packed", PACKED, {"bits": 9}),
        ("weight_packed", PACKED | {"weight_scale": ("BF16", (8, 5))}, {"bits": 4}),
        ("weight_packed", PACKED | {"weight_zero_point": ("I32", (2, 2))}, {"bits": 4}),
        ("weight_packed", PACKED | {"weight_zero_point": ("I32", (1, 3))}, {"bits": 4}),
        ("weight_packed", PACKED | {"weight_zero_point": ("I8", (8, 1))}, {"bits": 4}),
        ("weight_packed", PACKED | {"weight_g_idx": ("I32", (32,))}, {"bits": 4}),
        (
            "weight_packed",
            {"weight_packed": ("I32", (2, 4, 8)), "weight_scale": ("BF16", (2, 4, 2)), "weight_zero_point": ("I32", (2, 1, 2))},
            {"bits": 4},
        ),
        ("qweight", of_gptq(), {}),
        ("qweight", of_gptq(), {"bits": 4}),
        ("qweight", of_gptq(), {"bits": 5}),
        ("qweight", of_gptq(), {"bits": 8, "gptq": "v1"}),
        ("qweight", of_gptq(scales=("F16", (64,))), {"bits": 4, "gptq": "v1"}),
        ("qweight", of_gptq(qzeros=("I32", (1, 4))), {"bits": 4, "gptq": "v1"}),
        ("qweight", of_gptq(g_idx=("I32", (80,))), {"bits": 4, "gptq": "v1"}),
        ("qweight", of_gptq(qzeros=("I32", (3, 4)), scales=("F16", (3, 32))), {"bits": 4, "gptq": "v1"}),
        ("qweight", {part: spec for part, spec in of_gptq().items() if part != "qzeros"}, {"bits": 4, "gptq": "v1"}),
        ("qweight", AWQ, {"bits": 8}),
        ("qweight", AWQ | {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (2, 8))}, {"bits": 8}),
        ("qweight", AWQ | {"scales": ("F16", (64, 2))}, {"bits": 4}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(last: str, specs: Specs, known: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        told(last, specs, **known)
    assert [(finding.id, finding.exit_code) for finding in caught.value.findings] == [("decode.format", USAGE)]


@pytest.mark.parametrize(
    ("last", "specs"),
    [
        ("weight", {"weight": ("F8_E4M3", (4, 4))}),
        ("weight_packed", {"weight_packed": ("I32", (4, 4))}),
        ("qweight", {"qweight": ("I32", (4, 4))}),
        ("blocks", {"blocks": ("U8", (2, 4, 2, 16))}),
        ("weight", {part: spec for part, spec in NVFP4.items() if part != "weight_scale_2"}),
    ],
)
def test_a_weight_without_its_scale(last: str, specs: Specs) -> None:
    with pytest.raises(UserError) as caught:
        told(last, specs, bits=4)
    assert [(f.id, f.exit_code) for f in caught.value.findings] == [("names.weight-without-scale", SOURCE)]


def test_fp8_that_needs_no_scale() -> None:
    """Where it is asked for, its numbers are taken as they are."""
    codes = Stored("F8_E4M3", (2, 3), bytes([0x38, 0x40, 0x80, 0xB8, 0x01, 0x7E]))
    found = Module("weight", {"weight": codes}, unscaled=True)
    assert found.in_pieces(1).tolist() == [[1.0, 2.0, -0.0], [-1.0, 2**-9, 448.0]]
    assert np.signbit(found.rows()).tolist() == [[False, False, True], [True, False, False]]


def test_one_group_in_all() -> None:
    found = told("weight", {"weight": ("U8", (1, 16)), "weight_scale": ("U8", (1, 1))})
    assert (found.rows, found.cols, found.width, found.grid) == (1, 32, 32, (1, 1))


def test_a_shape_of_f4_counts_numbers() -> None:
    found = told("weight", {"weight": ("F4", (8, 64)), "weight_scale": ("F8_E8M0", (8, 2))})
    assert (found.rows, found.cols, found.width) == (8, 64, 32)


@pytest.mark.parametrize("group", [-1, 3])
def test_a_group_that_there_is_not(group: int) -> None:
    sample = gptq(4, order="runs")
    order = Stored("I32", (96,), struct.pack("<96i", *([0] * 95), group))
    with pytest.raises(UserError) as caught:
        Module("qweight", {**sample.tensors, "g_idx": order}, **sample.known).rows()
    assert [(f.id, f.exit_code) for f in caught.value.findings] == [("data.group-order", SOURCE)]


def test_an_order_of_minus_ones_is_none() -> None:
    """compressed-tensors leaves a ``weight_g_idx`` that is not in use so."""
    sample = sample_of("packed, 4 bits")
    order = Stored("I32", (96,), struct.pack("<96i", *[-1] * 96))
    found = Module("weight_packed", {**sample.tensors, "weight_g_idx": order}, **sample.known).rows()
    assert found.tolist() == Module("weight_packed", sample.tensors, **sample.known).rows().tolist()
