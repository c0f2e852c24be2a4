"""What ranks chose against what the whole head would: in numpy, which knows nothing of how they chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..checks.bounds import ROUNDOFF
from ..decode.numbers import Floats
from .cut import Cut
from .ranks import Ids, Sent

TOP = 10
# Of the largest logit: what sums of 10,000 products in float32 may differ by when they are taken in another order.
# Another row in a row's place makes a difference of about the logit itself.
SUMMED = 2.0**-12
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Whole(NamedTuple):
    """The logits of all ranks put together in the order of tokens [states, tokens], and the token that wins each state.

    ``nan``: states with a NaN among their logits, for which no token wins. ``tied``: how many tokens share the largest
    logit.
    """

    logits: Floats
    winners: Ids
    nan: Mask
    tied: Ids


def whole(own: list[Floats], cut: Cut) -> Whole:
    found = np.empty((len(own[0]), len(cut.tokens)), np.float32)
    for rank, logits in enumerate(own):
        start, stop = cut.rows(rank)
        found[:, cut.tokens[start:stop]] = logits
    has_nan: Mask = np.asarray(np.isnan(found).any(axis=1))
    tied = (found == found.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.int32)
    return Whole(found, found.argmax(axis=1).astype(np.int32), has_nan, tied)


def lost(sent: Sent, dense: Whole) -> Mask:
    """States for which some rank takes another token than the whole head for the winner; [states]."""
    wrong: Mask = np.any([winners != dense.winners for winners in sent.winners], axis=0)
    return wrong & ~dense.nan


def broken(sent: Sent, dense: Whole, cut: Cut, count: int) -> Mask:
    """States whose candidates are not what ranks must send, or not what they were sent; [states].

    Of each rank: no token twice, only tokens of its rows, with the bits of their logits, the first its own winner, and
    none left out that is larger than one that was sent.
    """
    found = np.zeros(len(dense.logits), np.bool_)
    for logits, tokens in zip(sent.logits, sent.tokens, strict=True):
        for rank in range(cut.ranks):
            part = slice(rank * count, (rank + 1) * count)
            found |= _broken(logits[:, part], tokens[:, part], dense.logits, cut, rank)
    return found & ~dense.nan


def _broken(values: Floats, tokens: Ids, logits: Floats, cut: Cut, rank: int) -> Mask:
    """The same for the candidates of one rank, [states, count]; those of rows that pad its slice are -inf."""
    mine = np.sort(cut.tokens[slice(*cut.rows(rank))])
    if not len(mine):
        found: Mask = (values != -np.inf).any(axis=1)
        return found
    here = logits[:, mine]
    places = np.minimum(np.searchsorted(mine, tokens), len(mine) - 1)
    real = mine[places] == tokens
    theirs = np.where(real, np.take_along_axis(here, places, 1), np.float32(-np.inf))
    other = (theirs.view(np.uint32) != values.view(np.uint32)).any(axis=1)
    ordered = np.sort(np.where(real, places, -1 - np.arange(places.shape[1])), axis=1)
    twice = (np.diff(ordered, axis=1) == 0).any(axis=1)
    kept = min(values.shape[1], len(mine))
    least = np.partition(here, -kept, axis=1)[:, -kept, None]
    fewer = (values >= least).sum(axis=1) < kept
    wrong: Mask = other | twice | fewer | (tokens[:, 0] != mine[here.argmax(axis=1)])
    return wrong


class Agreement(NamedTuple):
    """How the choice came out for states of one kind.

    ``equal``: states for which every rank takes the whole head's winner; ``recall``: the mean share of the whole head's
    first 10 tokens (or as many as there are candidates) that are among the candidates; ``kl``: of the candidates'
    softmax from the head's, nats in the mean; ``tied``: states whose largest logit several tokens share, and
    ``tied_across`` those of them where ranks do; ``winners``: how many states each rank has the winner of.
    """

    states: int
    equal: int
    recall: float
    kl: float
    tied: int
    tied_across: int
    winners: list[int]


def agreements(kinds: Mapping[str, slice], sent: Sent, dense: Whole, cut: Cut) -> dict[str, Agreement]:
    """By kind of states, which are ``kinds[kind]`` of all; those with a NaN are left out."""
    return {kind: _agreement(np.arange(len(dense.nan))[part], sent, dense, cut) for kind, part in kinds.items()}


def _agreement(states: Any, sent: Sent, dense: Whole, cut: Cut) -> Agreement:
    states = states[~dense.nan[states]]
    if not len(states):
        return Agreement(0, 0, 1.0, 0.0, 0, 0, [0] * cut.ranks)
    values, logits, winners = sent.logits[0][states], dense.logits[states], dense.winners[states]
    rank_of = np.empty(len(cut.tokens), np.int32)
    for rank in range(cut.ranks):
        rank_of[cut.tokens[slice(*cut.rows(rank))]] = rank
    across = sum(len({*rank_of[np.flatnonzero(row == row.max())].tolist()}) > 1 for row in logits)
    return Agreement(
        states=len(states),
        equal=int((~lost(sent, dense)[states]).sum()),
        recall=float(np.mean([*_recalls(values, logits, values.shape[1] // cut.ranks)])),
        kl=float(np.mean(_log_sums(logits) - _log_sums(values))),
        tied=int((dense.tied[states] > 1).sum()),
        tied_across=int(across),
        winners=np.bincount(rank_of[winners], minlength=cut.ranks).tolist(),
    )


def _recalls(values: Floats, logits: Floats, count: int) -> Iterator[float]:
    """By state; of tokens that tie for the last place any will do."""
    top = min(TOP, count, logits.shape[1])
    for chosen, row in zip(values, logits, strict=True):
        least = np.partition(row, -top)[-top]
        yield min(int((chosen >= least).sum()), top) / top


def _log_sums(logits: Floats) -> Any:
    """log sum exp, [states]. A candidate's share of the candidates' sum over its share of all is the same for all."""
    peak = logits.max(axis=1, keepdims=True).astype(np.float64)
    return peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))


class Bytes(NamedTuple):
    """What a rank receives for one state, in bytes: candidates, and all logits instead of them."""

    candidates: int
    dense: int


def received(cut: Cut, count: int, itemsize: int) -> Bytes:
    """``itemsize``: bytes of a logit in a dense gather, where every rank sends as many as the largest slice holds."""
    others = cut.ranks - 1
    return Bytes(others * count * 8, others * max(cut.held) * itemsize)


class Drift(NamedTuple):
    """The logits of the ranks, put together, against those of one device.

    ``largest``: the largest difference; ``flips``: states for which another token comes first; ``off``: those with a
    logit that is further off than the order in which products are summed up explains.
    """

    largest: float
    flips: int
    off: int


def drift(dense: Whole, alone: Floats, dtype: str) -> Drift:
    """``alone`` [states, tokens] are logits of ``dtype`` computed on one device, in the order of tokens."""
    clean = ~dense.nan & np.isfinite(alone).all(axis=1)
    here, there = dense.logits[clean], alone[clean]
    differences = np.abs(here - there).max(axis=1, initial=0)
    explained = (2 * ROUNDOFF[dtype] + SUMMED) * np.abs(there).max(axis=1, initial=0)
    flips = int((here.argmax(axis=1) != there.argmax(axis=1)).sum())
    return Drift(float(differences.max(initial=0)), flips, int((differences > explained).sum()))
