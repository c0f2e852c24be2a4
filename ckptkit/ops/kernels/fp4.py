"""FP4 (E2M1) codes, two to a byte: NVFP4 (an E4M3 scale for a group, one float32 for all) and MXFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Args
from .arrays import largest, over, pack_nibbles
from .mx import power_of_two_scale

TOP = 6.0
SCALE_TOP = 448.0
SCALE_OF_NOTHING = 0.125


def nvfp4(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """Scales are E4M3 times ``weight_global_scale``, a divisor: nvfp4-pack-quantized."""
    x = w.view(len(w), -1, args["weights"]["group_size"])
    overall = global_scale(state, w)
    local = (overall * over(largest(x), TOP).float()).clamp_(-SCALE_TOP, SCALE_TOP).to(torch.float8_e4m3fn)
    scale = local.float()
    scale.masked_fill_(scale == 0, SCALE_OF_NOTHING)
    ratio = x.float() / (scale / overall).unsqueeze(-1)
    return {
        "weight_packed": pack_nibbles(nearest_codes(ratio).view_as(w)),
        "weight_scale": scale.to(torch.float8_e4m3fn),
    }


def mxfp4(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """A power of two for each group: mxfp4-pack-quantized."""
    x = w.view(len(w), -1, args["weights"]["group_size"])
    exponents, scale = power_of_two_scale(largest(x), 2)
    ratio = (x / scale.unsqueeze(-1)).float()
    return {"weight_packed": pack_nibbles(nearest_codes(ratio).view_as(w)), "weight_scale": exponents}


def global_scale(state: Any, w: Tensor) -> Tensor:
    """float32 [1]: what makes the set's largest magnitude the largest E4M3 scale times the largest code; else 1.

    Divided in the weights' dtype as compressed-tensors does, through the reciprocal (that is what ``number / tensor``
    means). Where that overflows, as in float16 for a maximum below about 0.04, that library gives 1; here it is
    divided again in float32.
    """
    highest, lowest, has_nan = state
    peak = max(highest, lowest)
    top = torch.tensor([float("nan") if has_nan else peak], dtype=torch.float32, device=w.device)
    found = (SCALE_TOP * TOP / top.to(w.dtype)).float()
    if peak > 0:
        found = torch.where(found.isinf(), SCALE_TOP * TOP / top, found)
    return found.nan_to_num_(nan=1.0, posinf=1.0)


def nearest_codes(ratio: Tensor) -> Tensor:
    """float32 (overwritten) -> uint8: the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; 8 for a sign.

    Values are .5 apart below 2, 1 apart below 4, then 2: each stretch is rounded to its own step, and the steps of
    the three are added up. Zero has no sign, but what is rounded to it keeps its own.
    """
    ratio.add_(0.0)  # -0 becomes 0
    size = ratio.abs()
    code = _steps(size.clamp_max(2), 0.5, 0)
    code += _steps(size.clamp(2, 4), 1, 2)
    code += _steps(size.clamp_(4, 6), 2, 2)
    code.add_(ratio.view(torch.int32) >> 31, alpha=8)
    return code.to(torch.uint8).bitwise_and_(15)


def _steps(x: Tensor, step: float, first: int) -> Tensor:
    """int32 whose low byte is x / step rounded half to even, less ``first``. Overwrites x.

    Adding a float large enough that its last bit is worth ``step`` does the rounding and puts the count there.
    """
    return x.add_((1.5 * 2**23 - first) * step).view(torch.int32)
