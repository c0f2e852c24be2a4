"""The output head of a checkpoint: where its rows lie, what is added to their logits, and the logits themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..checks.views import View, linear
from ..declarations import declarations, packing_of
from ..decode import encoded
from ..errors import fail
from ..families import config_value, embedding_of, head_of, is_tied
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..plan import Ref
from ..stored import COMPANIONS, WEIGHTS, split_name
from ..vocab.marks import REORDERED

if TYPE_CHECKING:
    from ..decode.numbers import Floats

ROWS_BYTES = 32 << 20  # of float32 rows of a head that are held at once
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class Head(NamedTuple):
    """A head: ``view`` [rows, width] of its weight, ``bias`` [rows] if it has one.

    ``softcap``: logits x become softcap tanh(x / softcap). ``dtype``: what an engine computes logits in (BF16, F16, F32).
    """

    view: View
    bias: Ref | None
    softcap: float | None
    dtype: str


def find_head(checkpoint: Checkpoint) -> Head:
    """The head of a language model; of a tied one, its embedding.

    Raises UserError: ``source.head`` where there is none that is known, ``names.*`` and ``decode.format`` for one that
    cannot be decoded.
    """
    config = checkpoint.config or {}
    module, parts = _module(checkpoint)
    last = next(part for part in parts if part in WEIGHTS)
    packing = packing_of(declarations(checkpoint))(module.removesuffix(f".{REORDERED}"))
    width = config_value(config, "hidden_size")
    fits = width if type(width) is int and parts[last].dtype == "I32" and last == "weight_packed" else 0
    view = linear(encoded(last, parts, packing.bits, packing.block, fits, packing.gptq))
    cap = config_value(config, "final_logit_softcapping")
    said = str(config_value(config, "dtype") or config_value(config, "torch_dtype")).removeprefix("torch.")
    stored = view.stored.codes.dtype
    dtype = _DTYPES.get(said) or (stored if stored in {"BF16", "F16"} else "F32")
    is_capped = isinstance(cap, int | float) and not isinstance(cap, bool) and cap > 0
    return Head(view, parts.get("bias"), float(cap) if is_capped else None, dtype)


def _module(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Ref]]:
    """The head's module and its tensors by the last part of their names. Raises UserError: ``source.head``."""
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    name = head_of(embedding) if embedding else None
    tied = embedding if is_tied(checkpoint.config) else None
    for module in (f"{name}.{REORDERED}", name, tied):
        found = {
            last: ref
            for tensor, ref in checkpoint.tensors.items()
            if split_name(tensor)[0] == module and (last := split_name(tensor)[1]) in WEIGHTS | COMPANIONS | {"bias"}
        }
        if module and not found.keys().isdisjoint(WEIGHTS):
            return module, found
    looked_for = f"no {name}" if name else "no token embedding, by which a head is found,"
    message = f"there is {looked_for} among the tensors"
    raise fail("source.head", message, hint=f"ckptkit inspect {checkpoint.source.uri}")


def logits(
    head: Head, checkpoint: Checkpoint, states: Floats, start: int, stop: int, dtype: str | None = None
) -> Floats:
    """Logits of rows [start, stop) for float32 ``states`` [n, width]: float32 [n, stop - start].

    They are summed up in float32 and rounded once to ``dtype`` (the head's own), as matrix products on GPUs do; so is
    what the soft cap makes of them.
    """
    import numpy as np

    from ..checks.viewing import values
    from ..decode.numbers import rounded

    dtype = dtype or head.dtype
    found = np.empty((len(states), stop - start), np.float32)
    step = max(ROWS_BYTES // (4 * head.view.cols) // 32 * 32, 32)
    for at in range(start, stop, step):
        end = min(at + step, stop)
        np.matmul(states, values(head.view, checkpoint.source, at, end).T, out=found[:, at - start : end - start])
    if head.bias is not None:
        found += bias(head, head.bias, checkpoint)[start:stop]
    found = rounded(found, dtype)
    if head.softcap is not None:
        cap = np.float32(head.softcap)
        found = rounded(np.tanh(found / cap) * cap, dtype)
    return found


def bias(head: Head, ref: Ref, checkpoint: Checkpoint) -> Floats:
    """A head's bias, float32 [rows]. Raises UserError (``decode.format``) for one that is not such a vector."""
    import numpy as np

    from ..decode.numbers import to_float32

    if ref.dtype not in FLOATS or ref.shape != (head.view.rows,):
        message = f"{ref.name} is {ref.dtype} {list(ref.shape)}, and a bias is {head.view.rows:,} floats"
        raise fail("decode.format", message, file=ref.file, tensor=ref.name)
    raw = checkpoint.source.read(ref.file, ref.start, ref.stop)
    return to_float32(np.frombuffer(raw, np.uint8), ref.dtype)
