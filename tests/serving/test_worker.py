"""Parts of the server that runs references."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ckptkit.serving import worker  # noqa: E402


def test_eight_bits_by_block() -> None:
    """Each value is the nearest of 255 that are evenly spread over its block; a block of noughts stays so."""
    values = np.random.default_rng(3).normal(size=(2, 3, 96)).astype(np.float32)
    values[0, 0, :32] = 0
    found = worker._eight_bits(torch.from_numpy(values), 32).numpy()
    for row, rounded in zip(values.reshape(-1, 32), found.reshape(-1, 32), strict=True):
        step = np.abs(row).max() / 127
        levels = step * np.arange(-127, 128)
        nearest = levels[np.abs(row[:, None] - levels).argmin(1)]
        np.testing.assert_allclose(rounded, nearest, atol=1e-6)
    assert 0 < np.abs(found - values).max() < 0.03


@pytest.mark.parametrize(
    ("stop", "text"),
    [(None, "a\nb.c"), ([], "a\nb.c"), ("\n", "a"), ([".", "\n"], "a"), (["."], "a\nb"), (["x", ""], "a\nb.c")],
)
def test_a_text_ends_before_the_first_stop(stop: str | list[str] | None, text: str) -> None:
    assert worker._until("a\nb.c", stop) == text
