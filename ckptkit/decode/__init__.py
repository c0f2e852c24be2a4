"""Decode: a weight as it is stored, in any known format, back to float32. No code is shared with the quantizers.

Every format is ``value = scale x (number - zero point)``, with one scale for a block of the weight:

=========================  ============================  ========================================================
format                     number                        scale
=========================  ============================  ========================================================
pack-quantized             1 to 8 bits in I32 words,     ``weight_scale``; ``weight_zero_point`` packed along the
                           offset by half their range    rows; ``weight_g_idx``: the group of each column
int-quantized              I8                            ``weight_scale``
float-quantized, DeepSeek  F8_E4M3 or F8_E5M2            ``weight_scale``, ``weight_scale_inv`` or ``scale``: for
                                                         the tensor, a row, a group or a block; E8M0 or a float
mxfp8-quantized            F8_E4M3                       U8 exponents (E8M0) for 32 columns
nvfp4-pack-quantized       E2M1, two in a byte           F8_E4M3 for 16 columns, over ``weight_global_scale``
NVFP4 of ModelOpt          E2M1                          F8_E4M3 for 16 columns, times ``weight_scale_2``
mxfp4-pack-quantized       E2M1                          U8 exponents (E8M0) for 32 columns
gpt-oss                    E2M1 ``_blocks`` of 16 bytes  U8 exponents for 32 columns; a module has [in, out]
DeepSeek-V4                E2M1 in I8                    F8_E8M0 exponents for 32 columns
``ckptkit unpack``         E2M1 ``_codes``, one in a     as the format has it that they were taken from
                           byte
GPTQ                       2, 3, 4 or 8 bits in I32      ``scales`` [groups, out]; ``qzeros`` packed along the
                           words along the inputs        outputs, less one in v1; ``g_idx``: the group of each input
AWQ (GEMM)                 4 bits in I32 words along     ``scales`` [groups, out]; ``qzeros`` as the numbers
                           the outputs, 0 2 4 6 1 3 5 7
=========================  ============================  ========================================================

Of two numbers in a byte the first lies in the low half; of numbers in a word the first lies in the lowest bits, and a
number may lie across two words. E2M1 may have the dtype F4, whose shape counts numbers, not bytes. GPTQ and AWQ store
the transpose of the weight, [in, out]; rows here are rows as stored. Products are taken in float32 in the order in
which the formats' own code takes them: scale and scale of scales first, then the number less its zero point. Sources:
compressed-tensors 0.19 (``compressors/``), the OCP specifications of 8-bit floating point (OFP8 1.0) and of
microscaling formats (MX 1.0), and the published code of DeepSeek, gpt-oss, ModelOpt, AutoGPTQ, GPTQModel and AutoAWQ.

:func:`encoded` says from headers how a weight is stored, :func:`spans` which bytes some rows of it need, and
:func:`decode` what they mean.
"""

from __future__ import annotations

from .headers import encoded
from .layout import Coding, Encoded, dense, spans

__all__ = ["Coding", "Encoded", "decode", "dense", "encoded", "spans", "unpack"]


def __getattr__(name: str) -> object:
    """What computes needs numpy, which is imported on first use."""
    if name in {"decode", "unpack"}:
        from . import rows

        return getattr(rows, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
