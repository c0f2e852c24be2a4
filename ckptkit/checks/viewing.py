"""Rows of a view as numbers. Imports numpy: import it only to compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import Encoded, spans
from ..decode.columns import WHOLE, columns, strips
from ..decode.numbers import Floats, to_float32
from ..decode.rows import Unpacked, decode, scaled, unpack
from ..files.reading import read_block
from ..files.source import Source
from ..ops import Read
from .views import View


def read(weight: Encoded, source: Source, start: int, stop: int) -> dict[str, bytearray]:
    """The bytes that stored rows [start, stop) need."""
    return {role: _bytes(source, *span) for role, span in spans(weight, start, stop).items()}


def _bytes(source: Source, file: str, start: int, stop: int) -> bytearray:
    found = bytearray(stop - start)
    source.read_into(file, start, memoryview(found))
    return found


def values(view: View, source: Source, start: int, stop: int) -> Floats:
    """Rows [start, stop), float32."""
    found = unpacked(view, source, start, stop)
    return found.numbers if view.turned or view.stored.scale is None else scaled(found)


def rows_of(view: View, source: Source, rows: np.ndarray[Any, Any]) -> Floats:
    """Rows in any order, float32 [len(rows), cols]; those that lie one after the other are read together."""
    order = np.argsort(rows)
    found = np.empty((len(rows), view.cols), np.float32)
    for run in np.split(order, np.flatnonzero(np.diff(rows[order]) != 1) + 1):
        if len(run):
            found[run] = values(view, source, int(rows[run[0]]), int(rows[run[-1]]) + 1)
    return found


def unpacked(view: View, source: Source, start: int, stop: int) -> Unpacked:
    """Rows [start, stop) with numbers and scales apart; of a view that lies turned, the values with scales of 1."""
    if view.turned:
        found = np.ascontiguousarray(_columns(view, source, start, stop).T)
        return Unpacked(found, np.ones((1, 1), np.float32), view.cols)
    first = view.first + view.start + start * view.step
    last = first + (stop - 1 - start) * view.step + 1
    rows = unpack(view.stored, first, last, read(view.stored, source, first, last))
    return rows if view.step == 1 else _every(rows, view.step)


def _every(found: Unpacked, step: int) -> Unpacked:
    """Every ``step``-th row."""
    scale, zero = (table if table is None or len(table) == 1 else table[::step] for table in (found.scale, found.zero))
    assert scale is not None
    return found._replace(numbers=np.ascontiguousarray(found.numbers[::step]), scale=scale, zero=zero)


def _columns(view: View, source: Source, start: int, stop: int) -> Floats:
    """Columns of the stored rows that the view's rows [start, stop) are."""
    stored = view.stored
    if stored.scale is None:
        first = view.start + start * view.step
        last = first + (stop - 1 - start) * view.step + 1
        block = read_block(source, stored.codes, Read(0, view.first, view.first + view.cols, first, last))
        flat = to_float32(np.frombuffer(block.data, np.uint8), stored.codes.dtype)
        return flat.reshape(view.cols, -1)[:, :: view.step]
    first, last = start // WHOLE * WHOLE, min(-(-stop // WHOLE) * WHOLE, stored.cols)
    cut = columns(stored, first, last)
    parts = strips(stored, 0, first, last)
    data = {role: read_block(source, ref, Read(0, *parts[role])).data for role, ref in stored.parts.items()}
    return decode(cut, 0, cut.rows, data)[:, start - first : stop - first]
