from __future__ import annotations

import numpy as np
import pytest

from ckptkit.errors import UserError
from ckptkit.heads.cut import cut


def tokens(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


@pytest.mark.parametrize(
    ("engine", "rows", "ranks", "bounds", "held"),
    [
        ("sglang", 50_257, 2, [0, 25_152, 50_257], [25_152, 25_152]),
        ("vllm", 151_936, 3, [0, 50_688, 101_376, 151_936], [50_688] * 3),
        ("lightllm", 50_257, 2, [0, 25_128, 50_257], [25_128, 25_129]),
        ("sglang", 50, 3, [0, 50, 50, 50], [50, 50, 50]),
    ],
)
def test_ranks_hold_their_rows_and_what_pads_them(
    engine: str, rows: int, ranks: int, bounds: list[int], held: list[int]
) -> None:
    found = cut(engine, tokens(rows), ranks)
    assert ([*found.bounds], [*found.held], found.ranks) == (bounds, held, ranks)


def test_as_many_candidates_as_the_smallest_slice_has() -> None:
    assert cut("lightllm", tokens(101), 4).at_most(128) == 25
    assert cut("lightllm", tokens(101), 4).at_most(8) == 8


def test_a_rank_that_would_hold_nothing() -> None:
    with pytest.raises(UserError) as refused:
        cut("lightllm", tokens(3), 4)
    assert [finding.id for finding in refused.value.findings] == ["usage.slices"]
