"""Which tokens a draft vocabulary takes, and what share of a text's tokens they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..console import Table
from ..errors import fail
from .corpus import Label

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Coverage(NamedTuple):
    """Of one kind of text: its tokens, and how many of them the list has. ``kind`` None: of all kinds together."""

    kind: str | None
    language: str | None
    tokens: int
    covered: int

    @property
    def share(self) -> float | None:
        """None where there is no token to cover."""
        return self.covered / self.tokens if self.tokens else None

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "share": self.share}


def most_frequent(counts: Array, size: int, forced: Array) -> Array:
    """``size`` token ids, int32: ``forced`` ascending, then by falling count, equal counts by rising id.

    Tokens that never occur come last, by rising id: in a vocabulary made by merges the frequent ones come first. Raises
    UserError (``vocab.size``) where ``size`` is too small for ``forced``, or more than there are.
    """
    import numpy as np

    if size > len(counts) or size < len(forced):
        limit = f"there are {len(counts):,}" if size > len(counts) else f"{len(forced):,} are special and go first"
        raise fail("vocab.size", f"--size {size:,}: {limit}", hint="name another --size")
    order = np.lexsort((np.arange(len(counts)), -counts))
    rest = order[~np.isin(order, forced)]
    return np.concatenate([np.sort(forced), rest])[:size].astype(np.int32)


def coverage(ids: Array, held_out: Mapping[Label, Array]) -> list[Coverage]:
    """What ``ids`` cover of each kind of text, and last of all together; counts are int64 [n_vocab]."""
    rows = [
        Coverage(label.kind, label.language, int(counts.sum()), int(counts[ids].sum()))
        for label, counts in sorted(held_out.items(), key=lambda item: (item[0].kind, item[0].language or ""))
    ]
    return [*rows, Coverage(None, None, sum(row.tokens for row in rows), sum(row.covered for row in rows))]


def coverage_table(rows: list[Coverage]) -> Table:
    return Table(("kind", "language", "tokens", "covered"), list(_cells(rows)), "<<>>")


def _cells(rows: list[Coverage]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        share = "no text" if row.share is None else f"{row.share:.2%}"
        yield (row.kind or "all", row.language or "", f"{row.tokens:,}", share)
