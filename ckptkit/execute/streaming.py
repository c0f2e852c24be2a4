"""Rows that change places, read in the order in which they lie: once, from beginning to end.

An order of which a draft head is a view is a stable partition: in a few streams, each ascending, rows keep their order. So what
is read at a time goes to as few places as there are streams, and no more than that is held.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..files.header import Entry, row_view
from ..ops.rows import PIECE
from ..plan import Step
from ..vocab.order import inverse
from .target import Target
from .work import Work

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.int32]]

_HELD = 4 * PIECE  # bytes that are read at a time: from a server, many small requests would cost more than the bytes


def can_stream(step: Step, work: Work) -> bool:
    """Whether the rows are to be read so, and all of them are wanted once."""
    ref, numbers = step.inputs[0], step.inputs[-1]
    wanted = work.options.streaming or not work.source.files[ref.file].here
    return wanted and step.op == "rows@1" and ref.shape[0] == numbers.shape[0] and step.args.keys() == {"name", "rows"}


def stream(step: Step, numbers: Numbers, place: Entry, target: Target, work: Work) -> None:
    """Make the output of ``step``, which lies at ``place``: output row r is row ``numbers[r]`` of its input."""
    import numpy as np

    ref = step.inputs[0]
    rows, width = row_view(ref.dtype, ref.shape)
    at_once = max(1, _HELD // width)
    data = np.empty((min(at_once, rows), width), np.uint8)
    destinations = inverse(numbers)
    for start in range(0, rows, at_once):
        work.check()
        mine = destinations[start : start + at_once]
        held = data[: len(mine)]
        work.source.read_into(ref.file, ref.start + start * width, held.reshape(-1).data)
        by_place = np.argsort(mine)
        ordered = mine[by_place]
        breaks = [0, *(np.flatnonzero(np.diff(ordered) != 1) + 1).tolist(), len(ordered)]
        for first, stop in pairwise(breaks):
            taken = held[by_place[first:stop]]
            target.put(place.start + int(ordered[first]) * width, taken.reshape(-1).data)
            work.progress.advance(taken.nbytes)
    target.read_back(place)
