"""Rows of embeddings and heads: which are in use, and which of those are alike or next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..errors import Finding
from ..families import config_value
from ..plan import Ref
from . import Subject
from .sidecars import tokens

if TYPE_CHECKING:
    from .tally import Rows

# Published vocabularies reserve up to 2.4 % of their tokens (Gemma 3: 6,242 of 262,144), whose rows nobody trains:
# they stay equal or near zero.
RESERVED = 0.05
# Rows of trained tokens were seen to differ in their largest magnitude by a factor of about ten.
NEAR_ZERO = 0.01


def used_rows(subject: Subject) -> Callable[[], int | None]:
    """How many rows stand for tokens, found out when first asked: those behind are padding. None if nothing says."""

    @cache
    def count() -> int | None:
        stated = config_value(subject.config, "vocab_size")
        in_config = stated if type(stated) is int and stated > 0 else None
        return max((token.id + 1 for token in tokens(subject.sidecars)), default=in_config)

    return count


def odd_rows(ref: Ref, rows: Sequence[Rows], used: Callable[[], int | None]) -> list[Finding]:
    """Warnings where many rows of a table that are in use are near zero, or equal to another one."""
    import numpy as np

    from ..decode.numbers import to_float32

    hashes = np.concatenate([part.hashes for part in rows]) if rows else np.zeros(0, np.uint64)
    if len(hashes) != ref.shape[0]:
        return []
    peaks = to_float32(np.concatenate([part.peaks for part in rows]).view(np.uint8), ref.dtype)
    near_zero = peaks < NEAR_ZERO * np.median(peaks)
    repeated = ~near_zero
    repeated[np.unique(hashes, return_index=True)[1]] = False
    found = []
    for id, odd, text in (
        ("data.near-zero-rows", near_zero, "are near zero"),
        ("data.repeated-rows", repeated, "repeat an earlier one"),
    ):
        if odd.sum() <= RESERVED * len(odd):
            continue
        tokens = used() or len(odd)
        odd = odd[:tokens]
        if odd.sum() > RESERVED * len(odd):
            first = int(np.flatnonzero(odd)[0])
            message = f"{ref.name}: {int(odd.sum()):,} of {len(odd):,} rows in use {text}, row {first} first"
            data = {"rows": int(odd.sum()), "of": len(odd), "first": first}
            found.append(Finding(id, message, ref.file, ref.name, severity="warning", data=data))
    return found
