"""What a draft vocabulary is a part of: the target's vocabulary, as tokenizer.json and the configs beside it say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import fail
from ..families import config_value
from ..files.checkpoint import parse_json, read_config
from ..files.source import Source, open_source
from .fingerprint import TOKENIZER, fingerprint_of, read_tokenizer, tokens_by_id

_GENERATION = "generation_config.json"


class Target(NamedTuple):
    """``path`` is the tokenizer.json; ``n_vocab`` the rows that config.json gives the head, else the tokenizer's ids.

    ``specials`` are the special tokens, ascending, ``ends`` those that end a text.
    """

    path: str
    n_vocab: int
    fingerprint: str
    specials: tuple[int, ...]
    ends: tuple[int, ...]


def target_of(folder: str) -> Target:
    """The target whose tokenizer lies in ``folder``.

    Raises UserError: ``vocab.tokenizer``, ``config.parse``, ``source.*``.
    """
    with open_source(folder) as source:
        table = read_tokenizer(source)
        if table is None:
            hint = "give the target's folder; AutoTokenizer.save_pretrained makes one of a tokenizer of another form"
            raise fail("vocab.tokenizer", f"{folder} has no {TOKENIZER}", file=TOKENIZER, hint=hint)
        tokens = tokens_by_id(table)
        config = read_config(source)
        stated = config_value(config, "vocab_size")
        n_vocab = stated if type(stated) is int and stated > 0 else len(tokens)
        ends = {id for id in _ends(source, config) if 0 <= id < n_vocab}
        marked = {token["id"] for token in table.get("added_tokens") or [] if token.get("special")}
        specials = sorted(id for id in marked | ends if id < n_vocab)
        path = str(source.files[TOKENIZER].path)
    return Target(path, n_vocab, fingerprint_of(tokens), tuple(specials), tuple(sorted(ends)))


def _ends(source: Source, config: Mapping[str, Any] | None) -> Iterator[int]:
    """The ids that end a text, by config.json and generation_config.json."""
    generation = (
        parse_json(source.text(_GENERATION), _GENERATION, "config.parse") if _GENERATION in source.files else {}
    )
    for stated in (config_value(config, "eos_token_id"), dict(generation).get("eos_token_id")):
        yield from (id for id in (stated if isinstance(stated, list) else [stated]) if type(id) is int)
