"""What ranks choose, against a plain argmax over all logits in the order of tokens: the first of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.heads.choice import NO_TOKEN, candidates, packed, unpacked, winner

BF16_LARGEST = 3.3895313892515355e38


def payloads(logits: np.ndarray, order: Sequence[int], bounds: Sequence[int], count: int, held: int) -> torch.Tensor:
    """What ranks send of logits [states, tokens], rank j the rows [bounds[j], bounds[j + 1]) of tokens in ``order``.

    A rank holds ``held`` rows, or as many as it has.
    """
    sent = []
    for start, stop in pairwise(bounds):
        tokens = np.full(max(held, stop - start), NO_TOKEN, np.int32)
        tokens[: stop - start] = order[start:stop]
        own = np.full((len(logits), len(tokens)), -np.inf, np.float32)
        own[:, : stop - start] = logits[:, order[start:stop]]
        ascending = bool((np.diff(tokens) >= 0).all())
        sent.append(packed(*candidates(torch.from_numpy(own), torch.from_numpy(tokens), count, ascending)))
    return torch.stack(sent)


def chosen(logits: np.ndarray, order: Sequence[int], bounds: Sequence[int], count: int, held: int = 0) -> list[int]:
    return winner(*unpacked(payloads(logits, order, bounds, count, held))).tolist()


def first_of_largest(logits: np.ndarray) -> list[int]:
    return np.argmax(logits, axis=1).tolist()


def in_order(length: int) -> list[int]:
    return list(range(length))


@st.composite
def heads(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], int, int]:
    """Logits of few values, so that they tie; tokens in any order; uneven slices; padding."""
    length = draw(st.integers(1, 40))
    values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 1.0000001, float(2**-149), -np.inf])
    row = st.lists(values, min_size=length, max_size=length)
    logits = np.array(draw(st.lists(row, min_size=1, max_size=3)), np.float32)
    logits[:, draw(st.integers(0, length - 1))] = 0.5  # somewhere there is a number
    order = draw(st.permutations(range(length)))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    bounds = [0, *cuts, length]
    held = max(b - a for a, b in pairwise(bounds)) + draw(st.integers(0, 3))
    return logits, list(order), bounds, draw(st.integers(1, held)), held


@settings(max_examples=300, deadline=None)
@given(heads())
def test_ranks_choose_what_the_whole_head_would(head: tuple[np.ndarray, list[int], list[int], int, int]) -> None:
    logits, order, bounds, count, held = head
    assert chosen(logits, order, bounds, count, held) == first_of_largest(logits)


@settings(max_examples=100, deadline=None)
@given(heads())
def test_candidates_are_the_largest_of_their_rank(head: tuple[np.ndarray, list[int], list[int], int, int]) -> None:
    logits, order, bounds, count, held = head
    for (start, stop), payload in zip(pairwise(bounds), payloads(logits, order, bounds, count, held), strict=True):
        for state, (values, tokens) in enumerate(zip(payload[0].view(torch.float32), payload[1], strict=True)):
            real = [token for token in tokens.tolist() if token != NO_TOKEN]
            own = logits[state, order[start:stop]]
            assert len(set(real)) == len(real)
            assert set(real) <= set(order[start:stop])
            largest = np.sort(own)[::-1][:count].tolist()
            assert sorted(values.tolist(), reverse=True)[: len(largest)] == largest
            assert [logits[state, token] for token in real] == [
                v for v, t in zip(values, tokens, strict=True) if t != NO_TOKEN
            ]


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 97, 1009])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_vocabularies_that_nothing_divides(vocab: int, ranks: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((4, vocab), np.float32)
    bounds = [vocab * rank // ranks for rank in range(ranks + 1)]
    held = max(b - a for a, b in pairwise(bounds))
    assert chosen(logits, in_order(vocab), bounds, min(8, held), held) == first_of_largest(logits)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ties_within_a_rank_beyond_what_is_sent(count: int) -> None:
    """Five rows of one rank are equal, and at most three are sent: the smallest id is among them."""
    logits = np.zeros((1, 12), np.float32)
    logits[0, [2, 3, 5, 8, 9]] = 4.0
    order = [9, 8, 5, 0, 3, 2, 1, 4, 6, 7, 10, 11]
    assert chosen(logits, order, [0, 6, 12], count) == [2]


def test_ties_across_ranks_go_to_the_smallest_id_not_to_the_lowest_rank() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, [1, 6]] = 1.0
    assert chosen(logits, [4, 5, 6, 7, 0, 1, 2, 3], [0, 4, 8], 2) == [1]
    assert np.argmax(logits[0, [4, 5, 6, 7, 0, 1, 2, 3]]) == 2  # what the first row of the largest would be: token 6


def test_the_order_of_tied_candidates_does_not_matter() -> None:
    logits = np.zeros((1, 32), np.float32)
    found, tokens = unpacked(payloads(logits, in_order(32)[::-1], [0, 11, 32], 8, 0))
    for seed in range(20):
        places = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        assert winner(found[:, places], tokens[:, places]).tolist() == [0]


def test_zeros_of_both_signs_tie() -> None:
    logits = np.array([[-1, 0.0, -0.0, -1], [-1, -0.0, 0.0, -1]], np.float32)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for bounds in ([0, 2, 4], [0, 4], [0, 1, 4]):
            assert chosen(logits, order, bounds, 1) == [1, 1]


def test_logits_that_differ_under_equal_probabilities() -> None:
    """float32 softmax gives both one probability; the larger logit wins, though its id is the greater."""
    logits = np.array([[-1.0, 1e-9, 2e-9]], np.float32)
    probabilities = torch.from_numpy(logits).softmax(1)
    assert probabilities[0, 1] == probabilities[0, 2]
    for bounds in ([0, 2, 3], [0, 3]):
        assert chosen(logits, in_order(3), bounds, 1) == [2]


def test_a_winner_that_moves_between_ranks() -> None:
    logits = np.tile(np.linspace(0, 1, 30, dtype=np.float32), (30, 1))
    logits[np.arange(30), np.arange(30)] = 2.0
    assert chosen(logits, in_order(30), [0, 7, 8, 30], 1) == in_order(30)


def test_padded_rows_are_never_chosen() -> None:
    """All real logits are less than the zero that a row of zeros would give."""
    logits = np.full((2, 5), -3.0, np.float32)
    logits[1, 4] = -2.0
    found, tokens = unpacked(payloads(logits, in_order(5), [0, 5, 5], 4, 8))
    assert winner(found, tokens).tolist() == [0, 4]
    assert (found[:, 4:] == -torch.inf).all()
    assert (tokens[:, 4:] == NO_TOKEN).all()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0]])
def test_where_there_is_a_nan_nothing_is_chosen(count: int, order: list[int]) -> None:
    logits = np.array([[5.0, np.nan, 1.0, 2.0], [5.0, 4.0, 1.0, 2.0]], np.float32)
    assert chosen(logits, order, [0, 2, 4], count) == [NO_TOKEN, 0]


def test_the_largest_numbers_and_infinity() -> None:
    rows = [[np.inf, BF16_LARGEST, np.inf], [-np.inf, -BF16_LARGEST, -np.inf], [-np.inf] * 3]
    assert chosen(np.array(rows, np.float32), [2, 1, 0], [0, 1, 3], 1, 4) == [0, 1, 0]


def test_bits_of_logits_and_ids_arrive() -> None:
    """Ids are denormals as floats, and logits may be: none is flushed, rounded or reduced on the way."""
    logits = torch.tensor([[1.5, 2.0**-149, -0.0]])
    tokens = torch.tensor([[0, 8_388_607, 248_319]], dtype=torch.int32)
    payload = packed(logits, tokens)
    assert payload.dtype == torch.int32
    assert (payload.numel(), payload.element_size()) == (6, 4)
    found, ids = unpacked(torch.stack([payload, payload]))
    assert found.view(torch.int32).tolist() == logits.view(torch.int32).repeat(1, 2).tolist()
    assert ids.tolist() == tokens.repeat(1, 2).tolist()
