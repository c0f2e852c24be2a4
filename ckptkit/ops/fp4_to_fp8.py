"""``fp4_to_fp8_block@1``: FP4 with a power of two for 32 columns as FP8 with a power of two for a block of 128 x 128.

Inputs: E2M1 codes [N, K / 2], two in a byte (or F4 [N, K]), and E8M0 exponents [N, K / 32]. Outputs: F8_E4M3 [N, K] and
scales [ceil(N / 128), ceil(K / 128)]. Arguments:

``names``
    Of the two outputs.
``scale_dtype``
    F8_E8M0 or U8 (exponents), BF16 or F32.
``inexact``
    What becomes of values that E4M3 does not hold: ``error`` raises Inexact, ``round`` rounds to nearest, ties to even.

A block's scale is that of its largest group over 64: the largest code, 6, becomes 384, and the next power of two would
not fit. That is DeepSeek's own cast, but that groups without any value do not count. It is exact where the scales of
a block lie within 14 binades: the least code, 0.5, is then no less than E4M3's least, 2**-9. A NaN among the exponents
raises NonFinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..files.header import DTYPE_BITS, Spec
from . import Args, Block, Chunk, Context, Inexact, NonFinite, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

GROUP, BLOCK = 32, 128
_SIXTY_FOUR = 6  # binades between a block's scale and its largest group's
_EXACT = -8  # from here on, relative to the block's scale, a group is held exactly
_NOTHING = -14  # here everything is rounded to zero
_NAN = 255


def specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    """Codes and scales."""
    (rows, cols), (codes, scale) = _shape(inputs[0]), args["names"]
    blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
    return [Spec(codes, "F8_E4M3", (rows, cols)), Spec(scale, args["scale_dtype"], blocks)]


def _shape(codes: Spec) -> tuple[int, int]:
    rows, cols = codes.shape
    return rows, cols if codes.dtype == "F4" else 2 * cols


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of whole rows of blocks; ``budget`` holds for what is looked up with, four times what is made."""
    rows, cols = _shape(inputs[0])
    if not cols:
        return
    step = max(budget // (4 * cols * BLOCK), 1) * BLOCK
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        yield Chunk((Read(0, row, stop), Read(1, row, stop)), (Write(0, row), Write(1, row // BLOCK)))


def make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    from ..decode.numbers import exponents
    from .rounding import rounded

    codes, exponent = (np.frombuffer(block.data, np.uint8).reshape(block.rows, -1) for block in blocks)
    if int(exponent.max()) == _NAN:
        raise NonFinite(1, "NaN")
    has_values = np.asarray((codes.reshape(*exponent.shape, GROUP // 2) & 0x77).any(axis=-1))
    base = _block_exponents(exponent, has_values)
    relative = exponent.astype(np.int16) - _spread(base, exponent.shape)
    table, is_exact = _table()
    row = np.clip(relative, _NOTHING, _SIXTY_FOUR) - _NOTHING
    index = np.repeat(row.astype(np.uint16) << 8, GROUP // 2, axis=1) | codes
    if args["inexact"] == "error" and (relative < _EXACT).any() and not np.take(is_exact, index).all():
        raise Inexact(0, f"values that {BLOCK} x {BLOCK} blocks of FP8 cannot hold: scales too far apart")
    made = np.take(table, index, mode="clip")
    scale = base if DTYPE_BITS[args["scale_dtype"]] == 8 else rounded(exponents()[base], args["scale_dtype"])
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (made, scale)]


def _block_exponents(exponent: Array, has_values: Array) -> Array:
    """uint8 [row blocks, column blocks]: the scale of each block. Where nothing has a value, all groups count."""
    import numpy as np

    largest = np.where(_largest(has_values), _largest(exponent * has_values), _largest(exponent))
    return np.maximum(largest, _SIXTY_FOUR) - np.uint8(_SIXTY_FOUR)


def _largest(of_groups: Array) -> Array:
    """The largest in each block; those at the edges are cut short."""
    import numpy as np

    rows, groups = of_groups.shape
    by_row = np.maximum.reduceat(of_groups, np.arange(0, rows, BLOCK), axis=0)
    return np.maximum.reduceat(by_row, np.arange(0, groups, BLOCK // GROUP), axis=1)


def _spread(of_blocks: Array, shape: tuple[int, ...]) -> Array:
    """For each group what its block has: [rows, groups]."""
    rows, groups = shape
    return of_blocks.repeat(BLOCK, axis=0)[:rows].repeat(BLOCK // GROUP, axis=1)[:, :groups]


@lru_cache
def _table() -> tuple[Array, Array]:
    """For each binade from _NOTHING on and each byte of two E2M1 codes: its two E4M3 codes (uint16), if they are exact."""
    import numpy as np

    from ..decode.numbers import E2M1, float8

    held = float8("F8_E4M3")[:0x7F, 0]
    even_first = np.argsort(np.arange(0x7F) & 1, kind="stable")  # of two that are equally near, the even one
    wanted = np.ldexp(np.array(E2M1)[None], np.arange(_NOTHING, _SIXTY_FOUR + 1)[:, None])
    code = even_first[np.abs(wanted[..., None] - held[even_first]).argmin(axis=-1)]
    both_signs = np.concatenate([code, code | 0x80], axis=1).astype(np.uint16)
    is_exact = np.tile(held[code] == wanted, 2)
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    pairs = both_signs[:, low] | both_signs[:, high] << 8
    return pairs.ravel(), (is_exact[:, low] & is_exact[:, high]).ravel()


OPERATIONS = {
    "fp4_to_fp8_block@1": Operation("fp4_to_fp8_block@1", specs, chunks, make, bits_on_cuda=True, uses_torch=False)
}
