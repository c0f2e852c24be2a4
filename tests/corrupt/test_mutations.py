"""Random single mutations: with recorded digests all are found, and without them as many as docs/mutations.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from corrupt.mutations import COUNT, KINDS, Seen, harmless, measure, page

DOCS = Path(__file__).parents[2] / "docs/mutations.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    return measure()


def test_all_are_found_where_digests_are_recorded(seen: list[Seen]) -> None:
    assert len(seen) == COUNT
    assert {item.kind for item in seen} == KINDS.keys()
    assert [item for item in seen if not item.digests] == []


def test_a_bit_of_data_is_one_digest(seen: list[Seen]) -> None:
    for item in seen:
        if item.kind in {"a bit of a scale", "a bit of a weight"}:
            assert item.digests == {"data.digest"}, item


def test_every_miss_is_known_to_be_harmless(seen: list[Seen]) -> None:
    """What neither headers nor data nor a source show: each has a reason why nothing could show it."""
    assert [item for item in seen if not (item.data or item.numeric) and harmless(item) is None] == []


def test_the_table_is_what_is_measured(seen: list[Seen]) -> None:
    assert DOCS.read_text() == page(seen)
