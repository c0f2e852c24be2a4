"""The small files beside the shards, read as far as they can be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..files.foreign import LFS
from ..files.header import check_characters
from ..files.source import Source

_LFS_SIZE = 1024


class Token(NamedTuple):
    """A token of a tokenizer."""

    id: int
    text: str


class Sidecars(dict[str, Any]):
    """JSON files by name, parsed when they are first asked for; None where a file is not there or is no JSON."""

    def __init__(self, source: Source):
        super().__init__()
        self.source = source

    def __missing__(self, name: str) -> Any:
        try:
            info = self.source.files.get(name)
            text = self.source.read(name, 0, info.size).decode("utf-8-sig") if info else "null"
            found = json.loads(text)
            check_characters(found, text)
        except (ValueError, RecursionError):
            found = None
        self[name] = found
        return found

    def table(self, name: str) -> Mapping[str, Any]:
        """The parsed file where it is a JSON object; else empty."""
        found = self[name]
        return found if isinstance(found, dict) else {}


def is_hollow(source: Source, name: str) -> bool:
    """Whether the file holds nothing: it is empty, or a Git LFS pointer to what it should hold."""
    size = source.files[name].size
    return size == 0 or (size <= _LFS_SIZE and source.read(name, 0, min(size, len(LFS))) == LFS)


def tokens(sidecars: Sidecars) -> Iterator[Token]:
    """Tokens with their ids: the last one of the vocabulary, and those that were added.

    From tokenizer.json, or else from vocab.json and added_tokens.json; none where neither is there.
    """
    tokenizer = sidecars.table("tokenizer.json")
    if tokenizer:
        model = tokenizer.get("model")
        yield from _vocabulary(model.get("vocab") if isinstance(model, dict) else None)
        added = tokenizer.get("added_tokens")
        for entry in added if isinstance(added, list) else ():
            match entry:
                case {"id": int(id), "content": str(text)}:
                    yield Token(id, text)
    else:
        yield from _vocabulary(sidecars["vocab.json"])
        yield from (Token(id, text) for text, id in sidecars.table("added_tokens.json").items() if type(id) is int)


def _vocabulary(vocab: Any) -> Iterator[Token]:
    """The token of the largest id in a table from text to id, or in a list of [text, score] (Unigram)."""
    if isinstance(vocab, dict) and vocab and all(type(id) is int for id in vocab.values()):
        text = max(vocab, key=vocab.__getitem__)
        yield Token(vocab[text], text)
    elif isinstance(vocab, list) and vocab:
        last = vocab[-1]
        yield Token(len(vocab) - 1, str(last[0] if isinstance(last, list) and last else last))
