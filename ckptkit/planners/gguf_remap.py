"""``reorder-vocab --remap-ids`` of a GGUF file: rows and ids in another order together, so that llama.cpp serves it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..files.checkpoint import parse_json
from ..files.gguf import (
    ARRAY,
    I32,
    INTEGERS,
    STRING,
    U32,
    Field,
    Gguf,
    Tensor,
    integer_field,
    numbers,
    numbers_field,
    scalar,
    strings,
    strings_field,
    text_field,
)
from ..vocab.conventions import tokens_of as tokens_of_map
from ..vocab.order import Order
from ..vocab.remap_files import UNKNOWN, remapped_tokenizer
from ..vocab.renumber import NewId, holds_ids, numbering
from .allowing import passed_over
from .gguf_plan import EMBEDDING, TOKENS, GgufPlan, Move, Moves, moved, planned

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TABLE = "vocab.table"
RECORD = "ckptkit.vocab_remap."
_MAPS = ("d2t", "d2t.weight")
_MODEL, _HF = "tokenizer.ggml.model", "tokenizer.huggingface.json"
_KNOWN = re.compile(
    r"(token_embd|output|per_layer_token_embd|(blk\.\d+\.)?nextn\.(embed_tokens|shared_head_head)|blk\.\d+\.ffn_gate_tid2eid"
    r"|markov_w[12])(\.weight)?|output\.bias|t2d"
)
_HASHED = ".ple.ngram_size"
_INTEGER_TENSORS = {26: "<i4", 27: "<i8"}  # ggml's I32 and I64
# Which ids llama.cpp takes where the file names none, by tokenizer.ggml.model; from its vocabulary loader.
_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "hybriddna": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
    "gemma4": {},
    "rwkv": {},
}


class Remapped(NamedTuple):
    """A plan, and what a reader should know."""

    plan: GgufPlan
    warnings: tuple[Finding, ...]


def vocabulary_rows(gguf: Gguf, file: str) -> int:
    """How many token ids a model has room for. Raises UserError ``vocab.gguf-kind`` for one without a vocabulary."""
    embedding, tokens = gguf.tensors.get(EMBEDDING), gguf.fields.get(TOKENS)
    if tokens is None or tokens.type != ARRAY or tokens.item_type != STRING:
        message = f"{file} has no {TOKENS}: there are no ids to be changed with the rows"
        raise fail("vocab.gguf-kind", message, file=file, hint="give a model that was converted with its tokenizer")
    return embedding.rows if embedding else tokens.length


def plan_remap(gguf: Gguf, buffer: memoryview, order: Order, file: str, allow: Collection[str]) -> Remapped:
    """The file in which each token's id is its row in ``order``.

    Raises UserError: ``vocab.table``, ``vocab.unknown-ids``, ``vocab.remap``, ``vocab.mapping``, ``vocab.tokenizer``.
    """
    if any(key.startswith(RECORD) for key in gguf.fields):
        message = f"{file} was renumbered before: nothing would say which ids it had at first"
        raise fail("vocab.remap", message, file=file, hint="renumber the file that it was made from")
    findings = list(_crowded(gguf.fields[TOKENS].length, order, file))
    moves = _moves(gguf, buffer, order, file, findings)
    fields = {field.key: field for field in _fields(gguf, order, file, findings)}
    warnings = passed_over(findings, allow, lambda id: id not in {TABLE, UNKNOWN})
    return Remapped(planned(gguf, fields, gguf.tensors.values(), moves), tuple(warnings))


# --- tensors -----------------------------------------------------------------------------------------------


def _moves(gguf: Gguf, buffer: memoryview, order: Order, file: str, findings: list[Finding]) -> Moves:
    moves: dict[str, Move | bytes] = {}
    hashed = next((key for key in gguf.fields if key.endswith(_HASHED)), None)
    if hashed:
        message = f"{file}: {hashed}: the model computes with token ids, and others would mean other rows"
        findings.append(Finding("vocab.remap", message, file))
    for name, tensor in gguf.tensors.items():
        try:
            if name in _MAPS:
                moves[name] = _new_map(gguf, buffer, tensor, order, file)
            elif _KNOWN.fullmatch(name):
                moves[name] = moved(tensor, order.n_rows, order.row_to_token, file)
            elif order.n_rows in (tensor.rows, tensor.shape[-1]):
                findings.append(_strange(tensor, file))
        except UserError as error:
            findings += error.findings
    return moves


def _new_map(gguf: Gguf, buffer: memoryview, tensor: Tensor, order: Order, file: str) -> bytes:
    """A draft's map to tokens: of ids, as llama.cpp has ``d2t``, or of offsets where it can't be one of ids.

    Raises UserError ``vocab.mapping``.
    """
    import numpy as np

    dtype = _INTEGER_TENSORS.get(tensor.type)
    if dtype is None or len(tensor.shape) != 1:
        message = f"{file}: {tensor.name} is no vector of integers"
        raise fail("vocab.mapping", message, file=file, tensor=tensor.name)
    values = np.frombuffer(buffer, dtype, tensor.shape[0], gguf.data_start + tensor.offset)
    is_ids = len(np.unique(values)) == len(values) and ((values >= 0) & (values < order.n_rows)).all()
    tokens = values if is_ids else tokens_of_map(values, None, order.n_rows, None, file)
    base = 0 if is_ids else np.arange(len(values))
    return bytes((order.token_to_row[tokens] - base).astype(dtype).tobytes())


def _strange(tensor: Tensor, file: str) -> Finding:
    message = (
        f"{file}: {tensor.name}, {list(tensor.shape)}, has a row for each token and is no table known to go by them"
    )
    return Finding(TABLE, message, file, tensor.name, f"--allow {TABLE} keeps it as it is, if it does not")


# --- fields ------------------------------------------------------------------------------------------------


def _fields(gguf: Gguf, order: Order, file: str, findings: list[Finding]) -> Iterator[Field]:
    new_id = numbering(order.token_to_row)
    size = gguf.fields[TOKENS].length
    for field in gguf.fields.values():
        try:
            yield _field(field, order, new_id, size, file)
        except UserError as error:
            findings += error.findings
    try:
        yield from _defaults(gguf, new_id, size, file)
    except UserError as error:
        findings += error.findings
    yield from _record(order)


def _field(field: Field, order: Order, new_id: NewId, size: int, file: str) -> Field:
    last = field.key.rpartition(".")[2]
    if field.key == _HF and field.type == STRING:
        found = parse_json(scalar(field), _HF, "vocab.tokenizer")
        document = remapped_tokenizer(found, new_id, order.n_rows, _HF)
        return text_field(field.key, json.dumps(document, ensure_ascii=False, separators=(",", ":")))
    if field.key.startswith("tokenizer.ggml.") and field.type == ARRAY and field.length == size and last != "merges":
        return _per_token(field, order, file)
    if field.type in INTEGERS and holds_ids(last):
        return integer_field(field.key, field.type, new_id(int(scalar(field))))
    if field.type == ARRAY and field.item_type in INTEGERS and field.length:
        if holds_ids(last):
            return numbers_field(field.key, field.item_type, [new_id(id) for id in numbers(field).tolist()])
        if field.key.startswith("tokenizer.") and field.item_type != 0 and last not in _NO_IDS:
            message = f"{file}: {field.key} may be token ids, and nothing is known of a field of that name"
            hint = f"--allow {UNKNOWN} keeps it as it is"
            raise UserError(Finding(UNKNOWN, message, file, hint=hint, data={"field": field.key}))
    return field


def _crowded(count: int, order: Order, file: str) -> Iterator[Finding]:
    """``vocab.remap`` where the ids of the tokens wouldn't be those up to their number, or there are more than rows."""
    if count > order.n_rows or int(order.row_to_token[:count].max(initial=-1)) >= count:
        message = f"{file} has {count:,} tokens for {order.n_rows:,} rows, and some would get an id beyond their last"
        yield Finding(
            "vocab.remap", message, file, hint="--slices 1 keeps rows without a token last; else convert it again"
        )


_PER_TOKEN = frozenset({"tokens", "scores", "token_type"})
_NO_IDS = frozenset({"precompiled_charsmap"})


def _per_token(field: Field, order: Order, file: str) -> Field:
    """A value for each token, put where its new id is. Raises UserError: ``vocab.remap``, ``vocab.unknown-ids``."""
    last = field.key.rpartition(".")[2]
    if last not in _PER_TOKEN:
        message = f"{file}: {field.key} has an item for each token, and nothing is known of a field of that name"
        raise fail(UNKNOWN, message, file=file, hint=f"--allow {UNKNOWN} keeps it as it is")
    rows = order.row_to_token[: field.length]
    if field.item_type == STRING:
        tokens = strings(field)
        return strings_field(field.key, [tokens[id] for id in rows.tolist()])
    assert field.item_type is not None
    return numbers_field(field.key, field.item_type, numbers(field)[rows])


def _defaults(gguf: Gguf, new_id: NewId, size: int, file: str) -> Iterator[Field]:
    """The special tokens that the file leaves to llama.cpp's defaults, under their new ids."""
    model = gguf.fields.get(_MODEL)
    name = str(scalar(model)) if model and model.type == STRING else ""
    if name not in _DEFAULTS:
        message = f"{file}: nothing is known of the special tokens of a tokenizer {name or 'without a name'}"
        raise fail("vocab.remap", message, file=file, hint=f"known: {', '.join(_DEFAULTS)}")
    for role, id in _DEFAULTS[name].items():
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in gguf.fields and id < size:
            yield integer_field(key, U32, new_id(id))


def _record(order: Order) -> Iterator[Field]:
    """What became of the ids, for whoever has stored some: ``row_to_token`` gives the old id by the new one."""
    yield integer_field(RECORD + "version", U32, 1)
    yield text_field(RECORD + "engine", order.engine)
    yield numbers_field(RECORD + "slice_rows", I32, order.slice_rows)
    yield numbers_field(RECORD + "slice_list_rows", I32, order.slice_list_rows)
    yield numbers_field(RECORD + "row_to_token", I32, order.row_to_token)
