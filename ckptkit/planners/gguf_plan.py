"""GGUF files made of GGUF files: other fields, other names, and tensors whose rows are in another order.

Every tensor keeps its offset, so all that is not moved is copied as it lies, padding included. Rows are moved as bytes:
all of ggml's types are quantized along the row, whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..files.gguf import ARRAY, INTEGERS, STRING, Field, Gguf, Tensor, encode, numbers, scalar, strings
from ..pieces import Copied, Made, Piece, Taken
from ..vocab.fingerprint import fingerprint_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ARCHITECTURE = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_SPLIT_COUNT = "split.count"
_UNUSED = 5  # llama.cpp's token type of ids that no token has


class Move(NamedTuple):
    """Units of ``width`` bytes that a tensor is made of, to be put in the order ``rows``."""

    width: int
    rows: Array


Moves = Mapping[str, Move | bytes]  # by tensor; or the bytes that it is to have


class GgufPlan(NamedTuple):
    """A file to be made: its header as it will be read, and its pieces."""

    gguf: Gguf
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def planned(
    gguf: Gguf, fields: Mapping[str, Field], tensors: Iterable[Tensor], moves: Moves, behind: Made | None = None
) -> GgufPlan:
    """``gguf`` with other ``fields`` and ``tensors``, the data as it is but for ``moves``, by the source's names.

    ``behind`` is data that follows it.
    """
    made = gguf._replace(fields=dict(fields), tensors={tensor.name: tensor for tensor in tensors})
    head = encode(made)
    pieces = (Made(head), *_data(gguf, moves), *([behind] if behind else []))
    return GgufPlan(made._replace(data_start=len(head), size=sum(piece.nbytes for piece in pieces)), pieces)


def _data(gguf: Gguf, moves: Moves) -> Iterator[Piece]:
    at = gguf.data_start
    for tensor in sorted((gguf.tensors[name] for name in moves), key=lambda tensor: tensor.offset):
        start = gguf.data_start + tensor.offset
        move = moves[tensor.name]
        yield Copied(at, start)
        yield Made(move) if isinstance(move, bytes) else Taken(start, *move)
        at = start + tensor.nbytes
    yield Copied(at, gguf.size)


def moved(tensor: Tensor, n_rows: int, rows: Array, file: str) -> Move:
    """``rows``, an order of ``n_rows``, applied to a tensor that has one row or, as a vector, one number for each.

    Raises UserError (``vocab.table``) for a tensor of another size.
    """
    if tensor.shape[1:] == (n_rows,):
        return Move(tensor.row_bytes, rows)
    if tensor.shape == (n_rows,) and tensor.nbytes % n_rows == 0:
        return Move(tensor.nbytes // n_rows, rows)
    message = f"{file}: {tensor.name} has shape {list(tensor.shape)}: not one row for each of {n_rows:,} tokens"
    raise fail(
        "vocab.table", message, file=file, tensor=tensor.name, hint=f"ckptkit cannot move it: {file} stays as it is"
    )


def check_whole(gguf: Gguf, file: str) -> None:
    """Raises UserError (``vocab.gguf-split``, ``vocab.gguf-kind``) for what is not a model in one file."""
    split = gguf.fields.get(_SPLIT_COUNT)
    if split and split.type in INTEGERS and scalar(split) > 1:
        hint = "llama-gguf-split --merge FIRST.gguf WHOLE.gguf makes one of them"
        raise fail("vocab.gguf-split", f"{file} is one of {scalar(split)} files of a model", file=file, hint=hint)
    architecture = gguf.fields.get(ARCHITECTURE)
    if not architecture or architecture.type != STRING or not gguf.tensors:
        message = f"{file} is no model: it has no {ARCHITECTURE}" if gguf.tensors else f"{file} has no tensors"
        raise fail("vocab.gguf-kind", message, file=file, hint="give the GGUF file of a whole model")


def head_of(gguf: Gguf, file: str) -> Tensor:
    """The output head. Raises UserError: ``vocab.tied`` for a model that has none of its own, ``layout.header``."""
    head = gguf.tensors.get(HEAD)
    if head is None:
        message = f"{file} has no {HEAD}: its head is the token embedding, which stays in the order of ids"
        hint = "--remap-ids moves the ids with the rows; or convert the model with a head of its own"
        raise fail("vocab.tied", message, file=file, tensor=EMBEDDING, hint=hint)
    if len(head.shape) != 2:
        message = f"{file}: {HEAD} has {len(head.shape)} dimensions, not 2"
        raise fail("layout.header", message, file=file, tensor=HEAD)
    return head


def layers_of(gguf: Gguf) -> int:
    """How many layers the model has; 0 where it does not say."""
    count = gguf.fields.get(f"{scalar(gguf.fields[ARCHITECTURE])}.block_count")
    return int(scalar(count)) if count and count.type in INTEGERS else 0


def tokenizer_fingerprint(gguf: Gguf) -> str | None:
    """What :func:`ckptkit.vocab.fingerprint.tokenizer_fingerprint` gives for a tokenizer.json with these tokens."""
    tokens = tokens_of(gguf)
    return fingerprint_of([token.decode("utf-8", "surrogateescape") for token in tokens]) if tokens else None


def tokens_of(gguf: Gguf) -> list[bytes]:
    """The tokens in the order of ids, without those at the end that only fill the vocabulary up; [] if there are none."""
    field, types = gguf.fields.get(TOKENS), gguf.fields.get(TOKEN_TYPES)
    if field is None or field.type != ARRAY or field.item_type != STRING:
        return []
    tokens = strings(field)
    if types and types.item_type in INTEGERS and types.length == len(tokens):
        kinds = numbers(types)
        while tokens and kinds[len(tokens) - 1] == _UNUSED:
            tokens.pop()
    return tokens
