"""What the view that is a draft head saves, against a copy of its rows: for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ..console import Table, fmt_bytes
from .order import Order

_PLACE = "it must lie whole on CUDA, ROCm, MUSA, Vulkan or Metal, or be split by -sm tensor"


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


def llama_cpp_line(own: str | None) -> str:
    """Whether llama.cpp could take the draft head as a view of the head's first rows.

    ``own``: what a head is that is a tensor of its own, None for one that is tied to the embedding.
    """
    if own is None:
        return "llama.cpp  no view: the head is tied to the embedding, which lies in host memory; it would keep a copy"
    return f"llama.cpp  a view is possible: {own}; {_PLACE}"
