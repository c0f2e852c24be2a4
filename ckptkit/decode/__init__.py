"""Decode: a weight as it is stored, in any known format, back to float32. No code is shared with the quantizers.

Every format is ``value = scale x (number - zero point)``, with one scale for a block of the weight:

=========================  ============================  ========================================================
format                     number                        scale
=========================  ============================  ========================================================
pack-quantized             1 to 8 bits in I32 words,     ``weight_scale``; ``weight_zero_point`` packed along the
                           offset by half their range    rows
int-quantized              I8                            ``weight_scale``
float-quantized, DeepSeek  F8_E4M3 or F8_E5M2            ``weight_scale``, ``weight_scale_inv`` or ``scale``: for
                                                         the tensor, a row, a group or a block; E8M0 or a float
mxfp8-quantized            F8_E4M3                       U8 exponents (E8M0) for 32 columns
nvfp4-pack-quantized       E2M1, two in a byte           F8_E4M3 for 16 columns, over ``weight_global_scale``
NVFP4 of ModelOpt          E2M1                          F8_E4M3 for 16 columns, times ``weight_scale_2``
mxfp4-pack-quantized       E2M1                          U8 exponents (E8M0) for 32 columns
gpt-oss, DeepSeek-V4       E2M1 (``_blocks``; I8)        U8 or F8_E8M0 exponents for 32 columns
=========================  ============================  ========================================================

Of two numbers in a byte the first lies in the low half; of numbers in a word the first lies in the lowest bits, and a
number may lie across two words. Sources: compressed-tensors 0.19 (``compressors/``), the OCP specifications of 8-bit
floating point (OFP8 1.0) and of microscaling formats (MX 1.0), and the published code of DeepSeek and gpt-oss.

:func:`encoded` says from headers how a weight is stored, :func:`spans` which bytes some rows of it need, and
:func:`decode` what they mean.
"""

from __future__ import annotations

from .layout import Coding, Encoded, dense, encoded, spans

__all__ = ["Coding", "Encoded", "decode", "dense", "encoded", "spans", "unpack"]


def __getattr__(name: str) -> object:
    """What computes needs numpy, which is imported on first use."""
    if name in {"decode", "unpack"}:
        from . import rows

        return getattr(rows, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
