"""Scales of the OCP microscaling formats: powers of two, stored as E8M0 (uint8, bias 127)."""

from __future__ import annotations

import torch
from torch import Tensor

# For each dtype the integers that hold its bits, its mantissa's bits and 127 - the exponent's bias.
_FIELDS = {
    torch.bfloat16: (torch.int16, 7, 0),
    torch.float16: (torch.int16, 10, 112),
    torch.float32: (torch.int32, 23, 0),
}


def power_of_two_scale(peak: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Stored exponents, and the scales they stand for in peak's dtype.

    A scale is the power of two that ``peak`` reaches, taken to reach the next one from 1.75 times it on, over
    2**``exponent``: the exponent of the element type's largest value. Below peak's normal range it is 2**-127,
    or 1 in a dtype that has no 2**-127. All of this is compressed-tensors' choice, but what it does from 1.75 times
    the dtype's topmost power of two on: there it finds infinity, and the group becomes zeros.
    """
    integers, mantissa, bias = _FIELDS[peak.dtype]
    reached = (peak.view(integers) + (1 << mantissa - 2) >> mantissa).to(torch.int32)
    stored = torch.where(reached > 0, reached + (bias - exponent), 0).clamp_min_(0)
    scale = torch.where(stored > 0, stored << 23, 1 << 22).view(torch.float32).to(peak.dtype)
    nothing = scale == 0
    return stored.masked_fill_(nothing, 127).to(torch.uint8), scale.masked_fill_(nothing, 1)
