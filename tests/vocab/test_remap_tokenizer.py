"""A renumbered tokenizer against the ``tokenizers`` library: the same text gives the old ids, mapped, token by token."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ckptkit.errors import UserError
from ckptkit.vocab.remap_tokenizer import remapped
from ckptkit.vocab.renumber import numbering
from vocab.tokenizers_made import KINDS, corpus, made


def shuffled(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permutation(size).astype(np.int32)


def table(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def loaded(content: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("kind", KINDS)
def test_text_gives_the_old_ids_mapped(kind: str) -> None:
    before = made(kind)
    new_ids = shuffled(before.get_vocab_size())
    after = loaded(remapped(table(before), numbering(new_ids), "tokenizer.json"))
    assert after.get_vocab() == {token: new_ids[id] for token, id in before.get_vocab().items()}
    for text in corpus():
        for special in (True, False):
            old, new = before.encode(text, add_special_tokens=special), after.encode(text, add_special_tokens=special)
            assert new.ids == [new_ids[id] for id in old.ids], text
            assert (new.tokens, new.offsets, new.type_ids) == (old.tokens, old.offsets, old.type_ids)
            assert after.decode(new.ids) == before.decode(old.ids)
    pair, mapped = before.encode("low", "wide"), after.encode("low", "wide")
    assert mapped.ids == [new_ids[id] for id in pair.ids]


@pytest.mark.parametrize("kind", KINDS)
def test_back_again(kind: str) -> None:
    """The inverse order gives every text the ids it had."""
    before = made(kind)
    new_ids = shuffled(before.get_vocab_size(), 1)
    there = remapped(table(before), numbering(new_ids), "tokenizer.json")
    back = loaded(remapped(there, numbering(np.argsort(new_ids).astype(np.int32)), "tokenizer.json"))
    assert [back.encode(text).ids for text in corpus()] == [before.encode(text).ids for text in corpus()]


def test_without_the_models_vocabulary_added_tokens_would_be_misnumbered() -> None:
    """Why they are written there too: a library that did as ``added_tokens`` says would make this test superfluous."""
    before = made("bpe")
    new_ids = shuffled(before.get_vocab_size())
    content = remapped(table(before), numbering(new_ids), "tokenizer.json")
    old = set(table(before)["model"]["vocab"])
    content["model"]["vocab"] = {token: id for token, id in content["model"]["vocab"].items() if token in old}
    assert loaded(content).get_vocab() != {token: new_ids[id] for token, id in before.get_vocab().items()}


def _of(kind: str, **changes: Any) -> dict[str, Any]:
    content = table(made(kind))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place: Any = content
        for key in parents:
            place = place[int(key)] if key.lstrip("-").isdigit() else place[key]
        place[int(last) if last.lstrip("-").isdigit() else last] = value
    return content


@pytest.mark.parametrize(
    ("content", "id"),
    [
        (lambda: _of("bpe", added_tokens__0__id=7), "vocab.tokenizer"),
        (lambda: _of("bpe", model__vocab={"a": 0, "b": 0}), "vocab.tokenizer"),
        (lambda: _of("wordlevel", model__type="Other"), "vocab.remap"),
        (lambda: _of("wordlevel", post_processor={"type": "Other"}), "vocab.remap"),
        (lambda: _of("wordlevel", **{"added_tokens__-1__single_word": True}), "vocab.remap"),
        (lambda: _of("unigram", **{"added_tokens__-1__single_word": True}), "vocab.remap"),
    ],
)
def test_refused(content: Any, id: str) -> None:
    found = content()
    with pytest.raises(UserError) as error:
        remapped(found, numbering(shuffled(600)), "tokenizer.json")
    assert [finding.id for finding in error.value.findings] == [id]


def test_a_unigram_with_holes_in_the_new_ids_is_refused() -> None:
    before = made("unigram")
    size = before.get_vocab_size()
    new_ids = np.roll(np.arange(size + 2), 1).astype(np.int32)
    with pytest.raises(UserError) as error:
        remapped(table(before), numbering(new_ids), "tokenizer.json")
    assert error.value.findings[0].id == "vocab.remap"
