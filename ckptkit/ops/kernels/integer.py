"""Symmetric integers: codes in [-2^(b-1), 2^(b-1) - 1], one scale for a row or a group of a row.

The scale makes the largest magnitude half the range, 2^b - 1, so one end is clamped, as compressed-tensors does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import Args
from .arrays import largest, pack_nibbles, scale_to


def int8(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """One code a byte: format int-quantized."""
    codes, scale = _quantize(w, args)
    return {"weight": codes, "weight_scale": scale}


def pack_int(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """4- or 8-bit codes, offset to be unsigned, in 32-bit words, the first in the lowest bits: pack-quantized."""
    codes, scale = _quantize(w, args)
    if args["weights"]["num_bits"] == 8:
        packed = codes.view(torch.uint8).bitwise_xor_(0x80)
    else:
        packed = pack_nibbles(codes.add_(8).view(torch.uint8))
    return {"weight_packed": packed.view(torch.int32), "weight_scale": scale}


def _quantize(w: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """int8 codes [r, c] and scales [r, groups]."""
    q = args["weights"]
    limit = 2 ** (q["num_bits"] - 1)
    x = w.view(len(w), -1, q.get("group_size") or w.shape[1])
    scale = scale_to(largest(x), limit - 0.5)
    if args.get("arithmetic") == "float32":
        ratio = x.float() / scale.float().unsqueeze(-1)
    else:
        ratio = (x / scale.unsqueeze(-1)).float()
    return ratio.clamp_(-limit, limit - 1).round_().to(torch.int8).view_as(w), scale
