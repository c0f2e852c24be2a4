"""Whether a head's rows are those of its source, each where the order says: by digests of rows, without any activation.

Imports numpy and xxhash: import it only to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..checks.viewing import values
from ..checks.views import View
from ..files.checkpoint import Checkpoint
from ..files.parallel import on_threads
from ..files.source import Source
from .head import Head, bias

Digests = np.ndarray[Any, np.dtype[np.uint64]]
Ids = np.ndarray[Any, np.dtype[np.int32]]

ELEMENTS = 1 << 21  # of a head, digested by a thread at a time


class Misplaced(NamedTuple):
    """A row that is not its token's. ``found``: the token of the source whose row it is, None where it is nobody's."""

    row: int
    token: int
    found: int | None


def digests(view: View, source: Source, jobs: int = 0) -> Digests:
    """The xxh3-128 of each row's values as float32, [rows, 2]. Every value that differs in a bit gives another one."""
    step = max(ELEMENTS // max(view.cols, 1) // 32 * 32, 32)
    tasks = (partial(_digests, view, source, at, min(at + step, view.rows)) for at in range(0, view.rows, step))
    return np.concatenate([np.empty((0, 2), np.uint64), *on_threads(tasks, jobs)])


def _digests(view: View, source: Source, start: int, stop: int) -> Digests:
    rows = np.ascontiguousarray(values(view, source, start, stop))
    found = b"".join(xxhash.xxh3_128_digest(row.data) for row in rows)
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def misplaced(mine: Digests, theirs: Digests, tokens: Ids) -> list[Misplaced]:
    """The rows of a head that do not hold their token's row of the source.

    ``mine``: digests of its rows, ``theirs`` of the source's, a row for each token; ``tokens``: the token of each row.
    """
    wrong = np.flatnonzero((mine != theirs[tokens]).any(axis=1))
    return list(_found(mine, theirs, tokens, wrong)) if len(wrong) else []


def _found(mine: Digests, theirs: Digests, tokens: Ids, wrong: Any) -> Iterator[Misplaced]:
    token_of = {digest.tobytes(): token for token, digest in enumerate(theirs)}
    for row in wrong.tolist():
        yield Misplaced(row, int(tokens[row]), token_of.get(mine[row].tobytes()))


def bias_differs(head: Head, made: Checkpoint, origin: Head, source: Checkpoint, tokens: Ids) -> bool:
    """Whether the bias is not the source's, each number at its token's row; also where one of the two has none."""
    if head.bias is None or origin.bias is None:
        return (head.bias is None) != (origin.bias is None)
    return not np.array_equal(bias(head, head.bias, made), bias(origin, origin.bias, source)[tokens], equal_nan=True)
