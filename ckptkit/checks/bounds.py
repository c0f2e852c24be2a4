"""How far a converted weight may be from its source: bounds that follow from format and arithmetic, not from samples."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..decode import Coding, Encoded

ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24, "F64": 2.0**-53}
DERIVATION = """\
A weight w is stored as a number v with a scale s. Let u be the unit roundoff of the dtype that the weight was
quantized in (2**-8 for bfloat16, 2**-11 for float16, 2**-24 for float32), so that rounding x to it moves x by at most
u times the power of two that x reaches, which is u / (1 + u) of x or less. Quantizers compute the scale from the largest weight M, rounded to that dtype,
then round w / s to it, clamp, and round to the nearest number of the format. So |w - v s| is at most, in units of s:

Integers of b bits, symmetric, L = 2**(b-1), s = M / (L - 1/2):
    1/2 for the nearest integer, and u 2**(b-2) for the quotient: 0.75 for 8 bits in bfloat16, 0.516 for 4. At the
    topmost number, L - 1, the largest weight is cut off: 1/2, and u (L - 1/2) for the rounded scale: 0.998 and 0.53.
    Computed in float32 the quotient's part vanishes: 1/2.
Integers, asymmetric, N = 2**b - 1, s = (max - min) / N, with a zero point:
    1/2, and u 2**(b-1) for the quotient and its sum with the zero point (either the quotient is that coarse and the
    sum exact, or both together are finer): 0.53 for 4 bits in bfloat16. For 8 bits it is 0.75: quotients from 128 on
    are whole numbers there, and below ties to even do not add up. At both ends of the range the zero point's own
    rounding counts as much, and about 2 u N for the scale's two roundings.
Floats with m bits of mantissa (E4M3: 3, E5M2: 2, E2M1: 1), where v reaches the power of two p:
    p / 2**(m+1) for the nearest number, 2 p u for the quotient; below the least normal number q it is q / 2**(m+1).
MX formats: the same; the quotient by a power of two is exact. At the largest number OCP's rule for the scale leaves
    weights of up to the next power of two, which are cut off: 8 - 6 in MXFP4, 512 - 448 in MXFP8.
NVFP4: the same, divided in float32. Where the E4M3 scale of a block is below its normal numbers, its rounding by
    2**-10 moves the largest weight by 6 times that, times the scale of the scales.
Casts: u times the power of two that the value reaches.

Float16 has coarse small numbers: a scale below its normal ones is off by up to 2**-25, so weights by L, N or 448 times
that. Numbers are compared in float32, which adds 2**-22 of the value. A source that is itself quantized is decoded in
float32 here and was perhaps rounded to bfloat16 before: that adds u of the value.
"""

_LEAST = {"F16": 2.0**-25, "BF16": 2.0**-134}  # half of the least subnormal number, where float32 has it
# Of the floats that weights are stored in: bits of mantissa, exponent of the least normal number, largest number.
_FLOATS = {"F8_E4M3": (3, -6, 448.0), "F8_E5M2": (2, -14, 57344.0), "F4": (1, 0, 6.0)}
_COMPARED = 2.0**-22
_EXPONENTS = frozenset({"U8", "F8_E8M0"})


class Bound(NamedTuple):
    """``|w - v s| <= allowed s + rest``.

    ``allowed`` is ``step``, or ``relative`` times the power of two that v reaches where that is more, or ``end`` where
    the number as stored, its zero point put back, is ``low`` or ``high``. ``rest`` is absolute. ``subnormal``: what is
    allowed besides, in units of the scale of scales, where a block's E4M3 scale is below its normal numbers.
    """

    step: float
    relative: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    end: float = 0.0
    rest: float = 0.0
    subnormal: float = 0.0


EXACT = Bound(0.0)  # nothing may be off, not even the sign of a zero


def same_numbers(made: Encoded, source: Encoded) -> bool:
    """Whether both hold the same kind of numbers with the same kind of scales: nothing was to be rounded."""
    return _kind(made) == _kind(source)


def _kind(weight: Encoded) -> tuple[object, ...]:
    numbers: object = weight.codes.dtype if weight.coding in {Coding.DENSE, Coding.FP8} else weight.bits
    if weight.coding in {Coding.FP4, Coding.CODES}:
        numbers = "E2M1"
    scale = weight.scale and ("exponent" if weight.scale.dtype in _EXPONENTS else weight.scale.dtype)
    block = weight.width, weight.height
    return numbers, scale, block, weight.divides, weight.overall is None, weight.zero is None, weight.zero_bias


def bound(made: Encoded, source: Encoded, arithmetic: str = "compat") -> Bound:
    """The bound for a weight made of ``source``. ``arithmetic`` is a recipe's: ``compat`` or ``float32``."""
    dtype = source.codes.dtype if source.coding is Coding.DENSE else "BF16"
    scale_u = ROUNDOFF[dtype]
    u = ROUNDOFF["F32"] if arithmetic == "float32" else scale_u
    given = 0.0 if source.coding is Coding.DENSE else scale_u
    match made.coding:
        case Coding.DENSE:
            out = made.codes.dtype
            return Bound(_LEAST.get(out, 0.0), ROUNDOFF[out] + given + _COMPARED)
        case Coding.WORDS | Coding.INT8 | Coding.GPTQ | Coding.AWQ:
            found, range = _integers(made, u, scale_u, given), 2.0 ** (made.bits - (made.zero is None))
        case _:
            found, range = _floats(made, scale_u), 448.0
    return found._replace(rest=range * _LEAST.get(dtype, 0.0))


def _integers(made: Encoded, u: float, scale_u: float, given: float) -> Bound:
    half, limit = 0.5, 2.0 ** (made.bits - 1)
    noise = limit * (_COMPARED + given)
    if made.zero is None:
        step = half + u * limit / 2 + noise
        end = half + (limit - half) * scale_u + noise
        return Bound(step, high=limit - 1, end=max(step, end))
    step = half + _quotient_and_sum(u * limit) + noise
    end = half + _quotient_and_sum(scale_u * limit) + (2 * limit - 1) * (2 * scale_u + scale_u**2) + noise
    low = -limit if made.coding is Coding.WORDS else 0.0
    return Bound(step, low=low, high=low + 2 * limit - 1, end=max(step, end))


def _quotient_and_sum(coarse: float) -> float:
    return coarse / 2 if coarse == 0.5 else coarse


def _floats(made: Encoded, u: float) -> Bound:
    mantissa, least, top = _FLOATS[made.codes.dtype if made.coding is Coding.FP8 else "F4"]
    exponents = made.scale is not None and made.scale.dtype in _EXPONENTS
    nvfp4 = made.coding is not Coding.FP8 and not exponents
    u = ROUNDOFF["F32"] if exponents or nvfp4 else u
    relative = 2.0 ** -(mantissa + 1) + 2 * u + _COMPARED
    step = 2.0**least * (2.0 ** -(mantissa + 1) + u + _COMPARED)
    cut = 2.0 ** math.ceil(math.log2(top)) - top if exponents else 0.0
    end = max(cut, relative * 2.0 ** math.floor(math.log2(top)))
    return Bound(step, relative, low=-top, high=top, end=end, subnormal=6 * 2.0**-10 if nvfp4 else 0.0)
