"""Which tensors of the source a checkpoint's tensors were made of, told by names, shapes and what is known of families.

A weight's source has its name; or it is the embedding, where the source has no head of its own; or one of the two is a
piece of stacked experts. Names that ``ckptkit reshard`` changed are followed by the rules in its manifest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..declarations import Packing, declarations, packing_of
from ..decode import Encoded, dense, encoded
from ..errors import Finding, UserError
from ..families import embedding_of, head_of, is_tied
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..naming.renaming import rename, rename_rule
from ..plan import Ref
from ..stored import COMPANIONS, WEIGHTS, split_name
from ..vocab.marks import REORDERED, is_declared
from . import Subject
from .bounds import same_numbers
from .stacked import BARE, Held, Parts, expanded, stated
from .views import View, check_readable, column, linear, same_module, whole

# Scales of the attention's cache, which a calibration adds to a checkpoint.
_CALIBRATED = re.compile(r"\.(?:[qkv]|kv_cache|k_cache|v_cache)_(?:scale|zero_point)$")


class Pair(NamedTuple):
    """A weight, or a matrix of it, as it was made and as its source has it."""

    made: View
    source: View


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
    """The tensors of a checkpoint by module and part, and what it declares of them.

    ``embedding`` is the token embedding's module, ``head`` that of the head which it can feed. ``unscaled``: FP8
    without a scale is as it is.
    """

    modules: Mapping[str, Parts]
    config: Mapping[str, Any]
    packing: Callable[[str], Packing]
    embedding: str | None
    head: str | None
    unscaled: bool = False


def match(subject: Subject) -> Matched:
    """Every tensor of the checkpoint with its source. Findings: ``numeric.missing``, ``numeric.shape``."""
    assert subject.against is not None
    manifest = subject.manifest or {}
    made, source = _side(subject.checkpoint, {}), _side(subject.against, _renamed(subject.against, manifest))
    if is_declared(made.config) != is_declared(source.config):
        made, source = _without_head(made), _without_head(source)  # its rows are head.order's to compare
    source = source._replace(unscaled=_settings(manifest).get("missing_scale") == "one")
    known = stated(made.config, source.config, manifest)
    mine, theirs = (expanded(a.modules, b.modules, known) for a, b in ((made, source), (source, made)))
    matched = Matched([], [], [], {})
    used: set[str] = set()
    for name, held in mine.items():
        origin = name if name in theirs else source.embedding if name == source.head else None
        if origin is None:
            matched.findings.extend(_unknown(ref) for ref in _refs(name, held) if not _CALIBRATED.search(ref.name))
            continue
        used.add(origin)
        _add(matched, held, theirs[origin], made, source)
    for name, held in theirs.items():
        if name not in used and not (name == source.head and is_tied(made.config)):
            matched.findings.extend(map(_left_behind, _refs(name, held)))
    return matched._replace(findings=list(_not_dropped(matched.findings, manifest.get("dropped") or {})))


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
    return Side(modules, config, _packing(checkpoint), embedding, embedding and head_of(embedding))


def _without_head(side: Side) -> Side:
    """All but the head, in an order of its own or in that of tokens."""
    heads = {side.head, f"{side.head}.{REORDERED}"}
    return side._replace(modules={name: parts for name, parts in side.modules.items() if name not in heads})


def _packing(checkpoint: Checkpoint) -> Callable[[str], Packing]:
    """What the config declares of a module; nothing where it cannot be read, which other checks tell."""
    try:
        return packing_of(declarations(checkpoint))
    except UserError:
        return lambda module: Packing()


def _renamed(against: Checkpoint, manifest: Mapping[str, Any]) -> dict[str, str]:
    """The source's names as ``ckptkit reshard`` changed them."""
    match manifest:
        case {"command": "reshard", "settings": {"rename": [*texts]}}:
            found, _ = rename(against.tensors, [rename_rule(str(text)) for text in texts])
            return {old: new.name for old, new in found.items()}
    return {}


def _settings(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    found = manifest.get("settings")
    return found if isinstance(found, Mapping) else {}


def _refs(name: str, held: Held) -> Iterator[Ref]:
    """The tensors of a module; the stack's, with the module's name, for a piece of one."""
    if held.piece is None:
        yield from held.parts.values()
    elif held.last is not None:
        ref = held.parts[held.last]
        yield ref._replace(name=f"{ref.name} ({name})")


def _not_dropped(findings: Iterable[Finding], dropped: Mapping[str, Any]) -> Iterator[Finding]:
    """Without tensors of the source that a manifest says were dropped."""
    return (finding for finding in findings if not (finding.tensor in dropped and "source_file" in finding.data))


# --- one weight --------------------------------------------------------------------------------------------


def _add(matched: Matched, mine: Held, theirs: Held, made: Side, source: Side) -> None:
    """Match a module with its source: copies of its parts, or a conversion of the weight."""
    if mine.piece is None and theirs.piece is None and _is_copied(mine, theirs):
        _add_copies(matched, mine.parts, theirs.parts)
        return
    if mine.last is None or theirs.last is None:
        matched.findings.extend(map(_unknown, mine.parts.values()))
        return
    try:
        pairs = list(_pairs(mine, theirs, made, source))
    except UserError as error:
        matched.unreadable[mine.module] = str(error)
        return
    unlike = next((pair for pair in pairs if pair.made.shape != pair.source.shape), None)
    if unlike is not None:
        matched.findings.append(_mismatch(unlike))
        return
    matched.pairs.extend(pairs)
    if mine.piece is None and theirs.piece is None and same_numbers(pairs[0].made.stored, pairs[0].source.stored):
        _add_copies(matched, _others(mine, pairs[0].made, theirs), _others(theirs, pairs[0].source, mine))


def _is_copied(mine: Held, theirs: Held) -> bool:
    if mine.last is None or theirs.last is None:
        return True
    return mine.last == theirs.last and _alike(mine.parts[mine.last], theirs.parts[theirs.last])


def _add_copies(matched: Matched, parts: Parts, origin: Parts) -> None:
    for part, ref in parts.items():
        if part not in origin:
            matched.findings.append(_unknown(ref))
        elif _alike(ref, origin[part]):
            matched.copies.append(Copy(ref, origin[part]))
        elif ref.dtype in FLOATS and origin[part].dtype in FLOATS and ref.shape == origin[part].shape:
            matched.pairs.append(Pair(whole(dense(ref)), whole(dense(origin[part]))))
        else:
            matched.findings.append(_misshapen(ref, origin[part]))
    matched.findings.extend(_left_behind(ref) for part, ref in origin.items() if part not in parts)


def _alike(a: Ref, b: Ref) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _others(held: Held, view: View, other: Held) -> Parts:
    """Parts that decoding does not read; a shape, which the tensors show too, only if both have it."""
    read = {ref.name for ref in view.stored.parts.values()}
    kept = (item for item in held.parts.items() if item[0] != "weight_shape" or "weight_shape" in other.parts)
    return {part: ref for part, ref in kept if ref.name not in read}


def _pairs(mine: Held, theirs: Held, made: Side, source: Side) -> Iterator[Pair]:
    """The weight's matrices with those of its source. Raises UserError where one cannot be decoded."""
    before = _encoded(theirs, source, _width(mine))
    if mine.piece is None and theirs.piece is None:
        views = same_module(_encoded(mine, made, linear(before).cols), before)
    else:
        second = _view(theirs, before, mine)
        views = [(_view(mine, _encoded(mine, made, second.cols), theirs), second)]
    for view, other in views:
        check_readable(view, other)
        yield Pair(view, other)


def _width(held: Held) -> int:
    """Columns of a dense weight; 0 where they are not known."""
    ref = held.parts[held.last or BARE]
    return ref.shape[-1] if held.piece is None and ref.dtype in FLOATS and ref.shape else 0


def _view(held: Held, stored: Encoded, other: Held) -> View:
    """A piece of a stack, or what is such a piece in the ``other``."""
    if held.piece is not None:
        return held.piece.view(stored)
    return column(stored) if other.piece is not None and other.piece.is_bias else linear(stored)


def _encoded(held: Held, side: Side, cols: int = 0) -> Encoded:
    """How a weight is stored; ``cols`` are its columns, if those of a packed one may be as many."""
    last, parts = held.last or "weight", held.parts
    if held.last == BARE:
        parts = {**parts, "weight": parts[BARE]}
    weight, packing = parts[last], side.packing(held.module)
    bits = packing.bits
    words = weight.shape[-1] if last == "weight_packed" and weight.dtype == "I32" and weight.shape else 0
    fits = cols if bits and words and -(-cols * bits // 32) == words else 0
    return encoded(last, parts, bits, packing.block, fits, packing.gptq, side.unscaled)


def _mismatch(pair: Pair) -> Finding:
    made, source = pair
    message = f"{made.name} holds {list(made.shape)}, its source {source.name} {list(source.shape)}"
    return Finding("numeric.shape", message, file=made.stored.codes.file, tensor=made.name)


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
