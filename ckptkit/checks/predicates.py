"""What a rule of the engine lint can ask of a checkpoint: a small fixed vocabulary on names, shapes and config.

A predicate is a function from the subject and the rule's arguments to the places where it holds; none means no. Its
name in a rule is the key in :data:`PREDICATES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

from ..families import LINEAR_LIKE, Kind, config_value, draft_part, experts_of, fused_set, head_of, is_tied
from ..inspecting.survey import Module
from ..plan import Ref
from . import Subject
from .hits import Hit, at, fits, modules
from .merging import bfloat16_only, merged_experts, models, renamed
from .reach import excluded, reach
from .stacks import absent

_BODY_LAYER = re.compile(r"(?:(?:thinker|language_model|text_model|llm|model)\.)*layers\.#(?:\.|$)")
_STAGE = re.compile(r"mtp\.#\.")
_DRAFTS = (Kind.MTP, Kind.DRAFT)
_SAMPLES = 3
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _templates(subject: Subject) -> Iterator[tuple[str, Ref]]:
    """The name of every tensor, ``#`` in the place of its numbers, with the first of those alike."""
    for (place, last, _, _), cell in subject.survey.cells.items():
        yield (f"{place[0]}.{last}" if place[0] else last), cell.first


Predicate = Callable[..., Sequence[Hit]]
Tile = tuple[int, int]


# --- config ------------------------------------------------------------------------------------------------


def architectures(subject: Subject, any_of: Sequence[str]) -> Sequence[Hit]:
    """The config names an architecture that fits."""
    return [Hit(f"the architecture is {name}") for name in _architectures(subject) if fits(name, any_of)][:1]


def _architectures(subject: Subject) -> list[str]:
    named = subject.config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def config(
    subject: Subject,
    any_of: Sequence[str] = (),
    absent: Sequence[str] = (),
    values: Mapping[str, Sequence[str]] = _NOTHING,
) -> Sequence[Hit]:
    """Keys of the language model's config: one of ``any_of`` is there, those ``absent`` are not, ``values`` fit."""
    found = {key: config_value(subject.config, key) for key in (*any_of, *absent, *values)}
    present = [key for key in any_of if found[key] is not None]
    holds = (
        bool(present or not any_of)
        and all(found[key] is None for key in absent)
        and all(fits(str(found[key]), globs) for key, globs in values.items())
    )
    said = [f"no {key}" if found[key] is None else f"{key}: {found[key]}" for key in (*present, *absent, *values)]
    return [Hit(f"config.json has {', '.join(said)}")] if holds else []


def tied(subject: Subject) -> Sequence[Hit]:
    """The config ties the head to the embedding."""
    return [Hit("config.json ties the head to the embedding")] if is_tied(subject.config) else []


def quantization(
    subject: Subject,
    any_of: Sequence[str] = (),
    formats: Sequence[str] = (),
    strategies: Sequence[str] = (),
    groups: int = 0,
    without: Sequence[str] = (),
) -> Sequence[Hit]:
    """The config declares a method that fits ``any_of``, and no true value for the keys ``without``.

    Under compressed-tensors: a format of ``formats``, at least so many ``groups``, one of them by one of ``strategies``.
    """
    found = subject.quantization
    if found is None or not fits(found.method, any_of) or any(found.table.get(key) for key in without):
        return []
    declared = found.table.get("config_groups")
    named = [str(found.weights(group).get("strategy")) for group in declared] if isinstance(declared, Mapping) else []
    if len(named) < groups or not fits(found.format or "", formats):
        return []
    if strategies and not any(fits(name, strategies) for name in named):
        return []
    said = [found.method, found.format or "", f"{len(named)} groups" if groups else "", *(named if strategies else ())]
    return [Hit(f"the checkpoint is quantized ({', '.join(filter(None, said))})")]


# --- names -------------------------------------------------------------------------------------------------


def tensors(
    subject: Subject,
    present: Sequence[str] = (),
    any_of: Sequence[str] = (),
    absent: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> Sequence[Hit]:
    """A tensor (of one of ``dtypes``) for each glob of ``present`` and for one of ``any_of``; none for ``absent``.

    Globs are matched with the whole name, ``#`` in the place of its numbers.
    """

    def first(glob: str) -> Hit | None:
        found = (ref for name, ref in _templates(subject) if fnmatchcase(name, glob) and fits(ref.dtype, dtypes))
        return next((Hit(f"there is {ref.name} ({ref.dtype})", ref.file, ref.name) for ref in found), None)

    if any(first(glob) for glob in absent):
        return []
    required = [first(glob) for glob in present]
    either = [hit for hit in map(first, any_of) if hit]
    if None in required or (any_of and not either):
        return []
    return either or [hit for hit in required if hit] or [Hit(f"there is no {absent[0]}", file=None)]


def draft_layers(subject: Subject, there: bool = True) -> Sequence[Hit]:
    """Whether a tensor lies in a part that drafts tokens; where ``there`` is false, whether none does."""
    part_of = draft_part(subject.config)
    found = next((ref for _, ref in _templates(subject) if part_of(ref.name)), None)
    if found is None:
        return [] if there else [Hit("the checkpoint has no layers that draft tokens", file=None)]
    return [Hit(f"{found.name} is part of layers that draft tokens", found.file, found.name)] if there else []


def stages(subject: Subject, differ_from: str, default: int | None = None) -> Sequence[Hit]:
    """The number of DSpark stages (``mtp.0``, ``mtp.1`` …) is not what the config's ``differ_from`` says.

    That is a number or a list, one item for a stage; ``default`` stands for it where it is absent.
    """
    found = {place[1]: cell.first for (place, *_), cell in subject.survey.cells.items() if _STAGE.match(f"{place[0]}.")}
    said = config_value(subject.config, differ_from)
    expected = len(said) if isinstance(said, list) else said if isinstance(said, int) else default
    if not found or expected is None or len(found) == expected:
        return []
    meant = f"{differ_from} means {expected}" if said is not None else f"without {differ_from} {expected} are meant"
    first = next(iter(found.values()))
    return [Hit(f"there are {len(found)} stages (mtp.#), and {meant}", first.file, first.name)]


def draft_vocabulary(subject: Subject, kinds: Sequence[str], whole: bool = False) -> Sequence[Hit]:
    """A draft of one of ``kinds``, by its architecture or config, with a map from its own vocabulary (``d2t``).

    ``whole``: the map has as many entries as the vocabulary.
    """
    named = " ".join((*_architectures(subject), *subject.config)).lower()
    if not any(kind in named for kind in kinds):
        return []
    vocabulary = config_value(subject.config, "vocab_size")
    return [
        Hit(f"{ref.name} maps {ref.shape[0]:,} draft ids to ids of the target", ref.file, ref.name)
        for name, ref in _templates(subject)
        if name.rpartition(".")[2] == "d2t" and (not whole or ref.shape[:1] == (vocabulary,))
    ]


def tensors_missing(subject: Subject) -> Sequence[Hit]:
    """Layers of the model's own that have no tensor, quantized weights without a scale, an output head that is absent."""
    return [*_absent_layers(subject), *_scaleless(subject), *_absent_head(subject)]


def _absent_layers(subject: Subject) -> Iterator[Hit]:
    part_of, declared = draft_part(subject.config), config_value(subject.config, "num_hidden_layers")
    there = {
        int(place[1])
        for (place, *_), cell in subject.survey.cells.items()
        if _BODY_LAYER.match(place[0]) and not part_of(cell.first.name)
    }
    if there and type(declared) is int:
        missing = absent(there, declared)
        if missing:
            yield Hit(
                f"layer {', '.join(map(str, missing[:_SAMPLES]))} of {declared} has no tensor", number=len(missing)
            )


def _scaleless(subject: Subject) -> Iterator[Hit]:
    for module in subject.survey.modules:
        if module.stored.lacks_scale:
            yield at(module, f"{module.weight.first.name} has no scale")


def _absent_head(subject: Subject) -> Iterator[Hit]:
    embedding = next(modules(subject, Kind.EMBEDDING), None)
    head = head_of(embedding.name) if embedding else None
    names = {module.name for module in subject.survey.modules}
    # A model of layers alone that takes in hidden states (``fc``) is a draft: it borrows the target's head.
    if head and not any(modules(subject, Kind.HEAD)) and not is_tied(subject.config) and not names & {"fc", "model.fc"}:
        yield Hit(f"there is no {head}, and config.json does not tie it")


# --- modules -----------------------------------------------------------------------------------------------


def _quantized(
    kind: Kind,
    subject: Subject,
    parts: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    formats: Sequence[str] = (),
    reached: Sequence[str] = (),
    prefix: str = "",
) -> list[Hit]:
    """Quantized modules of a kind whose weight is named by one of ``parts`` and stored in ``dtypes`` and ``formats``.

    ``reached``: how a compressed-tensors config reaches it under the name that the engine gives it, ``prefix`` before
    the checkpoint's: one of ``name``, ``class``, ``ignored``, ``nothing``.
    """
    reached_by = reach(subject.quantization, prefix)
    return [
        at(module, f"{module.weight.first.name} holds {module.name} as {module.stored.label}")
        for module in modules(subject, kind)
        if module.stored.quantized
        and fits(module.weight.key[1], parts)
        and fits(module.weight.first.dtype, dtypes)
        and fits(module.stored.label, formats)
        and (not reached or reached_by(module.name) in reached)
    ]


head = partial(_quantized, Kind.HEAD)
embedding = partial(_quantized, Kind.EMBEDDING)


def zero_point_rows(subject: Subject) -> Sequence[Hit]:
    """A packed asymmetric head whose rows do not divide by the number of zero points in one stored word."""
    return [
        at(module, f"{module.name} has {rows:,} rows, and {packed} zero points are packed into each word")
        for module in modules(subject, Kind.HEAD)
        for rows, packed in [(module.weight.first.shape[0], module.stored.per_element)]
        if "weight_zero_point" in module.companions and rows % packed
    ]


def wna16_shape(subject: Subject, misses: Sequence[Tile], fits: Sequence[Tile] = ()) -> Sequence[Hit]:
    """Packed integers whose inputs and outputs divide by no tile (inputs, outputs) of ``misses``, but by one of ``fits``.

    Outputs are those of all that engines fuse; those of a head are padded to 64. Experts have kernels of their own.
    """
    packed = {
        module.name: module
        for module in modules(subject, Kind.LINEAR, Kind.HEAD)
        if module.weight.key[1] == "weight_packed" and module.stored.per_element > 1 and not experts_of(module.name)
    }
    hits = []
    for name, module in packed.items():
        members = [member for member in (fused_set(name) or (name, (name,)))[1] if member in packed]
        inputs, outputs = module.shape[-1], sum(packed[member].shape[0] for member in members)
        outputs += -outputs % 64 if module.kind is Kind.HEAD else 0
        if (
            name == members[0]
            and not _divides(inputs, outputs, misses)
            and (not fits or _divides(inputs, outputs, fits))
        ):
            fused = " with what it is fused with" if len(members) > 1 else ""
            hits.append(at(module, f"{name} has {outputs} outputs{fused} and {inputs} inputs"))
    return hits


def _divides(inputs: int, outputs: int, tiles: Sequence[Tile]) -> bool:
    return any(inputs % k == 0 and outputs % n == 0 for k, n in tiles)


def unmatched_linear(subject: Subject) -> Sequence[Hit]:
    """A Linear that no target and no ignore of a compressed-tensors config reaches."""
    reached_by = reach(subject.quantization)
    return [
        at(module, f"no target and no ignore reaches {module.name}")
        for module in modules(subject, Kind.LINEAR)
        if reached_by(module.name) == "nothing"
    ]


def ignored(subject: Subject) -> Sequence[Hit]:
    """A module that is quantized on disk and ignored by the config."""
    reached_by = reach(subject.quantization)
    return [
        at(module, f"{module.name} is stored as {module.stored.label}, and config.json ignores it")
        for module in modules(subject, *LINEAR_LIKE, Kind.EMBEDDING)
        if module.stored.quantized and reached_by(module.name) == "ignored"
    ]


def dense_draft(subject: Subject) -> Sequence[Hit]:
    """A projection in a draft part that is dense where the body's of the same name is quantized, and not excluded."""

    def last(module: Module) -> str:
        return module.name.rpartition(".")[2]

    everything, left_out = subject.survey.modules, excluded(subject.quantization)
    quantized = {last(module) for module in everything if module.stored.quantized and module.kind not in _DRAFTS}
    return [
        at(module, f"{module.weight.first.name} is {module.stored.label} and {last(module)} is quantized elsewhere")
        for module in modules(subject, *_DRAFTS)
        if not module.stored.quantized and last(module) in quantized and not left_out(module.name)
    ]


PREDICATES: Mapping[str, Predicate] = {
    "architectures": architectures,
    "models": models,
    "config": config,
    "quantization": quantization,
    "tied": tied,
    "tensors": tensors,
    "draft-layers": draft_layers,
    "stages": stages,
    "draft-vocabulary": draft_vocabulary,
    "tensors-missing": tensors_missing,
    "head": head,
    "embedding": embedding,
    "zero-point-rows": zero_point_rows,
    "wna16-shape": wna16_shape,
    "unmatched-linear": unmatched_linear,
    "ignored": ignored,
    "dense-draft": dense_draft,
    "merged-experts": merged_experts,
    "bfloat16-only": bfloat16_only,
    "renamed": renamed,
}
