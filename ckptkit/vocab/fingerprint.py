"""Which tokenizer a list of token ids belongs to: a digest of its tokens, and how many ids it gives."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import fail
from ..files.checkpoint import parse_json
from ..files.source import Source, open_source

TOKENIZER = "tokenizer.json"
_DOMAIN = b"ckptkit.tokenizer.v1\0"
_MOST = 1 << 24  # ids: no model has as many
_HOLE = 0xFFFFFFFF  # in place of a length: an id that no token has


def tokenizer_fingerprint(place: str | Path | Source) -> str | None:
    """SHA-256 (hex) of all tokens of a folder's tokenizer.json in the order of ids; None where there is no such file.

    Digested are a name of this format, the number of ids as u64, and for each id the length of its token's UTF-8 bytes
    as u32 and the bytes; all numbers little-endian. So how the file is laid out doesn't count, and neither do merges.
    Raises UserError (``vocab.tokenizer``) for a file that is no tokenizer.
    """
    tokens = read_tokens(place)
    return None if tokens is None else fingerprint_of(tokens)


def fingerprint_of(tokens: Sequence[str | None]) -> str:
    """The fingerprint of tokens given in the order of ids, None for an id that no token has."""
    digest = hashlib.sha256(_DOMAIN + struct.pack("<Q", len(tokens)))
    for token in tokens:
        text = b"" if token is None else token.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<I", _HOLE if token is None else len(text)) + text)
    return digest.hexdigest()


def tokenizer_size(place: str | Path | Source) -> int | None:
    """How many ids a folder's tokenizer.json gives, added tokens and unused ids among them included; None as above."""
    tokens = read_tokens(place)
    return None if tokens is None else len(tokens)


def read_tokens(place: str | Path | Source) -> list[str | None] | None:
    """The tokens of a folder's tokenizer.json by id, None for an id without one; None where there is no such file."""
    table = read_tokenizer(place)
    return None if table is None else tokens_by_id(table)


def read_tokenizer(place: str | Path | Source) -> Mapping[str, Any] | None:
    """A folder's tokenizer.json as it is, None where there is none. Raises UserError (``vocab.tokenizer``)."""
    if not isinstance(place, Source):
        with open_source(str(place)) as source:
            return read_tokenizer(source)
    if TOKENIZER not in place.files:
        return None
    table = parse_json(place.text(TOKENIZER), TOKENIZER, "vocab.tokenizer")
    if not isinstance(table, dict) or not isinstance(table.get("model"), dict):
        raise fail("vocab.tokenizer", f"{TOKENIZER} has no model with a vocabulary in it", file=TOKENIZER)
    return table


def tokens_by_id(table: Mapping[str, Any]) -> list[str | None]:
    """The tokens of a parsed tokenizer.json by id; where an added token has the id of another, the added one counts.

    Definition: the tokenizers library's ``tokenizer.json`` (a model's ``vocab`` maps tokens to ids; Unigram's lists them).
    """
    try:
        vocabulary = table["model"].get("vocab", {})
        is_listed = not isinstance(vocabulary, Mapping)
        pairs = [(item[0], id) for id, item in enumerate(vocabulary)] if is_listed else list(vocabulary.items())
        pairs += [(token["content"], token["id"]) for token in table.get("added_tokens") or []]
        are_tokens = all(isinstance(token, str) and type(id) is int and 0 <= id < _MOST for token, id in pairs)
    except (TypeError, LookupError):
        are_tokens = False
    if not are_tokens:
        message = f"{TOKENIZER} has a token that is no text, or whose id is no number of a token"
        raise fail("vocab.tokenizer", message, file=TOKENIZER, hint="take the tokenizer of the original checkpoint")
    by_id = {id: token for token, id in pairs}
    return [by_id.get(id) for id in range(max(by_id, default=-1) + 1)]
