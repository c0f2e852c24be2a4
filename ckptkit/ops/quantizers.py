"""The quantizing operations: which tensors they make of a weight, and how the work is cut. No torch.

Names, dtypes and shapes are those that compressed-tensors 0.19.0 writes for each of its formats
(``compressed_tensors.compressors``); a test holds them, and the bytes, equal to that library's. What an operation
computes is in :mod:`ckptkit.ops.kernels`, imported when the first chunk is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files.header import DTYPE_BITS, Spec
from . import Args, Block, Chunk, Context, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

# Dtypes of stored scales and zero points.
_SCALES = {"nvfp4-pack-quantized": "F8_E4M3", "mxfp4-pack-quantized": "U8", "mxfp8-quantized": "U8"}
_ZERO_POINTS = {"torch.int8": "I8", "torch.uint8": "U8", "torch.float8_e4m3fn": "F8_E4M3"}


class Weight(NamedTuple):
    """The matrix [rows, cols] that input ``tensor`` holds: as stored, or columns start, start + step, … transposed."""

    tensor: int
    dtype: str
    rows: int
    cols: int
    columns: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes read for a row; of columns, what lies between them is read too."""
        return self.cols * (self.columns[1] if self.columns else 1) * DTYPE_BITS[self.dtype] // 8

    def read(self, start: int, stop: int) -> Read:
        """Where rows [start, stop) lie in the input."""
        if self.columns is None:
            return Read(self.tensor, start, stop)
        first, step = self.columns
        return Read(self.tensor, 0, self.cols, first + start * step, first + (stop - 1) * step + 1)

    def runs(self, budget: int, granule: int = 1) -> Iterator[tuple[int, int]]:
        """Runs of rows [start, stop) in multiples of ``granule`` but the last; without any rows, one empty run."""
        step = max(budget // self.row_bytes // granule, 1) * granule
        for start in range(0, max(self.rows, 1), step):
            yield start, min(start + step, self.rows)


def weights(inputs: Sequence[Spec], args: Args) -> list[Weight]:
    """The weight that each input holds."""
    return [_weight(index, spec, args.get("columns")) for index, spec in enumerate(inputs)]


def _weight(index: int, spec: Spec, columns: Sequence[Mapping[str, int]] | None) -> Weight:
    rows, cols = spec.shape
    if columns is None:
        return Weight(index, spec.dtype, rows, cols)
    part = columns[index]
    return Weight(index, spec.dtype, part["count"], rows, (part["start"], part["step"]))


class Output(NamedTuple):
    """A tensor made of a weight: ``rows`` of its rows for every ``per`` of the weight's, or all at the end (0)."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    rows: int = 1
    per: int = 1


def outputs(weight: Weight, args: Args) -> list[Output]:
    """The tensors that stand for a quantized weight; those that come at the end are the last of them."""
    q, packed = args["weights"], args["format"] == "pack-quantized"
    scale = _scale(weight, args["format"], q)
    made = [_codes(weight, packed, q), scale]
    if not q["symmetric"]:
        made.append(_zero_point(weight, packed, q, scale))
    if packed:
        made.append(Output("weight_shape", "I64", (2,), 0))
    if q["strategy"] == "tensor_group":
        made.append(Output("weight_global_scale", "F32", (1,), 0))
    return sorted(made, key=lambda output: output.rows == 0)


def _codes(weight: Weight, packed: bool, q: Args) -> Output:
    rows, cols, bits = weight.rows, weight.cols, q["num_bits"]
    if packed:
        return Output("weight_packed", "I32", (rows, cols * bits // 32))
    if q["type"] == "float" and bits == 4:
        return Output("weight_packed", "U8", (rows, cols // 2))
    return Output("weight", "I8" if q["type"] == "int" else "F8_E4M3", (rows, cols))


def _scale(weight: Weight, format: str, q: Args) -> Output:
    dtype = _SCALES.get(format, weight.dtype)
    if q["strategy"] == "tensor":
        return Output("weight_scale", dtype, (1,), 0)
    if q["strategy"] == "block":
        height, width = q["block_structure"]
        return Output("weight_scale", dtype, (-(-weight.rows // height), -(-weight.cols // width)), 1, height)
    groups = 1 if q["strategy"] == "channel" else weight.cols // q["group_size"]
    return Output("weight_scale", dtype, (weight.rows, groups))


def _zero_point(weight: Weight, packed: bool, q: Args, scale: Output) -> Output:
    """As the scale, unless it is packed: then 32 rows of zero points make as many rows of words as they have bits."""
    if packed and q["strategy"] in {"channel", "group"}:
        bits = q["num_bits"]
        common = gcd(bits, 32)
        shape = (-(-weight.rows * bits // 32), scale.shape[1])
        return Output("weight_zero_point", "I32", shape, bits // common, 32 // common)
    return scale._replace(suffix="weight_zero_point", dtype=_ZERO_POINTS[q["zp_dtype"]])


def granule(made: Sequence[Output]) -> int:
    """The least number of a weight's rows that make whole rows of every output."""
    return lcm(*(out.per for out in made))


def specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    """The outputs of each module in turn. The shapes are taken to fit the scheme."""
    made = zip(args["modules"], weights(inputs, args), strict=False)
    return [Spec(f"{name}.{out.suffix}", out.dtype, out.shape) for name, w in made for out in outputs(w, args)]


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of rows of one weight each; outputs that come at the end go with its last run."""
    first = 0
    for weight in weights(inputs, args)[: len(args["modules"])]:
        made = outputs(weight, args)
        for start, stop in weight.runs(budget, granule(made)):
            ready = [out for out in made if out.rows or stop == weight.rows]
            writes = [Write(first + i, start // out.per * out.rows) for i, out in enumerate(ready)]
            yield Chunk((weight.read(start, stop),), tuple(writes))
        first += len(made)


def measures(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Read]:
    """All of every input, where a scale depends on a whole tensor or a set of them."""
    if args["weights"]["strategy"] in {"tensor", "tensor_group"}:
        for weight in weights(inputs, args):
            yield from (weight.read(start, stop) for start, stop in weight.runs(budget))


def _make(
    id: str, blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context
) -> list[np.ndarray[Any, Any]]:
    from .kernels import make

    return make(id, blocks[0], chunk, args, state, context)


def _measure(block: Block, args: Args, context: Context) -> list[float]:
    from .kernels import measure

    return measure(block, args, context)


_NATIVE = ("pack_int@1", "int8@1", "fp8_channel@1", "fp8_block@1", "mxfp8@1", "nvfp4@1", "mxfp4@1")
_GENERIC = "ct_generic@1"  # compressed-tensors' own functions, which compute in other steps on a GPU

OPERATIONS = {
    id: Operation(id, specs, chunks, partial(_make, id), measures, _measure, bits_on_cuda=id != _GENERIC)
    for id in (*_NATIVE, _GENERIC)
}
