"""FP8 (E4M3) codes, with a scale for a row, for a block, or a power of two for 32 elements of a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import Args
from .arrays import largest, scale_to
from .mx import power_of_two_scale

E4M3 = torch.float8_e4m3fn
TOP = 448.0


def channel(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """A scale for each row: float-quantized."""
    scale = scale_to(largest(w), TOP).unsqueeze(-1)
    return {"weight": _codes(w / scale), "weight_scale": scale}


def block(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """A scale for each block, those at the edges cut short: float-quantized."""
    (rows, cols), (height, width) = w.shape, args["weights"]["block_structure"]
    height = min(height, rows)  # a few very wide rows are not to be padded to a block's height
    padded = pad(w, (0, -cols % width, 0, -rows % height)) if cols % width or rows % height else w
    x = padded.view(-(-rows // height), height, -(-cols // width), width)
    scale = scale_to(largest(x).amax(1), TOP)
    codes = _codes(x / scale[:, None, :, None]).view_as(padded)
    return {"weight": codes[:rows, :cols], "weight_scale": scale}


def mxfp8(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """A power of two for each group: mxfp8-quantized."""
    x = w.view(len(w), -1, args["weights"]["group_size"])
    exponents, scale = power_of_two_scale(largest(x), 8)
    return {"weight": _codes(x / scale.unsqueeze(-1)).view_as(w), "weight_scale": exponents}


def _codes(ratio: Tensor) -> Tensor:
    """Clamped: beyond the largest value the conversion would give NaN."""
    return ratio.float().clamp_(-TOP, TOP).to(E4M3)
