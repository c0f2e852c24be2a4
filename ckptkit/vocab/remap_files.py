"""All files of a checkpoint that hold token ids, with others: tokenizer, configs, generation, processors. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..files.checkpoint import parse_json
from .fingerprint import TOKENIZER, tokens_by_id
from .remap_tokenizer import remapped, remapped_decoder, remapped_ids
from .renumber import NewId, numbering, renumbered

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int32]]

UNKNOWN, FILE = "vocab.unknown-ids", "vocab.tokenizer-file"
# Files in which a token's id is its place, or its rank among the merges.
_RANKS = re.compile(r"(.*/)?([^/]*\.(model|tiktoken|spm)|tekken\.json|dict(\.[\w-]+)?\.txt)")
_PROGRAM = re.compile(r"tokenization_\w+\.py")
_IDS_BY_TOKEN = ("vocab.json", "added_tokens.json")
_LINES = "vocab.txt"


class Remapped(NamedTuple):
    """New texts by file name, what cannot be in the result by name with the reason, and findings."""

    texts: dict[str, str]
    stale: dict[str, str]
    findings: tuple[Finding, ...]


def remapped_files(texts: Mapping[str, str], names: Iterable[str], new_ids: Ids, sizes: Collection[int]) -> Remapped:
    """The JSON files ``texts``, and ``vocab.txt``, renumbered; ``names`` are all files there are.

    ``new_ids`` [n_rows] gives the new id by the old one, ``sizes`` are what the vocabulary's size is said to be. Findings
    are errors: ``vocab.unknown-ids``, ``vocab.tokenizer-file``, ``vocab.tokenizer``, ``vocab.remap``.
    """
    new_id = numbering(new_ids)
    made: dict[str, str] = {}
    findings: list[Finding] = []
    for name, text in texts.items():
        try:
            changed, unknown = _document(name, text, new_id, len(new_ids), sizes)
        except UserError as error:
            findings += error.findings
            continue
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            message = f"{name} is not as the libraries write a file of that name"
            findings.append(Finding("vocab.tokenizer", message, file=name, hint=_SAVE))
            continue
        findings += [_unknown(name, path) for path in unknown]
        if changed is not None:
            made[name] = changed
    ranked = [name for name in names if _RANKS.fullmatch(name)]
    findings += [_of_ranks(name) for name in ranked]
    findings += [_program(name) for name in names if _PROGRAM.fullmatch(_base(name))]
    if TOKENIZER not in texts and any(_base(name) in (*_IDS_BY_TOKEN, _LINES) for name in texts):
        message = f"there is no {TOKENIZER}, and without it added tokens get ids that no other file says"
        findings.append(Finding("vocab.remap", message, file=TOKENIZER, hint=_SAVE))
    return Remapped(made, dict.fromkeys(ranked, "numbers tokens as the source does"), tuple(findings))


_SAVE = "AutoTokenizer.from_pretrained(SRC).save_pretrained(FOLDER) writes one; put it into a copy of SRC"


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _document(
    name: str, text: str, new_id: NewId, n_rows: int, sizes: Collection[int]
) -> tuple[str | None, tuple[str, ...]]:
    """A file's new text, None where nothing changes, and the paths in it of what may be ids."""
    if _base(name) == _LINES:
        return _lines(text, new_id, name), ()
    document = parse_json(text, name, "config.parse")
    if _base(name) == TOKENIZER:
        return _compact(remapped_tokenizer(document, new_id, n_rows, name)), ()
    if _base(name) in _IDS_BY_TOKEN and isinstance(document, dict):
        return _indented(remapped_ids(document, new_id)), ()
    decoder = document.pop("added_tokens_decoder", None) if isinstance(document, dict) else None
    found = renumbered(document, new_id, sizes)
    content = found.content
    if isinstance(decoder, dict):
        content["added_tokens_decoder"] = remapped_decoder(decoder, new_id)
        return _indented(content), found.unknown
    return (None if content == document else _indented(content)), found.unknown


def remapped_tokenizer(document: Any, new_id: NewId, n_rows: int, name: str) -> dict[str, Any]:
    """A tokenizer.json, checked and renumbered. Raises UserError: ``vocab.tokenizer``, ``vocab.remap``."""
    try:
        tokens = tokens_by_id(document)
        if len(tokens) > n_rows:
            message = f"{name} gives {tokens[-1]!r} the id {len(tokens) - 1:,}, and there are {n_rows:,} rows"
            raise fail("vocab.remap", message, file=name, hint="take the tokenizer of this model")
        return remapped(document, new_id, name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        message = f"{name} is no tokenizer that the tokenizers library writes"
        raise fail("vocab.tokenizer", message, file=name, hint=_SAVE) from None


def _lines(text: str, new_id: NewId, name: str) -> str:
    """A vocab.txt, in which line n is the token with id n."""
    tokens = text.split("\n")
    rest = [tokens.pop()] if tokens[-1] == "" else []
    ordered = {new_id(id): token for id, token in enumerate(tokens)}
    if sorted(ordered) != list(range(len(tokens))):
        message = f"{name}: the new ids of its {len(tokens):,} tokens are not one for each of its lines"
        raise fail("vocab.remap", message, file=name, hint=f"leave {name} out of SRC: {TOKENIZER} says the same")
    return "\n".join([*(ordered[id] for id in range(len(tokens))), *rest])


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"


def _indented(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _unknown(name: str, path: str) -> Finding:
    message = f"{name}: {path} may be token ids, and nothing is known of a field of that name"
    return Finding(UNKNOWN, message, file=name, hint=f"--allow {UNKNOWN} keeps it as it is", data={"field": path})


def _program(name: str) -> Finding:
    message = f"{name} is a program, which may know tokens by their ids"
    return Finding(UNKNOWN, message, file=name, hint=f"look into it; --allow {UNKNOWN} keeps it as it is")


def _of_ranks(name: str) -> Finding:
    message = f"{name} numbers tokens by their place in it: it cannot give them other ids"
    hint = f"--allow {FILE} leaves it out; {TOKENIZER} says the same where there is one"
    return Finding(FILE, message, file=name, hint=hint)
