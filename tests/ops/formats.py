"""Weights in every format that is dequantized, of random bytes, in sizes that fit nothing well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ckptkit.decode import encoded, spans
from ckptkit.decode.rows import decode
from ckptkit.files.header import DTYPE_BITS, Spec
from ckptkit.plan import Ref

# Bytes or numbers that a scale of each dtype is drawn from: nothing that makes a BF16 overflow.
_SCALES: Mapping[str, Any] = {
    "F8_E8M0": lambda rng, count: rng.integers(0, 240, count).astype(np.uint8),
    "U8": lambda rng, count: rng.integers(90, 135, count).astype(np.uint8),
    "F8_E4M3": lambda rng, count: rng.integers(0, 0x7F, count).astype(np.uint8),
    "BF16": lambda rng, count: (rng.normal(size=count).astype("<f4").view("<u4") >> 16).astype("<u2"),
    "F16": lambda rng, count: rng.normal(size=count).astype("<f2"),
    "F32": lambda rng, count: rng.normal(size=count).astype("<f4"),
}


class Format(NamedTuple):
    """The parts of a weight by role: dtype and shape. ``shape`` is the weight's own, ``last`` the part that holds it."""

    parts: Mapping[str, tuple[str, tuple[int, ...]]]
    shape: tuple[int, ...]
    bits: int | None = None
    block: tuple[int, int] | None = None
    cols: int = 0
    layout: Mapping[str, Any] = {}

    def args(self, dtype: str = "BF16") -> dict[str, Any]:
        block = None if self.block is None else list(self.block)
        return {
            "name": "m.weight", "dtype": dtype, "shape": list(self.shape), "roles": list(self.parts),
            "bits": self.bits, "block": block, "cols": self.cols, "layout": dict(self.layout),
        }  # fmt: skip

    def made(self, seed: int = 0) -> dict[Spec, bytes]:
        """The parts, of random bytes. No code is NaN; scales are as _SCALES has them."""
        rng = np.random.default_rng(seed)
        return {
            Spec(f"m.{role}", dtype, shape): _bytes(rng, role, dtype, shape)
            for role, (dtype, shape) in self.parts.items()
        }


def _bytes(rng: np.random.Generator, role: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    count = math.prod(shape)
    if role == "g_idx":
        return np.sort(rng.integers(0, 3, count)).astype("<i4").tobytes()
    if role == "weight_g_idx":
        return rng.integers(0, 3, count).astype("<i4").tobytes()
    if role == "weight_zero_point" and dtype == "I8":
        return rng.integers(-8, 8, count).astype(np.int8).tobytes()
    if "scale" in role:
        return bytes(_SCALES[dtype](rng, count).tobytes())
    codes = rng.integers(0, 256, count * DTYPE_BITS[dtype] // 8).astype(np.uint8)
    if dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] -= 1
    if dtype == "F8_E5M2":
        codes[codes & 0x7F >= 0x7C] = 0x81
    return codes.tobytes()


def decoded(given: Mapping[Spec, bytes], format: Format) -> np.ndarray[Any, Any]:
    """All of a weight in float32, in the module's own orientation, decoded at once."""
    parts = {spec.name.removeprefix("m."): Ref("", *spec, 0, spec.nbytes) for spec in given}
    if "blocks" in parts:
        scales, codes = parts["scales"].shape, parts["blocks"]
        parts["blocks"] = codes._replace(shape=(*scales, codes.shape[-1] // scales[-1]))
    layout: Any = dict(format.layout)
    weight = encoded(next(iter(format.parts)), parts, format.bits, format.block, format.cols, **layout)
    content = {spec.name: data for spec, data in given.items()}
    whole = spans(weight, 0, weight.rows)
    data = {role: content[weight.parts[role].name][span.start : span.stop] for role, span in whole.items()}
    with np.errstate(all="ignore"):
        found = decode(weight, 0, weight.rows, data)
    if weight.transposed:
        found = found.reshape(-1, weight.stack, weight.cols).transpose(0, 2, 1)
    return np.ascontiguousarray(found).reshape(format.shape)


FORMATS = {
    "fp4": Format({"weight": ("I8", (37, 48)), "scale": ("F8_E8M0", (37, 3))}, (37, 96)),
    "fp4 as F4": Format({"weight": ("F4", (9, 64)), "scale": ("F8_E8M0", (9, 2))}, (9, 64)),
    "mxfp4": Format({"weight_packed": ("U8", (10, 32)), "weight_scale": ("U8", (10, 2))}, (10, 64)),
    "gpt-oss": Format({"blocks": ("U8", (3, 50, 48)), "scales": ("U8", (3, 50, 3))}, (3, 96, 50)),
    "gpt-oss in NVFP4": Format(
        {"blocks": ("U8", (3, 50, 48)), "scales": ("F8_E4M3", (3, 50, 6)), "weight_scale_2": ("F32", (3,))}, (3, 96, 50)
    ),
    "nvfp4": Format(
        {"weight_packed": ("U8", (21, 24)), "weight_scale": ("F8_E4M3", (21, 3)), "weight_global_scale": ("F32", (1,))},
        (21, 48),
    ),
    "nvfp4 of ModelOpt": Format(
        {"weight": ("U8", (21, 24)), "weight_scale": ("F8_E4M3", (21, 3)), "weight_scale_2": ("F32", ())}, (21, 48)
    ),
    "fp8 block": Format(
        {"weight": ("F8_E4M3", (300, 200)), "weight_scale_inv": ("F32", (3, 2))}, (300, 200), block=(128, 128)
    ),
    "fp8 block of exponents": Format(
        {"weight": ("F8_E4M3", (130, 200)), "scale": ("F8_E8M0", (2, 2))}, (130, 200), block=(128, 128)
    ),
    "fp8 small blocks": Format({"weight": ("F8_E4M3", (70, 65)), "weight_scale": ("BF16", (3, 3))}, (70, 65), block=(32, 32)),
    "fp8 stacked": Format(
        {"weight": ("F8_E4M3", (3, 130, 70)), "weight_scale": ("BF16", (3, 2, 1))}, (3, 130, 70), block=(128, 128)
    ),
    "fp8 channel": Format({"weight": ("F8_E4M3", (20, 2050)), "weight_scale": ("BF16", (20, 1))}, (20, 2050)),
    "fp8 channel, a vector": Format({"weight": ("F8_E5M2", (20, 1100)), "weight_scale": ("F32", (20,))}, (20, 1100)),
    "fp8 tensor": Format({"weight": ("F8_E4M3", (33, 65)), "weight_scale": ("F32", (1,))}, (33, 65)),
    "fp8 without a scale": Format({"weight": ("F8_E4M3", (33, 64))}, (33, 64), layout={"unscaled": True}),
    "mxfp8": Format({"weight": ("F8_E4M3", (33, 64)), "weight_scale": ("U8", (33, 2))}, (33, 64)),
    "int8": Format({"weight": ("I8", (9, 1200)), "weight_scale": ("BF16", (9, 1))}, (9, 1200)),
    "int4 group": Format({"weight_packed": ("I32", (13, 8)), "weight_scale": ("BF16", (13, 2))}, (13, 64), 4, (1, 32)),
    "int4 channel": Format({"weight_packed": ("I32", (5, 513)), "weight_scale": ("F16", (5, 1))}, (5, 4104), 4),
    "int4 asymmetric": Format(
        {"weight_packed": ("I32", (43, 8)), "weight_scale": ("BF16", (43, 2)), "weight_zero_point": ("I32", (6, 2))},
        (43, 64), 4, (1, 32),
    ),
    "int4 in an order": Format(
        {"weight_packed": ("I32", (13, 12)), "weight_scale": ("BF16", (13, 3)), "weight_g_idx": ("I32", (96,))},
        (13, 96), 4, (1, 32),
    ),
    "int8 in words, the last not full": Format(
        {"weight_packed": ("I32", (6, 300)), "weight_scale": ("F32", (6, 1))}, (6, 1199), 8, cols=1199
    ),
    "int3 in words": Format({"weight_packed": ("I32", (7, 6)), "weight_scale": ("F32", (7, 2))}, (7, 64), 3, (1, 32)),
    "gptq": Format(
        {"qweight": ("I32", (12, 104)), "qzeros": ("I32", (3, 13)), "scales": ("F16", (3, 104)), "g_idx": ("I32", (96,))},
        (104, 96), 4, (1, 32), layout={"gptq": "v1"},
    ),
    "gptq of 3 bits": Format(
        {"qweight": ("I32", (9, 96)), "qzeros": ("I32", (3, 9)), "scales": ("F16", (3, 96))}, (96, 96), 3, (1, 32),
        layout={"gptq": "v2"},
    ),
    "awq": Format(
        {"qweight": ("I32", (96, 13)), "qzeros": ("I32", (3, 13)), "scales": ("F16", (3, 104))}, (104, 96), 4, (1, 32)
    ),
}  # fmt: skip
