"""DeepSeek-V4's own formats made from floats: what a trained draft goes back into. Arguments: names (weight, scale).

``dsv4_fp4@1``
    [N, K] floats -> I8 [N, K / 2], two E2M1 codes a byte, the low half first, and F8_E8M0 [N, K / 32].
``dsv4_fp8@1``
    [N, K] floats -> F8_E4M3 [N, K], and F8_E8M0, one for each ``block`` of [rows, columns] (an argument), those at the
    edges cut short.

The scale of a group is the least power of two that brings its greatest magnitude to the format's greatest number (6,
448), as far as E8M0 reaches; of a group of zeros it is 1. Codes are value / scale, a power of two and so exact, rounded to
nearest, ties to even; zeros keep their sign. NaN or Inf raises NonFinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import Spec
from . import Args, Block, Chunk, Context, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Array = np.ndarray[Any, Any]

GROUP = 32
_TILE = 64 << 10  # numbers computed with at once, as float32: they stay in a processor's cache
_WIDE = 4  # bytes of one
_ONE = 127  # the exponent of 1 in E8M0
# The greatest numbers, 6 and 448, as float32: the exponent, and the bits of the mantissa.
_FP4_MOST, _FP8_MOST = (2, 0x400000), (8, 0x600000)


def _fp4_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    (rows, cols), (weight, scale) = inputs[0].shape, args["names"]
    return [Spec(weight, "I8", (rows, cols // 2)), Spec(scale, "F8_E8M0", (rows, cols // GROUP))]


def _fp8_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    (rows, cols), (weight, scale), (height, width) = inputs[0].shape, args["names"], args["block"]
    return [Spec(weight, "F8_E4M3", (rows, cols)), Spec(scale, "F8_E8M0", (-(-rows // height), -(-cols // width)))]


def _chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of whole rows of blocks; ``budget`` holds for the float32 that is computed with."""
    rows, cols = inputs[0].shape
    height = args.get("block", (1, GROUP))[0]
    if not cols:
        return
    step = max(budget // (_WIDE * cols * height), 1) * height
    for row in range(0, rows, step):
        yield Chunk((Read(0, row, min(row + step, rows)),), (Write(0, row), Write(1, row // height)))


def _make_fp4(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    return _by_tiles(blocks[0], 1, _fp4, context)


def _make_fp8(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    height, width = args["block"]
    return _by_tiles(blocks[0], height, lambda w: _fp8(w, height, width), context)


def _by_tiles(
    block: Block, height: int, make: Callable[[Tensor], tuple[Tensor, Tensor]], context: Context
) -> list[Array]:
    """What ``make`` makes of float32 rows, some whole rows of blocks at a time."""
    import torch

    from .kernels.arrays import matrix, raw

    given = matrix(block, context.device)
    step = max(_TILE // (block.cols * height), 1) * height
    made = [make(given[row : row + step].float()) for row in range(0, block.rows, step)]
    return [raw(torch.cat(parts)) for parts in zip(*made, strict=True)]


def _fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    from .kernels.arrays import largest, pack_nibbles
    from .kernels.fp4 import nearest_codes

    groups = w.view(len(w), -1, GROUP)
    exponents, scale = _scales(largest(groups), *_FP4_MOST)
    codes = nearest_codes(groups / scale.unsqueeze(-1)).view_as(w)
    codes |= (w.view(torch.int32) >> 28).to(torch.uint8) & 8
    return pack_nibbles(codes), exponents


def _fp8(w: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    import torch
    from torch.nn.functional import pad

    from .kernels.arrays import largest

    rows, cols = w.shape
    padded = pad(w, (0, -cols % width, 0, -rows % height))
    x = padded.view(-(-rows // height), height, -(-cols // width), width)
    exponents, scale = _scales(largest(x).amax(1), *_FP8_MOST)
    codes = (x / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(padded)
    return codes[:rows, :cols].view(torch.uint8), exponents


def _scales(peak: Tensor, exponent: int, mantissa: int) -> tuple[Tensor, Tensor]:
    """E8M0 (uint8) and float32 of the least power of two by which ``peak`` is ``2**exponent * (1 + mantissa / 2**23)``.

    By the bits of ``peak`` (float32): its own power of two over that of the greatest number, and the next one where its
    mantissa is larger.
    """
    import torch

    reached = peak.view(torch.int32) + (0x7FFFFF - mantissa) >> 23
    stored = (reached - exponent).clamp_min_(0).masked_fill_(peak == 0, _ONE)
    scale = torch.where(stored > 0, stored << 23, 1 << 22).view(torch.float32)
    return stored.to(torch.uint8), scale


OPERATIONS = {
    "dsv4_fp4@1": Operation("dsv4_fp4@1", _fp4_specs, _chunks, _make_fp4),
    "dsv4_fp8@1": Operation("dsv4_fp8@1", _fp8_specs, _chunks, _make_fp8),
}
