"""Small SVG drawings as text: rectangles, labels, ticks. Sizes in pixels; colours are classes of the page's style.

Every drawing has a title and a description for those who do not see it, and every label is real text.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import legal

WIDTH = 1000  # of a drawing that fills the page
MONO = 6.05  # the width of a character of the 10-pixel labels


class Figure(NamedTuple):
    """Drawings under one title with a sentence or two; without drawings the sentence says why there are none."""

    name: str
    title: str
    text: str
    drawings: Sequence[str] = ()


def escape(text: str) -> str:
    """``text`` as it may stand in an element or a quoted attribute."""
    return html.escape(legal(text))


def number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def drawing(name: str, width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """A drawing that shrinks with its page and never grows. ``name`` is unique in the page."""
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-desc" viewBox="0 0 {number(width)} {number(height)}"'
        f' width="{number(width)}" height="{number(height)}"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, style: str, tip: str = "", shade: float | None = None) -> str:
    """A rectangle of class ``style``; ``tip`` shows under the pointer, ``shade`` (0 to 1) is how dense its colour is."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    opacity = "" if shade is None else f' fill-opacity="{number(shade)}"'
    body = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
    return f'<rect {place} class="{style}"{opacity}{body}'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line of class ``style``."""
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" class="{style}"/>'


def label(x: float, y: float, text: str, style: str = "label", anchor: str = "start", turn: float = 0) -> str:
    """Text whose baseline begins, ends or has its middle at (x, y); ``turn`` in degrees."""
    place = f'x="{number(x)}" y="{number(y)}"'
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    turned = f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
    return f'<text {place} class="{style}"{end}{turned}>{escape(text)}</text>'


# Where the ticks of a logarithmic axis may be in a decade, coarse to fine.
_STEPS = ((1,), (1, 2, 5), tuple(n / 2 for n in range(2, 20)), tuple(n / 10 for n in range(10, 100)))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``: the coarsest that are three at least, or the finest."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _STEPS:
        found = (float(f"{step}e{decade}") for decade in decades for step in steps)
        ticks = [tick for tick in found if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def count_ticks(high: int) -> list[int]:
    """Round counts from zero to ``high``, about four of them."""
    if high <= 4:
        return list(range(high + 1))
    magnitude = 10 ** (len(str(high // 4)) - 1)
    step = next(unit * magnitude for unit in (1, 2, 5, 10) if unit * magnitude >= high / 5)
    return list(range(0, high + 1, step))


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters: its end tells more than its beginning."""
    return text if len(text) <= width else "…" + text[1 - width :]
