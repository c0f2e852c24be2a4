"""What a report says of a head that ranks served: its figure ``head`` in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..console import fmt_bytes

COLUMNS = ("hidden states", "greedy equal", "recall", "KL", "tied", "across ranks", "winners by rank")


def rows(figure: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row under ``COLUMNS`` for each kind of hidden states."""
    for kind, found in figure["kinds"].items():
        yield (
            kind, f"{found['equal']}/{found['states']}", f"{found['recall']:.4f}", _number(found["kl"], ".4f"),
            str(found["tied"]), str(found["tied_across"]), _listed(found["winners"]),
        )  # fmt: skip


def sentences(figure: Mapping[str, Any]) -> Iterator[str]:
    """What was run, what it saves, and for which requests it may be used."""
    received, alone = figure["received"], figure["one_device"]
    yield (
        f"{figure['tensor']} in {figure['ranks']} slices of {_listed(figure['slice_rows'])} rows ({figure['engine']}),"
        f" {figure['logits']} logits, {figure['candidates']} candidates a rank by {figure['backend']}: a rank receives"
        f" {fmt_bytes(received['candidates'])} a token instead of {fmt_bytes(received['dense'])}"
    )
    yield (
        f"against the {alone['of']}'s head on one device: logits off by up to {_number(alone['largest'], '.3g')},"
        f" {alone['flips']} of {figure['states']} first tokens differ"
    )
    yield f"usable for {figure['usable']}"


def _number(value: float | None, form: str) -> str:
    """A number that a report may not hold, as Inf, is none there."""
    return "not finite" if value is None else format(value, form)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
