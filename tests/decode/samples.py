"""A small weight of random codes in every stored format, and what the slow implementation says of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from functools import cache
from math import ceil, prod
from typing import Any, NamedTuple

from . import slow
from .memory import Stored

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}


class Sample(NamedTuple):
    """A weight [rows, cols] as stored, and how to read each of its codes. ``known``: what the config says of it."""

    last: str
    tensors: Mapping[str, Stored]
    known: Mapping[str, Any]
    rows: int
    cols: int
    bits: int
    place: slow.Place
    number: Callable[[int], float]
    scale: slow.At
    zero: slow.At = lambda row, col: 0.0

    @property
    def data(self) -> bytes:
        return self.tensors[self.last].data

    @property
    def codes(self) -> slow.Codes:
        return slow.taken(self.data, self.rows, self.cols, self.bits, self.place)


def table(stored: Stored, by_rows: int = 1, by_cols: int = 1) -> slow.At:
    """The number of ``stored``, [.., columns], for blocks of ``by_rows`` x ``by_cols``."""
    numbers, across = slow.floats(stored.data, stored.dtype), stored.shape[-1]
    return lambda row, col: numbers[row // by_rows * across + col // by_cols]


class Source:
    """Random tensors; the same ones for the same seed."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)

    def bytes(self, dtype: str, *shape: int, among: range | None = None) -> Stored:
        count = prod(shape) * BYTES.get(dtype, 1)
        return Stored(dtype, shape, bytes(self.random.choices(among or range(256), k=count)))

    def floats(self, dtype: str, *shape: int) -> Stored:
        """Scales as trained weights have them: positive, no two alike."""
        numbers = [self.random.uniform(0.001, 0.02) for _ in range(prod(shape))]
        if dtype == "BF16":
            return Stored(dtype, shape, b"".join(struct.pack("<f", x)[2:] for x in numbers))
        return Stored(dtype, shape, struct.pack(f"<{len(numbers)}{'e' if dtype == 'F16' else 'f'}", *numbers))

    def exponents(self, dtype: str, *shape: int) -> Stored:
        return self.bytes(dtype, *shape, among=range(100, 140))

    def fp8(self, dtype: str, *shape: int) -> Stored:
        """Codes of FP8 without NaN and infinity."""
        found = self.bytes(dtype, *shape)
        top = 0x7C if dtype == "F8_E5M2" else 0x7F
        return found._replace(data=bytes(b ^ 4 if b & top == top else b for b in found.data))


# --- four bits with a mantissa -----------------------------------------------------------------------------


def fp4(name: str, dtype: str, scale: str, scale_dtype: str, shape: tuple[int, int] = (6, 96)) -> Sample:
    """E2M1 with a power of two for 32 columns: DeepSeek-V4, compressed-tensors, safetensors' F4."""
    source, (rows, cols) = Source(name), shape
    weight = source.bytes(dtype, rows, cols // 2)
    weight = weight._replace(shape=shape) if dtype == "F4" else weight
    scales = source.exponents(scale_dtype, rows, cols // 32)
    return Sample(
        name, {name: weight, scale: scales}, {}, rows, cols, 4, slow.along_columns(cols, 4), slow.e2m1,
        table(scales, 1, 32),
    )  # fmt: skip


def gpt_oss() -> Sample:
    """Blocks of 16 bytes, one exponent each, for every output of every expert."""
    source, (experts, outputs, groups) = Source("blocks"), (3, 4, 2)
    blocks = source.bytes("U8", experts, outputs, groups, 16)
    scales = source.exponents("U8", experts, outputs, groups)
    rows, cols = experts * outputs, groups * 32
    tensors = {"blocks": blocks, "scales": scales}
    return Sample("blocks", tensors, {}, rows, cols, 4, slow.along_columns(cols, 4), slow.e2m1, table(scales, 1, 32))


def nvfp4(last: str, overall: str, lead: tuple[int, ...] = (), dtype: str = "U8") -> Sample:
    """E2M1 with an E4M3 scale for 16 columns: over a number in compressed-tensors, times one in ModelOpt.

    ``lead``: of a stack, where each matrix has its own number.
    """
    source, stack, cols = Source(f"{last}{overall}{lead}{dtype}"), 4, 64
    weight = source.bytes(dtype, *lead, stack, cols // 2)
    weight = weight._replace(shape=(*lead, stack, cols)) if dtype == "F4" else weight
    scales = source.bytes("F8_E4M3", *lead, stack, cols // 16, among=range(1, 0x7F))
    numbers = [source.random.uniform(1000, 4000) for _ in range(prod(lead))]
    numbers = numbers if overall == "weight_global_scale" else [1 / number for number in numbers]
    whole = Stored(
        "F32", lead or ((1,) if overall == "weight_global_scale" else ()), struct.pack(f"<{len(numbers)}f", *numbers)
    )
    of_block, of_matrix = table(scales, 1, 16), slow.floats(whole.data, "F32")

    def scale(row: int, col: int) -> float:
        number = of_matrix[row // stack]
        by = of_block(row, col)
        return slow.float32(by / number if overall == "weight_global_scale" else by * number)

    tensors = {last: weight, "weight_scale": scales, overall: whole}
    place = slow.along_columns(cols, 4)
    return Sample(last, tensors, {}, stack * prod(lead), cols, 4, place, slow.e2m1, scale)


# --- eight bits --------------------------------------------------------------------------------------------


def fp8(
    scale: str, scale_dtype: str, scale_shape: tuple[int, ...], by: tuple[int, int], *,
    shape: tuple[int, ...] = (40, 96), dtype: str = "F8_E4M3", block: bool = True,
) -> Sample:  # fmt: skip
    """FP8 with a scale for blocks of ``by`` rows and columns; ``block``: the config declares them."""
    source = Source(f"{scale}{scale_dtype}{scale_shape}{dtype}")
    weight = source.fp8(dtype, *shape)
    exponents = scale_dtype in {"F8_E8M0", "U8"}
    scales = (source.exponents if exponents else source.floats)(scale_dtype, *scale_shape)
    rows, cols, stack = prod(shape[:-1]), shape[-1], shape[-2]
    numbers, down, across = slow.floats(scales.data, scale_dtype), ceil(stack / by[0]), ceil(cols / by[1])

    def at(row: int, col: int) -> float:
        return numbers[(row // stack * down + row % stack // by[0]) * across + col // by[1]]

    number = slow.e5m2 if dtype == "F8_E5M2" else slow.e4m3
    known = {"block": by} if block else {}
    return Sample(
        "weight", {"weight": weight, scale: scales}, known, rows, cols, 8, slow.along_columns(cols, 8), number, at
    )


def int8(zero: bool) -> Sample:
    """int-quantized of compressed-tensors: signed bytes, groups of 32 columns, zero points one a byte."""
    source, rows, cols = Source(f"int8 {zero}"), 6, 96
    weight, scales = source.bytes("I8", rows, cols), source.floats("BF16", rows, 3)
    tensors, points = {"weight": weight, "weight_scale": scales}, Stored("I8", (rows, 3), bytes(3 * rows))
    if zero:
        tensors["weight_zero_point"] = points = source.bytes("I8", rows, 3)
    return Sample(
        "weight", tensors, {}, rows, cols, 8, slow.along_columns(cols, 8), signed,
        table(scales, 1, 32), lambda row, col: signed(points.data[row * 3 + col // 32]),
    )  # fmt: skip


def signed(byte: int) -> float:
    return float(byte - 256 if byte > 127 else byte)


# --- integers in words -------------------------------------------------------------------------------------


def packed(bits: int, group: int, zero: bool = False, order: bool = False, *, rows: int = 11, cols: int = 96) -> Sample:
    """pack-quantized: along the columns, offset by half the range; zero points likewise, but along the rows."""
    source = Source(f"{bits} {group} {zero} {order} {rows} {cols}")
    words, groups, half = ceil(cols * bits / 32), cols // group, 1 << bits - 1
    place = slow.along_columns(cols, bits, 32 * words)
    codes = [[source.random.randrange(1 << bits) for _ in range(cols)] for _ in range(rows)]
    weight = Stored("I32", (rows, words), slow.put(codes, bits, place, 4 * words * rows))
    scales = source.floats("BF16", rows, groups)
    tensors = {"weight_packed": weight, "weight_scale": scales}
    group_of = [col // group for col in range(cols)]
    if order:
        source.random.shuffle(group_of)
        tensors["weight_g_idx"] = Stored("I32", (cols,), struct.pack(f"<{cols}i", *group_of))
    at, points = table(scales), [[half] * groups for _ in range(rows)]
    if zero:
        tall = ceil(rows * bits / 32)
        points = [[source.random.randrange(1 << bits) for _ in range(groups)] for _ in range(rows)]
        data = slow.put(points, bits, slow.along_rows(groups, bits), 4 * tall * groups)
        tensors["weight_zero_point"] = Stored("I32", (tall, groups), data)
    return Sample(
        "weight_packed", tensors, {"bits": bits, "cols": cols}, rows, cols, bits, place, float,
        lambda row, col: at(row, group_of[col]), lambda row, col: float(points[row][group_of[col]]),
    )  # fmt: skip


def stacked(sample: Sample, count: int) -> Sample:
    """The same bytes seen as ``count`` matrices, one below the other."""
    tensors = {
        name: stored._replace(shape=(count, stored.shape[0] // count, *stored.shape[1:]))
        for name, stored in sample.tensors.items()
    }
    return sample._replace(tensors=tensors)


def gptq(bits: int, version: str = "v1", order: str = "") -> Sample:
    """GPTQ: along the inputs; zero points along the outputs, less one in v1; ``order``: "" (none), "runs", "mixed"."""
    source, rows, cols, group = Source(f"gptq {bits} {version} {order}"), 96, 64, 32
    tall, wide, groups = rows * bits // 32, cols * bits // 32, rows // group
    weight, zeros = source.bytes("I32", tall, cols), source.bytes("I32", groups, wide)
    scales = source.floats("F16", groups, cols)
    tensors = {"qweight": weight, "qzeros": zeros, "scales": scales}
    group_of = [row // group for row in range(rows)]
    if order:
        if order == "mixed":
            source.random.shuffle(group_of)
        tensors["g_idx"] = Stored("I32", (rows,), struct.pack(f"<{rows}i", *group_of))
    at = table(scales)
    points = slow.taken(zeros.data, groups, cols, bits, slow.along_columns(cols, bits))
    return Sample(
        "qweight", tensors, {"bits": bits, "gptq": version}, rows, cols, bits, slow.along_rows(cols, bits), float,
        lambda row, col: at(group_of[row], col), lambda row, col: float(points[group_of[row]][col] + (version == "v1")),
    )  # fmt: skip


def awq() -> Sample:
    """AWQ as its GEMM kernels read it: along the outputs, in the order of AWQ_ORDER, weights and zero points."""
    source, rows, cols, group = Source("awq"), 64, 40, 16
    weight, zeros = source.bytes("I32", rows, cols // 8), source.bytes("I32", rows // group, cols // 8)
    scales = source.floats("F16", rows // group, cols)
    points = slow.taken(zeros.data, rows // group, cols, 4, slow.as_awq(cols))
    tensors = {"qweight": weight, "qzeros": zeros, "scales": scales}
    return Sample(
        "qweight", tensors, {"bits": 4}, rows, cols, 4, slow.as_awq(cols), float,
        table(scales, group), lambda row, col: float(points[row // group][col]),
    )  # fmt: skip


FORMATS: dict[str, Callable[[], Sample]] = {
    "DeepSeek-V4 expert": lambda: fp4("weight", "I8", "scale", "F8_E8M0"),
    "MXFP4 of compressed-tensors": lambda: fp4("weight_packed", "U8", "weight_scale", "U8"),
    "MXFP4 in F4": lambda: fp4("weight", "F4", "weight_scale", "F8_E8M0"),
    "gpt-oss": gpt_oss,
    "NVFP4 of compressed-tensors": lambda: nvfp4("weight_packed", "weight_global_scale"),
    "NVFP4 of ModelOpt": lambda: nvfp4("weight", "weight_scale_2"),
    "NVFP4 in F4": lambda: nvfp4("weight", "weight_scale_2", dtype="F4"),
    "NVFP4, stacked, of compressed-tensors": lambda: nvfp4("weight_packed", "weight_global_scale", (3,)),
    "NVFP4, stacked, of ModelOpt": lambda: nvfp4("weight", "weight_scale_2", (3,)),
    "FP8 blocks, E8M0, cut short": lambda: fp8("scale", "F8_E8M0", (3, 3), (16, 40)),
    "FP8 blocks, whole": lambda: fp8("weight_scale_inv", "F32", (2, 3), (20, 32)),
    "FP8 blocks of 32": lambda: fp8("scale", "F8_E8M0", (2, 3), (32, 32)),
    "FP8 blocks, F32, inverse": lambda: fp8("weight_scale_inv", "F32", (3, 2), (16, 64)),
    "FP8 blocks of 128, BF16": lambda: fp8("weight_scale", "BF16", (2, 2), (128, 128), shape=(130, 200)),
    "FP8 blocks, one row": lambda: fp8("scale", "F8_E8M0", (1, 2), (128, 128), shape=(1, 200)),
    "FP8 blocks of a stack": lambda: fp8("weight_scale_inv", "F32", (2, 3, 2), (16, 64), shape=(2, 40, 96)),
    "FP8 blocks of ModelOpt": lambda: fp8("weight_scale", "F32", (2, 1, 2, 1), (32, 64)),
    "FP8 channel": lambda: fp8("weight_scale", "F32", (40, 1), (1, 96), block=False),
    "FP8 channel, no column": lambda: fp8("weight_scale", "BF16", (40,), (1, 96), block=False),
    "FP8 channel of a stack": lambda: fp8("weight_scale", "F32", (2, 20), (1, 96), shape=(2, 20, 96), block=False),
    "FP8 tensor": lambda: fp8("weight_scale", "F32", (), (40, 96), block=False),
    "FP8 tensor, E5M2": lambda: fp8("weight_scale", "F32", (1,), (40, 96), dtype="F8_E5M2", block=False),
    "FP8 tensor of a stack": lambda: fp8("weight_scale", "F32", (3,), (8, 32), shape=(3, 8, 32), block=False),
    "MXFP8": lambda: fp8("weight_scale", "U8", (40, 3), (1, 32), block=False),
    "INT8": lambda: int8(zero=False),
    "INT8, asymmetric": lambda: int8(zero=True),
    **{f"packed, {bits} bits": lambda bits=bits: packed(bits, 32) for bits in range(1, 9)},
    **{f"packed, {bits} bits, asymmetric": lambda bits=bits: packed(bits, 32, zero=True) for bits in range(1, 9)},
    "packed, channel": lambda: packed(4, 96),
    "packed, a last word that is not full": lambda: packed(4, 20, cols=100),
    "packed, g_idx": lambda: packed(4, 32, order=True),
    "packed, g_idx, asymmetric": lambda: packed(4, 32, zero=True, order=True),
    "packed, stacked, asymmetric": lambda: stacked(packed(4, 32, zero=True, rows=16), 2),
    **{f"GPTQ v1, {bits} bits": lambda bits=bits: gptq(bits) for bits in (2, 3, 4, 8)},
    **{f"GPTQ v2, {bits} bits": lambda bits=bits: gptq(bits, "v2") for bits in (2, 3, 4, 8)},
    "GPTQ, g_idx": lambda: gptq(4, order="runs"),
    **{f"GPTQ, act-order, {bits} bits": lambda bits=bits: gptq(bits, order="mixed") for bits in (2, 3, 4, 8)},
    "AWQ": awq,
}  # fmt: skip


@cache
def sample_of(name: str) -> Sample:
    return FORMATS[name]()


@cache
def values_of(name: str) -> slow.Matrix:
    sample = sample_of(name)
    return slow.values(sample.codes, sample.number, sample.scale, sample.zero)
