"""A module's tensors as bytes in memory, and rows of the weight that they hold by the package's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptkit.decode import Encoded, decode, encoded, spans
from ckptkit.plan import Ref

DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class Module:
    """Tensors by the last part of their names, laid one after the other."""

    def __init__(self, last: str, tensors: Mapping[str, torch.Tensor], **known: Any):
        self.bytes, self.parts = b"", {}
        for name, tensor in tensors.items():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            start = len(self.bytes)
            self.parts[name] = Ref(
                "file", f"m.{name}", DTYPES[tensor.dtype], tuple(tensor.shape), start, start + len(raw)
            )
            self.bytes += raw
        self.weight: Encoded = encoded(last, self.parts, **known)

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        stop = self.weight.rows if stop is None else stop
        data = {role: self.bytes[span.start : span.stop] for role, span in spans(self.weight, start, stop).items()}
        return decode(self.weight, start, stop, data)

    def in_pieces(self, step: int) -> np.ndarray[Any, Any]:
        rows = range(0, self.weight.rows, step)
        return np.concatenate([self.rows(start, min(start + step, self.weight.rows)) for start in rows])
