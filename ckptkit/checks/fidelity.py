"""What a converted head does to the logits, for hidden states of :mod:`ckptkit.heads.states`. Imports numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..decode.numbers import Floats
from ..files.source import Source
from .bounds import Bound
from .compare import limits
from .matching import Pair
from .viewing import rows_of, unpacked, values

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]

ROWS = 1024  # of a head, multiplied at once
TOP = 10

# Errors of rounding are independent, so a logit's is nearly normal. A flip that needs more than so many standard
# deviations is no rounding.
DEVIATIONS = 8.0


class Agreement(NamedTuple):
    """How far two heads agree on states of one kind. KL in nats, source over result and the reverse.

    ``flips``: states whose first token changed; ``beyond``: those of them that no rounding explains.
    """

    states: int
    top1: float
    top5: float
    top10: float
    kl: float
    kl_reverse: float
    mean_abs: float
    max_abs: float
    flips: int
    beyond: int
    worst: tuple[int, int] | None


def agreements(
    pair: Pair, made: Source, source: Source, bound: Bound, kinds: Mapping[str, Floats], rows: Ids | None = None
) -> dict[str, Agreement]:
    """How far the head agrees with its source, by kind of hidden states [states, width].

    ``rows`` [tokens]: the row of each token, of a head whose rows were put in another order than its source's.
    """
    states = np.concatenate(list(kinds.values()))
    seen: Seen | None = None
    for start in range(0, pair.source.rows, ROWS):
        stop = min(start + ROWS, pair.source.rows)
        theirs = states @ values(pair.source, source, start, stop).T
        same = values(pair.made, made, start, stop) if rows is None else rows_of(pair.made, made, rows[start:stop])
        part = _seen(start, theirs, states @ same.T)
        seen = part if seen is None else _both(seen, part)
    assert seen is not None
    explained = _explained(seen, states, lambda token: _row_limits(pair, made, bound, token, rows))
    found, at = {}, 0
    for kind, some in kinds.items():
        chosen = slice(at, at + len(some))
        found[kind] = _agreement(Seen._make(field[chosen] for field in seen), explained[chosen])
        at += len(some)
    return found


def _row_limits(pair: Pair, made: Source, bound: Bound, token: int, rows: Ids | None) -> Floats:
    """How far each number of a token's row may be off."""
    row = token if rows is None else int(rows[token])
    found: Floats = limits(unpacked(pair.made, made, row, row + 1), bound)[0]
    return found


def _explained(seen: Seen, states: Floats, limits_of: Callable[[int], Floats]) -> Floats:
    """By state, the margin within which rounding explains that another token comes first; 0 where none does.

    Errors of rounding are independent, and uniform within their bounds.
    """
    found = np.zeros(len(states), np.float32)
    first, now = seen.their_tokens[:, 0], seen.my_tokens[:, 0]
    for state in np.flatnonzero(first != now):
        errors = [states[state] * limits_of(int(token)) for token in (first[state], now[state])]
        found[state] = DEVIATIONS * math.sqrt(sum(float(np.vecdot(error, error)) for error in errors) / 3)
    return found


# --- logits, some rows after others ------------------------------------------------------------------------


class Seen(NamedTuple):
    """What is kept of the logits of all rows so far, each field by state.

    Of either head: the largest logits with their tokens and the other head's logits there, the peak m, the sum of
    exp(logit - m), and that of exp(logit - m) times the difference to the other head.
    """

    theirs: Floats
    their_tokens: Ids
    their_other: Floats
    their_sums: Floats
    mine: Floats
    my_tokens: Ids
    my_other: Floats
    my_sums: Floats
    difference: Floats


def _seen(first: int, theirs: Floats, mine: Floats) -> Seen:
    difference = np.abs(theirs - mine)
    told = np.stack([difference.sum(axis=1), difference.max(axis=1), np.full(len(theirs), theirs.shape[1])], axis=1)
    return Seen(*_top(first, theirs, mine), *_top(first, mine, theirs), told)


def _top(first: int, logits: Floats, other: Floats) -> tuple[Floats, Ids, Floats, Floats]:
    count = min(TOP, logits.shape[1])
    columns = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    order = np.lexsort((columns, -np.take_along_axis(logits, columns, 1)), axis=1)
    columns = np.take_along_axis(columns, order, 1)
    peak = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - peak)
    moved = (weights * (logits - other)).sum(axis=1, dtype=np.float64)
    sums = np.stack([peak[:, 0], weights.sum(axis=1, dtype=np.float64), moved], axis=1)
    return np.take_along_axis(logits, columns, 1), columns + first, np.take_along_axis(other, columns, 1), sums


def _both(a: Seen, b: Seen) -> Seen:
    told = np.stack(
        [a.difference[:, 0] + b.difference[:, 0], np.maximum(a.difference[:, 1], b.difference[:, 1]),
         a.difference[:, 2] + b.difference[:, 2]], axis=1,
    )  # fmt: skip
    return Seen(*_tops(a[:4], b[:4]), *_tops(a[4:8], b[4:8]), told)


def _tops(a: Sequence[Any], b: Sequence[Any]) -> tuple[Floats, Ids, Floats, Floats]:
    logits, tokens, other = (np.concatenate([x, y], axis=1) for x, y in zip(a[:3], b[:3], strict=True))
    count = min(TOP, logits.shape[1])
    order = np.lexsort((tokens, -logits), axis=1)[:, :count]
    peak = np.maximum(a[3][:, 0], b[3][:, 0])
    shrunk = [sums[:, 1:] * np.exp(sums[:, 0] - peak)[:, None] for sums in (a[3], b[3])]
    sums = np.concatenate([peak[:, None], shrunk[0] + shrunk[1]], axis=1)
    return (*(np.take_along_axis(x, order, 1) for x in (logits, tokens, other)), sums)  # type: ignore[return-value]


def _agreement(seen: Seen, explained: Floats) -> Agreement:
    first, now = seen.their_tokens[:, 0], seen.my_tokens[:, 0]
    over = seen.theirs[:, 0] - seen.my_other[:, 0] - explained
    beyond = (first != now) & (over > 0)
    worst = int(np.argmax(np.where(beyond, over, -np.inf)))
    total, other = (np.log(sums[:, 1]) + sums[:, 0] for sums in (seen.their_sums, seen.my_sums))
    top1, top5, top10 = (_shared(seen, count) for count in (1, 5, TOP))
    return Agreement(
        states=len(first), top1=top1, top5=top5, top10=top10,
        kl=float(np.mean(seen.their_sums[:, 2] / seen.their_sums[:, 1] - total + other)),
        kl_reverse=float(np.mean(seen.my_sums[:, 2] / seen.my_sums[:, 1] - other + total)),
        mean_abs=float(seen.difference[:, 0].sum() / seen.difference[:, 2].sum()),
        max_abs=float(seen.difference[:, 1].max()),
        flips=int(np.count_nonzero(first != now)), beyond=int(beyond.sum()),
        worst=(int(first[worst]), int(now[worst])) if beyond.any() else None,
    )  # fmt: skip


def _shared(seen: Seen, count: int) -> float:
    """The mean share of the source's ``count`` first tokens that are among the result's."""
    theirs, mine = seen.their_tokens[:, :count], seen.my_tokens[:, :count]
    return float((theirs[:, :, None] == mine[:, None, :]).any(axis=2).mean())
