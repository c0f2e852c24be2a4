"""Figures of what a checkpoint holds: bytes by dtype, and its shards as they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..console import fmt_bytes, fmt_count
from .model import Report, Segment, ShardBar, Stats, Totals
from .svg import MONO, WIDTH, Figure, cut, drawing, label, number, rect

_BAR, _ROW = 13, 22  # a shard's bar and the room it takes


def dtypes(report: Report) -> Figure:
    """Bytes by dtype, of the source too where there is one."""
    title = "Bytes by dtype"
    stats = report.stats
    if stats is None or not stats.bytes:
        return Figure("dtypes", title, "No tensor could be read.")
    totals: list[tuple[str, Totals]] = [("checkpoint", stats)]
    text = f"{fmt_bytes(stats.bytes)} in {fmt_count(stats.tensors, 'tensor')}"
    if stats.against and stats.against.bytes:
        totals.insert(0, ("source", stats.against))
        text += f", {stats.bytes / stats.against.bytes:.0%} of the source's {fmt_bytes(stats.against.bytes)}"
    return Figure("dtypes", title, f"{text}.", [_dtype_bars(totals, _palette(stats))])


def _palette(stats: Stats) -> dict[str, str]:
    """A class for each dtype, the same in all figures."""
    names = {*stats.by_dtype, *(stats.against.by_dtype if stats.against else ())}
    return {dtype: f"c{index % 8}" for index, dtype in enumerate(sorted(names))}


def _dtype_bars(totals: Sequence[tuple[str, Totals]], colors: Mapping[str, str]) -> str:
    left, height, full = 80, 30, WIDTH - 170
    largest = max(total.bytes for _, total in totals)
    parts = []
    for index, (name, total) in enumerate(totals):
        x, y = float(left), 6 + index * (height + 12)
        parts.append(label(left - 8, y + 19, name, anchor="end"))
        for dtype, nbytes in sorted(total.by_dtype.items(), key=lambda item: -item[1]):
            width = full * nbytes / largest
            parts.append(rect(x, y, width, height, colors[dtype], f"{dtype}: {fmt_bytes(nbytes)}"))
            if width > MONO * (len(dtype) + 1):
                parts.append(label(x + 5, y + 19, dtype, "on"))
            x += width
        parts.append(label(x + 8, y + 19, fmt_bytes(total.bytes), "strong"))
    top = 6 + len(totals) * (height + 12)
    parts += _legend(totals, colors, left, top)
    return drawing("dtypes-0", WIDTH, top + 16 * len(colors) + 6, "Bytes by dtype", "A stacked bar each.", parts)


def _legend(totals: Sequence[tuple[str, Totals]], colors: Mapping[str, str], x: float, y: float) -> Iterator[str]:
    for index, (dtype, style) in enumerate(colors.items()):
        sizes = " → ".join(fmt_bytes(total.by_dtype.get(dtype, 0)) for _, total in totals)
        yield rect(x, y + 16 * index, 10, 10, style)
        yield label(x + 16, y + 16 * index + 9, f"{dtype:12} {sizes}")


def shard_map(report: Report) -> Figure:
    """The shards, each a bar, and where in them something is wrong."""
    title = "Shards"
    stats = report.stats
    if stats is None or not stats.shard_map:
        return Figure("shards", title, "No shard could be read.")
    faulty = sum(bar.faulty for bar in stats.shard_map)
    text = "Each shard a bar, its tensors as they lie, coloured by dtype; small neighbours are drawn as one."
    text += (
        f" Faulty: {fmt_count(faulty, 'shard')}; tensors that a finding names are red under a mark." if faulty else ""
    )
    if stats.shards > len(stats.shard_map):
        text += f" {len(stats.shard_map)} of {stats.shards:,} shards are shown, faulty ones first."
    return Figure("shards", title, text, [_shard_bars(stats.shard_map, _palette(stats))])


def _shard_bars(bars: Sequence[ShardBar], colors: Mapping[str, str]) -> str:
    names = [cut(bar.file.removesuffix(".safetensors"), 36) for bar in bars]
    left = 20 + MONO * max(map(len, names))
    scale = (WIDTH - left - 130) / (max(bar.bytes for bar in bars) or 1)
    parts = []
    for index, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y, style = 8 + index * _ROW, "strong" if bar.faulty else "label"
        end = left + scale * bar.bytes
        parts.append(label(left - 8, y + 10, name, style, "end"))
        parts += _segments(bar.segments, left, y, scale, colors)
        parts.append(label(end + 6, y + 10, f"{fmt_bytes(bar.bytes)}{' ✕ faulty' if bar.faulty else ''}", style))
    height = 8 + _ROW * len(bars)
    return drawing("shards-0", WIDTH, height, "Shard map", f"{fmt_count(len(bars), 'shard')}, a bar each.", parts)


def _segments(
    segments: Sequence[Segment], x: float, y: float, scale: float, colors: Mapping[str, str]
) -> Iterator[str]:
    """A bar's segments; faulty ones are drawn last and never thinner than can be seen."""
    marks = []
    for segment in segments:
        width = scale * segment.bytes
        more = f" and {fmt_count(segment.tensors - 1, 'neighbour')}" if segment.tensors > 1 else ""
        tip = f"{segment.name}{more}: {segment.dtype}, {fmt_bytes(segment.bytes)}"
        if segment.faulty:
            marks.append(rect(x, y, max(width, 2), _BAR, "bad", tip))
            marks.append(f'<path class="mark" d="M{number(x + max(width, 2) / 2)} {y - 1}l-4 -6h8z"/>')
        else:
            yield rect(x, y, width, _BAR, colors[segment.dtype], tip)
        x += width
    yield from marks
