"""Rows of an output head, or of an embedding, by their numbers: the steps for all its tensors, in whichever format.

Every format but FP8 in blocks keeps a row's numbers to itself, so that rows are moved without being rounded: as rows, as
columns (GPTQ), or as codes within words (AWQ; zero points of compressed-tensors and GPTQ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..declarations import Packing, declarations, packing_of
from ..errors import UserError, fail
from ..files.checkpoint import Checkpoint
from ..files.header import DTYPE_BITS
from ..ops import operation
from ..plan import COPY, Ref, Step, copy_step
from ..stored import WEIGHTS, split_name

_WORD, _AWQ_BITS, _USUAL_BLOCK = 32, 4, 128
_AWQ_LANES = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 8n to 8n + 7, where in their word they are
_OF_COLUMNS = frozenset({"weight_g_idx", "g_idx"})
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_KNOWN = frozenset({
    "weight", "weight_packed", "qweight", "bias", *_SCALES, "scales", "biases", "qzeros", "weight_zero_point",
    "weight_global_scale", "weight_shape", "weight_scale_2", "input_scale", "input_global_scale", *_OF_COLUMNS,
})  # fmt: skip


class Rows(NamedTuple):
    """Which rows: a vector of int32 that lies beside the checkpoint, the sha256 (hex) of its bytes, and by what rule."""

    ref: Ref
    sha256: str
    rule: str

    @property
    def number(self) -> int:
        return self.ref.shape[0]


class Parts(NamedTuple):
    """A module's tensors by the last parts of their names, and how they hold its rows.

    ``layout``: ``rows``, or by whose method inputs lie along the first dimension, ``gptq`` or ``awq``. ``bits`` of a packed code
    are None where nothing tells them. ``block``: how many rows share a scale of FP8 in blocks, 0 where none do.
    """

    module: str
    refs: Mapping[str, Ref]
    n_rows: int
    layout: str
    bits: int | None
    block: int

    @property
    def weight(self) -> Ref:
        return next(ref for last, ref in self.refs.items() if last in WEIGHTS)


def parts_of(checkpoint: Checkpoint, module: str) -> Parts:
    """What a module is stored in. Raises UserError ``vocab.format`` for what rows cannot be taken out of."""
    found = ((split_name(name), ref) for name, ref in checkpoint.tensors.items() if name.startswith(module))
    refs = {last: ref for (owner, last), ref in found if owner == module}
    weights = [last for last in refs if last in WEIGHTS]
    strange = next((ref for last, ref in refs.items() if last not in _KNOWN), None)
    if strange or len(weights) != 1:
        what = f"has {strange.name}" if strange else f"has {len(weights)} tensors that could be its weight"
        raise _unfit(module, what, strange)
    weight = refs[weights[0]]
    if len(weight.shape) != 2 or not weight.nbytes or weight.shape[1] * DTYPE_BITS[weight.dtype] % 8:
        raise _unfit(module, f"is {weight.dtype} {list(weight.shape)}, no matrix with rows of whole bytes", weight)
    packing = packing_of(declarations(checkpoint))(module)
    if weights[0] == "qweight":
        n_rows, layout = _of_words(module, refs, packing)
        return Parts(module, refs, n_rows, layout, packing.bits, 0)
    block = packing.block[0] if packing.block and packing.block[0] > 1 else _USUAL_BLOCK
    scale = next((refs[name] for name in _SCALES if name in refs), None)
    in_blocks = scale is not None and len(scale.shape) == 2 and 1 < scale.shape[0] == -(-weight.shape[0] // block)
    return Parts(module, refs, weight.shape[0], "rows", packing.bits, block if in_blocks else 0)


def _of_words(module: str, refs: Mapping[str, Ref], packing: Packing) -> tuple[int, str]:
    """The number of rows, and whose layout it is: GPTQ's words lie along the inputs, AWQ's along the rows."""
    weight, scales = refs["qweight"], refs.get("scales")
    if packing.unknown or scales is None or len(scales.shape) != 2:
        what = f"is declared {packing.unknown}" if packing.unknown else "has no matrix of scales"
        raise _unfit(module, what, weight)
    n_rows = scales.shape[1]
    if weight.shape[1] == n_rows:
        return n_rows, "gptq"
    if weight.shape[1] * _WORD == n_rows * (packing.bits or 0) and packing.bits == _AWQ_BITS:
        return n_rows, "awq"
    what = f"is {list(weight.shape)} beside scales {list(scales.shape)}, which is neither GPTQ's layout nor AWQ's"
    raise _unfit(module, what, weight)


def row_steps(
    checkpoint: Checkpoint,
    module: str,
    rows: Rows,
    called: Callable[[str], str],
    expand_blocks: bool = False,
    collapse: int = 0,
) -> dict[str, list[Step]]:
    """By source tensor, the steps that make the rows ``rows`` of ``module``; ``called`` gives each tensor's new name.

    Rows may be fewer than there are. ``expand_blocks``: scales of FP8 in blocks become each row's own; ``collapse``: of so many
    rows one's scale becomes that of all, which undoes it. Raises UserError: ``vocab.format``, ``vocab.block-fp8``.
    """
    parts = parts_of(checkpoint, module)
    if parts.block and not expand_blocks:
        message = f"{parts.weight.name} has a scale for every {parts.block} rows, which other rows cannot share"
        hint = "--expand-blocks gives each row the scales it had; or make it dense first: ckptkit dequantize SRC OUT"
        raise fail("vocab.block-fp8", message, file=parts.weight.file, tensor=parts.weight.name, hint=hint)
    if parts.layout == "awq" and rows.number % len(_AWQ_LANES):
        what = f"is AWQ's, of {len(_AWQ_LANES)} rows a word: {rows.number:,} of them do not fill whole words"
        raise _unfit(parts.module, what, parts.weight)
    ways = {last: _way(parts, last, ref, rows.number, collapse) for last, ref in parts.refs.items()}
    return {ref.name: [_step(ref, rows, called(ref.name), *ways[last])] for last, ref in parts.refs.items()}


def _step(ref: Ref, rows: Rows, name: str, op: str, args: Mapping[str, Any]) -> Step:
    if op == COPY:
        return copy_step(ref, rows.rule, name)
    args = {"name": name, "rows": rows.sha256, **args}
    inputs = (ref, rows.ref)
    return Step(op, inputs, tuple(operation(op).specs([item.spec for item in inputs], args)), rows.rule, args)


def _way(parts: Parts, last: str, ref: Ref, number: int, collapse: int) -> tuple[str, dict[str, Any]]:
    """The operation for one of the tensors, and its arguments."""
    if last == "weight_shape":
        return (COPY if number == parts.n_rows else "row_count@1"), {}
    if last in _OF_COLUMNS or math.prod(ref.shape) == 1 or (last in _SCALES and ref.shape[0] == 1):
        return COPY, {}
    if ref.shape == (parts.n_rows,):
        return "columns@1", {}
    if last in _SCALES and (parts.block or collapse):
        return "rows@1", {"per": parts.block} if parts.block else {"every": collapse}
    if parts.layout == "rows":
        return _way_of_rows(parts, last, ref)
    if last in {"scales", "qweight"} and ref.shape[-1] == parts.n_rows:
        return "columns@1", {}
    if last in {"qzeros", "qweight"}:
        lanes = {"lanes": list(_AWQ_LANES)} if parts.layout == "awq" else {}
        return "packed_columns@1", {"bits": _packed_bits(parts, ref, ref.shape[-1]), **lanes}
    raise _misfit(parts, ref)


def _way_of_rows(parts: Parts, last: str, ref: Ref) -> tuple[str, dict[str, Any]]:
    if ref.shape[0] == parts.n_rows:
        return "rows@1", {}
    if last == "weight_zero_point" and ref.dtype == "I32":
        return "packed_rows@1", {"bits": _packed_bits(parts, ref, ref.shape[0])}
    raise _misfit(parts, ref)


def _packed_bits(parts: Parts, ref: Ref, words: int) -> int:
    """The bits of a code, of which a whole number fill a word: what is declared, or what fits. Raises ``vocab.format``."""
    fitting = [bits for bits in (2, 4, 8) if -(-parts.n_rows * bits // _WORD) == words and parts.bits in {bits, None}]
    if len(fitting) != 1:
        raise _misfit(parts, ref)
    return fitting[0]


def _misfit(parts: Parts, ref: Ref) -> UserError:
    return _unfit(parts.module, f"has {ref.name} {list(ref.shape)}, which does not go with {parts.n_rows:,} rows", ref)


def _unfit(module: str, what: str, ref: Ref | None) -> UserError:
    where = {"file": ref.file, "tensor": ref.name} if ref else {}
    hint = "ckptkit dequantize SRC OUT makes it dense first; ckptkit inspect SRC shows how it is stored"
    return fail("vocab.format", f"{module} {what}: its rows cannot be taken apart", hint=hint, **where)
