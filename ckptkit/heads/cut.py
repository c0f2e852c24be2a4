"""A head cut into slices: which rows a rank holds, and which token each row belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..vocab.slices import bounds

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int32]]

_PADDING = frozenset({"sglang", "vllm"})  # whose ranks all hold as many rows as the first


class Cut(NamedTuple):
    """A head of ``tokens`` [rows], the token of each row, cut by the rule of ``engine``.

    Rank j has the rows [bounds[j], bounds[j + 1]) and holds ``held[j]`` rows, those that pad its slice among them.
    """

    engine: str
    tokens: Ids
    bounds: Sequence[int]
    held: Sequence[int]

    @property
    def ranks(self) -> int:
        return len(self.held)

    def at_most(self, topk: int) -> int:
        """How many candidates every rank sends: ``topk``, or as many rows as the smallest slice holds."""
        return min(topk, *self.held)

    def rows(self, rank: int) -> tuple[int, int]:
        """The rows of a rank, [start, stop)."""
        return self.bounds[rank], self.bounds[rank + 1]


def cut(engine: str, tokens: Ids, ranks: int, n_layer: int = 0) -> Cut:
    """Raises UserError ``usage.slices`` where a rank would hold nothing."""
    found = bounds(engine, len(tokens), ranks, n_layer)
    sizes = [stop - start for start, stop in pairwise(found)]
    held = [max(sizes)] * ranks if engine in _PADDING else sizes
    if not all(held):
        message = f"a head of {len(tokens):,} rows leaves nothing for some of {ranks:,} slices"
        raise fail("usage.slices", message, hint=f"--slices {max(len(tokens), 1)}")
    return Cut(engine, tokens, found, held)
