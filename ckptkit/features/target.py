"""Captured states against the target that they are said to be of: its final norm and its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks.heads import final_norm
from ..errors import Finding
from ..families import config_value, embedding_of, head_of, is_tied
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..plan import Ref
from .draft import Draft
from .sample import Sample, Stored, rows
from .specs import Sound, finding

if TYPE_CHECKING:
    from torch import Tensor

# RMSNorm leaves states whose RMS, after dividing by its weight, is 1: rounding to bfloat16, which is done once or
# twice, moves it by less than 0.5 %. Real states before the norm are 5 to 1,000 times as large.
TOLERANCE = 0.02
POSITIONS = 512  # hidden states that the head is applied to: a share of them is known within 2.2 % (one sigma)
FEWEST = 64
# Models put the right token first for 40 % and more of text by others, and for most of their own. Guessing the most
# frequent token is right for about 5 %.
LEAST_AGREEMENT = 0.2
SHIFTS = (0, 1, 2)
_HEAD_BYTES = 64 << 20  # of float32 rows of the head that are read together


class Target(NamedTuple):
    """What is compared with. ``norm``: the final norm's factors, float32 [hidden]; ``head``: the head, floats.

    The reasons say why one of the two is not there.
    """

    checkpoint: Checkpoint
    norm: Tensor | None
    head: Ref | None
    no_norm: str | None
    no_head: str | None


class Picked(NamedTuple):
    """Last states of some tokens, [n, hidden], and the tokens from each on: itself, the next, the one after [n, 3]."""

    states: Tensor
    tokens: Tensor


def target_of(checkpoint: Checkpoint, draft: Draft) -> tuple[Target, list[Finding]]:
    """What of a checkpoint states are compared with; a finding where it is another model than the draft's target."""
    import torch

    misfits = [
        f"{key} {mine} there, {expected} in the draft's config"
        for key, expected in (("hidden_size", draft.hidden), ("vocab_size", draft.vocab))
        if (mine := config_value(checkpoint.config, key)) not in {expected, None}
    ]
    if misfits:
        reason = "the target is another model (features.target)"
        message = f"{checkpoint.source.uri} is not the draft's target: {'; '.join(misfits)}"
        return Target(checkpoint, None, None, reason, reason), [Finding("features.target", message)]
    weight = final_norm(checkpoint, draft.hidden)
    norm = None if weight is None else torch.from_numpy(weight.copy())
    no_norm = "the target's final norm is not found" if norm is None else None
    if norm is not None and not norm.all():
        norm, no_norm = None, "the target's final norm has zeros, which cannot be divided by"
    head = _head(checkpoint, draft)
    no_head = None if head else "the target's head is not found, or not stored as floats"
    return Target(checkpoint, norm, head, no_norm, no_head), []


def _head(checkpoint: Checkpoint, draft: Draft) -> Ref | None:
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    head = checkpoint.tensors.get(f"{head_of(embedding)}.weight") if embedding else None
    if head is None and embedding and is_tied(checkpoint.config):
        head = checkpoint.tensors.get(f"{embedding}.weight")
    fits = head is not None and head.dtype in FLOATS and head.shape[1:] == (draft.hidden,)
    return head if fits else None


# --- the norm ----------------------------------------------------------------------------------------------


def rms(states: Tensor, norm: Tensor) -> Tensor:
    """The RMS of each row over the norm's factors, float32 [n]."""
    scaled: Tensor = states.float() / norm
    return scaled.square().mean(1).sqrt()


def pre_norm(sample: Sample, key: str, found: Sequence[float]) -> Iterator[Finding]:
    """``found``: that RMS of each state of the sample."""
    off = [value for value in found if not abs(value - 1) <= TOLERANCE]
    if off:
        middle = sorted(off)[len(off) // 2]
        text = (
            f"{len(off):,} of {len(found):,} last states have not passed the target's final norm: over its weight their"
            f" RMS is {middle:.4g}, and 1 after it"
        )
        data: dict[str, Any] = {"states": len(off), "median": middle}
        yield finding("features.pre-norm", sample, text, key, data=data)


# --- the head ----------------------------------------------------------------------------------------------


def pick(sound: Sound, count: int) -> Picked | None:
    """At most ``count`` last states whose token and next token are trained on, spread over the sample."""
    import torch

    if sound.ids is None or sound.mask is None or sound.last is None or not count:
        return None
    length = min(sound.ids.shape[0], sound.mask.shape[0], sound.last.shape[0])
    ids, on = rows(sound.ids, 0, length).long(), rows(sound.mask, 0, length).bool()
    places = (on[:-2] & on[1:-1]).nonzero().flatten() if length > 2 else torch.empty(0, dtype=torch.long)
    if not len(places):
        return None
    chosen = places[torch.linspace(0, len(places) - 1, min(count, len(places))).long()]
    states = torch.cat([_state(sound.last, int(place)) for place in chosen])
    return Picked(states, torch.stack([ids[chosen + shift] for shift in SHIFTS], 1))


def _state(last: Stored, place: int) -> Tensor:
    return rows(last, place, place + 1).float()


def agreement(target: Target, picked: Picked) -> dict[int, float]:
    """By shift, how often the head's first token for a state is the token so many places after it."""
    first = _first_tokens(target, picked.states)
    return {shift: float((first == picked.tokens[:, column]).float().mean()) for column, shift in enumerate(SHIFTS)}


def _first_tokens(target: Target, states: Tensor) -> Tensor:
    """The row of the head with the largest product, for each state; the head is read once, some rows at a time."""
    import torch

    head = target.head
    assert head is not None
    count, width = head.shape
    best = torch.full((len(states),), -torch.inf)
    first = torch.zeros(len(states), dtype=torch.long)
    step = max(1, _HEAD_BYTES // (4 * width))
    for start in range(0, count, step):
        logits = states @ _head_rows(target, head, start, min(start + step, count)).T
        top, at = logits.max(1)
        better = top > best
        best, first = torch.where(better, top, best), torch.where(better, at + start, first)
    return first


def _head_rows(target: Target, head: Ref, start: int, stop: int) -> Tensor:
    import torch

    from ..decode import dense, spans
    from ..decode.rows import decode

    weight, source = dense(head), target.checkpoint.source
    held = {role: source.read(*span) for role, span in spans(weight, start, stop).items()}
    return torch.from_numpy(decode(weight, start, stop, held))


def misaligned(shares: dict[int, float], states: int) -> Iterator[Finding]:
    """What is wrong with these shares of ``states`` states."""
    best = max(SHIFTS, key=lambda shift: shares[shift])
    sigma = (0.25 / states) ** 0.5
    data = {
        "states": states,
        "agreement": shares[1],
        "by_shift": {str(shift): share for shift, share in shares.items()},
    }
    if best != 1 and shares[best] > shares[1] + 3 * sigma:
        where = "the token itself" if best == 0 else "the token after the next"
        text = (
            f"the head puts {where} first for {shares[best]:.0%} of {states} last states, the next token for"
            f" {shares[1]:.0%}: states and tokens are shifted against each other"
        )
        yield Finding("features.next-token", text, data=data)
    elif shares[1] < LEAST_AGREEMENT:
        text = (
            f"the head puts the next token first for {shares[1]:.0%} of {states} last states, where text of any kind"
            f" gives {LEAST_AGREEMENT:.0%} and more: the states are not those that this target's head reads"
        )
        yield Finding("features.next-token", text, data=data)
