"""The order of a head's rows of which a draft head is a view: in every slice the list's tokens come first.

With slice bounds ``b`` and cumulative list counts ``c`` (:mod:`.slices`), slice j holds the list tokens
``sorted_list[c[j]:c[j + 1]]``, then the others ``sorted_rest[b[j] - c[j]:b[j + 1] - c[j + 1]]``, both ascending. The draft head is
the first rows of each slice, and its logits come in the order of the list.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .slices import bounds, list_counts

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int32]]


class Order(NamedTuple):
    """An order of rows, and by what it was made. Ids and rows are int32.

    ``row_to_token`` [n_rows] and ``token_to_row`` [n_rows] are each other's inverse; a row past the tokenizer's tokens
    is a token of its own. ``slice_rows``: rows of each slice; ``slice_list_rows``: how many of them, its first, are the
    draft head's. ``list``: the token of each row of the draft head, which ``align`` may have made longer than
    ``list_requested``, the ascending list it was made for; ascending too where it did not.
    """

    row_to_token: Ids
    token_to_row: Ids
    slice_rows: tuple[int, ...]
    slice_list_rows: tuple[int, ...]
    list: Ids
    list_requested: Ids
    engine: str
    align: int
    n_layer: int
    n_tokenizer: int | None

    @property
    def n_rows(self) -> int:
        return len(self.row_to_token)

    @property
    def slices(self) -> int:
        return len(self.slice_rows)


def order_rows(
    list_sorted: Ids,
    n_rows: int,
    slices: int,
    engine: str,
    align: int = 1,
    n_layer: int = 0,
    n_tokenizer: int | None = None,
) -> Order:
    """The order of ``n_rows`` rows for the ascending, distinct tokens of ``list_sorted``, cut by ``engine``'s rule.

    ``align`` rounds each slice's count up to a multiple of it with the next of the slice's other tokens, as far as the
    slice has any that are the tokenizer's (below ``n_tokenizer``). Raises UserError ``vocab.slice``.
    """
    import numpy as np

    found = bounds(engine, n_rows, slices, n_layer)
    counts = list_counts(engine, len(list_sorted), found, n_layer)
    listed = np.asarray(list_sorted, np.int32)
    rest = np.setdiff1d(np.arange(n_rows, dtype=np.int32), listed, assume_unique=True)
    pieces: list[Ids] = []
    aligned: list[Ids] = []
    taken = 0
    for (start, stop), count in zip(pairwise(found), counts, strict=True):
        mine, others = listed[taken : taken + count], rest[start - taken : stop - taken - count]
        taken += count
        real = len(others) if n_tokenizer is None else int(np.searchsorted(others, n_tokenizer))
        more = min(-count % align, real)
        aligned.append(np.sort(np.concatenate([mine, others[:more]])))
        pieces += [aligned[-1], others[more:]]
    row_to_token = np.concatenate(pieces)
    return Order(
        row_to_token, inverse(row_to_token), tuple(b - a for a, b in pairwise(found)), tuple(map(len, aligned)),
        np.concatenate(aligned), listed, engine, align, n_layer, n_tokenizer,
    )  # fmt: skip


def inverse(order: Ids) -> Ids:
    """The row of each token, for the token of each row; or the other way about."""
    import numpy as np

    rows = np.empty_like(order)
    rows[order] = np.arange(len(order), dtype=order.dtype)
    return rows


def is_permutation(order: Ids) -> bool:
    """Whether each of 0 to n - 1 stands once in ``order`` [n]."""
    import numpy as np

    return bool(np.array_equal(np.sort(order), np.arange(len(order))))
