"""What ``ckptkit inspect --draft`` tells: a draft's parameters, bytes and memory, each figure with its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..console import Table, fmt_bytes, fmt_parameters
from ..drafts.accounting import Figure, Size
from ..drafts.costs import Costs, amounts, by_part, by_stage, memory

_COLUMNS = ("tensors", "parameters", "active", "stored", "FP4", "FP8", "BF16")


def page_data(found: Costs, cards: int) -> dict[str, Any]:
    """The page as it stands in ``--json`` output."""
    stages, parts = by_stage(found.sizes), by_part(found.sizes)
    return {
        "kind": found.kind,
        "cards": cards,
        "stages": [{"stage": stage} | size._asdict() for stage, size in stages.items()],
        "parts": [{"part": part} | size._asdict() for part, size in parts.items()],
        "amounts": [_amount(figure) for figure in amounts(found)],
        "memory": [figure._asdict() for figure in memory(found, cards)],
    }


def page_lines(src: str, found: Costs, cards: int) -> Iterator[str | Table]:
    """The page for people."""
    yield src
    yield f"draft  {found.kind}"
    yield ""
    yield _figures("amount", amounts(found))
    yield ""
    stages = {"whole draft" if stage is None else str(stage): size for stage, size in by_stage(found.sizes).items()}
    yield _sizes("stage", stages)
    yield ""
    yield _sizes("part", {str(part): size for part, size in by_part(found.sizes).items()})
    yield ""
    yield _figures("memory", memory(found, cards))
    yield "Weights, gradients and optimizer only: KV cache and activations depend on the load."


def _amount(figure: Figure) -> dict[str, Any]:
    """Not all of these are bytes."""
    return {"what": figure.what, "amount": figure.bytes, "formula": figure.formula}


def _figures(title: str, figures: list[Figure]) -> Table:
    rows = [(figure.what, f"{figure.bytes:,}", figure.formula) for figure in figures]
    return Table((title, "parameters or bytes" if title == "amount" else "bytes", "formula"), rows, "<><")


def _sizes(title: str, sizes: Mapping[str, Size]) -> Table:
    rows = [
        (name, f"{size.tensors:,}", *map(fmt_parameters, size[1:3]), *map(fmt_bytes, size[3:]))
        for name, size in sizes.items()
    ]
    return Table((title, *_COLUMNS), rows, "<" + ">" * len(_COLUMNS))
