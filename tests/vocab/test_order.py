"""The order of rows against a slow implementation of its definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import UserError
from ckptkit.files.source import open_source
from ckptkit.vocab.list_writers import tensors_file
from ckptkit.vocab.order import Order, is_permutation, order_rows
from ckptkit.vocab.order_file import facts_of, metadata_of, read_facts, read_order, tables_of
from ckptkit.vocab.slices import ENGINES, bounds


def slow_order(listed: list[int], rows: int, cuts: list[int]) -> tuple[list[int], list[int]]:
    """Row to token by the definition, and how many rows of each slice are the list's; every cut but llama.cpp's."""
    rest = [token for token in range(rows) if token not in listed]
    order, counts = [], []
    for a, b in pairwise(cuts):
        lo, hi = len(listed) * a // rows, len(listed) * b // rows
        order += listed[lo:hi] + rest[a - lo : b - hi]
        counts.append(hi - lo)
    return order, counts


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_order_is_its_definition(data):
    rows = data.draw(st.integers(1, 200))
    listed = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    slices = data.draw(st.integers(1, 5))
    engine = data.draw(st.sampled_from(["sglang", "vllm", "lightllm", "even"]))
    made = order_rows(np.array(listed, np.int32), rows, slices, engine)
    order, counts = slow_order(listed, rows, list(bounds(engine, rows, slices)))
    assert made.row_to_token.tolist() == order
    assert made.slice_list_rows == tuple(counts)
    assert made.list.tolist() == made.list_requested.tolist() == listed
    assert [made.row_to_token[row] for row in made.token_to_row] == list(range(rows))
    assert made.row_to_token.dtype == made.token_to_row.dtype == np.int32


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("listed", [[17], list(range(0, 150, 3)), list(range(150))], ids=["one", "a third", "all"])
def test_draft_index_i_is_the_lists_token_i(engine, listed):
    made = order_rows(np.array(listed, np.int32), 150, 4, engine, n_layer=30)
    assert is_permutation(made.row_to_token)
    assert _draft_head(made) == listed


def _draft_head(order: Order) -> list[int]:
    """The tokens of the view: the first rows of each slice."""
    tokens, start = [], 0
    for size, count in zip(order.slice_rows, order.slice_list_rows, strict=True):
        tokens += order.row_to_token[start : start + count].tolist()
        start += size
    return tokens


def test_align_takes_the_next_of_the_slices_rest():
    made = order_rows(np.array([1, 5, 9], np.int32), 16, 2, "even", align=4)
    # Slices of 8 rows: the list gives 1 and 2 of its tokens to them, the rest is [0 2 3 4 6 7 8 | 10 .. 15].
    assert made.slice_list_rows == (4, 4)
    assert made.row_to_token.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 5, 9, 10, 11, 12, 13, 14, 15]
    assert made.list.tolist() == _draft_head(made) == [0, 1, 2, 3, 5, 9, 10, 11]
    assert made.list_requested.tolist() == [1, 5, 9]


def test_align_neither_leaves_the_slice_nor_takes_rows_of_no_token():
    past_slice = order_rows(np.arange(5, dtype=np.int32), 10, 2, "lightllm", align=64)
    assert past_slice.slice_list_rows == (5, 5)
    made = order_rows(np.array([0], np.int32), 10, 1, "even", align=8, n_tokenizer=6)
    assert made.slice_list_rows == (6,)
    assert made.row_to_token.tolist() == list(range(10))


def test_rows_past_the_tokenizer_stay_last():
    made = order_rows(np.array([3, 4], np.int32), 12, 2, "even", n_tokenizer=10)
    assert made.row_to_token[-2:].tolist() == [10, 11]


# --- on disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    order = order_rows(np.array([2, 3, 7], np.int32), 12, 2, "lightllm", align=2, n_layer=5, n_tokenizer=11)
    metadata = metadata_of(facts_of(order), {"a": "{}"})
    (tmp_path / "vocab_order.safetensors").write_bytes(tensors_file(tables_of(order), metadata))
    return tmp_path, order


def test_what_is_written_is_read(saved):
    folder, order = saved
    with open_source(str(folder)) as source:
        found = read_order(source)
        assert found is not None
        for field, value in found._asdict().items():
            assert np.array_equal(value, getattr(order, field)), field
        assert read_facts(source) == facts_of(order)


def test_the_safetensors_package_reads_it(saved):
    from safetensors.numpy import load_file

    folder, order = saved
    tables = load_file(folder / "vocab_order.safetensors")
    assert tables["row_to_token"].tolist() == order.row_to_token.tolist()
    assert tables["list_requested"].tolist() == [2, 3, 7]


@pytest.mark.parametrize("at", [-1, -30, -60, -90])
def test_a_changed_table_is_refused(saved, at):
    folder, _ = saved
    path = folder / "vocab_order.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with open_source(str(folder)) as source, pytest.raises(UserError) as raised:
        read_order(source)
    assert raised.value.findings[0].id == "source.vocab-order"
    assert raised.value.exit_code == 3


def test_metadata_that_is_none_is_refused(tmp_path):
    order = order_rows(np.array([2], np.int32), 4, 1, "even")
    for metadata in (None, {"vocab_order": "{"}, {"vocab_order": '{"version": 2}'}, {"vocab_order": '{"version": 1}'}):
        (tmp_path / "vocab_order.safetensors").write_bytes(tensors_file(tables_of(order), metadata))
        with open_source(str(tmp_path)) as source, pytest.raises(UserError) as raised:
            read_order(source)
        assert raised.value.findings[0].id == "source.vocab-order"
