"""What the groups and ignores of a recipe reach and should not, and what they miss. Each yields findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..errors import Finding
from ..families import Kind, draft_part, is_transposed
from ..files.checkpoint import Checkpoint
from ..naming.names import Matcher
from ..naming.patterns import CLASS_TARGETS, nearest, pattern
from ..plan import Ref
from ..recipe.recipe import Group, Recipe
from ..stored import split_name
from .generalise import by_template, patterns
from .selection import NOT_LINEAR, Choice

# Reached by a class target only together with a target or an ignore that names them.
NAMED_ONLY = {Kind.HEAD: "head", Kind.ROUTER: "router", Kind.MTP: "MTP module", Kind.DRAFT: "draft module"}
_DENSE_FIRST = "ckptkit dequantize SRC OUT makes {} dense first"

# --- reached and not meant ---------------------------------------------------------------------------------


def overreach(recipe: Recipe, choices: Sequence[Choice], checkpoint: Checkpoint) -> Iterator[Finding]:
    """What a group reaches and may not take: in passing, no Linear, in three dimensions, quantized already."""
    in_passing: dict[tuple[str, Kind], list[str]] = defaultdict(list)
    experts: dict[str, list[str]] = defaultdict(list)
    quantized: dict[str, list[str]] = defaultdict(list)
    swept = {c.group.name for c in choices if c.group is not None and c.kind not in NOT_LINEAR}
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
            in_passing[group.name, kind] += choice.modules
        elif kind in NOT_LINEAR:
            # A pattern that takes Linear modules too was not meant for this; one that takes nothing else was.
            passing = [name for name in choice.modules if group.name in swept and name not in group.targets]
            in_passing[group.name, kind] += passing
            if len(passing) < len(choice.modules):
                yield _not_linear(group.name, choice, checkpoint.config)
    yield from _class_reach({key: modules for key, modules in in_passing.items() if modules}, choices, checkpoint)
    yield from (_experts_3d(group, names) for group, names in experts.items())
    yield from (_quantized(group, names) for group, names in quantized.items())


def _class_reach(
    in_passing: dict[tuple[str, Kind], list[str]], choices: Sequence[Choice], checkpoint: Checkpoint
) -> Iterator[Finding]:
    if not in_passing:
        return
    passing = {module for modules in in_passing.values() for module in modules}
    kept = [module for choice in choices if choice.group is not None for module in choice.modules.keys() - passing]
    part = draft_part(checkpoint.config)
    trunk = {
        branch for choice in choices for name in choice.modules if part(name) is None for branch in _branches(name)
    }
    for (group, kind), modules in in_passing.items():
        found = _own_branches(modules, trunk) if kind in {Kind.MTP, Kind.DRAFT} else _forms(modules, kept)
        what = NAMED_ONLY.get(kind) or NOT_LINEAR[kind]
        message = f"groups.{group} reaches {len(modules):,} {what} weights only in passing ({modules[0]})"
        hint = f"name them: add to ignore, or to a group's targets: {', '.join(map(_quoted, found))}"
        data = {"group": group, "modules": len(modules), "patterns": found}
        yield Finding("recipe.class-reach", message, tensor=f"{modules[0]}.weight", hint=hint, data=data)


def _branches(name: str) -> Iterator[str]:
    """``a``, ``a.b``, ``a.b.c`` of ``a.b.c``."""
    return accumulate(name.split("."), "{}.{}".format)


def _own_branches(modules: Iterable[str], trunk: Collection[str]) -> list[str]:
    """Patterns of the whole branches that ``modules`` lie on: an MTP layer, say, and none of the model's own layers."""
    found = {name: next((branch for branch in _branches(name) if branch not in trunk), name) for name in modules}
    texts = (name if branch == name else rf"re:{_escaped(branch)}\..*" for name, branch in found.items())
    return list(dict.fromkeys(texts))


def _escaped(branch: str) -> str:
    return branch.replace(".", r"\.")


def _forms(modules: Iterable[str], kept: Sequence[str]) -> list[str]:
    """Patterns that match all of ``modules`` and nothing of ``kept``: a glob for each template if that can be."""
    found: list[str] = []
    among = by_template(kept)
    for template, names in by_template(modules).items():
        form = names[0] if len(names) == 1 else template.replace("#", "*")
        if any(map(pattern(form).matches, kept)):
            found += patterns({template: names}, {template: [*names, *among.get(template, ())]}, among.keys())
        else:
            found.append(form)
    return found


def _quoted(text: str) -> str:
    """As it is written in YAML, where a backslash in single quotes stands for itself."""
    return f"'{text}'"


def _not_linear(group: str, choice: Choice, config: Mapping[str, Any] | None) -> Finding:
    module, ref = choice.first
    what = _kind_in_words(choice, config)
    message = f"groups.{group} takes {ref.name}, which is no Linear ({what}): no engine loads one quantized"
    hint = f"take '{module}' out of its targets"
    data = {"group": group, "modules": len(choice.modules)}
    return Finding("plan.not-linear", message, file=ref.file, tensor=ref.name, hint=hint, data=data)


def _experts_3d(group: str, names: list[str]) -> Finding:
    message = f"groups.{group} reaches {len(names):,} 3-D expert tensors and does not say how they lie"
    hint = (
        f"set groups.{group}.experts to rows ([E, 2*inter, hidden]) or columns ([E, hidden, 2*inter]), or ignore them"
    )
    return Finding("plan.experts-3d", message, tensor=names[0], hint=hint, data={"group": group, "tensors": len(names)})


def _quantized(group: str, names: list[str]) -> Finding:
    message = f"groups.{group} reaches {len(names):,} weights that are quantized already"
    hint = f"{_DENSE_FIRST.format('them')}; or ignore them"
    return Finding("plan.existing", message, tensor=names[0], hint=hint, data={"group": group, "tensors": len(names)})


# --- meant and not reached ---------------------------------------------------------------------------------


def experts_left(recipe: Recipe, choices: Iterable[Choice]) -> Iterator[Finding]:
    """``recipe.experts-left`` (a warning): stacked experts that a recipe for the whole body passes by."""
    body = next((group for group in recipe.groups if CLASS_TARGETS.intersection(group.targets)), None)
    dense = [choice for choice in choices if choice.is_float]
    left = [c for c in dense if c.is_experts and c.group is None and not c.ignores]
    if body is None or not left:
        return
    refs = [ref for choice in left for ref in choice.modules.values()]
    size = sum(ref.nbytes for ref in refs)
    share = size / max(sum(ref.nbytes for choice in dense for ref in choice.modules.values()), 1)
    forms = sorted({choice.alike.template.replace("#", "*") for choice in left})
    message = (
        f"{len(refs):,} stacked expert tensors ({refs[0].name}, …), {share:.0%} of all weight bytes, stay as they are:"
        " Linear does not reach them"
    )
    hint = (
        f"add a group with targets {', '.join(map(_quoted, forms))}, a scheme, and experts: rows or columns;"
        " or ignore them"
    )
    data = {"tensors": len(refs), "bytes": size, "patterns": forms}
    yield Finding("recipe.experts-left", message, tensor=refs[0].name, hint=hint, severity="warning", data=data)


def unmatched(recipe: Recipe, choices: Sequence[Choice], checkpoint: Checkpoint) -> Iterator[Finding]:
    """Targets that win no tensor, and ignores that match no module."""
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
        modules = {split_name(name)[0]: ref for name, ref in checkpoint.tensors.items()}
        modules |= {name: ref for choice in choices for name, ref in choice.modules.items()}
        for group, target in targets:
            reason, hint = _why_unmatched(group, target, lost.get((group.name, target)), choices, checkpoint, modules)
            yield _target_unmatched(group, target, reason, hint)
        yield from (_ignore_unmatched(text, modules) for text in ignores if not any(map(Matcher([text]).all, modules)))


def _target_unmatched(group: Group, target: str, reason: str, hint: str) -> Finding:
    message = f"groups.{group.name}: target {target!r} wins no tensor: {reason}"
    return Finding("recipe.target-unmatched", message, hint=hint, data={"group": group.name, "target": target})


def _why_unmatched(
    group: Group,
    target: str,
    lost: Choice | None,
    choices: Iterable[Choice],
    checkpoint: Checkpoint,
    modules: dict[str, Ref],
) -> tuple[str, str]:
    """Why a target wins nothing, and what to do about it."""
    remove = f"correct the target, or remove it from groups.{group.name}"
    if lost is not None:
        return _why_lost(lost), f"move groups.{group.name} up, {remove}" if lost.group is not None else remove
    if target in CLASS_TARGETS:
        return _no_linear(choices, checkpoint), remove
    named = next((name for name in modules if Matcher([target]).all(name)), None)
    if named is None:
        close = nearest(target, [*modules, *CLASS_TARGETS])
        return "no module of the checkpoint has such a name", f"did you mean {close}?" if close else remove
    ref = modules[named]
    if split_name(ref.name)[1] == "weight":
        return f"{ref.name} is {ref.dtype} {list(ref.shape)}, no matrix", remove
    return f"{named} has no weight that is not quantized already ({ref.name})", f"{remove}; {_DENSE_FIRST.format('it')}"


def _no_linear(choices: Iterable[Choice], checkpoint: Checkpoint) -> str:
    """Why ``Linear`` reaches nothing: of what kinds the matrices are that it passes by."""
    kinds: Counter[str] = Counter()
    for choice in choices:
        if choice.kind in NOT_LINEAR and len(choice.alike.shape) == 2 and choice.is_float and not choice.ignores:
            kinds[_kind_in_words(choice, checkpoint.config)] += len(choice.modules)
    passed = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
    return "no weight that is left to it is a floating matrix of a Linear" + (
        f" (passed by: {passed})" if kinds else ""
    )


def _kind_in_words(choice: Choice, config: Mapping[str, Any] | None) -> str:
    transposed = is_transposed(choice.first[1].name, config)
    return "Conv1D, stored transposed as [in, out]" if transposed else NOT_LINEAR[choice.kind]


def _why_lost(choice: Choice) -> str:
    module, ref = choice.first
    if choice.group is not None:
        return f"{module} is won by groups.{choice.group.name}, which stands before it"
    if choice.ignores:
        return f"{module} is ignored by {choice.ignores[0]!r}"
    return f"{ref.name} is {ref.dtype} {list(ref.shape)}, not a floating matrix"


def _ignore_unmatched(text: str, modules: Iterable[str]) -> Finding:
    close = nearest(text, modules)
    meant = f"did you mean {close}? else " if close else ""
    message = f"ignore {text!r} matches no module of the checkpoint (patterns are matched against module names)"
    hint = f"{meant}write {{pattern: {_quoted(text)}, optional: true}}"
    return Finding("recipe.ignore-unmatched", message, hint=hint, data={"pattern": text})
