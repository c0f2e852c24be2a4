"""``dsv4_fp4@1`` and ``dsv4_fp8@1`` against plain float64 arithmetic and a search for the nearest code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.files.header import Spec
from ckptkit.ops import NonFinite
from ops.runner import NAMES, run_bytes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def like(values: torch.Tensor, form: str, budget: int = 20_000, **args: Any) -> tuple[Any, Any]:
    """The bytes of codes [N, ...] and of exponents [N', K'] that the operation makes, as uint8."""
    given = {Spec("w", NAMES[values.dtype], tuple(values.shape)): values.view(torch.uint8).numpy().tobytes()}
    made = run_bytes(f"dsv4_{form}@1", {"names": ["m.weight", "m.scale"], **args}, given, budget)
    codes, scale = (np.frombuffer(data, np.uint8).reshape(spec.shape) for spec, data in made.items())
    assert [spec.dtype for spec in made] == ["I8" if form == "fp4" else "F8_E4M3", "F8_E8M0"]
    return codes, scale


def fp8(values: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Any, Any]:
    return like(values, "fp8", block=list(block))


def exponent(peak: Any, top: float) -> Any:
    """E8M0 of 2**ceil(log2(peak / top)), of 1 where there is nothing."""
    with np.errstate(divide="ignore"):
        return np.where(peak > 0, np.maximum(np.ceil(np.log2(peak / top)) + 127, 0), 127).astype(np.uint8)


def nearest(values: Any, held: Any) -> Any:
    """The code of the nearest of ``held``, the even one of two, with its sign as the bit above all codes."""
    away = np.abs(np.abs(values)[..., None] - held)
    least = away == away.min(axis=-1, keepdims=True)
    even = np.arange(len(held)) % 2 == 0
    code = np.where((least & even).any(-1), (least & even).argmax(-1), least.argmax(-1))
    return code + np.signbit(values) * (8 if len(held) == 8 else 128)


def samples(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    spread = torch.exp2(
        torch.randint(-9, 9, (rows, -(-cols // 32)), generator=torch.Generator().manual_seed(1)).float()
    )
    random = (
        torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)) * spread.repeat_interleave(32, 1)[:, :cols]
    )
    random[0, :32], random[1, :5] = 0, 0
    return random.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp4(dtype: torch.dtype) -> None:
    given = samples(70, 96, dtype)
    values = given.double().numpy().reshape(70, 3, 32)
    packed, scale = like(given, "fp4")
    assert np.array_equal(scale, exponent(np.abs(values).max(-1), 6))
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(70, 3, 32)
    assert np.array_equal(codes, nearest(values / np.exp2(scale.astype(float) - 127)[..., None], E2M1))


@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_fp8(block: tuple[int, int]) -> None:
    """Edges included: blocks are cut short there."""
    given = samples(300, 176) * 1e3
    values = given.double().numpy()
    codes, scale = fp8(given, block)
    for row, line in enumerate(scale):
        for column, found in enumerate(line):
            at = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            assert found == exponent(np.abs(values[at]).max(), 448)
            assert np.array_equal(codes[at], nearest(values[at] / 2.0 ** (float(found) - 127), E4M3))


@pytest.mark.parametrize(("top", "form"), [(6.0, "fp4"), (448.0, "fp8")])
def test_the_scale_changes_just_above_the_largest_code(top: float, form: str) -> None:
    below, at, above = (
        np.nextafter(np.float32(top), 0),
        np.float32(top),
        np.nextafter(np.float32(top), np.inf, dtype="f4"),
    )
    made = []
    for value in (below, at, above):
        given = torch.full((1, 32), float(value), dtype=torch.float32)
        codes, scale = like(given, "fp4") if form == "fp4" else fp8(given)
        made.append(int(scale[0, 0]))
        assert codes[0, 0] == {"fp4": 0x77 if value <= at else 0x55, "fp8": 0x7E if value <= at else 0x76}[form]
    assert made == [127, 127, 128]


def test_zeros_keep_their_sign() -> None:
    given = torch.zeros(2, 64)
    given[1, 1::2] = -0.0
    (packed, scale), (codes, scale8) = like(given, "fp4"), fp8(given)
    assert (scale == 127).all()
    assert (scale8 == 127).all()
    assert packed.tolist() == [[0] * 32, [0x80] * 32]
    assert codes.tolist() == [[0] * 64, [0, 0x80] * 32]


def test_the_least_scale() -> None:
    """Below 2**-127 E8M0 has nothing: what is left are smaller codes."""
    given = torch.full((1, 32), 2.0**-127, dtype=torch.float32)
    given[0, 1] = 2.0**-128
    packed, scale = like(given, "fp4")
    assert (scale.tolist(), packed[0, 0]) == ([[0]], 0x12)


def test_a_worked_example() -> None:
    """One value of each code, with 2**-7: bytes 10 32 54 76 and the negatives."""
    row = torch.tensor([*E2M1, *-E2M1] * 2) / 128
    packed, scale = like(row.to(torch.bfloat16)[None], "fp4")
    assert (packed.tobytes().hex(), scale.tolist()) == ("1032547698badcfe" * 2, [[120]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_said(bad: float) -> None:
    given = torch.ones(4, 64)
    given[2, 3] = bad
    for make in (fp8, lambda values: like(values, "fp4")):
        with pytest.raises(NonFinite):
            make(given)
