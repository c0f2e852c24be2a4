"""A module's tensors as bytes in memory, and rows of the weight that they hold by the package's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptkit.decode import Encoded, decode, encoded, spans
from ckptkit.decode.columns import Strip
from ckptkit.plan import Ref

DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(tensor: torch.Tensor) -> Stored:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Stored(DTYPES[tensor.dtype], tuple(tensor.shape), raw)


def tensor(stored: Stored) -> torch.Tensor:
    dtype = next(dtype for dtype, name in DTYPES.items() if name == stored.dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(dtype).reshape(stored.shape)


class Module:
    """Tensors by the last part of their names, laid one after the other."""

    def __init__(self, last: str, tensors: Mapping[str, torch.Tensor | Stored], **known: Any):
        self.bytes, self.parts = b"", {}
        for name, tensor in tensors.items():
            dtype, shape, data = stored(tensor) if isinstance(tensor, torch.Tensor) else tensor
            start = len(self.bytes)
            self.parts[name] = Ref("file", f"m.{name}", dtype, shape, start, start + len(data))
            self.bytes += data
        self.weight: Encoded = encoded(last, self.parts, **known)

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        stop = self.weight.rows if stop is None else stop
        data = {role: self.bytes[span.start : span.stop] for role, span in spans(self.weight, start, stop).items()}
        return decode(self.weight, start, stop, data)

    def in_pieces(self, step: int) -> np.ndarray[Any, Any]:
        rows = range(0, self.weight.rows, step)
        return np.concatenate([self.rows(start, min(start + step, self.weight.rows)) for start in rows])

    def strip(self, role: str, strip: Strip) -> bytes:
        ref = self.weight.parts[role]
        raw = np.frombuffer(self.bytes[ref.start : ref.stop], np.uint8).reshape(
            -1, ref.shape[-1], ref.nbytes // prod(ref.shape)
        )
        return raw[strip.row : strip.row_stop, strip.col : strip.col_stop].tobytes()
