"""DeepSeek-V4's own formats made from floats: what a trained draft goes back into. Arguments: names (weight, scale).

``dsv4_fp4@1``
    [N, K] floats -> I8 [N, K / 2], two E2M1 codes a byte, the low half first, and F8_E8M0 [N, K / 32].
``dsv4_fp8@1``
    [N, K] floats -> F8_E4M3 [N, K], and F8_E8M0, one for each ``block`` of [rows, columns] (an argument).

The scale of a group is the least power of two that brings its greatest magnitude to the format's greatest number (6,
448); of a group of zeros it is 1. Codes are value / scale, a power of two and so exact, rounded to nearest, ties to even.
NaN or Inf raises NonFinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..header import Spec
from . import Args, Block, Chunk, Context, NonFinite, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

GROUP = 32
_BIAS = 127
_WIDE = 4  # bytes of what is computed with
# Numbers halfway between two of E2M1's magnitudes, and whether the greater of the two has the even code.
_HALVES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The greatest numbers, as fraction in [0.5, 1) and exponent: 6 and 448.
_FP4_MOST, _FP8_MOST = (0.75, 3), (0.875, 9)


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
    import numpy as np

    values = _values(blocks[0]).reshape(blocks[0].rows, -1, GROUP)
    exponent = _exponents(np.abs(values).max(axis=-1), _FP4_MOST)
    scaled = np.ldexp(values, -exponent[..., None]).reshape(blocks[0].rows, -1)
    halves = [np.nextafter(np.float32(half), np.float32(0)) if even_above else half for half, even_above in _HALVES]
    codes = np.searchsorted(np.array(halves, np.float32), np.abs(scaled)).astype(np.uint8)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    return [codes[:, ::2] | codes[:, 1::2] << 4, (exponent + _BIAS).astype(np.uint8)]


def _make_fp8(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np
    import torch

    values, (height, width) = _values(blocks[0]), args["block"]
    by_row = np.maximum.reduceat(np.abs(values), np.arange(0, values.shape[0], height), axis=0)
    exponent = _exponents(np.maximum.reduceat(by_row, np.arange(0, values.shape[1], width), axis=1), _FP8_MOST)
    each = exponent.repeat(height, axis=0)[: values.shape[0]].repeat(width, axis=1)[:, : values.shape[1]]
    codes = torch.from_numpy(np.ldexp(values, -each)).to(torch.float8_e4m3fn)
    return [codes.view(torch.uint8).numpy(), (exponent + _BIAS).astype(np.uint8)]


def _values(block: Block) -> Array:
    import numpy as np

    from ..decode.numbers import to_float32

    values = to_float32(np.frombuffer(block.data, np.uint8), block.dtype).reshape(block.rows, block.cols)
    if not np.isfinite(values).all():
        raise NonFinite(0, "NaN" if np.isnan(values).any() else "Inf")
    return values


def _exponents(largest: Array, most: tuple[float, int]) -> Array:
    """The least k with ``largest`` <= most x 2**k, as far as E8M0 reaches; 0 for zero."""
    import numpy as np

    fraction, exponent = np.frexp(largest)
    found = exponent - most[1] + (fraction > most[0])
    return np.where(largest == 0, 0, np.clip(found, -_BIAS, _BIAS))


OPERATIONS = {
    "dsv4_fp4@1": Operation("dsv4_fp4@1", _fp4_specs, _chunks, _make_fp4, bits_on_cuda=True, uses_torch=False),
    "dsv4_fp8@1": Operation("dsv4_fp8@1", _fp8_specs, _chunks, _make_fp8, bits_on_cuda=True),
}
