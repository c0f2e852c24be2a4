"""``fp4_like@1`` and ``fp8_like@1`` against plain float64 arithmetic and exhaustive search for the nearest code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.ops import NonFinite
from ops.runner import run

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def like(values: torch.Tensor, form: str, budget: int = 20_000, **args: Any) -> tuple[Any, Any]:
    """The bytes of codes [N, …] and of scales [N', K'] that the operation makes, as uint8 (F32 scales as they are)."""
    scale = "F32" if args.get("power_of_two") is False else "F8_E8M0"
    named = {"names": ["m.weight", "m.scale"], "dtypes": ["I8" if form == "fp4" else "F8_E4M3", scale]}
    made = run(f"{form}_like@1", named | args, {"w": values}, budget)
    codes, scales = made["m.weight"], made["m.scale"]
    return codes.view(torch.uint8).numpy(), (scales if scale == "F32" else scales.view(torch.uint8)).numpy()


def fp8(values: torch.Tensor, block: tuple[int, int] = (128, 128), power_of_two: bool = True) -> tuple[Any, Any]:
    return like(values, "fp8", block=list(block), power_of_two=power_of_two)


def exponent(peak: Any, top: float) -> Any:
    """E8M0 of 2**ceil(log2(peak / top)), 1 at least."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.ceil(np.log2(peak / top)) + 127, 1).astype(np.uint8)


def nearest(values: Any, held: Any) -> Any:
    """The code of the nearest of ``held``, the even one of two, with its sign as the bit above all codes."""
    away = np.abs(np.abs(values)[..., None] - held)
    least = away == away.min(axis=-1, keepdims=True)
    even = np.arange(len(held)) % 2 == 0
    code = np.where((least & even).any(-1), (least & even).argmax(-1), least.argmax(-1))
    return code + (values < 0) * (8 if len(held) == 8 else 128)


def samples(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    spread = torch.exp2(torch.randint(-20, 20, (rows, cols // 32), generator=torch.Generator().manual_seed(1)).float())
    random = torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)) * spread.repeat_interleave(32, 1)
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
@pytest.mark.parametrize("power_of_two", [True, False])
def test_fp8(block: tuple[int, int], power_of_two: bool) -> None:
    """Edges included: blocks are cut short there."""
    given = samples(300, 160) * 1e3
    values = given.double().numpy()
    codes, scale = fp8(given, block, power_of_two)
    for row, line in enumerate(scale):
        for column, found in enumerate(line):
            at = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            peak = np.abs(values[at]).max()
            if power_of_two:
                assert found == exponent(peak, 448)
                wanted = nearest(values[at] / 2.0 ** (float(found) - 127), E4M3)
            else:
                assert found == np.float32(np.float32(peak) / np.float32(448))
                wanted = nearest((given[at].float() / torch.tensor(found)).double().numpy(), E4M3)
            assert np.array_equal(codes[at], wanted)


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


def test_nothing_but_zeros() -> None:
    for codes, scale in (like(torch.zeros(2, 64), "fp4"), fp8(torch.zeros(2, 64))):
        assert not codes.any()
        assert (scale == 1).all()
    assert (fp8(torch.zeros(2, 64), power_of_two=False)[1] == 1).all()


def test_a_worked_example() -> None:
    """One value of each code, with 2**-7: bytes 10 32 54 76 and the negatives; -0 becomes 0."""
    row = torch.tensor([*E2M1, *-E2M1] * 2) / 128
    packed, scale = like(row.to(torch.bfloat16)[None], "fp4")
    assert (packed.tobytes().hex(), scale.tolist()) == ("1032547690badcfe" * 2, [[120]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_said(bad: float) -> None:
    given = torch.ones(4, 64)
    given[2, 3] = bad
    for form in ("fp4", "fp8"):
        with pytest.raises(NonFinite):
            like(given, form, **({} if form == "fp4" else {"block": [128, 128], "power_of_two": True}))
