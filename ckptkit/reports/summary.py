"""What a report's figures show, counted: totals and shard map of a checkpoint, errors by layer, module and expert."""

from __future__ import annotations

import hashlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, NamedTuple

from ..checks import Subject
from ..errors import Finding
from ..files.checkpoint import SUFFIX, Checkpoint
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..naming.names import split
from ..plan import Ref
from ..stored import split_name
from .model import (
    CellError,
    ExpertErrors,
    Histogram,
    LayerError,
    Numeric,
    Place,
    Segment,
    ShardBar,
    Stats,
    TensorError,
    Totals,
)

# What a figure can show: more shards would be thin lines, smaller segments thinner than a pixel.
SHARDS_SHOWN = 40
SEGMENTS_SHOWN = 150
WORST_SHOWN = 20
BINS_PER_DECADE = 20
SMALLEST = 1e-10

# The name before the first number, the number, the rest.
_PLACE = re.compile(r"(?:(.*?)\.)?(\d{1,6})(?:\.(.+))?")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d{1,4})(?:\.|$)")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def place_of(source: Source) -> Place:
    """Where a source lies. The revision is that of a Hub cache's folder."""
    cached = _SNAPSHOT.search(source.root.as_posix())
    manifest = source.files.get(MANIFEST)
    digest = hashlib.sha256(source.read(MANIFEST, 0, manifest.size)).hexdigest() if manifest else None
    return Place(uri=plain(source.uri), revision=cached[1] if cached else None, manifest_sha256=digest)


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: text without lone surrogates, finite numbers or None, lists, string keys."""
    match value:
        case None | bool():
            return value
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {plain(str(key)): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    return plain(str(value))


# --- what a checkpoint holds -------------------------------------------------------------------------------


def stats_of(subject: Subject, findings: Iterable[Finding]) -> Stats:
    """Totals and shard map of a checkpoint, with what errors among the ``findings`` name marked; totals of its source."""
    errors = [finding for finding in findings if finding.severity == "error"]
    files = {finding.file for finding in errors if finding.file is not None and finding.file.endswith(SUFFIX)}
    tensors = {name for finding in errors for name in _named(finding)}
    return Stats(
        **_totals(subject).model_dump(),
        shards=len(subject.checkpoint.shards),
        shard_map=_shard_map(subject.checkpoint, files, tensors),
        against=None if subject.against is None else _totals(Subject(subject.against)),
    )


def _named(finding: Finding) -> Iterator[str]:
    """The tensors that a finding names: its own, and examples of those that it stands for."""
    examples = finding.data.get("examples")
    names = (finding.tensor, *(examples if isinstance(examples, list | tuple) else ()))
    return (name for name in names if isinstance(name, str))


def _totals(subject: Subject) -> Totals:
    found = subject.survey
    by_dtype: dict[str, int] = {}
    for cell in found.cells.values():
        by_dtype[cell.first.dtype] = by_dtype.get(cell.first.dtype, 0) + cell.bytes
    return Totals(
        tensors=len(found.tensors),
        parameters=sum(cell.number * found.parameters[key] for key, cell in found.cells.items()),
        bytes=sum(by_dtype.values()),
        by_dtype=dict(sorted(by_dtype.items(), key=lambda item: -item[1])),
    )


def _shard_map(checkpoint: Checkpoint, files: Set[str], tensors: Set[str]) -> list[ShardBar]:
    """Shards in name order, as many as are shown: faulty ``files`` before others, unreadable ones included."""
    faulty = files | {checkpoint.tensors[name].file for name in tensors if name in checkpoint.tensors}
    shards = sorted(checkpoint.shards.keys() | faulty, key=lambda shard: (shard not in faulty, shard))
    rows = {shard: _refs(checkpoint, shard) for shard in sorted(shards[:SHARDS_SHOWN])}
    smallest = max(sum(ref.nbytes for ref in refs) for refs in rows.values()) // SEGMENTS_SHOWN if rows else 0
    return [
        ShardBar(
            file=plain(shard),
            bytes=sum(ref.nbytes for ref in refs),
            faulty=shard in faulty,
            segments=[_segment(run, tensors) for run in _runs(refs, tensors, smallest)],
        )
        for shard, refs in rows.items()
    ]


def _refs(checkpoint: Checkpoint, shard: str) -> list[Ref]:
    """The tensors of a shard, as far as it can be read and the index lets it have them, as they lie."""
    header = checkpoint.shards.get(shard)
    entries = header.entries if header else ()
    return [ref for entry in entries if (ref := checkpoint.tensors.get(entry.name)) and ref.file == shard]


def _runs(refs: Iterable[Ref], faulty: Set[str], smallest: int) -> Iterator[list[Ref]]:
    """Neighbours taken together until they have ``smallest`` bytes; faulty tensors and good ones stay apart."""
    run: list[Ref] = []
    nbytes = 0
    for ref in refs:
        if run and (nbytes >= smallest or (ref.name in faulty) != (run[-1].name in faulty)):
            yield run
            run, nbytes = [], 0
        run.append(ref)
        nbytes += ref.nbytes
    if run:
        yield run


def _segment(run: Sequence[Ref], faulty: Set[str]) -> Segment:
    """A run as it is drawn: named and coloured by its largest tensor."""
    largest = max(run, key=lambda ref: ref.nbytes)
    return Segment(
        name=plain(largest.name),
        dtype=largest.dtype,
        tensors=len(run),
        bytes=sum(ref.nbytes for ref in run),
        faulty=largest.name in faulty,
    )


# --- errors ------------------------------------------------------------------------------------------------


class _Spot(NamedTuple):
    """Where a tensor lies: ``model.layers``, 3, ``mlp.experts.#.up_proj``, 17; and its error, infinite for none."""

    stack: str
    layer: int | None
    module: str
    expert: int | None
    error: float
    beyond: bool


def numeric_of(tensors: Sequence[TensorError]) -> Numeric:
    """The figures of a comparison, tensor by tensor, with the source."""
    spots = [_spot(tensor) for tensor in tensors]
    cells = [_cell(*item) for item in _grouped(spots, lambda spot: (spot.stack, spot.layer, spot.module))]
    layers = _grouped((spot for spot in spots if spot.layer is not None), lambda spot: (spot.stack, spot.layer))
    return Numeric(
        tensors=len(tensors),
        median=_finite(statistics.median(spot.error for spot in spots)) if spots else None,
        worst=sorted(tensors, key=_error, reverse=True)[:WORST_SHOWN],
        histogram=_histogram(tensors),
        per_layer=[LayerError(stack=stack, layer=layer, rel_rms=_worst(found)) for (stack, layer), found in layers],
        cells=cells,
        experts=list(_experts(spots)),
    )


def _error(tensor: TensorError) -> float:
    """Its relative error; infinite where it is no number."""
    return math.inf if tensor.rel_rms is None else tensor.rel_rms


def _spot(tensor: TensorError) -> _Spot:
    error = _error(tensor)
    beyond = tensor.is_wrong
    module, last = split_name(tensor.tensor)
    place = _PLACE.fullmatch(module)
    if place is None:
        return _Spot("", None, module or last, None, error, beyond)
    stack, layer, rest = place.groups()
    expert = _EXPERT.search(rest or "")
    number = int(expert[1]) if expert else None
    return _Spot(stack or "", int(layer), split(rest or last)[0], number, error, beyond)


def _grouped(spots: Iterable[_Spot], key: Callable[[_Spot], tuple[Any, ...]]) -> list[tuple[Any, list[_Spot]]]:
    """Spots by key; layers in the order of their numbers, else in the order of first appearance."""
    groups: dict[tuple[Any, ...], list[_Spot]] = {}
    for spot in sorted(spots, key=lambda spot: -1 if spot.layer is None else spot.layer):
        groups.setdefault(key(spot), []).append(spot)
    return list(groups.items())


def _cell(place: tuple[str, int | None, str], spots: Sequence[_Spot]) -> CellError:
    stack, layer, module = place
    beyond = any(spot.beyond for spot in spots)
    return CellError(stack=stack, layer=layer, module=module, rel_rms=_worst(spots), tensors=len(spots), beyond=beyond)


def _experts(spots: Iterable[_Spot]) -> Iterator[ExpertErrors]:
    routed = [spot for spot in spots if spot.expert is not None]
    for (stack, layer), found in _grouped(routed, lambda spot: (spot.stack, spot.layer)):
        worst: dict[int, float] = {}
        for spot in found:
            expert = spot.expert or 0
            worst[expert] = max(worst.get(expert, 0.0), spot.error)
        row = [_finite(worst[expert]) if expert in worst else None for expert in range(max(worst) + 1)]
        yield ExpertErrors(stack=stack, layer=layer, rel_rms=row)


def _worst(spots: Iterable[_Spot]) -> float | None:
    return _finite(max(spot.error for spot in spots))


def _finite(value: float) -> float | None:
    """Four significant digits; None for what is no number."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _histogram(tensors: Iterable[TensorError]) -> Histogram | None:
    """Errors over a logarithmic axis; those below :data:`SMALLEST` count at its lower end."""
    errors = [error for tensor in tensors if math.isfinite(error := _error(tensor))]
    bins = Counter(math.floor(math.log10(max(error, SMALLEST)) * BINS_PER_DECADE) for error in errors if error > 0)
    if not errors:
        return None
    span = range(min(bins), max(bins) + 1) if bins else range(0)
    return Histogram(
        edges=[float(f"{10 ** (step / BINS_PER_DECADE):.4g}") for step in (*span, *(s + 1 for s in span[-1:]))],
        counts=[bins[step] for step in span],
        exact=sum(error == 0 for error in errors),
        bounds=list(_clusters(bound for tensor in tensors if (bound := _finite(tensor.bound or 0.0)))),
    )


def _clusters(values: Iterable[float]) -> Iterator[tuple[float, float]]:
    """The ranges in which positive values lie, where neighbours differ by less than half of the smaller."""
    ordered = sorted(values)
    gaps = [at for at in range(1, len(ordered)) if ordered[at] > ordered[at - 1] * 1.5]
    for start, stop in zip([0, *gaps], [*gaps, len(ordered)], strict=True):
        if stop > start:
            yield ordered[start], ordered[stop - 1]
