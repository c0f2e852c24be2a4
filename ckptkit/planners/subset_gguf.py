"""``draft-vocab subset-head --layout llama.cpp``: the rows of a head and the map of their tokens as a GGUF file.

Rows are bytes: all of ggml's types are quantized along the row, and dense ones are the same in safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..files import gguf
from ..files.gguf import Gguf
from ..pieces import Made, Taken
from .gguf_order import check_unordered
from .gguf_plan import ARCHITECTURE, EMBEDDING, HEAD, GgufPlan, check_whole
from .head_rows import Parts

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MODEL = "ckptkit-draft-head"  # no architecture of llama.cpp's: it must not be served as a model
MAP = "d2t"
_I64 = 27  # ggml's number for tensors of int64, as llama.cpp wants the map
_DENSE = {"F32": 0, "F16": 1, "BF16": 30}
_ALIGNMENT = 32


class HeadRows(NamedTuple):
    """A head's rows as they lie in a file from ``start`` on: their number, elements and bytes of one, ggml's type."""

    start: int
    number: int
    length: int
    row_bytes: int
    type: int


def rows_in_gguf(found: Gguf, file: str) -> HeadRows:
    """The output head; of a tied one, the embedding.

    Raises UserError: ``vocab.gguf-kind``, ``vocab.gguf-split``, ``vocab.ordered``, ``vocab.head``.
    """
    check_whole(found, file)
    check_unordered(found, file)
    head = found.tensors.get(HEAD) or found.tensors.get(EMBEDDING)
    if head is None or len(head.shape) != 2:
        message = f"{file} has neither {HEAD} nor {EMBEDDING} as a matrix"
        raise fail("vocab.head", message, file=file, hint="give the GGUF file of a whole model")
    return HeadRows(found.data_start + head.offset, head.rows, head.shape[0], head.row_bytes, head.type)


def rows_in_safetensors(parts: Parts) -> HeadRows:
    """A dense head of a checkpoint. Raises UserError (``vocab.format``) for one that ggml has no type for."""
    weight = parts.weight
    if parts.refs.keys() != {"weight"} or weight.dtype not in _DENSE:
        what = (
            "is quantized" if weight.dtype not in _DENSE else f"has {', '.join(sorted(parts.refs.keys() - {'weight'}))}"
        )
        message = f"{parts.module} {what}: in a GGUF file a head is one dense tensor, or one of ggml's types"
        hint = "ckptkit dequantize SRC DENSE first; or take the head of the model's GGUF file"
        raise fail("vocab.format", message, file=weight.file, tensor=weight.name, hint=hint)
    number, length = weight.shape
    return HeadRows(weight.start, number, length, weight.nbytes // number, _DENSE[weight.dtype])


def plan_subset_gguf(head: HeadRows, ids: Array, facts: Mapping[str, str]) -> GgufPlan:
    """The file of the rows ``ids``, int32 [n] ascending, and of their map; ``facts`` go into its fields."""
    fields = {ARCHITECTURE: gguf.text_field(ARCHITECTURE, MODEL)}
    fields |= {
        f"ckptkit.{key}": gguf.text_field(f"ckptkit.{key}", text) for key, text in facts.items() if key != "n_vocab"
    }
    fields["ckptkit.n_vocab"] = gguf.integer_field("ckptkit.n_vocab", gguf.U32, head.number)
    rows = Taken(head.start, head.row_bytes, ids)
    padding = -rows.nbytes % _ALIGNMENT
    map_ = ids.astype("<i8").tobytes()
    tensors = [
        gguf.Tensor(HEAD, (head.length, len(ids)), head.type, 0),
        gguf.Tensor(MAP, (len(ids),), _I64, rows.nbytes + padding),
    ]
    made = Gguf(3, fields, {tensor.name: tensor for tensor in tensors}, 0, 0)
    start = gguf.encode(made)
    pieces = (Made(start), rows, Made(bytes(padding) + map_ + bytes(-len(map_) % _ALIGNMENT)))
    size = sum(piece.nbytes for piece in pieces)
    return GgufPlan(made._replace(data_start=len(start), size=size), pieces)
