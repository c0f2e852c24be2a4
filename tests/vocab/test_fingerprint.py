"""The fingerprint of a tokenizer and what its folder says of the target, against the tokenizers library."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from ckptkit.errors import UserError
from ckptkit.vocab.fingerprint import read_tokens, tokenizer_fingerprint, tokenizer_size
from ckptkit.vocab.target import target_of


def save(folder: Path, model: Any, *added: AddedToken) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


MODELS = {
    "wordlevel": lambda: models.WordLevel({"a": 0, "é": 1, "<unk>": 2}, unk_token="<unk>"),
    "bpe": lambda: models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    "wordpiece": lambda: models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"),
    "unigram": lambda: models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    tokenizer = save(tmp_path, MODELS[name](), AddedToken("<|x|>", special=True), AddedToken("plain word"))
    expected = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    assert read_tokens(tmp_path) == expected
    assert tokenizer_size(tmp_path) == len(expected) == 5
    parts = [token.encode() for token in expected]
    digested = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    content = b"ckptkit.tokenizer.v1\0" + (5).to_bytes(8, "little") + digested
    assert tokenizer_fingerprint(tmp_path) == hashlib.sha256(content).hexdigest()


def test_layout_does_not_count_and_ids_do(tmp_path: Path) -> None:
    save(tmp_path, MODELS["wordlevel"]())
    first = tokenizer_fingerprint(tmp_path)
    path = tmp_path / "tokenizer.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table, indent=7, ensure_ascii=True))
    assert tokenizer_fingerprint(tmp_path) == first
    table["model"]["vocab"] = {"a": 1, "é": 0, "<unk>": 2}
    path.write_text(json.dumps(table))
    assert tokenizer_fingerprint(tmp_path) != first


def test_a_hole_is_no_empty_token(tmp_path: Path) -> None:
    found = []
    for vocabulary in ({"a": 0, "b": 2}, {"a": 0, "": 1, "b": 2}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        found.append((tokenizer_size(tmp_path), tokenizer_fingerprint(tmp_path)))
    assert [size for size, _ in found] == [3, 3]
    assert found[0] != found[1]


def test_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert (tokenizer_fingerprint(tmp_path), tokenizer_size(tmp_path)) == (None, None)


BROKEN = {
    "no json": "{",
    "no model": "{}",
    "ids that are none": '{"model": {"vocab": {"a": "0"}}}',
    "negative": '{"model": {"vocab": {"a": -1}}}',
    "far": '{"model": {"vocab": {"a": 2000000000}}}',
    "a list": "[]",
    "pieces that are none": '{"model": {"vocab": [1]}}',
    "no vocab": '{"model": {"vocab": 3}}',
    "added that are none": '{"model": {"vocab": {}}, "added_tokens": [7]}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizers(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(BROKEN[name])
    with pytest.raises(UserError) as caught:
        target_of(str(tmp_path))
    assert caught.value.findings[0].id == "vocab.tokenizer"


@pytest.mark.parametrize(
    ("config", "generation", "n_vocab", "ends"),
    [
        (None, None, 5, ()),
        ({"vocab_size": 8, "eos_token_id": 1}, None, 8, (1,)),
        ({"text_config": {"vocab_size": 9, "eos_token_id": [1, 2]}}, {"eos_token_id": [2, 4]}, 9, (1, 2, 4)),
        ({"vocab_size": 4, "eos_token_id": 77}, {"eos_token_id": None}, 4, ()),
        ({"vocab_size": "many"}, [], 5, ()),
    ],
)
def test_the_target(tmp_path: Path, config: Any, generation: Any, n_vocab: int, ends: tuple[int, ...]) -> None:
    save(tmp_path, MODELS["bpe"](), AddedToken("<|x|>", special=True), AddedToken("plain word"))
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    found = target_of(str(tmp_path))
    assert (found.n_vocab, found.ends) == (n_vocab, ends)
    assert found.specials == tuple(sorted({3, *ends} if n_vocab > 3 else set(ends)))
