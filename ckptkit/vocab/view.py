"""What the view that is a draft head saves, against a copy of its rows: for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ..console import Table, fmt_bytes
from .order import Order


def view_lines(order: Order, row_bytes: int) -> Iterator[str | Table]:
    """Slice by slice the rows, how many of them are the draft head's, and what a copy of those would take.

    ``row_bytes``: of a row with its scales.
    """
    starts = accumulate(order.slice_rows, initial=0)
    cells = zip(starts, order.slice_rows, order.slice_list_rows, strict=False)
    rows = [
        (str(number), f"{start:,}", f"{size:,}", f"{count:,}", fmt_bytes(count * row_bytes), "0 B")
        for number, (start, size, count) in enumerate(cells)
    ]
    yield Table(("slice", "first row", "rows", "list rows", "a copy", "the view"), rows, ">>>>>>")
    added = len(order.list) - len(order.list_requested)
    rule = order.engine if order.engine != "even" else "every engine's"
    aligned = f", {added:,} of them to align counts to {order.align}" if added else ""
    yield f"list    {len(order.list):,} tokens of {order.n_rows:,}{aligned}; cut by {rule} rule"
    yield f"saved   {fmt_bytes(len(order.list) * row_bytes)}: the draft head is the first rows of each slice"
