"""What a quantization recipe may not do to a checkpoint, from headers and config alone. Each yields findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import Finding
from ..families import Kind, experts_of, fused_set
from ..naming.names import to_template
from ..plan import Ref, canonical
from ..recipe.recipe import Group, Recipe
from ..recipe.schemes import config_group, problems
from .experts import Slice
from .generalise import by_template
from .selection import Choice

INCOMPLETE = {"gate_proj": "up_proj", "w1": "w3"}


def indivisible(choices: Iterable[Choice], pieces: Mapping[str, list[Slice]]) -> Iterator[Finding]:
    """``plan.divide``: shapes that group size or pack width do not divide; one finding per kind of module."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for choice in choices:
        group = choice.group
        for shape in {piece.shape for module in choice.modules for piece in pieces.get(module, ())}:
            why = group and problems(group.scheme, shape)
            if group and why:
                found[group.name, choice.alike.template, why] += choice.weights()
    for (name, _, why), tensors in found.items():
        others = f" and {len(tensors) - 1:,} more like it" if len(tensors) > 1 else ""
        hint = f"ignore it, or give groups.{name} another strategy or group_size"
        data = {"group": name, "tensors": tensors}
        yield Finding("plan.divide", f"{tensors[0]}{others}: {why}", tensor=tensors[0], hint=hint, data=data)


def head_blocks(choices: Iterable[Choice]) -> Iterator[Finding]:
    """``plan.head-block-fp8``: SGLang refuses or misreads heads whose scales are of blocks."""
    for choice in choices:
        if choice.group is not None and choice.kind is Kind.HEAD and choice.group.scheme.weights.strategy == "block":
            for module, ref in choice.modules.items():
                message = f"{module} would be {choice.group.scheme.describe()}; engines serve no head in blocks"
                group = f"{{targets: [{module!r}], scheme: W8A16, strategy: channel}}"
                hint = f"give the head a group of its own, say {group}"
                yield Finding("plan.head-block-fp8", message, tensor=ref.name, hint=hint)


def fused_differ(groups: Iterable[Group], choices: Sequence[Choice], quantized: Collection[str]) -> Iterator[Finding]:
    """``recipe.fused-differ``: what engines load into one layer, under different schemes or one of it ignored.

    ``quantized`` are modules quantized on disk already: beside a part that is to be quantized they differ too.
    """
    layers: dict[str, dict[str, _State]] = defaultdict(dict)
    for part in _suspect(list(_parts(groups, choices, quantized))):
        for module in part.modules:
            for layer in _layers_of(module, part.stacked):
                layers[layer][module] = part.state
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for members in layers.values():
        if len(set(members.values())) > 1:
            forms = sorted({f"{to_template(name).replace('#', '*')}: {s.text}" for name, s in members.items()})
            found[tuple(forms)].append(next(iter(members)))
    for parts, modules in found.items():
        message = (
            f"{len(modules):,} layers that engines fuse would be quantized in part or in two ways ({'; '.join(parts)})"
        )
        hint = "give all of a layer one scheme, or ignore all of it"
        data = {"layers": len(modules), "parts": list(parts)}
        yield Finding("recipe.fused-differ", message, tensor=f"{modules[0]}.weight", hint=hint, data=data)


class _State(NamedTuple):
    """What becomes of a module: equal for modules of one scheme, and a few words on it."""

    scheme: str
    text: str


class _Part(NamedTuple):
    """Modules of one template that become the same; ``stacked`` if they are 3-D experts."""

    state: _State
    modules: Collection[str]
    stacked: bool

    @property
    def layers(self) -> list[str]:
        """The templates of the layers that the modules go into."""
        return [to_template(layer) for layer in _layers_of(next(iter(self.modules)), self.stacked)]


def _parts(groups: Iterable[Group], choices: Sequence[Choice], quantized: Collection[str]) -> Iterator[_Part]:
    schemes = {group.name: _state_of(group) for group in groups}
    on_disk = _State("quantized", "quantized already")
    for choice in choices:
        if choice.is_float:
            state = schemes[choice.group.name] if choice.group else _State("", "left as it is")
            yield _Part(state, choice.modules, choice.is_experts)
        elif modules := [module for module in choice.modules if module in quantized]:
            yield _Part(on_disk, modules, choice.is_experts)
    if quantized:
        others = set(quantized).difference(*(choice.modules for choice in choices))
        for modules in by_template(module for module in quantized if module in others).values():
            yield _Part(on_disk, modules, False)


def _state_of(group: Group) -> _State:
    return _State(canonical(config_group(group.scheme, [])), group.scheme.describe())


def _suspect(parts: Sequence[_Part]) -> list[_Part]:
    """The parts of layers that some part tells from the others: seen on templates, so in most checkpoints there are none."""
    states: dict[str, set[_State]] = defaultdict(set)
    for part in parts:
        for layer in part.layers:
            states[layer].add(part.state)
    return [part for part in parts if any(len(states[layer]) > 1 for layer in part.layers)]


def _layers_of(module: str, stacked: bool) -> list[str]:
    """The engine's layers that ``module`` goes into: a fused projection, the routed experts."""
    fused = fused_set(module)
    experts = module.rpartition(".")[0] if stacked else experts_of(module)
    return [layer for layer in (fused[0] if fused else None, experts) if layer is not None]


def incomplete_layers(choices: Iterable[Choice], tensors: Mapping[str, Ref]) -> Iterator[Finding]:
    """``names.incomplete-layer``: a gate projection to be quantized whose up projection is nowhere."""
    for choice in choices:
        partner = INCOMPLETE.get(choice.alike.template.rpartition(".")[2])
        if partner is None or choice.group is None or choice.is_experts:
            continue
        for module, ref in choice.modules.items():
            stem = module.rpartition(".")[0]
            if not any(f"{stem}.{partner}.{end}" in tensors for end in ("weight", "weight_packed", "qweight")):
                message = f"{ref.name} has no {stem}.{partner}.weight beside it: the layer is incomplete"
                hint = "fetch the checkpoint again: a lost shard looks like this"
                yield Finding("names.incomplete-layer", message, file=ref.file, tensor=ref.name, hint=hint)


def ties(recipe: Recipe, choices: Iterable[Choice], head: tuple[str, Ref] | None) -> Iterator[Finding]:
    """``plan.tie``: quantizing a head or an embedding that the config ties to the other."""
    if head is None or recipe.tie == "untie":
        return
    module, embedding = head
    tied = {module, embedding.name.removesuffix(".weight")}
    for choice in choices:
        for name in tied.intersection(choice.modules) if choice.group is not None else ():
            message = f"{name} is tied ({module} is {embedding.name} itself), so it cannot be quantized alone"
            hint = "--set tie=untie makes the head a tensor of its own, from the embedding's bytes"
            yield Finding("plan.tie", message, file=embedding.file, tensor=embedding.name, hint=hint)
