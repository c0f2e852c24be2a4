"""Dequantizing on a CUDA device: the same bits as on the CPU, and by its kernels where there are any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptkit.files.header import Spec
from ckptkit.ops import Context, NonFinite, Overflow, values
from ops.formats import FORMATS, Format
from ops.test_dequantize import changed, dequantized

pytestmark = pytest.mark.gpu

CUDA, KEEP = Context("cuda"), Context("cuda", nonfinite_error=False)
WHOLE = {
    "fp4": Format({"weight": ("I8", (300, 512)), "scale": ("F8_E8M0", (300, 32))}, (300, 1024)),
    "nvfp4": Format(
        {
            "weight_packed": ("U8", (300, 512)),
            "weight_scale": ("F8_E4M3", (300, 64)),
            "weight_global_scale": ("F32", (1,)),
        },
        (300, 1024),
    ),
    "fp8 block": Format(
        {"weight": ("F8_E4M3", (300, 1024)), "weight_scale_inv": ("F32", (3, 8))}, (300, 1024), block=(128, 128)
    ),
    "fp8 block of exponents": Format(
        {"weight": ("F8_E5M2", (300, 1024)), "scale": ("F8_E8M0", (10, 32))}, (300, 1024), block=(32, 32)
    ),
    "fp8 channel": Format({"weight": ("F8_E4M3", (300, 1000)), "weight_scale": ("BF16", (300, 1))}, (300, 1000)),
    "fp8 tensor": Format({"weight": ("F8_E4M3", (300, 1000)), "weight_scale": ("F32", (1,))}, (300, 1000)),
    "mxfp8": Format({"weight": ("F8_E4M3", (300, 1024)), "weight_scale": ("U8", (300, 32))}, (300, 1024)),
}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    "format", [*FORMATS.values(), *WHOLE.values()], ids=[*FORMATS, *(f"{key}, whole" for key in WHOLE)]
)
def test_bits_are_the_cpus(format: Format, dtype: str) -> None:
    for seed in range(3):
        given = format.made(seed)
        wanted = dequantized(format, given, dtype)
        for budget in (20_000, 1 << 20):
            assert np.array_equal(dequantized(format, given, dtype, budget, KEEP), wanted)


@pytest.mark.parametrize("name", WHOLE)
def test_common_formats_have_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("computed on the CPU")

    monkeypatch.setattr(values, "fill", never)
    dequantized(WHOLE[name], WHOLE[name].made(), "BF16", 20_000, CUDA)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_code_under_every_scale(dtype: str) -> None:
    """Subnormals, negative zero and infinity included."""
    codes, scales = np.tile(np.arange(256, dtype=np.uint8), 256), np.arange(256, dtype=np.uint8)
    fp4 = Format({"weight": ("I8", (256, 256)), "scale": ("F8_E8M0", (256, 16))}, (256, 512))
    fp8 = Format({"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("U8", (256, 8))}, (256, 256))
    for format, per_row in ((fp4, 16), (fp8, 8)):
        weight, scale = (Spec(f"m.{role}", *part) for role, part in format.parts.items())
        given = {weight: codes.tobytes(), scale: scales.repeat(per_row).tobytes()}
        wanted = dequantized(format, given, dtype)
        for budget in (256, 1 << 20):  # a row at a time, only those that hold what is not finite go to the CPU
            assert np.array_equal(dequantized(format, given, dtype, budget, KEEP), wanted)


def test_what_does_not_fit_is_refused() -> None:
    given = WHOLE["fp4"].made()
    with pytest.raises(NonFinite):
        dequantized(WHOLE["fp4"], changed(given, "scale", 50, b"\xff"), "BF16", context=CUDA)
    with pytest.raises(Overflow):
        dequantized(WHOLE["fp4"], changed(given, "scale", 50, b"\xfd"), "BF16", context=CUDA)
