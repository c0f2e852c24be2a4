"""Any scheme, by compressed-tensors' own functions: slow, and 355 MB to import, but all of its bytes."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from torch.nn.functional import pad

from .. import Args
from .arrays import largest
from .fp4 import global_scale


def checked(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """As :func:`encode`, but NonFinite for NaN and Inf."""
    largest(w)
    return encode(w, args, state)


def encode(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """Every output of some rows of a weight, NaN and Inf included, by its suffix."""
    q = QuantizationArgs(**args["weights"])
    scheme = QuantizationScheme(targets=[], weights=q, format=args["format"])
    found = qparams(w, args, state)
    wide = torch.float32 if args.get("arithmetic") == "float32" else w.dtype
    given = found | {"weight": w.to(wide), "weight_scale": found["weight_scale"].to(wide)}
    made: dict[str, Tensor] = BaseCompressor.get_value_from_registry(args["format"]).compress(given, scheme)
    if wide != w.dtype:
        made["weight_scale"] = found["weight_scale"]
    return made


def qparams(w: Tensor, args: Args, state: Any) -> dict[str, Tensor]:
    """Scales in w's dtype, zero points unless symmetric, and the global scale if there is one."""
    q = QuantizationArgs(**args["weights"])
    low, high = _range(w, args["weights"], state)
    overall = global_scale(state, w) if q.strategy == "tensor_group" else None
    scale, zero_point = calculate_qparams(low, high, q, overall)
    found = {"weight_scale": scale.to(w.dtype)}
    if not q.symmetric:
        found["weight_zero_point"] = zero_point
    if overall is not None:
        found["weight_global_scale"] = overall
    return found


def _range(w: Tensor, q: Args, state: Any) -> tuple[Tensor, Tensor]:
    """Least and greatest value for each scale: of a row, of a group, of a block padded with zeros, of the tensor."""
    if q["strategy"] == "tensor":
        top, bottom, has_nan = state
        ends = (float("nan"), float("nan")) if has_nan else (-bottom, top)
        low, high = (torch.tensor([end], dtype=w.dtype, device=w.device) for end in ends)
        return low, high
    if q["strategy"] == "block":
        height, width = q["block_structure"]
        w = pad(w, (0, -w.shape[1] % width, 0, -w.shape[0] % height))
        x = w.view(w.shape[0] // height, height, -1, width).transpose(1, 2).flatten(2)
    else:
        x = w.view(w.shape[0], -1, q.get("group_size") or w.shape[1])
    return x.amin(-1), x.amax(-1)
