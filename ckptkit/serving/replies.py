"""Reading what engines reply: numbers that may be missing, counters, and shapes that may be others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .client import Failed
from .engine import Speculation

_COUNTER = re.compile(r"^\w+:spec_decode_num_(?P<name>\w+?)_total(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.M)
_POSITION = re.compile(r'position="(\d+)"')


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Failed, of status 200, where what is done here finds another shape than it expects."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Failed(f"{path}: an answer of another shape: {type(error).__name__}: {error}", 200) from error


def nats(values: Iterable[Any]) -> tuple[float, ...]:
    """Logprobs as they come in JSON, where null is what is no number."""
    return tuple(math.nan if value is None else float(value) for value in values)


def leads(places: Iterable[Iterable[Any]]) -> tuple[float, ...]:
    """By how much the best logprob of each place leads the second best, nats; not a number where there is one alone."""
    best = [sorted(nats(values), reverse=True)[:2] for values in places]
    return tuple(pair[0] - pair[1] if len(pair) == 2 else math.nan for pair in best)


def counted(metrics: str) -> Speculation | None:
    """Speculation since the start, in the names that vLLM and llama-server share; None where none are told.

    Counters of several engines of one server are added.
    """
    sums: dict[str, float] = {}
    places: dict[int, float] = {}
    for found in _COUNTER.finditer(metrics):
        value = float(found["value"])
        sums[found["name"]] = sums.get(found["name"], 0) + value
        place = _POSITION.search(found["labels"] or "")
        if place:
            places[int(place[1])] = places.get(int(place[1]), 0) + value
    if "drafts" not in sums:
        return None
    by_position = tuple(int(places[at]) for at in sorted(places))
    steps, accepted, drafted = (int(sums.get(name, 0)) for name in ("drafts", "accepted_tokens", "draft_tokens"))
    return Speculation(steps, accepted, drafted, by_position)
