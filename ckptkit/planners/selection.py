"""Which module gets which group of a recipe: ignores win, then the first group that reaches it.

A *choice* is made for every weight of rank two or more and for every 3-D expert tensor. Everything else is copied.
Nothing is decided silently: each choice names its rule, and each rule that decides nothing is a finding.

A checkpoint of 230,000 tensors has a few dozen name templates, so one choice is made for all weights that are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import Finding
from ..families import Kind, classifier, embedding_of, head_of, is_expert_tensor, is_tied, module_of
from ..header import FLOATS
from ..names import Matcher, layered, to_template
from ..patterns import CLASS_TARGETS, nearest
from ..plan import Ref
from ..recipe import Group, Recipe

# Reached by a class target only together with a target or an ignore that names them.
NAMED_ONLY = {Kind.HEAD: "head", Kind.ROUTER: "router", Kind.MTP: "MTP module", Kind.DRAFT: "draft module"}
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


class Selection(NamedTuple):
    """All choices, in the order of the checkpoint, and every problem seen while choosing."""

    choices: list[Choice]
    problems: list[Finding]


def select(checkpoint: Checkpoint, recipe: Recipe) -> Selection:
    """Apply groups and ignores of ``recipe`` to the checkpoint's modules."""
    choices = [_choice(recipe, alike, modules) for alike, modules in _gathered(checkpoint, recipe).items()]
    return Selection(choices, [*_overreach(recipe, choices), *_unmatched(recipe, choices, checkpoint)])


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


# --- problems ----------------------------------------------------------------------------------------------


def _overreach(recipe: Recipe, choices: Sequence[Choice]) -> Iterator[Finding]:
    """What a group reaches and may not take: by class only, in passing, in three dimensions, quantized already."""
    in_passing: dict[tuple[str, str], list[str]] = defaultdict(list)
    experts: dict[str, list[str]] = defaultdict(list)
    quantized: dict[str, list[str]] = defaultdict(list)
    swept = _groups_of_linear(choices)
    for choice in choices:
        group, kind = choice.group, choice.kind
        if group is None:
            if not choice.ignores and not choice.is_float:
                for reaching, by in zip(recipe.groups, choice.named, strict=True):
                    if by:
                        quantized[reaching.name] += choice.weights()
        elif choice.is_experts:
            if group.experts is None:
                experts[group.name] += choice.weights()
        elif kind in NAMED_ONLY and not any(choice.named):
            in_passing[group.name, NAMED_ONLY[kind]] += choice.modules
        elif kind in NOT_LINEAR and group.name in swept and choice.modules.keys() - group.targets:
            in_passing[group.name, NOT_LINEAR[kind]] += [name for name in choice.modules if name not in group.targets]
    yield from (_class_reach(group, what, modules) for (group, what), modules in in_passing.items())
    yield from (_experts_3d(group, names) for group, names in experts.items())
    yield from (_quantized(group, names) for group, names in quantized.items())


def _groups_of_linear(choices: Iterable[Choice]) -> set[str]:
    """Groups that quantize something Linear: a pattern of theirs that also reaches an embedding was not meant to."""
    return {c.group.name for c in choices if c.group is not None and c.kind not in NOT_LINEAR}


def _unmatched(recipe: Recipe, choices: Iterable[Choice], checkpoint: Checkpoint) -> Iterator[Finding]:
    won: set[tuple[str, str]] = set()
    lost: dict[tuple[str, str], Choice] = {}
    ignoring: set[str] = set()
    for choice in choices:
        ignoring.update(choice.ignores)
        for group, matched in zip(recipe.groups, choice.named, strict=True):
            if choice.group is group:
                won.update((group.name, target) for target in matched)
                if choice.kind not in NOT_LINEAR and not choice.is_experts:
                    won.update((group.name, target) for target in CLASS_TARGETS)
            else:
                for target in matched:
                    lost.setdefault((group.name, target), choice)
    targets = [(group, t) for group in recipe.groups for t in group.targets if (group.name, t) not in won]
    ignores = [item.pattern for item in recipe.ignore if not item.optional and item.pattern not in ignoring]
    if targets or ignores:
        modules = {name.rpartition(".")[0] for name in checkpoint.tensors}.union(*(c.modules for c in choices))
        yield from (_target_unmatched(group, t, lost.get((group.name, t)), modules) for group, t in targets)
        yield from (_ignore_unmatched(text, modules) for text in ignores if not any(map(Matcher([text]).all, modules)))


def _target_unmatched(group: Group, target: str, lost: Choice | None, modules: set[str]) -> Finding:
    close = None
    if lost is not None:
        reason = _why_lost(lost)
    elif target in CLASS_TARGETS:
        reason = "no weight that is left to it is a floating matrix of a Linear"
    else:
        reason = "no weight of the checkpoint has such a name"
        close = nearest(target, modules)
    message = f"groups.{group.name}: target {target!r} wins no tensor: {reason}"
    hint = f"did you mean {close}?" if close else f"move groups.{group.name} up, correct the target, or remove it"
    return Finding("recipe.target-unmatched", message, hint=hint, data={"group": group.name, "target": target})


def _why_lost(choice: Choice) -> str:
    module, ref = choice.first
    if choice.group is not None:
        return f"{module} is won by groups.{choice.group.name}, which stands before it"
    if choice.ignores:
        return f"{module} is ignored by {choice.ignores[0]!r}"
    return f"{ref.name} is {ref.dtype} {list(ref.shape)}, not a floating matrix"


def _ignore_unmatched(pattern: str, modules: Iterable[str]) -> Finding:
    close = nearest(pattern, modules)
    meant = f"did you mean {close}? else " if close else ""
    message = f"ignore {pattern!r} matches no module of the checkpoint (patterns are matched against module names)"
    hint = f"{meant}write {{pattern: {pattern!r}, optional: true}}"
    return Finding("recipe.ignore-unmatched", message, hint=hint, data={"pattern": pattern})


def _class_reach(group: str, what: str, modules: list[str]) -> Finding:
    forms = sorted({to_template(module).replace("#", "*") for module in modules})
    message = f"groups.{group} reaches {len(modules):,} {what} weights only in passing ({', '.join(forms[:3])})"
    hint = f"name it: add {forms[0]!r} to ignore, or to a group's targets"
    data = {"group": group, "modules": len(modules), "forms": forms}
    return Finding("recipe.class-reach", message, tensor=f"{modules[0]}.weight", hint=hint, data=data)


def _experts_3d(group: str, names: list[str]) -> Finding:
    message = f"groups.{group} reaches {len(names):,} 3-D expert tensors and does not say how they lie"
    hint = (
        f"set groups.{group}.experts to rows ([E, 2*inter, hidden]) or columns ([E, hidden, 2*inter]), or ignore them"
    )
    return Finding("plan.experts-3d", message, tensor=names[0], hint=hint, data={"group": group, "tensors": len(names)})


def _quantized(group: str, names: list[str]) -> Finding:
    message = f"groups.{group} reaches {len(names):,} weights that are quantized already"
    hint = "ckptkit dequantize SRC OUT makes them dense first; or ignore them"
    return Finding("plan.existing", message, tensor=names[0], hint=hint, data={"group": group, "tensors": len(names)})
