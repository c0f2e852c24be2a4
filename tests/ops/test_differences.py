"""Where the bytes are not the library's, because there it destroys what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.runner import DTYPES
from ops.samples import normal
from ops.schemes import library, ours

pytest.importorskip("llmcompressor")

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def fp4_values(packed: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return E2M1[codes.int()]


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found - wanted.double()).norm() / wanted.double().norm())


def nvfp4_error(made: dict[str, Tensor], w: Tensor) -> float:
    scale = made["m.weight_scale"].double() / made["m.weight_global_scale"].double()
    return error(fp4_values(made["m.weight_packed"]) * scale.repeat_interleave(16, 1), w)


def test_global_scale_of_small_float16_weights() -> None:
    """2688 over a maximum below 0.041 is past float16's range: the library then writes 1, and scales lose their bits."""
    w = normal(64, 256, "F16") * 0.3
    theirs, mine = library("NVFP4A16", {"m": w}), ours("NVFP4A16", {"m": w})
    assert theirs["m.weight_global_scale"].item() == 1
    assert mine["m.weight_global_scale"].item() == pytest.approx(2688 / w.abs().max().item(), rel=1e-6)
    assert nvfp4_error(mine, w) < 0.75 * nvfp4_error(theirs, w)
    # In bfloat16, where nothing overflows, such weights come out as well.
    w = w.bfloat16()
    assert nvfp4_error(ours("NVFP4A16", {"m": w}), w) == pytest.approx(nvfp4_error(mine, w.half()), rel=0.05)


def test_global_scale_of_nothing_is_the_librarys() -> None:
    w = torch.zeros(8, 64, dtype=torch.float16)
    assert ours("NVFP4A16", {"m": w})["m.weight_global_scale"].item() == 1
    assert library("NVFP4A16", {"m": w})["m.weight_global_scale"].item() == 1


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("name", ["MXFP4", "MXFP8"])
def test_microscaling_of_the_topmost_values(name: str, dtype: str) -> None:
    """From 1.75 times the topmost power of two on, the library takes infinity for a scale and writes zeros."""
    w = torch.full((4, 64), torch.finfo(DTYPES[dtype]).max).to(DTYPES[dtype])

    def restored(made: dict[str, Tensor]) -> Tensor:
        codes = fp4_values(made["m.weight_packed"]) if name == "MXFP4" else made["m.weight"].double()
        return codes * torch.exp2(made["m.weight_scale"].double() - 127).repeat_interleave(32, 1)

    assert error(restored(library(name, {"m": w})), w) == 1
    assert error(restored(ours(name, {"m": w})), w) < 0.3
