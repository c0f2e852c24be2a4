"""``fp4_to_fp8_block@1`` against torch's own float8 cast of plain float64 products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.files.header import Spec
from ckptkit.ops import Inexact, NonFinite
from ops.runner import run_bytes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = [(128, 128), (130, 160), (300, 64), (5, 32)]


def cast(codes: Any, exponents: Any, scale_dtype: str = "F8_E8M0", inexact: str = "error", budget: int = 40_000) -> Any:
    """Codes uint8 [N, K / 2] and exponents uint8 [N, K / 32] -> the bytes of FP8 [N, K] and of its scales."""
    rows, half = codes.shape
    given = {
        Spec("m.weight", "I8", codes.shape): codes.tobytes(),
        Spec("m.scale", "F8_E8M0", exponents.shape): exponents.tobytes(),
    }
    args = {"names": ["m.weight", "m.s"], "scale_dtype": scale_dtype, "inexact": inexact}
    made = run_bytes("fp4_to_fp8_block@1", args, given, budget)
    blocks = (-(-rows // 128), -(-2 * half // 128))
    assert [*made] == [Spec("m.weight", "F8_E4M3", (rows, 2 * half)), Spec("m.s", scale_dtype, blocks)]
    weight, scale = made.values()
    return np.frombuffer(weight, np.uint8).reshape(rows, -1), scale


def numbers(codes: Any) -> Any:
    return np.stack((E2M1[codes & 15], E2M1[codes >> 4]), axis=-1).reshape(len(codes), -1)


def by_block(exponents: Any) -> Any:
    """The largest exponent of each block of 128 rows and 4 groups, for every group."""
    found = np.empty_like(exponents)
    for row in range(0, exponents.shape[0], 128):
        for group in range(0, exponents.shape[1], 4):
            block = np.s_[row : row + 128, group : group + 4]
            found[block] = exponents[block].max()
    return found


def sample(size: tuple[int, int], low: int, high: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (size[0], size[1] // 2)).astype(np.uint8)
    codes[:, ::16] |= 0x11  # no group is without values
    return codes, rng.integers(low, high + 1, (size[0], size[1] // 32)).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("low", "high"), [(113, 127), (240, 254), (6, 20), (0, 8), (3, 3)])
def test_within_14_binades_nothing_is_lost(size: tuple[int, int], low: int, high: int) -> None:
    codes, exponents = sample(size, low, high)
    weight, scale = cast(codes, exponents)
    base = np.maximum(by_block(exponents).astype(int) - 6, 0)
    assert scale == base[::128, ::4].astype(np.uint8).tobytes()
    value = torch.from_numpy(weight.copy()).view(torch.float8_e4m3fn).double().numpy()
    wanted = np.ldexp(numbers(codes), exponents.astype(int).repeat(32, axis=1) - 127)
    assert np.array_equal(np.ldexp(value, base.repeat(32, axis=1) - 127), wanted)
    assert np.array_equal(np.signbit(value), np.signbit(wanted))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_exact_is_rounded_as_torch_does(size: tuple[int, int]) -> None:
    codes, exponents = sample(size, 90, 127)
    with pytest.raises(Inexact):
        cast(codes, exponents)
    weight, _ = cast(codes, exponents, inexact="round")
    relative = exponents.astype(int) - by_block(exponents).astype(int) + 6
    wanted = torch.from_numpy(np.ldexp(numbers(codes), relative.repeat(32, axis=1))).float().to(torch.float8_e4m3fn)
    assert np.array_equal(weight, wanted.view(torch.uint8).numpy())


def test_15_binades_lose_only_what_lies_between_values() -> None:
    codes, exponents = np.full((128, 64), 0x22, np.uint8), np.full((128, 4), 112, np.uint8)
    exponents[0, 0] = 127
    weight, _ = cast(codes, exponents)  # 1.0 becomes E4M3's least number
    assert (weight[5, 7], weight[0, 0]) == (0x01, 0x68)
    codes[3, 9] = 0x21
    with pytest.raises(Inexact) as error:
        cast(codes, exponents)
    assert error.value.index == 0


def test_a_worked_example() -> None:
    """6.0 under a block's largest scale, 2**-7, becomes 384 and the block's scale 2**-13."""
    codes, exponents = np.full((128, 64), 0x77, np.uint8), np.full((128, 4), 120, np.uint8)
    weight, scale = cast(codes, exponents)
    assert torch.from_numpy(weight.copy()).view(torch.float8_e4m3fn).float().unique().tolist() == [384.0]
    assert scale == bytes([127 - 13])


def test_groups_without_values_do_not_count_but_for_a_block_without_any() -> None:
    codes, exponents = np.full((256, 64), 0x11, np.uint8), np.full((256, 4), 100, np.uint8)
    codes[128:], exponents[128:] = 0x80, 140
    codes[7, :16], exponents[7, 0] = 0x08, 200
    weight, scale = cast(codes, exponents)
    assert scale == bytes([94, 134])
    assert weight[7, :32].tolist() == [0x80, 0] * 16
    assert set(weight[128:].ravel()) == {0, 0x80}


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32", "U8"])
def test_scales_in_other_dtypes_are_the_same_numbers(scale_dtype: str) -> None:
    codes, exponents = sample((256, 128), 0, 12)
    exponents[128:] += 200
    base = cast(codes, exponents)[1]
    _, scale = cast(codes, exponents, scale_dtype)
    if scale_dtype == "U8":
        assert scale == base
        return
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[scale_dtype]
    wanted = [2.0 ** (exponent - 127) for exponent in base]
    assert torch.frombuffer(scale, dtype=dtype).double().tolist() == wanted


def test_nan_is_refused() -> None:
    codes, exponents = sample((128, 128), 100, 110)
    exponents[70, 2] = 255
    with pytest.raises(NonFinite) as error:
        cast(codes, exponents, inexact="round")
    assert (error.value.index, error.value.what) == (1, "NaN")
