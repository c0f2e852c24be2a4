"""A tokenizer.json, and the files around it, with other token ids: it cuts text as before and calls the tokens otherwise.

Added tokens are written into the model's vocabulary too: the tokenizers library numbers one that is not there by
itself, after the vocabulary's last, whatever ``added_tokens`` says. Definition: the tokenizers library, 0.23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import fail
from .renumber import NewId

Table = Mapping[str, Any]

_MAPPED = ("BPE", "WordPiece", "WordLevel")
_HINT = "AutoTokenizer.from_pretrained(SRC).save_pretrained(FOLDER) writes it anew; put its files into a copy of SRC"


def remapped(table: Table, new_id: NewId, file: str) -> dict[str, Any]:
    """A parsed tokenizer.json with every id in it replaced.

    Raises UserError: ``vocab.tokenizer`` where it does not give each token one id, ``vocab.remap`` for what can't be
    renumbered so that text is cut as before.
    """
    model, added = table["model"], table.get("added_tokens") or []
    ids = _vocabulary(model)
    _check(ids, added, file)
    extra = {token["content"]: token["id"] for token in added if token["content"] not in ids}
    _check_seen(model, [token for token in added if token["content"] in extra], file)
    new = {token: new_id(id) for token, id in {**ids, **extra}.items()}
    moved = [{**token, "id": new_id(token["id"])} for token in added]
    result = {**table, "added_tokens": sorted(moved, key=lambda token: token["id"])}
    result["model"] = _model(model, new, new_id, file)
    if table.get("post_processor"):
        result["post_processor"] = _post_processor(table["post_processor"], new_id, file)
    if table.get("padding"):
        result["padding"] = {**table["padding"], "pad_id": new_id(table["padding"]["pad_id"])}
    return result


def remapped_decoder(decoder: Table, new_id: NewId) -> dict[str, Any]:
    """``added_tokens_decoder`` of tokenizer_config.json: tokens by id, written as text."""
    by_id = {new_id(int(id)): token for id, token in decoder.items()}
    return {str(id): by_id[id] for id in sorted(by_id)}


def remapped_ids(ids: Mapping[str, int], new_id: NewId) -> dict[str, int]:
    """A vocab.json or an added_tokens.json: ids by token, in the order of the new ids."""
    return _by_id({token: new_id(id) for token, id in ids.items()})


def _by_id(ids: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(ids.items(), key=lambda item: item[1]))


# --- the model's vocabulary --------------------------------------------------------------------------------


def _vocabulary(model: Table) -> dict[str, int]:
    """Ids by token."""
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    return {token: id for id, (token, _) in enumerate(vocabulary)}


def _check(ids: Mapping[str, int], added: Sequence[Table], file: str) -> None:
    """Raises UserError (``vocab.tokenizer``) unless the library gives each added token the id that the file says."""
    size, used = len(ids), Counter(ids.values())
    last = -1
    for token in added:
        content, id = token["content"], token["id"]
        given = ids[content] if content in ids else max(size, last + 1)
        if given != id or (content not in ids and used[id]):
            why = f"and the tokenizers library gives it {given}" if given != id else "which another token has too"
            message = f"{file}: the added token {content!r} has the id {id}, {why}"
            raise fail("vocab.tokenizer", message, file=file, hint=_HINT)
        last = max(last, given)
    twice = next((id for id, count in used.items() if count > 1), None)
    if twice is not None:
        raise fail("vocab.tokenizer", f"{file}: two tokens have the id {twice}", file=file, hint=_HINT)


def _check_seen(model: Table, extra: Iterable[Table], file: str) -> None:
    """Raises UserError (``vocab.remap``) for an added token that the model would find in text, once it is in its vocabulary.

    A BPE finds only what its merges make, a single character, or with ``ignore_merges`` a whole word.
    """
    for token in (token for token in extra if token.get("single_word")):
        if model.get("type", "BPE") != "BPE" or model.get("ignore_merges") or len(token["content"]) == 1:
            message = f"{file}: the model would find the added token {token['content']!r} within words (single_word)"
            raise fail("vocab.remap", message, file=file, hint="--remap-ids is not for this tokenizer")


def _model(model: Table, new: Mapping[str, int], new_id: NewId, file: str) -> dict[str, Any]:
    vocabulary = model.get("vocab")
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind in _MAPPED and isinstance(vocabulary, Mapping):
        return {**model, "vocab": _by_id(new)}
    if kind == "Unigram" and isinstance(vocabulary, list):
        return _unigram(model, new, new_id, file)
    raise fail("vocab.remap", f"{file}: a tokenizer of type {kind} can't be renumbered", file=file)


def _unigram(model: Table, new: Mapping[str, int], new_id: NewId, file: str) -> dict[str, Any]:
    """A Unigram's tokens are numbered by their place. Added ones get the least score there is, which changes no other."""
    scores = dict(model["vocab"])
    ordered = _by_id(new)
    if list(ordered.values()) != list(range(len(ordered))):
        message = f"{file}: a Unigram tokenizer has no ids without a token, and the new order would make some"
        raise fail("vocab.remap", message, file=file, hint="take --slices 1, or a list without added tokens")
    least = min(scores.values(), default=0.0)
    result = {**model, "vocab": [[token, scores.get(token, least)] for token in ordered]}
    if model.get("unk_id") is not None:
        result["unk_id"] = new_id(model["unk_id"])
    return result


# --- the post-processor ------------------------------------------------------------------------------------


def _template(processor: Table, new_id: NewId) -> dict[str, Any]:
    tokens = processor["special_tokens"]
    if isinstance(tokens, list):
        return {**processor, "special_tokens": [_inserted(token, new_id) for token in tokens]}
    return {**processor, "special_tokens": {name: _inserted(token, new_id) for name, token in tokens.items()}}


def _inserted(token: Table, new_id: NewId) -> dict[str, Any]:
    return {**token, "ids": [new_id(id) for id in token["ids"]]}


def _bert(processor: Table, new_id: NewId) -> dict[str, Any]:
    pairs = {key: [processor[key][0], new_id(processor[key][1])] for key in ("sep", "cls")}
    return {**processor, **pairs}


_PROCESSORS: Mapping[str, Callable[[Table, NewId], dict[str, Any]]] = {
    "TemplateProcessing": _template,
    "BertProcessing": _bert,
    "RobertaProcessing": _bert,
    "ByteLevel": lambda processor, new_id: dict(processor),
}


def _post_processor(processor: Table, new_id: NewId, file: str) -> dict[str, Any]:
    kind = str(processor.get("type"))
    if kind == "Sequence":
        return {**processor, "processors": [_post_processor(one, new_id, file) for one in processor["processors"]]}
    if kind not in _PROCESSORS:
        raise fail("vocab.remap", f"{file}: nothing is known of the ids in a post-processor {kind}", file=file)
    return _PROCESSORS[kind](processor, new_id)
