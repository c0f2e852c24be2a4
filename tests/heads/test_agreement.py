"""Faults of an exchange are seen: each is made by hand in what a sound one sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ckptkit.heads.agreement import agreements, broken, drift, lost, received, whole
from ckptkit.heads.choice import NO_TOKEN, candidates, packed, unpacked, winner
from ckptkit.heads.cut import Cut, cut
from ckptkit.heads.rank import padded
from ckptkit.heads.ranks import Sent

VOCAB, STATES, COUNT = 301, 6, 8
ORDER = np.random.default_rng(1).permutation(VOCAB).astype(np.int32)


def logits() -> np.ndarray:
    """In the order of tokens; the first state's largest is tied between tokens of both ranks."""
    found = np.random.default_rng(2).standard_normal((STATES, VOCAB)).astype(np.float32)
    found[0, [ORDER[3], ORDER[-3], ORDER[-5]]] = 9.0
    return found


def exchanged(cut: Cut, own: list[np.ndarray]) -> Sent:
    payloads = []
    for rank, mine in enumerate(own):
        parts = padded(mine, cut.tokens[slice(*cut.rows(rank))], cut.held[rank])
        payloads.append(packed(*candidates(*parts, COUNT)))
    found, tokens = unpacked(torch.stack(payloads))
    chosen = winner(found, tokens).numpy()
    copies = [[part.numpy().copy() for _ in own] for part in (found, tokens)]
    return Sent(own, *copies, [chosen.copy() for _ in own], "gloo")


@pytest.fixture
def sound() -> tuple[Cut, Sent]:
    found = cut("vllm", ORDER, 2)
    return found, exchanged(found, [logits()[:, ORDER[slice(*found.rows(rank))]] for rank in range(2)])


def test_a_sound_exchange(sound: tuple[Cut, Sent]) -> None:
    cut, sent = sound
    dense = whole(sent.own, cut)
    assert np.array_equal(dense.logits, logits())
    assert dense.winners.tolist() == logits().argmax(1).tolist()
    assert dense.tied.tolist() == [3, 1, 1, 1, 1, 1]
    assert not lost(sent, dense).any()
    assert not broken(sent, dense, cut, COUNT).any()
    found = agreements({"all": slice(0, STATES), "last": slice(5, 6)}, sent, dense, cut)
    assert (found["all"].equal, found["all"].recall, found["all"].tied, found["all"].tied_across) == (6, 1.0, 1, 1)
    of_rank = [int(np.flatnonzero(token == ORDER)[0] >= cut.bounds[1]) for token in dense.winners]
    assert found["all"].winners == [of_rank.count(0), of_rank.count(1)]
    assert found["last"].states == 1


def test_kl_is_that_of_the_candidates_softmax(sound: tuple[Cut, Sent]) -> None:
    cut, sent = sound
    log_p = torch.from_numpy(logits()).double().log_softmax(1)
    log_q = torch.from_numpy(sent.logits[0]).double().log_softmax(1)
    at = log_p.gather(1, torch.from_numpy(sent.tokens[0]).long())
    expected = (log_q.exp() * (log_q - at)).sum(1).mean()
    found = agreements({"all": slice(0, STATES)}, sent, whole(sent.own, cut), cut)["all"].kl
    assert found == pytest.approx(float(expected), rel=1e-6)
    assert found > 0.1


def another_winner(sent: Sent) -> None:
    sent.winners[1][2] = sent.tokens[0][2, 1]


def test_one_rank_that_takes_another_winner(sound: tuple[Cut, Sent]) -> None:
    cut, sent = sound
    another_winner(sent)
    assert np.flatnonzero(lost(sent, whole(sent.own, cut))).tolist() == [2]


def twice(sent: Sent) -> None:
    sent.tokens[0][3, 4], sent.logits[0][3, 4] = sent.tokens[0][3, 5], sent.logits[0][3, 5]


def a_bit(sent: Sent) -> None:
    sent.logits[1].view(np.uint32)[3, COUNT + 2] ^= 1


def another_ranks(sent: Sent) -> None:
    sent.tokens[0][3, 1], sent.logits[0][3, 1] = sent.tokens[0][3, COUNT + 1], sent.logits[0][3, COUNT + 1]


def a_smaller_one(sent: Sent) -> None:
    """The last candidate is replaced by the token of its rank with the least logit."""
    own = sent.own[0][3]
    sent.tokens[0][3, COUNT - 1], sent.logits[0][3, COUNT - 1] = ORDER[own.argmin()], own.min()


def the_second_first(sent: Sent) -> None:
    for part in (sent.tokens[0], sent.logits[0]):
        part[3, [0, 1]] = part[3, [1, 0]]


def no_token(sent: Sent) -> None:
    sent.tokens[0][3, 1] = NO_TOKEN


def flushed(sent: Sent) -> None:
    """Ids as floats that a device flushed to zero."""
    sent.tokens[0][3] = 0


@pytest.mark.parametrize("fault", [twice, a_bit, another_ranks, a_smaller_one, the_second_first, no_token, flushed])
def test_candidates_that_are_not_what_a_rank_must_send(sound: tuple[Cut, Sent], fault: Callable[[Sent], None]) -> None:
    cut, sent = sound
    fault(sent)
    assert np.flatnonzero(broken(sent, whole(sent.own, cut), cut, COUNT)).tolist() == [3]


def test_states_with_a_nan_are_told_apart(sound: tuple[Cut, Sent]) -> None:
    cut, _ = sound
    numbers = logits()
    numbers[4, 7] = np.nan
    sent = exchanged(cut, [numbers[:, ORDER[slice(*cut.rows(rank))]] for rank in range(2)])
    dense = whole(sent.own, cut)
    assert np.flatnonzero(dense.nan).tolist() == [4]
    assert sent.winners[0][4] == NO_TOKEN
    assert not lost(sent, dense).any()
    assert not broken(sent, dense, cut, COUNT).any()
    assert agreements({"all": slice(0, STATES)}, sent, dense, cut)["all"].states == 5


def test_logits_that_rounding_explains_and_others(sound: tuple[Cut, Sent]) -> None:
    cut, sent = sound
    dense = whole(sent.own, cut)
    assert drift(dense, logits(), "F32") == (0.0, 0, 0)
    near, moved = logits(), logits()
    near[1, 5] += 1e-4
    moved[:, [5, 6]] = moved[:, [6, 5]]
    assert drift(dense, near, "F32").off == 0
    assert drift(dense, moved, "F32").off == STATES


def test_bytes_that_a_rank_receives() -> None:
    """The figures of eight ranks and 248,320 rows in bfloat16."""
    found = cut("sglang", np.arange(248_320, dtype=np.int32), 8)
    assert received(found, 128, 2) == (7 * 128 * 8, 434_560)
    assert received(found, 1, 2).candidates == 56
