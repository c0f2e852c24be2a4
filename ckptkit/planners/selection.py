"""Which module gets which group of a recipe: ignores win, then the first group that reaches it.

A *choice* is made for every weight of rank two or more and for every 3-D expert tensor. Everything else is copied.
Nothing is decided silently: each choice names its rule, and each rule that decides nothing is a finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..checkpoint import Checkpoint
from ..errors import Finding
from ..families import Kind, classifier, embedding_of, head_of, is_expert_tensor, is_tied, module_of
from ..header import FLOATS
from ..names import Matcher, split
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


class Choice(NamedTuple):
    """A weight, its module, and the group that quantizes it (None: copied), with the rule that says so.

    ``named`` holds, per group of the recipe, the targets that match the module by name; ``ignores`` the ignores that do.
    ``from_embedding`` marks a tied head that is not stored: ``ref`` is then the embedding.
    """

    module: str
    ref: Ref
    kind: Kind
    group: Group | None
    rule: str
    ignores: tuple[str, ...]
    named: tuple[tuple[str, ...], ...]
    from_embedding: bool = False

    @property
    def is_experts(self) -> bool:
        return len(self.ref.shape) == 3 and is_expert_tensor(self.ref.name, self.ref.shape)


class Selection(NamedTuple):
    """All choices by module name, in the order of the checkpoint, and every problem seen while choosing."""

    choices: Mapping[str, Choice]
    problems: list[Finding]


def select(checkpoint: Checkpoint, recipe: Recipe) -> Selection:
    """Apply groups and ignores of ``recipe`` to the checkpoint's modules."""
    ignore = Matcher([item.pattern for item in recipe.ignore])
    named = [Matcher([target for target in group.targets if target not in CLASS_TARGETS]) for group in recipe.groups]
    choices = {}
    for module, ref, kind, from_embedding in _candidates(checkpoint):
        by_group = tuple(matcher.all(module) for matcher in named)
        ignores = ignore.all(module)
        group = None if ignores else _reaching(recipe.groups, by_group, ref, kind)
        rule = _rule(group, ignores, kind)
        choices[module] = Choice(module, ref, kind, group, rule, ignores, by_group, from_embedding)
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors} | choices.keys()
    problems = [*_overreach(recipe, choices.values()), *_unmatched(recipe, choices.values(), modules)]
    return Selection(choices, problems)


def tied_head(checkpoint: Checkpoint) -> tuple[str, Ref] | None:
    """The head's module name and the embedding it is tied to, where the config ties them."""
    if checkpoint.config is None or not is_tied(checkpoint.config):
        return None
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    head = head_of(embedding) if embedding is not None else None
    return None if head is None else (head, checkpoint.tensors[f"{embedding}.weight"])


def _candidates(checkpoint: Checkpoint) -> Iterator[tuple[str, Ref, Kind, bool]]:
    """Weights of rank two or more, 3-D expert tensors, and the tied head that is not stored."""
    classify = classifier(checkpoint.config)
    for name, ref in checkpoint.tensors.items():
        if len(ref.shape) >= 2 and (name.endswith(".weight") or is_expert_tensor(name, ref.shape)):
            yield module_of(name), ref, classify(name, ref.shape), False
    head = tied_head(checkpoint)
    if head is not None and f"{head[0]}.weight" not in checkpoint.tensors:
        yield head[0], head[1], Kind.HEAD, True


def _reaching(groups: Sequence[Group], named: Sequence[tuple[str, ...]], ref: Ref, kind: Kind) -> Group | None:
    """The first group that reaches a weight: by name whatever it is a floating matrix of, by class only Linear."""
    if ref.dtype not in FLOATS:
        return None
    experts = len(ref.shape) == 3 and is_expert_tensor(ref.name, ref.shape)
    for group, matched in zip(groups, named, strict=True):
        if matched and (experts or len(ref.shape) == 2):
            return group
        if CLASS_TARGETS.intersection(group.targets) and len(ref.shape) == 2 and kind not in NOT_LINEAR:
            return group
    return None


def _rule(group: Group | None, ignores: Sequence[str], kind: Kind) -> str:
    if ignores:
        return f"ignore {ignores[0]}"
    if group is not None:
        return f"groups.{group.name}"
    return f"not Linear: {NOT_LINEAR[kind]}" if kind in NOT_LINEAR else "reached by no group"


# --- problems ----------------------------------------------------------------------------------------------


def _overreach(recipe: Recipe, choices: Iterable[Choice]) -> Iterator[Finding]:
    """What a group reaches and may not take: by class only, in passing, in three dimensions, quantized already."""
    in_passing: dict[tuple[str, str], list[str]] = defaultdict(list)
    experts: dict[str, list[str]] = defaultdict(list)
    quantized: dict[str, list[str]] = defaultdict(list)
    swept = _groups_of_linear(choices := list(choices))
    for choice in choices:
        group = choice.group
        if group is None:
            if not choice.ignores and choice.ref.dtype not in FLOATS:
                for named, by in zip(recipe.groups, choice.named, strict=True):
                    quantized[named.name] += [choice.ref.name] if by else []
        elif choice.is_experts:
            experts[group.name] += [choice.ref.name] if group.experts is None else []
        elif choice.kind in NAMED_ONLY and not any(choice.named):
            in_passing[group.name, NAMED_ONLY[choice.kind]].append(choice.module)
        elif choice.kind in NOT_LINEAR and choice.module not in group.targets and group.name in swept:
            in_passing[group.name, NOT_LINEAR[choice.kind]].append(choice.module)
    yield from (_class_reach(group, what, modules) for (group, what), modules in in_passing.items())
    yield from (_experts_3d(group, names) for group, names in experts.items() if names)
    yield from (_quantized(group, names) for group, names in quantized.items() if names)


def _groups_of_linear(choices: Iterable[Choice]) -> set[str]:
    """Groups that quantize something Linear: a pattern of theirs that also reaches an embedding was not meant to."""
    return {c.group.name for c in choices if c.group is not None and c.kind not in NOT_LINEAR}


def _unmatched(recipe: Recipe, choices: Iterable[Choice], modules: set[str]) -> Iterator[Finding]:
    won: set[tuple[str, str]] = set()
    lost: dict[tuple[str, str], Choice] = {}
    for choice in choices:
        for group, matched in zip(recipe.groups, choice.named, strict=True):
            if choice.group is group:
                won.update((group.name, target) for target in matched)
                if choice.kind not in NOT_LINEAR and not choice.is_experts:
                    won.update((group.name, target) for target in CLASS_TARGETS)
            else:
                lost.update({(group.name, target): choice for target in matched})
    for group in recipe.groups:
        for target in group.targets:
            if (group.name, target) not in won:
                yield _target_unmatched(group, target, lost.get((group.name, target)), modules)
    for item in recipe.ignore:
        if not item.optional and not any(map(_matching(item.pattern), modules)):
            yield _ignore_unmatched(item.pattern, modules)


def _target_unmatched(group: Group, target: str, lost: Choice | None, modules: set[str]) -> Finding:
    close = None
    if lost is None and target in CLASS_TARGETS:
        reason = "no weight that is left to it is a floating matrix of a Linear"
    elif lost is None:
        reason = "no weight of the checkpoint has such a name"
        close = nearest(target, modules)
    elif lost.group is not None:
        reason = f"{lost.module} is won by groups.{lost.group.name}, which stands before it"
    elif lost.ignores:
        reason = f"{lost.module} is ignored by {lost.ignores[0]!r}"
    else:
        reason = f"{lost.ref.name} is {lost.ref.dtype} {list(lost.ref.shape)}, not a floating matrix"
    message = f"groups.{group.name}: target {target!r} wins no tensor: {reason}"
    hint = f"did you mean {close}?" if close else f"move groups.{group.name} up, correct the target, or remove it"
    return Finding("recipe.target-unmatched", message, hint=hint, data={"group": group.name, "target": target})


def _matching(pattern: str) -> Callable[[str], bool]:
    matcher = Matcher([pattern])
    return lambda name: bool(matcher.all(name))


def _ignore_unmatched(pattern: str, modules: Iterable[str]) -> Finding:
    close = nearest(pattern, modules)
    meant = f"did you mean {close}? else " if close else ""
    message = f"ignore {pattern!r} matches no module of the checkpoint (patterns are matched against module names)"
    hint = f"{meant}write {{pattern: {pattern!r}, optional: true}}"
    return Finding("recipe.ignore-unmatched", message, hint=hint, data={"pattern": pattern})


def _class_reach(group: str, what: str, modules: list[str]) -> Finding:
    forms = sorted({split(module)[0].replace("#", "*") for module in modules})
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
