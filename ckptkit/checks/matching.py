"""Which tensors of the source a checkpoint's tensors were made of, told by names, shapes and what is known of families.

A weight's source has its name; or it is the embedding, where the source has no head of its own; or a slice of a
tensor of stacked experts. Names that ``ckptkit reshard`` changed are followed by the rules in its manifest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..checkpoint import Checkpoint
from ..consumers import LINEAR_CLASS, by_compressed_tensors
from ..decode import Encoded, dense, encoded
from ..errors import Finding, UserError
from ..families import Piece, embedding_of, expert_projections, head_of, is_tied
from ..header import DTYPE_BITS, FLOATS
from ..plan import Ref
from ..renaming import rename, rename_rule
from ..stored import COMPANIONS, WEIGHTS, Quantization, declared_quantization, split_name
from . import Subject

Parts = Mapping[str, Ref]
BARE = ""  # the part that a tensor is which has no name of a part: a bias, stacked experts

# Scales of the attention's cache, which a calibration adds to a checkpoint.
_CALIBRATED = re.compile(r"\.(?:[qkv]|kv_cache|k_cache|v_cache)_(?:scale|zero_point)$")


class Columns(NamedTuple):
    """Which columns of the source's matrix are the rows of the weight: every ``step``-th from ``start`` on."""

    start: int
    step: int


class Pair(NamedTuple):
    """A weight that was converted: as made, and as its source stores it, or ``columns`` of that transposed."""

    made: Encoded
    source: Encoded
    columns: Columns | None = None


class Copy(NamedTuple):
    """A tensor whose bytes must be its source's."""

    made: Ref
    source: Ref


class Matched(NamedTuple):
    """How two checkpoints belong together. ``unreadable``: weights that cannot be decoded, and why."""

    pairs: list[Pair]
    copies: list[Copy]
    findings: list[Finding]
    unreadable: dict[str, str]


class Side(NamedTuple):
    """The tensors of a checkpoint by module and part, and what its config declares of them.

    ``embedding`` is the token embedding's module, ``head`` that of the head which it can feed.
    """

    modules: Mapping[str, Parts]
    config: Mapping[str, Any]
    quantization: Quantization | None
    embedding: str | None
    head: str | None


def match(subject: Subject) -> Matched:
    """Every tensor of the checkpoint with its source. Findings: ``numeric.missing``, ``numeric.shape``."""
    assert subject.against is not None
    manifest = subject.manifest or {}
    made, source = _side(subject.checkpoint, {}), _side(subject.against, _renamed(subject.against, manifest))
    slices = dict(_slices(made, source, manifest))
    matched = Matched([], [], [], {})
    used: set[str] = set()
    for module, parts in made.modules.items():
        if module in slices:
            used.add(module)
            _add_slice(matched, parts, slices[module], made, module)
            continue
        origin = module if module in source.modules else source.embedding if module == source.head else None
        if origin is None:
            matched.findings.extend(_unknown(ref) for ref in parts.values() if not _CALIBRATED.search(ref.name))
            continue
        used.add(origin)
        _add(matched, parts, source.modules[origin], made, source, module, origin)
    matched.findings.extend(_lost(made, source, slices, used, manifest))
    return matched


def _side(checkpoint: Checkpoint, names: Mapping[str, str]) -> Side:
    modules: dict[str, dict[str, Ref]] = defaultdict(dict)
    for name, ref in checkpoint.tensors.items():
        name = names.get(name, name)
        module, last = split_name(name)
        if last in WEIGHTS or last in COMPANIONS:
            modules[module][last] = ref
        else:
            modules[name][BARE] = ref
    config = checkpoint.config or {}
    embedding = embedding_of((f"{name}.weight" for name, parts in modules.items() if BARE not in parts), config)
    return Side(modules, config, declared_quantization(config)[0], embedding, embedding and head_of(embedding))


def _renamed(against: Checkpoint, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The source's names as ``ckptkit reshard`` changed them."""
    match manifest:
        case {"command": "reshard", "settings": {"rename": [*texts]}}:
            found, _ = rename(against.tensors, [rename_rule(str(text)) for text in texts])
            return {old: new.name for old, new in found.items()}
    return {}


# --- one weight --------------------------------------------------------------------------------------------


def _add(
    matched: Matched, parts: Parts, origin: Parts, made: Side, source: Side, module: str, origin_name: str
) -> None:
    """Match the parts of a module with those of its source: copies, or a conversion of the weight."""
    mine, theirs = _weight_part(parts), _weight_part(origin)
    same = mine == theirs and (mine is None or _alike(parts[mine], origin[mine or BARE]))
    if same or mine is None or theirs is None:
        _add_copies(matched, parts, origin)
        return
    try:
        before = _encoded(origin, theirs, source, origin_name)
        matched.pairs.append(Pair(_encoded(parts, mine, made, module, before.cols), before))
    except UserError as error:
        matched.unreadable[module] = str(error)
        return
    if (mismatch := _mismatch(matched.pairs[-1])) is not None:
        matched.pairs.pop()
        matched.findings.append(mismatch)


def _add_copies(matched: Matched, parts: Parts, origin: Parts) -> None:
    for part, ref in parts.items():
        if part not in origin:
            matched.findings.append(_unknown(ref))
        elif _alike(ref, origin[part]):
            matched.copies.append(Copy(ref, origin[part]))
        elif ref.dtype in FLOATS and origin[part].dtype in FLOATS and ref.shape == origin[part].shape:
            matched.pairs.append(Pair(dense(ref), dense(origin[part])))
        else:
            matched.findings.append(_misshapen(ref, origin[part]))
    matched.findings.extend(_left_behind(origin[part]) for part in origin.keys() - parts.keys())


def _add_slice(matched: Matched, parts: Parts, slice: _Slice, made: Side, module: str) -> None:
    """Match what was made of one expert's projection, or its bias, with its place in the stacked tensor."""
    ref, piece = slice
    part = _weight_part(parts)
    if part is None:
        matched.findings.extend(_unknown(found) for found in parts.values())
        return
    whole = dense(ref)
    try:
        found = _encoded(parts, part, made, module, piece.shape[-1])
    except UserError as error:
        matched.unreadable[module] = str(error)
        return
    if piece.kind == "bias":
        found = found._replace(rows=found.cols, cols=found.rows)  # as the columns of a row are, transposed
    if (found.rows, found.cols) != (*piece.shape, 1)[:2]:
        matched.findings.append(_misshapen(parts[part], ref._replace(shape=piece.shape)))
    elif piece.columns is None and _alike(parts[part], ref._replace(shape=piece.shape)):
        matched.copies.append(Copy(parts[part], ref))
    else:
        columns = None if piece.columns is None else Columns(piece.columns.start, piece.columns.step)
        matched.pairs.append(Pair(found, whole, columns))


def _weight_part(parts: Parts) -> str | None:
    """Which part holds the numbers; None for companions without a weight."""
    return next((part for part in ("weight", "weight_packed", "blocks", "qweight", BARE) if part in parts), None)


def _alike(a: Ref, b: Ref) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _encoded(parts: Parts, part: str, side: Side, module: str, cols: int = 0) -> Encoded:
    if part == BARE and parts[part].dtype in FLOATS:
        return dense(parts[part])
    bits, block = _declared(side.quantization, module)
    weight = parts[part]
    words = weight.shape[-1] if part == "weight_packed" and weight.dtype == "I32" and weight.shape else 0
    fits = cols if bits and words and -(-cols * bits // 32) == words else 0
    return encoded(part, parts, bits, block, fits)


def _declared(quantization: Quantization | None, module: str) -> tuple[int | None, Sequence[int] | None]:
    """Bits of packed numbers and sizes of blocks, as the config gives them for a module."""
    if quantization is None:
        return None, None
    group = None
    if quantization.declared is not None:
        groups = dict.fromkeys(name for name, _ in quantization.declared.targets)
        group = next(iter(groups)) if len(groups) == 1 else None
        group = group or by_compressed_tensors(quantization.declared, module, LINEAR_CLASS)
    block = quantization.weights(group).get("block_structure") or quantization.table.get("weight_block_size")
    return quantization.bits(group), block if isinstance(block, list) else None


def _mismatch(pair: Pair) -> Finding | None:
    made, source = pair.made, pair.source
    if (made.rows, made.cols) == (source.rows, source.cols):
        return None
    message = f"{made.name} holds [{made.rows}, {made.cols}], its source {source.name} [{source.rows}, {source.cols}]"
    return Finding("numeric.shape", message, file=made.codes.file, tensor=made.name)


def _misshapen(ref: Ref, source: Ref) -> Finding:
    message = (
        f"{ref.name} is {ref.dtype} {list(ref.shape)}, its source {source.name} {source.dtype} {list(source.shape)}"
    )
    return Finding("numeric.shape", message, file=ref.file, tensor=ref.name)


def _unknown(ref: Ref) -> Finding:
    message = f"{ref.name} has no counterpart in the source"
    return Finding("numeric.missing", message, file=ref.file, tensor=ref.name)


def _left_behind(ref: Ref) -> Finding:
    message = f"{ref.name} of the source has no counterpart"
    return Finding("numeric.missing", message, tensor=ref.name, data={"source_file": ref.file})


# --- stacked experts ---------------------------------------------------------------------------------------


class _Slice(NamedTuple):
    """A part of a stacked tensor: its bytes, and what it is of them."""

    ref: Ref
    piece: Piece


def _slices(made: Side, source: Side, manifest: Mapping[str, Any]) -> Iterator[tuple[str, _Slice]]:
    """Projections and biases of single experts, by the names under which the checkpoint would have them."""
    layouts = _layouts(manifest)
    for module, parts in source.modules.items():
        ref = parts.get(BARE) or parts.get("weight")
        if ref is None or ref.dtype not in FLOATS or module in made.modules or len(ref.shape) not in {2, 3}:
            continue
        for piece in _pieces(module, ref, layouts, made, source.config):
            size, (first, last) = DTYPE_BITS[ref.dtype] // 8, piece.span
            part = Ref(
                ref.file, ref.name, ref.dtype, piece.view, ref.start + first * size, ref.start + last * size, piece.span
            )
            yield (piece.module if piece.kind == "weight" else f"{piece.module}.bias"), _Slice(part, piece)


def _layouts(manifest: Mapping[str, Any]) -> Sequence[str]:
    """How the recipe said that stacked experts lie, or both ways that there are."""
    match manifest:
        case {"settings": {"recipe": {"recipe": {"groups": dict() as groups}}}}:
            stated = {group.get("experts") for group in groups.values() if isinstance(group, dict)} - {None}
            if len(stated) == 1:
                return [str(layout) for layout in stated]
    return ("rows", "columns")


def _pieces(module: str, ref: Ref, layouts: Sequence[str], made: Side, config: Mapping[str, Any]) -> list[Piece]:
    """The pieces by the first layout that fits what was made of them."""
    for layout in layouts:
        try:
            pieces = expert_projections(module, ref.shape, layout, config)
        except UserError:
            continue
        if pieces and all(_fits(piece, made) for piece in pieces[:2]):
            return pieces
    return []


def _fits(piece: Piece, made: Side) -> bool:
    parts = made.modules.get(piece.module if piece.kind == "weight" else f"{piece.module}.bias", {})
    part = _weight_part(parts)
    return part is not None and parts[part].shape[:1] == piece.shape[:1]


# --- what is left over -------------------------------------------------------------------------------------


def _lost(
    made: Side, source: Side, slices: Mapping[str, _Slice], used: set[str], manifest: Mapping[str, Any]
) -> Iterator[Finding]:
    """Tensors of the source that nothing was made of, unless the manifest says that they were dropped."""
    dropped = manifest.get("dropped") or {}
    sliced = {slice.ref.name for slice in slices.values()}
    for name in slices.keys() - used:
        yield _left_behind(slices[name].ref._replace(name=f"{slices[name].ref.name} ({name})"))
    for module in source.modules.keys() - used:
        refs = source.modules[module].values()
        second_head = module == source.head and is_tied(made.config)
        if second_head or any(ref.name in sliced for ref in refs):
            continue
        yield from (_left_behind(ref) for ref in refs if ref.name not in dropped)
