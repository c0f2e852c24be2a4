"""The figures of a report: errors by layer, module and expert and their distribution, here; its contents.

Each is a function of the report. One that has nothing to show says why instead of drawing empty axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..console import fmt_count
from .contents import dtypes, shard_map
from .model import CellError, ExpertErrors, Histogram, Report
from .svg import MONO, WIDTH, Figure, count_ticks, cut, drawing, label, line, log_ticks, number, rect

SHADES = 12  # steps of density in an expert strip
DENSEST = 0.75  # so that text on it can be read
LOOSE_SHOWN = 30
_NOT_COMPARED = "No tensor was compared with a source: --level numeric --against SRC does."


def figures(report: Report) -> list[Figure]:
    """All figures, in the order they are shown."""
    makers = (_error_map, _distribution, _expert_strip, dtypes, shard_map)
    return [make(report) for make in makers]


class _Scale(NamedTuple):
    """From an error to the density of a colour: from the least (never under half the span) to the worst."""

    low: float
    high: float

    def shade(self, error: float | None) -> float:
        return DENSEST if error is None else DENSEST * max(0.0, error - self.low) / (self.high - self.low)

    def legend(self, x: float, y: float) -> Iterator[str]:
        for step in range(6):
            error = self.low + (self.high - self.low) * step / 5
            yield rect(x + 40 * step, y, 40, 8, "heat", shade=self.shade(error))
            yield label(x + 40 * step + 20, y + 20, _error(error), "small", "middle")


def _scale(errors: Iterable[float | None]) -> _Scale:
    known = [error for error in errors if error is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return _Scale(low, max(high, low * 1.5) or 1.0)


def _error(error: float | None) -> str:
    return "n/a" if error is None else "0" if error == 0 else f"{error:#.3g}".removesuffix(".")


def _key(error: float | None) -> float:
    return math.inf if error is None else error


# --- errors by layer and module ----------------------------------------------------------------------------

_ORDER = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
_CELL, _ROW = 54, 16


def _error_map(report: Report) -> Figure:
    title = "Error by layer and module"
    if report.numeric is None or not report.numeric.cells:
        return Figure("errors", title, _NOT_COMPARED)
    cells = report.numeric.cells
    worst = max(cells, key=lambda cell: _key(cell.rel_rms))
    scale = _scale(cell.rel_rms for cell in cells if cell.layer is not None)
    stacks: dict[str, list[CellError]] = {}
    for cell in cells:
        if cell.layer is not None:
            stacks.setdefault(cell.stack, []).append(cell)
    drawings = [_stack_map(f"errors-{n}", stack, of, scale) for n, (stack, of) in enumerate(stacks.items())]
    loose = [cell for cell in cells if cell.layer is None]
    text = (
        "Relative RMS error against the source, the worst tensor of each module; experts of a layer taken together."
        f" Worst: {_name(worst)}, {_error(worst.rel_rms)}. Framed cells with a “!” have elements beyond their bound."
    )
    return Figure("errors", title, text, drawings + ([_loose_bars(loose)] if loose else []))


def _name(item: CellError | ExpertErrors) -> str:
    """Where in the model it is: ``model.layers.3.self_attn.q_proj``, ``model.layers.3``."""
    module = item.module if isinstance(item, CellError) else ""
    return ".".join(str(part) for part in (item.stack, item.layer, module) if part not in ("", None))


def _stack_map(name: str, stack: str, cells: Sequence[CellError], scale: _Scale) -> str:
    """Layers down, modules across."""
    modules = sorted({cell.module for cell in cells}, key=_module_order)
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    names = {module: cut(name, 40) for module, name in _short_names(modules).items()}
    left, top = 60, 24 + 0.64 * MONO * max(map(len, names.values()))
    column = {module: left + _CELL * index for index, module in enumerate(modules)}
    row = {layer: top + _ROW * index for index, layer in enumerate(layers)}
    bottom = top + _ROW * len(layers)
    parts = [label(column[module] + _CELL / 2 - 6, top - 6, names[module], turn=-40) for module in modules]
    parts += [label(left - 8, row[layer] + 12, str(layer), anchor="end") for layer in layers]
    parts.append(label(0, 12, cut(stack or "layers", 80), "strong"))
    for cell in cells:
        parts += _heat_cell(cell, column[cell.module], row[cell.layer or 0], scale)
    parts += scale.legend(left, bottom + 12)
    width = max(left + _CELL * len(modules) + 90, left + 260)
    description = (
        f"{fmt_count(len(layers), 'layer')} down, {fmt_count(len(modules), 'module')} across; values in cells."
    )
    return drawing(name, width, bottom + 40, f"Error by layer and module of {stack or 'the model'}", description, parts)


def _heat_cell(cell: CellError, x: float, y: float, scale: _Scale) -> Iterator[str]:
    tip = f"{_name(cell)}: {_error(cell.rel_rms)} ({fmt_count(cell.tensors, 'tensor')})"
    yield rect(x, y, _CELL - 1, _ROW - 1, "heat", tip, scale.shade(cell.rel_rms))
    if cell.beyond:
        yield rect(x + 1, y + 1, _CELL - 3, _ROW - 3, "frame")
    value = f"{'! ' if cell.beyond else ''}{_error(cell.rel_rms)}"
    yield label(x + _CELL / 2, y + 11.5, value, "strong" if cell.beyond else "small", "middle")


def _module_order(module: str) -> tuple[bool, str, int, str]:
    parent, _, last = module.rpartition(".")
    return "attn" not in parent, parent, _ORDER.index(last) if last in _ORDER else len(_ORDER), last


def _short_names(modules: Sequence[str]) -> dict[str, str]:
    """Of each module as many last parts of its path as tell it from the others."""
    paths = {module: module.replace(".#", "").split(".") for module in modules}

    def ends(length: int) -> list[str]:
        return [".".join(path[-length:]) for path in paths.values()]

    return {
        module: next(
            (end for length in range(1, len(path)) if ends(length).count(end := ".".join(path[-length:])) == 1), module
        )
        for module, path in paths.items()
    }


def _loose_bars(cells: Sequence[CellError]) -> str:
    """Tensors that lie in no layer, a bar each."""
    scale = _scale(cell.rel_rms for cell in cells)
    shown = sorted(cells, key=lambda cell: -_key(cell.rel_rms))[:LOOSE_SHOWN]
    left = 20 + MONO * min(40, max(len(cell.module) for cell in shown))
    parts = [label(0, 12, "outside the layers", "strong")]
    for index, cell in enumerate(shown):
        y = 22 + 18 * index
        length = max(1.0, 400 * (1.0 if cell.rel_rms is None else cell.rel_rms / scale.high))
        mark = " ! elements beyond their bound" if cell.beyond else ""
        parts.append(label(left - 8, y + 10, cut(cell.module, 40), anchor="end"))
        parts.append(rect(left, y, length, 13, "bad" if cell.beyond else "bar"))
        parts.append(label(left + length + 6, y + 10, f"{_error(cell.rel_rms)}{mark}"))
    more = f", the worst {len(shown)} of {len(cells)}" if len(cells) > len(shown) else ""
    height = 24 + 18 * len(shown)
    return drawing(
        "errors-loose", left + 560, height, "Error of tensors outside the layers", f"A bar each{more}.", parts
    )


# --- distribution ------------------------------------------------------------------------------------------


def _distribution(report: Report) -> Figure:
    title = "Distribution of the error"
    numeric = report.numeric
    if numeric is None or not numeric.tensors:
        return Figure("distribution", title, _NOT_COMPARED)
    histogram = numeric.histogram
    if histogram is None:
        return Figure("distribution", title, "No error is a finite number.")
    exact = f"{fmt_count(histogram.exact, 'tensor')} of {numeric.tensors:,} equal their source exactly."
    if not histogram.counts:
        return Figure("distribution", title, f"{exact} There is no error to draw.")
    beyond = sum(cell.beyond for cell in numeric.cells)
    text = (
        f"Relative RMS error of {fmt_count(sum(histogram.counts), 'tensor')} on a logarithmic axis, median"
        f" {_error(numeric.median)}. {exact if histogram.exact else ''} Modules with elements beyond their bound:"
        f" {beyond or 'none'}."
    )
    return Figure("distribution", title, text, [_histogram(histogram)])


def _histogram(histogram: Histogram) -> str:
    left, right, top, bottom = 50, WIDTH - 20, 26, 210
    ends = [*histogram.edges, *(end for bound in histogram.bounds for end in bound)]
    low, high = min(ends) / 1.1, max(ends) * 1.1
    most = max(histogram.counts)

    def x(error: float) -> float:
        return left + (right - left) * math.log(error / low) / math.log(high / low)

    def y(count: float) -> float:
        return bottom - (bottom - top) * count / most

    parts = []
    for tick in count_ticks(most):
        parts += [line(left, y(tick), right, y(tick), "grid"), label(left - 8, y(tick) + 3, f"{tick:,}", anchor="end")]
    for error in log_ticks(low, high):
        parts += [
            line(x(error), bottom, x(error), bottom + 4, "axis"),
            label(x(error), bottom + 16, f"{error:g}", anchor="middle"),
        ]
    for start, stop, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        if count:
            height = max(2.0, bottom - y(count))
            tip = f"{start:g} to {stop:g}: {fmt_count(count, 'tensor')}"
            parts.append(rect(x(start), bottom - height, max(1.0, x(stop) - x(start) - 1), height, "bar", tip))
    for first, last in histogram.bounds:
        if last > first:
            parts.append(rect(x(first), top - 8, x(last) - x(first), bottom - top + 8, "band"))
        parts += [line(x(end), top - 8, x(end), bottom, "bound") for end in sorted({first, last})]
        text = f"bound {first:#.2g}" + (f" to {last:#.2g}" if last > first else "")
        parts.append(label(x(last) - 4, top - 12, text, "strong", "end"))
    parts.append(line(left, bottom, right, bottom, "axis"))
    parts.append(label(right, bottom + 32, "relative RMS error →", anchor="end"))
    parts.append(label(0, 10, "tensors"))
    description = f"{len(histogram.counts)} bins from {histogram.edges[0]:g} to {histogram.edges[-1]:g}."
    return drawing("distribution-0", WIDTH, bottom + 40, "Histogram of relative RMS error", description, parts)


# --- experts -----------------------------------------------------------------------------------------------


def _expert_strip(report: Report) -> Figure:
    title = "Error by expert"
    if report.numeric is None:
        return Figure("experts", title, _NOT_COMPARED)
    rows = report.numeric.experts
    if not rows:
        return Figure("experts", title, "No compared tensor belongs to a single expert.")
    each = [(error, row, expert) for row in rows for expert, error in enumerate(row.rel_rms) if error is not None]
    worst = sorted(each, key=lambda item: -item[0])[:3]
    named = ", ".join(f"{_name(row)} expert {expert} ({_error(error)})" for error, row, expert in worst)
    text = f"The worst tensor of each expert, layers down, experts across: an odd expert stands out. Worst: {named}."
    stacks: dict[str, list[ExpertErrors]] = {}
    for row in rows:
        stacks.setdefault(row.stack, []).append(row)
    scale = _scale(error for error, *_ in each)
    drawings = [_strip(f"experts-{n}", stack, of, scale) for n, (stack, of) in enumerate(stacks.items())]
    return Figure("experts", title, text, drawings)


def _strip(name: str, stack: str, rows: Sequence[ExpertErrors], scale: _Scale) -> str:
    left, top, height = 60, 34, 12
    experts = max(len(row.rel_rms) for row in rows)
    width = min(24.0, (WIDTH - left - 10) / experts)
    paths: dict[int, list[str]] = {}
    for index, row in enumerate(rows):
        for expert, error in enumerate(row.rel_rms):
            if error is not None:
                step = round(scale.shade(error) / DENSEST * SHADES)
                cell = f"M{number(left + expert * width)} {top + index * height}h{number(width)}v{height - 1}h-{number(width)}z"
                paths.setdefault(step, []).append(cell)
    bottom = top + height * len(rows)
    parts = [label(0, 12, cut(stack or "layers", 80), "strong")]
    parts.append(rect(left, top, width * experts, height * len(rows) - 1, "empty"))
    for step, cells in sorted(paths.items()):
        parts.append(f'<path class="heat" fill-opacity="{number(DENSEST * step / SHADES)}" d="{"".join(cells)}"/>')
    parts += [label(left - 8, top + index * height + 9, str(row.layer), anchor="end") for index, row in enumerate(rows)]
    for tick in count_ticks(experts - 1):
        parts.append(label(left + (tick + 0.5) * width, top - 6, str(tick), "small", "middle"))
    parts += scale.legend(left, bottom + 10)
    description = f"{fmt_count(len(rows), 'layer')} down, {fmt_count(experts, 'expert')} across."
    return drawing(
        name,
        max(left + width * experts + 10, left + 260),
        bottom + 38,
        f"Error by expert of {stack or 'the model'}",
        description,
        parts,
    )
