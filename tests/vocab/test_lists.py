"""Draft vocabularies read from every form they are kept in; the worked example is that of the conventions' definition."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ckptkit.errors import USAGE, UserError
from ckptkit.vocab.conventions import mask_of, offsets_of, tokens_of
from ckptkit.vocab.lists import DraftVocab, list_sha256, read_list, sorted_unique

# V = 12: what the four ways to write one vocabulary look like.
IDS = [0, 1, 5, 7, 11]
OFFSETS = [0, 0, 3, 4, 7]
MASK = [id in IDS for id in range(12)]
RANKED = [5, 0, 11, 1, 7]


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert caught.value.exit_code == USAGE
    [finding] = caught.value.findings
    return finding.id


def i64(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def gguf_file(path: Path, name: str, values: np.ndarray, tokens: int = 0) -> Path:
    writer = GGUFWriter(path, "llama")
    if tokens:
        writer.add_token_list([f"t{id}" for id in range(tokens)])
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(folder: Path, form: str) -> Path:
    """The worked example in a form of the given name, which is also the file's."""
    path = folder / form
    d2t, t2d = i64(OFFSETS), np.array(MASK)
    match form:
        case "ids.txt":
            path.write_text("# 12 tokens\n0, 1\t5\n7 # seven\n\n11")
        case "ids.json":
            path.write_text(json.dumps(IDS))
        case "mask.json":
            path.write_text(json.dumps(MASK))
        case "list.pt":
            torch.save(IDS, path)
        case "tensor.pt":
            torch.save(torch.tensor(IDS, dtype=torch.int32), path)
        case "both.pt":
            torch.save({"d2t": torch.tensor(OFFSETS), "t2d": torch.tensor(MASK)}, path)
        case "ids.npy":
            np.save(path, i64(IDS))
        case "mask.npy":
            np.save(path, t2d)
        case "d2t-5.npy":
            np.save(path, d2t)
            np.save(folder / "t2d-5.npy", t2d)
        case "eagle.safetensors":
            save_file({"d2t": d2t, "t2d": t2d}, path)
        case "offsets.safetensors":
            save_file({"model.d2t": d2t.astype(np.int32)}, path)
        case "absolute.safetensors":
            save_file({"d2t": i64(IDS), "t2d": t2d}, path)
        case "medusa.safetensors":
            save_file({"token_map": i64(IDS)}, path)
        case "draft":
            path.mkdir()
            save_file(
                {"d2t": d2t, "t2d": t2d, "lm_head.weight": np.zeros((5, 4), np.float32)}, path / "model.safetensors"
            )
        case "absolute.gguf":
            gguf_file(path, "d2t", i64(IDS), 12)
        case "offsets.gguf":
            gguf_file(path, "d2t.weight", d2t)
    return path


FORMS = [
    "ids.txt", "ids.json", "mask.json", "list.pt", "tensor.pt", "both.pt", "ids.npy", "mask.npy", "d2t-5.npy",
    "eagle.safetensors", "offsets.safetensors", "absolute.safetensors", "medusa.safetensors", "draft", "absolute.gguf",
    "offsets.gguf",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tokens(tmp_path: Path, form: str) -> None:
    found = read_list(write(tmp_path, form), n_vocab=12)
    assert found.ids.dtype == np.int32
    assert found.ids.tolist() == IDS
    assert (found.is_ranked, found.n_vocab) == (False, 12)
    assert sorted_unique(found, 12).tolist() == IDS


@pytest.mark.parametrize(
    "form", ["mask.json", "mask.npy", "both.pt", "d2t-5.npy", "eagle.safetensors", "absolute.gguf"]
)
def test_a_mask_or_a_tokenizer_says_the_size(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    assert read_list(path).n_vocab == 12
    assert refused(lambda: read_list(path, n_vocab=13)) == "vocab.size"


def test_rank_is_kept_apart_from_order(tmp_path: Path) -> None:
    path = tmp_path / "ranked.json"
    path.write_text(json.dumps(RANKED))
    found = read_list(path)
    assert (found.ids.tolist(), found.is_ranked, found.n_vocab) == (RANKED, True, None)
    assert sorted_unique(found, 12).tolist() == IDS


def test_counts_by_token_give_the_rank(tmp_path: Path) -> None:
    torch.save({7: 1, 5: 9, 11: 3, 0: 3, 2: 0, 1: 2}, tmp_path / "token_freq.pt")
    assert read_list(tmp_path / "token_freq.pt").ids.tolist() == [5, 0, 11, 1, 7]


@pytest.mark.parametrize(
    ("text", "n_vocab", "ids"),
    [("prefix:3", None, [0, 1, 2]), ("prefix:3+tail:2", 12, [0, 1, 2, 10, 11]), ("prefix:0+tail:1", 12, [11])],
)
def test_lists_that_are_said(text: str, n_vocab: int | None, ids: list[int]) -> None:
    found = read_list(text, n_vocab=n_vocab)
    assert (found.ids.tolist(), found.is_ranked, found.is_map) == (ids, False, False)


@pytest.mark.parametrize(
    ("text", "n_vocab", "id"),
    [
        ("prefix:0", None, "vocab.list"),
        ("prefix:3+tail:2", None, "vocab.size"),
        ("prefix:11+tail:2", 12, "vocab.range"),
        ("prefix:99999999999", None, "vocab.range"),
    ],
)
def test_lists_that_cannot_be_said(text: str, n_vocab: int | None, id: str) -> None:
    assert refused(lambda: read_list(text, n_vocab=n_vocab)) == id


# --- offsets or tokens -------------------------------------------------------------------------------------


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1), st.booleans())
    )
)
def test_with_t2d_a_map_is_read_right_or_not_at_all(case: tuple[int, set[int], bool]) -> None:
    size, tokens, is_offset = case
    ids = sorted(tokens)
    map_ = [id - i for i, id in enumerate(ids)] if is_offset else ids
    found = tokens_of(i64(map_), np.array([id in tokens for id in range(size)]), None, None, "x")
    assert found.tolist() == ids


@given(st.lists(st.integers(-3, 20), min_size=1, max_size=6), st.none() | st.integers(1, 21))
def test_without_t2d_a_map_is_read_in_the_one_way_that_it_can_be(values: list[int], n_vocab: int | None) -> None:
    readings = [values, [i + value for i, value in enumerate(values)]]
    limit = 10**9 if n_vocab is None else n_vocab
    possible = [ids for ids in readings if len(set(ids)) == len(ids) and all(0 <= id < limit for id in ids)]
    distinct = {tuple(ids) for ids in possible}
    if len(distinct) == 1:
        assert tuple(tokens_of(i64(values), None, n_vocab, None, "x").tolist()) in distinct
    else:
        id = "vocab.ambiguous" if distinct else "vocab.mapping"
        assert refused(lambda: tokens_of(i64(values), None, n_vocab, None, "x")) == id


def test_a_map_that_can_be_both_is_refused_until_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "d2t.safetensors"
    save_file({"d2t": i64(IDS)}, path)
    assert refused(lambda: read_list(path)) == "vocab.ambiguous"
    assert read_list(path, n_vocab=12).ids.tolist() == IDS  # as offsets the last would be token 15
    assert read_list(path, offsets=False).ids.tolist() == IDS
    assert read_list(path, offsets=True).ids.tolist() == [id + i for i, id in enumerate(IDS)]


def test_a_map_against_its_mask(tmp_path: Path) -> None:
    save_file({"d2t": i64([0, 0, 3, 4, 6]), "t2d": np.array(MASK)}, tmp_path / "a.safetensors")
    assert refused(lambda: read_list(tmp_path / "a.safetensors")) == "vocab.mapping"
    save_file({"d2t": i64(OFFSETS), "t2d": np.array(MASK)}, tmp_path / "b.safetensors")
    assert refused(lambda: read_list(tmp_path / "b.safetensors", offsets=False)) == "vocab.mapping"


def test_offsets_and_masks_of_the_worked_example() -> None:
    assert offsets_of(np.array(IDS)).tolist() == OFFSETS
    assert mask_of(np.array(IDS), 12).tolist() == MASK


# --- what is no list ---------------------------------------------------------------------------------------


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    torch.save({"d2t": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    np.save(tmp_path / "evil.npy", np.array([Evil()], object), allow_pickle=True)
    for name in ("evil.pt", "plain.pt", "evil.npy"):
        assert refused(lambda name=name: read_list(tmp_path / name)) == "vocab.list"
    assert not marker.exists()


CONTENTS = {
    "empty.txt": b"# nothing\n",
    "words.txt": b"1 2 three",
    "float.txt": b"1.5 2",
    "huge.txt": b"99999999999999999999",
    "binary.txt": b"\xff\xfe\x00",
    "object.json": b'{"ids": [1]}',
    "nested.json": b"[[1, 2]]",
    "mixed.json": b"[1, true]",
    "float.json": b"[1.0]",
    "broken.json": b"[1, 2",
    "huge.json": b"[99999999999999999999999]",
    "empty.pt": b"",
    "cut.npy": b"\x93NUMPY\x01\x00",
    "text.npy": b"1 2 3",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_list_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name])
    assert refused(lambda: read_list(tmp_path / name)) == "vocab.list"


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int64), np.zeros(3), np.array(["a"]), np.array(5)], ids=str)
def test_arrays_that_are_no_lists(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    assert refused(lambda: read_list(tmp_path / "a.npy")) == "vocab.list"


def test_files_that_are_not_there_or_hold_no_map(tmp_path: Path) -> None:
    assert refused(lambda: read_list(tmp_path / "absent.txt")) == "vocab.list"
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "a.safetensors")
    assert refused(lambda: read_list(tmp_path / "a.safetensors")) == "vocab.list"
    save_file({"a.d2t": i64(OFFSETS), "b.d2t": i64(OFFSETS)}, tmp_path / "b.safetensors")
    assert refused(lambda: read_list(tmp_path / "b.safetensors")) == "vocab.list"
    gguf_file(tmp_path / "a.gguf", "output.weight", np.zeros((2, 32), np.float32))
    assert refused(lambda: read_list(tmp_path / "a.gguf")) == "vocab.list"


@pytest.mark.parametrize(("text", "id"), [("0 12", "vocab.range"), ("-1 2", "vocab.range")])
def test_ids_outside_the_vocabulary(tmp_path: Path, text: str, id: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert refused(lambda: read_list(tmp_path / "a.txt", n_vocab=12)) == id


def test_sorted_unique_refuses() -> None:
    twice = DraftVocab(np.array([1, 5, 1], np.int32), True, None, "x")
    assert refused(lambda: sorted_unique(twice, 12)) == "vocab.duplicate"
    assert refused(lambda: sorted_unique(twice._replace(ids=np.array([1, 5], np.int32)), 5)) == "vocab.range"


def test_the_digest_of_a_list() -> None:
    expected = hashlib.sha256(struct.pack("<5i", *RANKED)).hexdigest()
    assert list_sha256(np.array(RANKED, np.int32)) == list_sha256(np.array(RANKED, np.int64)) == expected
