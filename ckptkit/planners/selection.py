"""Which module gets which group of a recipe: ignores win, then the first group that reaches it.

A *choice* is made for every weight of rank two or more and for every 3-D expert tensor. Everything else is copied.
Nothing is decided silently: each choice names its rule, and each rule that decides nothing is a finding
(:mod:`.reach`).

A checkpoint of 230,000 tensors has a few dozen name templates, so one choice is made for all weights that are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..families import Kind, classifier, embedding_of, head_of, is_expert_tensor, is_tied, module_of
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..naming.names import Matcher, layered
from ..naming.patterns import CLASS_TARGETS
from ..plan import Ref
from ..recipe.recipe import Group, Recipe

NOT_LINEAR = {
    Kind.EMBEDDING: "embedding",
    Kind.POSITION: "position embedding",
    Kind.NORM: "norm",
    Kind.CONV: "convolution",
}


class Alike(NamedTuple):
    """What weights that are decided on together have in common; ``matched`` are the recipe's patterns that match them.

    ``from_embedding`` marks a tied head that is not stored: its weight is the embedding.
    """

    template: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    matched: tuple[str, ...]
    from_embedding: bool


class Choice(NamedTuple):
    """Modules that are alike, each with its weight, and the group that quantizes them (None: copied).

    ``rule`` says why. ``named`` holds, per group of the recipe, the targets that match the modules by name; ``ignores``
    the ignores that do.
    """

    alike: Alike
    modules: dict[str, Ref]
    group: Group | None
    rule: str
    ignores: tuple[str, ...]
    named: tuple[tuple[str, ...], ...]
    is_experts: bool

    @property
    def kind(self) -> Kind:
        return self.alike.kind

    @property
    def is_float(self) -> bool:
        return self.alike.dtype in FLOATS

    @property
    def first(self) -> tuple[str, Ref]:
        """One of the modules, and its weight."""
        return next(iter(self.modules.items()))

    def weights(self) -> list[str]:
        return [ref.name for ref in self.modules.values()]


def select(checkpoint: Checkpoint, recipe: Recipe) -> list[Choice]:
    """Apply groups and ignores of ``recipe`` to the checkpoint's modules: all choices, in the checkpoint's order.

    What is wrong with them is for :mod:`.reach` to say.
    """
    return [_choice(recipe, alike, modules) for alike, modules in _gathered(checkpoint, recipe).items()]


def tied_head(checkpoint: Checkpoint) -> tuple[str, Ref] | None:
    """The head's module name and the embedding it is tied to, where the config ties them."""
    if checkpoint.config is None or not is_tied(checkpoint.config):
        return None
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    head = head_of(embedding) if embedding is not None else None
    return None if head is None else (head, checkpoint.tensors[f"{embedding}.weight"])


def _gathered(checkpoint: Checkpoint, recipe: Recipe) -> dict[Alike, dict[str, Ref]]:
    """Modules by what they have in common: weights of rank two or more, 3-D experts, the tied head that is not stored."""
    targets = (target for group in recipe.groups for target in group.targets if target not in CLASS_TARGETS)
    matcher = Matcher([*(item.pattern for item in recipe.ignore), *targets])
    classify = classifier(checkpoint.config)
    found: dict[Alike, dict[str, Ref]] = defaultdict(dict)
    for (template, *_), refs in _cells(checkpoint).items():
        name, dtype, shape = refs[0].spec
        template, kind = module_of(template), classify(name, shape)
        modules = {module_of(ref.name): ref for ref in refs}
        if matcher.is_uniform:
            found[Alike(template, kind, dtype, shape, matcher.all(module_of(name)), False)].update(modules)
        else:
            for module, ref in modules.items():
                found[Alike(template, kind, dtype, shape, matcher.all(module), False)][module] = ref
    head = tied_head(checkpoint)
    if head is not None and f"{head[0]}.weight" not in checkpoint.tensors:
        module, ref = head
        found[Alike(module, Kind.HEAD, ref.dtype, ref.shape, matcher.all(module), True)][module] = ref
    return found


def _cells(checkpoint: Checkpoint) -> dict[tuple[str, str, str, tuple[int, ...]], list[Ref]]:
    """The weights to choose for, by template, layer, dtype and shape: those that are together here are of one kind."""
    found: dict[tuple[str, str, str, tuple[int, ...]], list[Ref]] = defaultdict(list)
    for name, ref in checkpoint.tensors.items():
        if len(ref.shape) >= 2 and (name.endswith(".weight") or is_expert_tensor(name, ref.shape)):
            template, layer = layered(name)
            found[template, layer, ref.dtype, ref.shape].append(ref)
    return found


def _choice(recipe: Recipe, alike: Alike, modules: dict[str, Ref]) -> Choice:
    _, ref = next(iter(modules.items()))
    is_experts = is_expert_tensor(ref.name, ref.shape)
    ignores = tuple(item.pattern for item in recipe.ignore if item.pattern in alike.matched)
    named = tuple(tuple(t for t in group.targets if t in alike.matched) for group in recipe.groups)
    group = None if ignores else _reaching(recipe.groups, named, alike, is_experts)
    return Choice(alike, modules, group, _rule(group, ignores, alike.kind), ignores, named, is_experts)


def _reaching(
    groups: Sequence[Group], named: Sequence[tuple[str, ...]], alike: Alike, is_experts: bool
) -> Group | None:
    """The first group that reaches weights: by name whatever is a floating matrix, by class only what is Linear."""
    if alike.dtype not in FLOATS:
        return None
    is_matrix = len(alike.shape) == 2
    for group, matched in zip(groups, named, strict=True):
        if matched and (is_experts or is_matrix):
            return group
        if CLASS_TARGETS.intersection(group.targets) and is_matrix and alike.kind not in NOT_LINEAR:
            return group
    return None


def _rule(group: Group | None, ignores: Sequence[str], kind: Kind) -> str:
    if ignores:
        return f"ignore {ignores[0]}"
    if group is not None:
        return f"groups.{group.name}"
    return f"not Linear: {NOT_LINEAR[kind]}" if kind in NOT_LINEAR else "reached by no group"
