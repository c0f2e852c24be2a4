"""Run one operation over tensors in memory, chunk by chunk, as the executor does over files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptkit.files.header import DTYPE_BITS, Spec, row_view
from ckptkit.ops import Block, Context, Operation, Read, operation

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def run(
    id: str,
    args: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    budget: int = 1 << 20,
    context: Context | None = None,
) -> dict[str, Tensor]:
    """The outputs of operation ``id`` on ``inputs`` by name, read at most about ``budget`` bytes at a time."""
    given = {
        Spec(name, NAMES[tensor.dtype], tuple(tensor.shape)): tensor.flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in inputs.items()
    }
    return {spec.name: _tensor(spec, data) for spec, data in run_bytes(id, args, given, budget, context).items()}


def run_bytes(
    id: str,
    args: Mapping[str, Any],
    inputs: Mapping[Spec, bytes],
    budget: int = 1 << 20,
    context: Context | None = None,
) -> dict[Spec, bytearray]:
    """The outputs of operation ``id`` on tensors given as bytes.

    Asserts what the contract of an operation promises: chunks write every output once, in order, without gap.
    """
    op, context = operation(id), context or Context()
    specs, tensors = list(inputs), list(inputs.values())
    outputs = op.specs(specs, args)
    state = _measured(op, specs, tensors, args, budget, context)
    made = [bytearray() for _ in outputs]
    for chunk in op.chunks(specs, args, budget):
        blocks = [_block(specs[read.tensor], tensors[read.tensor], read) for read in chunk.reads]
        arrays = op.make(blocks, chunk, args, state, context)
        for write, array in zip(chunk.writes, arrays, strict=True):
            assert array.dtype == np.uint8
            assert array.flags.c_contiguous
            _, row_bytes = row_view(outputs[write.tensor].dtype, outputs[write.tensor].shape)
            assert write.row * row_bytes == len(made[write.tensor]), f"{outputs[write.tensor].name}: gap or overlap"
            made[write.tensor] += array.tobytes()
    for spec, data in zip(outputs, made, strict=True):
        assert len(data) == spec.nbytes, f"{spec.name}: {len(data)} bytes of {spec.nbytes}"
    return dict(zip(outputs, made, strict=True))


def _measured(
    op: Operation,
    specs: Sequence[Spec],
    tensors: Sequence[bytes],
    args: Mapping[str, Any],
    budget: int,
    context: Context,
) -> list[float] | None:
    reads = op.measures(specs, args, budget) if op.measures else ()
    blocks = (_block(specs[read.tensor], tensors[read.tensor], read) for read in reads)
    found = [op.measure(block, args, context) for block in blocks if op.measure]
    return np.maximum.reduce(found).tolist() if found else None


def _block(spec: Spec, data: bytes, read: Read) -> Block:
    rows, width = row_view(spec.dtype, spec.shape)
    columns = spec.shape[-1] if spec.shape else 1
    first, stop = read.col or 0, columns if read.col_stop is None else read.col_stop
    left, right = (count * DTYPE_BITS[spec.dtype] // 8 for count in (first, stop))
    part = np.frombuffer(data, np.uint8).reshape(rows, width)[read.row : read.row_stop, left:right]
    return Block(bytearray(part.tobytes()), spec.dtype, len(part), stop - first, spec.shape)


def _tensor(spec: Spec, data: bytearray) -> Tensor:
    dtype = DTYPES[spec.dtype]
    return torch.frombuffer(data, dtype=dtype).view(spec.shape) if data else torch.empty(spec.shape, dtype=dtype)
