"""Slice bounds against the engines' own published numbers, and list counts against their definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ckptkit.errors import UserError
from ckptkit.vocab.slices import ENGINES, bounds, engines_agree, list_counts, rule_of

# What SGLang 0.5.23, LightLLM and llama.cpp compute for these vocabularies (64 layers).
KNOWN = {
    ("sglang", 248_320, 3): (0, 82_816, 165_632, 248_320),
    ("vllm", 151_936, 3): (0, 50_688, 101_376, 151_936),
    ("sglang", 50_257, 2): (0, 25_152, 50_257),
    ("lightllm", 248_320, 3): (0, 82_773, 165_546, 248_320),
    ("lightllm", 151_936, 3): (0, 50_645, 101_290, 151_936),
    ("lightllm", 50_257, 2): (0, 25_128, 50_257),
    ("llama.cpp", 248_320, 3): (0, 82_774, 165_547, 248_320),
    ("llama.cpp", 151_936, 3): (0, 50_646, 101_291, 151_936),
    ("llama.cpp", 50_257, 2): (0, 25_128, 50_257),
}


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_known_bounds(case):
    engine, rows, slices = case
    assert bounds(engine, rows, slices, n_layer=64) == KNOWN[case]


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
def test_all_engines_agree_where_64_n_divides_the_rows(slices):
    assert engines_agree(248_320, slices)
    assert len({bounds(engine, 248_320, slices, 64) for engine in (*ENGINES, "even")}) == 1
    assert rule_of(None, 248_320, slices) == "even"


def test_an_engine_must_be_named_where_they_differ():
    with pytest.raises(UserError) as raised:
        rule_of(None, 50_257, 2)
    assert raised.value.findings[0].id == "usage.engine"
    assert rule_of("vllm", 50_257, 2) == "vllm"


def test_lightllm_is_its_own_linspace():
    for rows in (1000, 50_257, 128_256):
        for slices in range(1, 9):
            assert bounds("lightllm", rows, slices) == tuple(np.linspace(0, rows, slices + 1, dtype=np.int64))


@pytest.mark.parametrize("engine", ENGINES)
def test_counts_fill_no_slice_beyond_its_rows(engine):
    """By brute force over small vocabularies: the counts are all of the list, or the list is refused."""
    for rows in (1, 7, 64, 131):
        for slices in range(1, 6):
            found = bounds(engine, rows, slices, n_layer=3)
            assert (found[0], found[-1]) == (0, rows)
            for listed in range(rows + 1):
                try:
                    counts = list_counts(engine, listed, found, n_layer=3)
                except UserError as error:
                    assert engine == "llama.cpp"
                    assert error.findings[0].id == "vocab.slice"
                    continue
                assert sum(counts) == listed
                assert all(count <= b - a for count, (a, b) in zip(counts, pairwise(found), strict=True))


def test_counts_are_in_proportion_to_rows():
    found = (0, 100, 150, 400)
    assert list_counts("sglang", 80, found) == (20, 10, 50)
    assert list_counts("sglang", 81, found) == (20, 10, 51)


def test_llama_cpp_cuts_a_list_as_it_cuts_rows():
    """The remainder of 7 over 3 goes to the last in scan order, which is the device before the rotation's."""
    found = bounds("llama.cpp", 100, 3, n_layer=64)
    assert list_counts("llama.cpp", 7, found, n_layer=64) == (3, 2, 2)
