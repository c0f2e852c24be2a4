"""Values of a sample: tokens, masks, hidden states. Each tensor is read once, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..errors import Finding
from .draft import Algorithm, Draft
from .sample import BLOCK, IDS, MASK, Dialect, Sample, Stored, rows
from .specs import Sound, finding

if TYPE_CHECKING:
    from torch import Tensor

# Trainers of blocks need a token and the one after it; EAGLE-3 takes a single one.
_RUN = {Algorithm.DSPARK: 2, Algorithm.DFLASH: 2, Algorithm.EAGLE3: 1}


@dataclass(slots=True)
class Slice:
    """What is seen of the states of one tap, row by row. ``first``: its first row, while all rows have been equal to it."""

    rows: int = 0
    zero: int = 0
    odd: int = 0
    first: Tensor | None = None
    varies: bool = False


@dataclass(slots=True)
class Seen:
    """What is seen of a sample's states: its slices by name, and the pairs of them that have been equal so far."""

    slices: dict[str, Slice]
    same: set[tuple[str, str]] = field(default_factory=set)


def tokens(sample: Sample, ids: Tensor, draft: Draft) -> Iterator[Finding]:
    """``ids`` are the token ids, [S]."""
    outside = (ids < 0) | (ids >= draft.vocab)
    if outside.any():
        at = int(outside.nonzero()[0])
        text = f"token {int(ids[at])} at {at:,}{_and_more(int(outside.sum()))} is outside of the vocabulary of {draft.vocab:,}"
        yield finding("features.tokens", sample, text, IDS, data={"tokens": int(outside.sum())})
    noise = int((ids == draft.noise).sum()) if draft.noise is not None else 0
    if noise:
        text = f"the noise token {draft.noise} stands {noise:,} times among the tokens"
        yield finding("features.noise", sample, text, IDS, data={"tokens": noise})


def masks(sample: Sample, mask: Tensor, dialect: Dialect, draft: Draft, max_len: int | None) -> Iterator[Finding]:
    """``mask`` is the loss mask, [S]; what a trainer would cut off counts for nothing."""
    strange = mask[(mask != 0) & (mask != 1)]
    if len(strange):
        text = f"the loss mask holds {strange[0].item():.4g}{_and_more(len(strange))}, and only 0 and 1 are meant"
        hint = "write 1 for tokens that are trained on, and 0 for others"
        yield finding("features.mask", sample, text, MASK, data={"values": len(strange)}, hint=hint)
    on = mask[:max_len].bool()
    if dialect.drops_last and not sample.whole_mask:
        on = on[:-1]
    run = _RUN[draft.algorithm]
    if not (on[1:] & on[:-1] if run == 2 else on).any():
        what = "no two neighbours are" if run == 2 else "no token is"
        text = f"nothing to train on: {what} 1 in the loss mask ({int(on.sum()):,} of {len(on):,} are)"
        yield finding("features.mask", sample, text, MASK, data={"ones": int(on.sum())})


def _and_more(count: int) -> str:
    """What follows the first of ``count`` things."""
    return f" (and {count - 1:,} more)" if count > 1 else ""


def blocks(sound: Sound) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Rows of the tapped states and the same rows of the last ones, some at a time."""
    held = [stored for stored in (sound.taps, sound.last) if stored is not None]
    if not held:
        return
    step = max(1, BLOCK // sum(stored.shape[1] * stored.dtype.itemsize for stored in held))
    for start in range(0, max(stored.shape[0] for stored in held), step):
        yield _block(sound.taps, start, start + step), _block(sound.last, start, start + step)


def _block(stored: Stored | None, start: int, stop: int) -> Tensor | None:
    return None if stored is None or start >= stored.shape[0] else rows(stored, start, min(stop, stored.shape[0]))


def look(seen: Seen, taps: Tensor | None, last: Tensor | None, draft: Draft) -> None:
    """Take a block of rows into account."""
    parts = {}
    if taps is not None:
        parts = {f"tap {i}": taps[:, i * draft.hidden : (i + 1) * draft.hidden] for i in range(draft.taps)}
    if last is not None:
        parts["last"] = last
    if not seen.slices:
        seen.slices.update({name: Slice() for name in parts})
        seen.same.update(combinations(parts, 2))
    for name, part in parts.items():
        _look(seen.slices[name], part)
    seen.same = {(a, b) for a, b in seen.same if a in parts and b in parts and _equal(parts[a], parts[b])}


def _look(slice: Slice, part: Tensor) -> None:
    peaks, limit = _magnitudes(part)
    slice.rows += len(part)
    slice.zero += int((peaks == 0).sum())
    slice.odd += int((peaks >= limit).sum())
    if slice.first is None:
        slice.first = part[0].clone()
    slice.varies = slice.varies or not bool((part == slice.first).all())


def _magnitudes(part: Tensor) -> tuple[Tensor, int]:
    """The largest magnitude of each row as bits without the sign, and the bits of infinity, which no finite number has."""
    import torch

    bits, infinity = {
        torch.bfloat16: (torch.int16, 0x7F80),
        torch.float16: (torch.int16, 0x7C00),
        torch.float32: (torch.int32, 0x7F800000),
    }[part.dtype]
    return (part.view(bits) & torch.iinfo(bits).max).amax(1), infinity


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def states(sample: Sample, seen: Seen) -> Iterator[Finding]:
    """What is wrong with the states, once all of their rows were looked at."""
    for name, slice in seen.slices.items():
        data: dict[str, Any] = {"rows": slice.rows}
        if slice.odd:
            text = f"{name}: {slice.odd:,} of {slice.rows:,} states hold NaN or Inf"
            yield finding("features.nonfinite", sample, text, name, data=data | {"nonfinite": slice.odd})
        elif slice.rows > 1 and not slice.varies:
            text = f"{name} is the same for all {slice.rows:,} tokens"
            yield finding("features.dead-tap", sample, text, name, data=data)
        elif slice.zero:
            text = f"{name}: {slice.zero:,} of {slice.rows:,} states are all zeros"
            yield finding("features.zero-states", sample, text, name, data=data | {"zero": slice.zero})
    for a, b in sorted(seen.same):
        if seen.slices[a].varies:
            yield finding("features.same-taps", sample, f"{a} and {b} hold the same states", f"{a} = {b}")
