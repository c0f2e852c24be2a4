"""Tables of finished values: what a byte of codes means under a scale, scaled and rounded.

A byte holds one number of 8 bits or two of 4, so a table has 256 entries for a scale, each the one or two values in the
dtype asked for, as a word. Looking up takes the place of unpacking, scaling and rounding, and gives the same bits: every
table is what :func:`ckptkit.decode.decode` makes of all bytes, rounded. Scales of one byte have one table for all
tensors (for each scale of scales, if there is one); others a table for each scale, where enough codes share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..decode import Coding, Encoded
from ..decode.layout import scale_row, scale_rows
from ..decode.rows import decode
from ..files.header import DTYPE_BITS
from .rounding import WORDS, Array, put, rounded

ENTRIES = 256

# From which byte on, its sign aside, a code of 8 bits is no finite number.
_ENDLESS = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}


class Table(NamedTuple):
    """``entries`` [256 for every scale]; ``first`` [rows or 1, blocks]: where those for each block of the rows begin.

    ``first`` holds each number, of dtype ``word``, as often as a word of 64 bits does, if whole words make a block;
    a block is ``width`` of them. ``endless``: from which code on, its sign aside, they are NaN or Inf.
    """

    entries: Array
    first: Array
    word: np.dtype[Any]
    width: int
    endless: int | None


def table(weight: Encoded, start: int, stop: int, data: Mapping[str, Any], dtype: str) -> Table | None:
    """For rows [start, stop) of ``weight``; None where there is none, or a scale makes something that is not finite."""
    if not _has_tables(weight):
        return None
    scale, overall = weight.scale, bytes(data.get("overall", b""))
    assert scale is not None
    raw = np.frombuffer(data["scale"], np.uint8)
    count = len(raw) * 8 // DTYPE_BITS[scale.dtype]
    if count == len(raw):
        entries, is_clean = _by_byte(_alone(weight, ENTRIES), overall, dtype)
        first, is_clean = raw.astype(np.uint16) << 8, is_clean[raw]
    elif 2 * count * ENTRIES <= (stop - start) * weight.row_bytes:
        entries, is_clean = _entries(_alone(weight, count), raw, overall, dtype)
        first = np.arange(0, count * ENTRIES, ENTRIES, dtype=np.uint16 if count <= ENTRIES else np.uint32)
    else:
        return None
    if not is_clean.all():
        return None
    first = first.reshape(-1, weight.grid[1])
    if weight.grid[0] > 1 and weight.height > 1:
        first = first[scale_row(weight, np.arange(start, stop)) - scale_rows(weight, start, stop)[0]]
    width, in_word = weight.width * weight.bits // 8, 8 // first.itemsize
    if width % in_word:
        return Table(entries.ravel(), first, first.dtype, width, _ENDLESS.get(weight.codes.dtype))
    filled = first * sum(np.uint64(1 << 64 // in_word * place) for place in range(in_word))
    return Table(entries.ravel(), filled, first.dtype, width // in_word, _ENDLESS.get(weight.codes.dtype))


def _has_tables(weight: Encoded) -> bool:
    """If every byte of its codes stands for itself under one scale."""
    if weight.scale is None or weight.zero is not None or weight.order is not None or weight.bits not in {4, 8}:
        return False
    if weight.coding not in {Coding.FP4, Coding.FP8, Coding.INT8, Coding.WORDS}:
        return False
    one = weight.overall is None or math.prod(weight.overall.shape) == 1
    return one and weight.width * weight.bits % 8 == 0 and weight.cols * weight.bits == 8 * weight.row_bytes


def _alone(weight: Encoded, scales: int) -> Encoded:
    """A weight stored like ``weight``, each of whose rows holds every code under a scale of its own. Has no names."""
    assert weight.scale is not None
    cols = 1 << weight.bits
    codes, scale = (ref._replace(file="", name="", start=0, stop=0, span=None) for ref in (weight.codes, weight.scale))
    overall = weight.overall and weight.overall._replace(file="", name="", start=0, stop=0, span=None)
    return weight._replace(
        rows=scales, cols=cols, stack=scales, height=1, width=cols, grid=(scales, 1), codes=codes, scale=scale,
        overall=overall,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _by_byte(alone: Encoded, overall: bytes, dtype: str) -> tuple[Array, Array]:
    return _entries(alone, np.arange(ENTRIES, dtype=np.uint8), overall, dtype)


def _entries(alone: Encoded, scale: Array, overall: bytes, dtype: str) -> tuple[Array, Array]:
    """[scales, 256] entries, and [scales] whether what is finite without its scale is so with it."""
    every = np.arange(1 << alone.bits, dtype=np.uint8)
    codes = every if alone.bits == 8 else every[::2] | every[1::2] << 4
    with np.errstate(all="ignore"):
        x = decode(alone, 0, alone.rows, {"codes": np.tile(codes, alone.rows), "scale": scale, "overall": overall})
    made, word = rounded(x, dtype), WORDS[dtype]
    finite = (made & word.dtype.type(word.unsigned)) < word.infinity
    if alone.codes.dtype in _ENDLESS:
        finite |= (every & 0x7F) >= _ENDLESS[alone.codes.dtype]
    if alone.bits == 4:
        wide = made.astype(f"<u{2 * word.dtype.itemsize}")
        made = (wide[:, None, :] | wide[:, :, None] << 8 * word.dtype.itemsize).reshape(-1, ENTRIES)
    return made, finite.all(axis=1)


def look_up(found: Table, codes: Array, first: Array, out: Array) -> bool:
    """Fill ``out`` [rows, cols]; False if one of the codes is NaN or Inf.

    ``codes`` uint8 [rows, bytes of a row]; ``first``: those rows of ``found.first``, or the one that all share.
    """
    if found.endless is not None and int((codes & 0x7F).max()) >= found.endless:
        return False
    # np.repeat keeps other threads waiting, so it is given as few and as large words as may be.
    index = np.repeat(first, found.width, axis=1).view(found.word)[:, : codes.shape[1]]
    index = np.bitwise_or(index, codes, out=index if len(index) == len(codes) else None)
    if out.flags.c_contiguous:
        np.take(found.entries, index, out=out.view(found.entries.dtype), mode="clip")
    else:
        put(out, np.take(found.entries, index, mode="clip").view(out.dtype))
    return True
