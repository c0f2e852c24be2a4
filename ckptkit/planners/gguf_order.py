"""A GGUF file whose head's rows are in another order, under a name that no engine loads; and the way back.

Beside its own it holds the fields ``ckptkit.vocab_order.*`` and, as I32 tensors behind all others, the token of each
row, the row of each token, and the list. Everything else keeps its place, so that the way back gives the source's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError, fail
from ..files.gguf import (
    ARRAY,
    I32,
    STRING,
    U32,
    U64,
    Field,
    Gguf,
    Tensor,
    integer_field,
    numbers_field,
    scalar,
    text_field,
)
from ..pieces import Made
from ..vocab.lists import list_sha256
from ..vocab.order import Order, inverse, is_permutation
from .gguf_plan import ARCHITECTURE, GgufPlan, Moves, head_of, moved, planned, tokenizer_fingerprint, tokens_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

NO_MODEL = "ckptkit-vocab-order"
PREFIX = "ckptkit.vocab_order."
_HEAD, _ROWS = "output.", "output.rows."
_VERSION = 1
_I32_TENSOR = 26  # ggml's number for tensors of int32
_TABLES = ("row_to_token", "token_to_row", "list")  # in the order in which they lie


def is_reordered(gguf: Gguf) -> bool:
    return any(key.startswith(PREFIX) for key in gguf.fields)


def source_digest(gguf: Gguf) -> str:
    """The xxh3-128 of the file that a reordered one was made of."""
    return str(scalar(gguf.fields[PREFIX + "source_xxh3"]))


def plan_reorder(gguf: Gguf, order: Order, source_xxh3: str, file: str) -> GgufPlan:
    """The file with its head's rows in ``order``; ``source_xxh3`` is the digest of what it is made of.

    Raises UserError: ``vocab.tied``, ``vocab.table``.
    """
    head = head_of(gguf, file)
    moves = _moves(gguf, _HEAD, head.rows, order.row_to_token, file)
    fields = {**gguf.fields, ARCHITECTURE: text_field(ARCHITECTURE, NO_MODEL)}
    fields |= {field.key: field for field in _said(gguf, order, source_xxh3)}
    tensors = [_renamed(tensor, _HEAD, _ROWS) for tensor in gguf.tensors.values()]
    added, content = _tables(gguf, order)
    return planned(gguf, fields, [*tensors, *added], moves, Made(content))


def plan_inverse(gguf: Gguf, buffer: memoryview, file: str) -> GgufPlan:
    """The file that was reordered. Raises UserError: ``vocab.not-ordered``, ``vocab.order``."""
    if not is_reordered(gguf):
        message = f"{file} is not reordered: it has no {PREFIX}version"
        raise fail("vocab.not-ordered", message, file=file, hint="leave out --inverse")
    row_to_token = _recorded(gguf, buffer, file)
    fields = {key: field for key, field in gguf.fields.items() if not key.startswith(PREFIX)}
    fields[ARCHITECTURE] = gguf.fields[PREFIX + "architecture"]._replace(key=ARCHITECTURE)
    tensors = [tensor for name, tensor in gguf.tensors.items() if not name.startswith(PREFIX)]
    moves = _moves(gguf, _ROWS, len(row_to_token), inverse(row_to_token), file)
    own = gguf._replace(size=gguf.data_start + int(scalar(gguf.fields[PREFIX + "data_bytes"])))
    return planned(own, fields, [_renamed(tensor, _ROWS, _HEAD) for tensor in tensors], moves)


def check_unordered(gguf: Gguf, file: str) -> None:
    """Raises UserError (``vocab.ordered``) for a file whose head has an order of its own."""
    if is_reordered(gguf):
        message = f"the head of {file} has an order of its own already"
        raise fail("vocab.ordered", message, file=file, hint=f"ckptkit reorder-vocab {file} PLAIN.gguf --inverse first")


# --- the head ----------------------------------------------------------------------------------------------


def _moves(gguf: Gguf, prefix: str, n_rows: int, rows: Array, file: str) -> Moves:
    """The order of each tensor of the head that has rows; a number for all of them, a scale say, has none."""
    of_head = [tensor for name, tensor in gguf.tensors.items() if name.startswith(prefix)]
    return {tensor.name: moved(tensor, n_rows, rows, file) for tensor in of_head if tensor.shape != (1,)}


def _renamed(tensor: Tensor, prefix: str, new: str) -> Tensor:
    name = tensor.name
    return tensor._replace(name=new + name.removeprefix(prefix)) if name.startswith(prefix) else tensor


# --- what is said of the order -----------------------------------------------------------------------------


def _said(gguf: Gguf, order: Order, source_xxh3: str) -> list[Field]:
    fingerprint, tokens = tokenizer_fingerprint(gguf), tokens_of(gguf)
    texts = {
        "architecture": scalar(gguf.fields[ARCHITECTURE]),
        "engine": order.engine,
        "list_sha256": list_sha256(order.list),
        "list_requested_sha256": list_sha256(order.list_requested),
        "source_xxh3": source_xxh3,
        "tool": f"ckptkit {__version__}",
    }
    if fingerprint:
        texts["tokenizer_sha256"] = fingerprint
    counts = {
        "version": _VERSION,
        "n_rows": order.n_rows,
        "n_tokenizer": len(tokens),
        "slices": order.slices,
        "align": order.align,
        "n_layer": order.n_layer,
    }
    lists: dict[str, Sequence[int] | Array] = {
        "slice_rows": order.slice_rows,
        "slice_list_rows": order.slice_list_rows,
        "list_requested": order.list_requested,
    }
    return [
        *(text_field(PREFIX + key, text) for key, text in texts.items()),
        *(integer_field(PREFIX + key, U32, count) for key, count in counts.items()),
        *(numbers_field(PREFIX + key, I32, numbers) for key, numbers in lists.items()),
        integer_field(PREFIX + "data_bytes", U64, gguf.size - gguf.data_start),
    ]


def _tables(gguf: Gguf, order: Order) -> tuple[list[Tensor], bytes]:
    """The tensors that say the order, and the bytes to be put behind the file's own, each aligned."""
    begin = gguf.size - gguf.data_start
    tensors, content = [], b""
    for name in _TABLES:
        table: Array = getattr(order, name)
        content += bytes(-(begin + len(content)) % gguf.alignment)
        tensors.append(Tensor(PREFIX + name, (len(table),), _I32_TENSOR, begin + len(content)))
        content += table.astype("<i4").tobytes()
    return tensors, content


def _recorded(gguf: Gguf, buffer: memoryview, file: str) -> Array:
    """``row_to_token``, int32 [n_rows]. Raises UserError (``vocab.order``) unless all that the way back needs is there."""
    import numpy as np

    needed = {"architecture": STRING, "source_xxh3": STRING, "data_bytes": U64, "slice_rows": ARRAY}
    types = {key: gguf.fields[PREFIX + key].type for key in needed if PREFIX + key in gguf.fields}
    head, table = gguf.tensors.get(_ROWS + "weight"), gguf.tensors.get(PREFIX + "row_to_token")
    if types != needed or head is None or table is None or table.type != _I32_TENSOR or table.shape != head.shape[1:]:
        raise _unfit(file)
    rows = np.frombuffer(buffer, "<i4", table.shape[0], gguf.data_start + table.offset).astype(np.int32)
    own = [tensor for name, tensor in gguf.tensors.items() if not name.startswith(PREFIX)]
    data_bytes = int(scalar(gguf.fields[PREFIX + "data_bytes"]))
    is_whole = max(tensor.offset + tensor.nbytes for tensor in own) <= data_bytes <= table.offset
    if not is_permutation(rows) or not is_whole:
        raise _unfit(file)
    return rows


def _unfit(file: str) -> UserError:
    message = f"{file}: the fields and tensors {PREFIX}* are not those that reorder-vocab wrote"
    return fail("vocab.order", message, file=file, hint="take the file that reorder-vocab made, or its source")
