"""The same weights quantized again by the peer library, and the bits compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..consumers import LINEAR_CLASS, by_compressed_tensors
from ..decode import Coding
from ..errors import Finding
from ..families import fused_set, shares_global_scale
from ..files.header import Spec
from ..files.reading import read_block
from ..ops import Context, Read
from ..ops.select import select
from ..plan import Ref
from ..stored import split_name
from . import Seen, Subject
from .folding import fold
from .matching import Pair
from .views import View
from .watching import watched

ID = "numeric.oracle"


def oracle(subject: Subject) -> Seen:
    """Findings where codes, scales or zero points are not the library's. One weight, or fused set, after another."""
    every = _sets(subject)
    sets = [pairs for pairs in every if subject.sample.holds(pairs[0].made.name)]
    sizes = [sum(pair.source.row_bytes * pair.source.rows for pair in pairs) for pairs in sets]
    compared = watched(subject, (_compare(pairs, subject) for pairs in sets), sizes)
    findings = [finding for found in compared for finding in found]
    left = len(subject.matched.pairs) - sum(map(len, every))
    partly = {ID: f"{left:,} weights are in no group of a compressed-tensors config"} if left else {}
    return Seen(list(fold(findings)), sum(map(len, sets)), partly=partly)


def oracle_unfit(subject: Subject) -> str | None:
    if not subject.options.get("oracle"):
        return "no --oracle"
    if subject.against is None:
        return "no --against"
    match subject.manifest or {}:
        case {"settings": {"recipe": {"recipe": {"arithmetic": "float32"}}}}:
            return "the recipe's arithmetic is float32, which the library does not have"
    return subject.unknown


def _sets(subject: Subject) -> list[list[Pair]]:
    """Weights that the library quantizes together: fused sets that share a global scale, else each alone."""
    found: dict[str, list[Pair]] = {}
    for pair in subject.matched.pairs:
        module, _ = split_name(pair.made.name)
        made, source = pair.made.stored, pair.source.stored
        if _weights(subject, module) and made.coding is not Coding.DENSE and source.coding is Coding.DENSE:
            together = fused_set(module) if made.overall is not None and shares_global_scale(module) else None
            found.setdefault(together[0] if together else module, []).append(pair)
    return list(found.values())


def _weights(subject: Subject, module: str) -> tuple[Mapping[str, Any], str] | None:
    """The arguments by which the config says that a module was quantized, and the format; None without a group."""
    quantization = subject.quantization
    if quantization is None or quantization.declared is None:
        return None
    group = by_compressed_tensors(quantization.declared, module, LINEAR_CLASS)
    weights = quantization.weights(group)
    if not weights:
        return None
    stated = quantization.table["config_groups"][group].get("format") or quantization.format
    return weights, str(stated)


def _compare(pairs: Sequence[Pair], subject: Subject) -> list[Finding]:
    from ..ops.llmcompressor_backend import make_whole

    assert subject.against is not None
    modules = [split_name(pair.made.name)[0] for pair in pairs]
    found = _weights(subject, modules[0])
    assert found is not None
    views = [pair.source for pair in pairs]
    _, args = select(*found, views[0].stored.codes.dtype, "compat")
    if any(view.turned for view in views):
        args["columns"] = [{"start": view.start, "step": view.step, "count": view.rows} for view in views]
    blocks = [read_block(subject.against.source, view.stored.codes, _rows(view)) for view in views]
    stored = [ref for pair in pairs for ref in pair.made.stored.parts.values()]
    try:
        made = make_whole(blocks, [Spec(*ref.spec) for ref in stored], args | {"modules": modules}, Context())
    except (ValueError, KeyError) as error:
        message = f"{pairs[0].made.name}: llmcompressor does not quantize it so: {error}"
        return [Finding(ID, message, file=stored[0].file, tensor=stored[0].name)]
    return list(_differences(stored, made, subject))


def _rows(view: View) -> Read:
    """The stored rows that a view lies in."""
    first = view.first if view.turned else view.first + view.start
    return Read(0, first, first + (view.cols if view.turned else view.rows))


def _differences(stored: Sequence[Ref], made: Sequence[Any], subject: Subject) -> Iterator[Finding]:
    import numpy as np

    for ref, theirs in zip(stored, made, strict=True):
        mine = np.frombuffer(subject.checkpoint.source.read(ref.file, ref.start, ref.stop), np.uint8)
        if len(mine) != len(theirs) or not np.array_equal(mine, theirs):
            unequal = np.flatnonzero(mine != theirs) if len(mine) == len(theirs) else [0]
            message = f"{ref.name} differs from what llmcompressor makes, first in byte {unequal[0]:,}"
            yield Finding(ID, message, file=ref.file, tensor=ref.name, data={"bytes": len(unequal), "of": len(mine)})
