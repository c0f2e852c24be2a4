"""What a quantization recipe may not do to a checkpoint, from headers and config alone. Each yields findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ..errors import Finding
from ..families import Kind, experts_of, fused_set
from ..header import FLOATS
from ..names import split
from ..plan import Ref, canonical
from ..recipe import Group, Recipe
from ..schemes import config_group, problems
from .experts import Slice
from .selection import Choice

INCOMPLETE = {"gate_proj": "up_proj", "w1": "w3"}


def indivisible(choices: Mapping[str, Choice], pieces: Mapping[str, list[Slice]]) -> Iterator[Finding]:
    """``plan.divide``: shapes that group size or pack width do not divide; one finding per kind of module."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for module, slices in pieces.items():
        group = choices[module].group
        for shape in {piece.shape for piece in slices}:
            why = group and problems(group.scheme, shape)
            if group and why:
                found[group.name, split(module)[0], why].append(choices[module].ref.name)
    for (name, _, why), tensors in found.items():
        others = f" and {len(tensors) - 1:,} more like it" if len(tensors) > 1 else ""
        hint = f"ignore it, or give groups.{name} another strategy or group_size"
        data = {"group": name, "tensors": tensors}
        yield Finding("plan.divide", f"{tensors[0]}{others}: {why}", tensor=tensors[0], hint=hint, data=data)


def head_blocks(choices: Iterable[Choice]) -> Iterator[Finding]:
    """``plan.head-block-fp8``: SGLang refuses or misreads block-scaled FP8 heads."""
    for choice in choices:
        if choice.group is not None and choice.kind is Kind.HEAD and choice.group.scheme.weights.strategy == "block":
            message = f"{choice.module} would be block-scaled FP8, which engines do not serve as a head"
            hint = f"give the head a group of its own, say {{targets: [{choice.module!r}], scheme: W8A16, strategy: channel}}"
            yield Finding("plan.head-block-fp8", message, tensor=choice.ref.name, hint=hint)


def fused_differ(
    groups: Iterable[Group], choices: Mapping[str, Choice], quantized: Collection[str]
) -> Iterator[Finding]:
    """``recipe.fused-differ``: what engines load into one layer, under different schemes or one of it ignored.

    ``quantized`` are modules quantized on disk already: beside a part that is to be quantized they differ too.
    """
    schemes = {group.name: _state_of(group) for group in groups}
    layers: dict[str, dict[str, _State]] = defaultdict(dict)
    for module in (*choices, *quantized):
        state = _state(choices.get(module), module in quantized, schemes)
        for layer in _layers_of(module, module in choices and choices[module].is_experts):
            if state is not None:
                layers[layer][module] = state
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for parts in layers.values():
        if len(set(parts.values())) > 1:
            form = dict.fromkeys(f"{split(module)[0].replace('#', '*')}: {s.text}" for module, s in parts.items())
            found[tuple(form)].append(next(iter(parts)))
    for forms, modules in found.items():
        message = (
            f"{len(modules):,} layers that engines fuse would be quantized in part or in two ways ({'; '.join(forms)})"
        )
        hint = "give all of a layer one scheme, or ignore all of it"
        data = {"layers": len(modules), "parts": list(forms)}
        yield Finding("recipe.fused-differ", message, tensor=f"{modules[0]}.weight", hint=hint, data=data)


def _layers_of(module: str, stacked: bool) -> list[str]:
    """The engine's layers that ``module`` goes into: a fused projection, the routed experts."""
    fused = fused_set(module)
    experts = module.rpartition(".")[0] if stacked else experts_of(module)
    return [layer for layer in (fused[0] if fused else None, experts) if layer is not None]


class _State(NamedTuple):
    """What becomes of a module: equal for modules of one scheme, and a few words on it."""

    scheme: str
    text: str


def _state_of(group: Group) -> _State:
    return _State(canonical(config_group(group.scheme, [])), group.scheme.describe())


def _state(choice: Choice | None, quantized: bool, schemes: Mapping[str, _State]) -> _State | None:
    if choice is not None and choice.group is not None:
        return schemes[choice.group.name]
    if choice is not None and choice.ref.dtype in FLOATS:
        return _State("", "left as it is")
    return _State("quantized", "quantized already") if quantized else None


def incomplete_layers(choices: Mapping[str, Choice], tensors: Mapping[str, Ref]) -> Iterator[Finding]:
    """``names.incomplete-layer``: a gate projection to be quantized whose up projection is nowhere."""
    for module, choice in choices.items():
        stem, _, last = module.rpartition(".")
        partner = INCOMPLETE.get(last)
        if partner is None or choice.group is None or choice.is_experts:
            continue
        if not any(f"{stem}.{partner}.{end}" in tensors for end in ("weight", "weight_packed", "qweight")):
            message = f"{choice.ref.name} has no {stem}.{partner}.weight beside it: the layer is incomplete"
            hint = "fetch the checkpoint again: a lost shard looks like this"
            yield Finding("names.incomplete-layer", message, file=choice.ref.file, tensor=choice.ref.name, hint=hint)


def ties(recipe: Recipe, choices: Mapping[str, Choice], head: tuple[str, Ref] | None) -> Iterator[Finding]:
    """``plan.tie``: quantizing a head or an embedding that the config ties to the other."""
    if head is None or recipe.tie == "untie":
        return
    module, embedding = head
    parts = (choices.get(module), choices.get(embedding.name.removesuffix(".weight")))
    for choice in parts:
        if choice is not None and choice.group is not None:
            message = f"{choice.module} is tied ({module} is {embedding.name} itself), so it cannot be quantized alone"
            hint = "--set tie=untie makes the head a tensor of its own, from the embedding's bytes"
            yield Finding("plan.tie", message, file=embedding.file, tensor=embedding.name, hint=hint)
