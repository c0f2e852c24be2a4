"""Whether the model is whole: every layer has what its siblings have, every layer its experts, the model its ends."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from ..console import fmt_count
from ..errors import Finding
from ..families import Kind, classifier, config_value, draft_part, embedding_of
from ..families.config import model_types, text_configs
from ..families.experts import declared_experts
from ..stored import COMPANIONS, WEIGHTS, split_name
from . import Subject
from .folding import EXAMPLES
from .stacks import Stack, absent, lost_tensors, runs, text_stack
from .weights import place_of

_REFETCH = "fetch the file that should hold it again, or take it from the source"


# --- layers ------------------------------------------------------------------------------------------------

# Keys under which configs say, layer by layer, what differs: layers of different kinds are not compared.
_PER_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern", "compress_ratios", "block_configs")
# As few layers as an accident leaves odd; more of one form are a kind of their own.
_ODD = 2
_MISSPELT = 0.75

Held = frozenset[str]


class Gap(NamedTuple):
    """What a layer lacks, and the one template that it has ``instead``, if so. ``certain``: it is not another kind."""

    missing: list[str]
    instead: str | None
    siblings: int
    certain: bool


def incomplete_layers(subject: Subject, found: list[Stack]) -> Iterator[Finding]:
    """``names.incomplete-layer``: one finding for each layer that lacks tensors."""
    is_norm = _norms(subject)
    told: set[str] = set()
    for stack in found:
        for layer, gap in sorted(_layer_gaps(stack, found, subject.config)):
            # The first layer of some models has no norm of its own, nor have some that draft.
            optional = (stack.part or layer == min(stack.layers)) and all(map(is_norm, gap.missing))
            finding = _told(stack, layer, gap, "error" if gap.certain and not optional else "warning")
            told.update(finding.data["missing"])
            yield finding
    yield from (finding for finding in _incomplete_sets(subject) if finding.tensor not in told)


def _layer_gaps(stack: Stack, found: list[Stack], config: Mapping[str, Any]) -> Iterator[tuple[int, Gap]]:
    layers = {layer: frozenset(held) for layer, held in stack.layers.items()}
    if stack.part:
        yield from _draft_gaps(layers) if len(layers) > 1 else _lone_gap(layers, stack.part, text_stack(found))
    elif stack.is_text or not any("#" in template for held in layers.values() for template in held):
        # Others are stages of a vision tower, each with its own number of blocks.
        kinds: dict[str, dict[int, Held]] = defaultdict(dict)
        for layer, held in layers.items():
            kinds[_kind(layer, config) if stack.is_text else ""][layer] = held
        for alike in kinds.values():
            yield from _gaps(alike, len(layers))


def _draft_gaps(layers: Mapping[int, Held]) -> Iterator[tuple[int, Gap]]:
    """Layers that draft may have parts of their own, at either end; what all others have belongs to each."""
    for layer, held in layers.items():
        others = [other for number, other in layers.items() if number != layer]
        missing = sorted(frozenset.intersection(*others) - held)
        if missing and len(others) > 1:
            yield layer, Gap(missing, None, len(others), True)


def _lone_gap(layers: Mapping[int, Held], part: Kind, own: Stack | None) -> Iterator[tuple[int, Gap]]:
    """A single layer that predicts further tokens has what those of the model's layers have that it is like."""
    ((layer, held),) = layers.items()
    forms = Counter(map(frozenset, own.layers.values())) if own and part is Kind.MTP else Counter()
    like = {
        form: number
        for form, number in forms.items()
        if number > _ODD and all(_has_siblings(template, held) for template in form)
    }
    missing = sorted(frozenset.intersection(*like) - held) if like else []
    if missing:
        yield layer, Gap(missing, None, sum(like.values()), True)


def _kind(layer: int, config: Mapping[str, Any]) -> str:
    said = (found.get(key) for _, found in text_configs(config) for key in _PER_LAYER)
    return repr([values[layer] for values in said if isinstance(values, list | str) and layer < len(values)])


def _gaps(layers: Mapping[int, Held], depth: int) -> Iterator[tuple[int, Gap]]:
    """Gaps in layers of one kind, in a stack of ``depth`` layers of all kinds."""
    counts = Counter(layers.values())
    for held, count in counts.items():
        others = {other: number for other, number in counts.items() if other != held}
        gap = _gap(held, count, others, depth) if others and count <= _ODD else None
        if gap is not None:
            yield from ((layer, gap) for layer, form in layers.items() if form == held)


def _gap(held: Held, count: int, others: Mapping[Held, int], depth: int) -> Gap | None:
    """What all larger forms have and this one lacks; None where they are too few to tell."""
    own = held.difference(*others)
    instead = next(iter(own)) if len(own) == 1 else None
    known = held - own if instead else held
    larger = {other: number for other, number in others.items() if other > known}
    siblings = sum(larger.values())
    if siblings < (2 * count if depth > 2 else 1):
        return None
    missing = sorted(frozenset.intersection(*larger) - known)
    certain = all(_has_siblings(template, known) for template in missing)
    if not missing or not (certain or siblings >= 3 * count):
        return None
    if instead and (len(missing) > 1 or SequenceMatcher(None, instead, missing[0]).ratio() < _MISSPELT):
        return None
    return Gap(missing, instead, siblings, certain)


def _has_siblings(template: str, held: Held) -> bool:
    """Whether ``held`` has anything of the block that holds the template's module (``self_attn``, ``mlp``)."""
    block = template.rpartition(".")[0].rpartition(".")[0]
    return not block or any(other.startswith(f"{block}.") for other in held)


def _told(stack: Stack, layer: int, gap: Gap, severity: str) -> Finding:
    place = f"{stack.prefix}.{layer}"
    names = [f"{place}.{template.replace('#', '0')}" for template in gap.missing]
    more = f" and {len(names) - 1} tensors more" if len(names) > 1 else ""
    message = f"{place} lacks {gap.missing[0]}{more}, which {fmt_count(gap.siblings, 'layer')} like it have"
    message += f"; it has {gap.instead} instead" if gap.instead else ""
    rename = f"ckptkit reshard SRC OUT --rename {place}.{gap.instead}={names[0]}"
    data = {"layer": layer, "missing": names[: 4 * EXAMPLES], "count": len(names), "instead": gap.instead}
    hint = rename if gap.instead else _REFETCH
    return Finding("names.incomplete-layer", message, tensor=names[0], hint=hint, severity=severity, data=data)


# Modules beside each other that only come together; the gate of an MLP may rightly be the one that is not there.
_TOGETHER = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w3", "w1", "w2"),
    ("enorm", "hnorm"),
    ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "fc", "norm"),
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ("main_proj", "main_norm"),
    ("markov_w1", "markov_w2"),
)
_OPTIONAL = frozenset({"gate_proj", "w3"})


def _incomplete_sets(subject: Subject) -> Iterator[Finding]:
    """What no sibling shows, because there is none: one missing of modules that only come together."""
    beside: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in (*(cell.first.name for cell in subject.survey.cells.values()), *lost_tensors(subject)):
        module, last = split_name(name)
        template, layer = place_of(module)
        if last in WEIGHTS or last in COMPANIONS:
            beside[template.rpartition(".")[0], layer].setdefault(module.rpartition(".")[2], module)
    for held in beside.values():
        for members in _TOGETHER:
            missing = [member for member in members if member not in held]
            if len(missing) == 1 and not _OPTIONAL.intersection(missing):
                there = next(held[member] for member in members if member in held)
                other = f"{there.rpartition('.')[0]}.{missing[0]}".removeprefix(".")
                message, data = f"{there} has no {other} beside it", {"missing": [f"{other}.weight"]}
                yield Finding("names.incomplete-layer", message, tensor=f"{other}.weight", hint=_REFETCH, data=data)


# --- experts -----------------------------------------------------------------------------------------------

_EACH = re.compile(r"(.*?experts)\.#\.(.+)")


def incomplete_experts(subject: Subject, found: list[Stack]) -> Iterator[Finding]:
    """``names.incomplete-experts``: for each layer's experts that are not as many as declared, one finding."""
    declared = declared_experts(subject.config)
    yield from _stacked(subject, declared)
    odd: dict[str, int] = {}
    for stack in found:
        paths = {
            f"{stack.prefix}.{layer}.{path}": set(parts.values())
            for layer, templates in stack.layers.items()
            for path, parts in _expert_counts(templates).items()
        }
        allowed = (declared if stack.is_text else None) or {max(map(max, paths.values()), default=0)}
        for path, numbers in paths.items():
            if len(numbers) > 1 or not numbers <= allowed:
                odd[path] = min((count for count in allowed if count >= max(numbers)), default=max(allowed))
    yield from _uncounted(subject, odd)


def _expert_counts(templates: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Experts by path and part: ``{"mlp.experts": {"up_proj.weight": 256, …}}``."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for template, number in templates.items():
        each = _EACH.fullmatch(template)
        if each:
            counts[each[1]][each[2]] = number
    return counts


def _uncounted(subject: Subject, odd: Mapping[str, int]) -> Iterator[Finding]:
    """Findings for the paths of experts of which there should be so many; only here single names are looked at."""
    held: dict[str, dict[str, set[int]]] = {path: defaultdict(set) for path in odd}
    for name in (*subject.checkpoint.tensors, *lost_tensors(subject)) if odd else ():
        above, _, below = name.partition(".experts.")
        number, _, part = below.partition(".")
        if number.isdecimal() and f"{above}.experts" in held:
            held[f"{above}.experts"][split_name(part)[0]].add(int(number))
    for path, wanted in odd.items():
        lacking = {part: absent(numbers, wanted) for part, numbers in held[path].items()}
        part, missing = max(lacking.items(), key=lambda item: len(item[1]))
        experts = len(set().union(*held[path].values()))
        data = {"wanted": wanted, "experts": experts, "missing": missing[: 4 * EXAMPLES]}
        if missing:
            message = f"{path} should be {wanted} experts, and {part} of {runs(missing)} is not there"
            tensor = f"{path}.{missing[0]}.{part}.weight"
        else:
            message, tensor = f"{path} are {experts} experts, and {wanted} are declared", f"{path}.{wanted}"
        yield Finding("names.incomplete-experts", message, tensor=tensor, hint=_REFETCH, data=data)


def _stacked(subject: Subject, declared: set[int]) -> Iterator[Finding]:
    """Experts in one tensor: its first dimension counts them."""
    for module in subject.survey.modules:
        ref = module.weight.first
        if module.kind is Kind.EXPERTS and declared and len(ref.shape) > 2 and ref.shape[0] not in declared:
            message = f"{ref.name} holds {ref.shape[0]} experts, and {max(declared)} are declared"
            data = {"declared": max(declared), "experts": ref.shape[0]}
            hint = "correct the number of experts in config.json, or take the tensor from the source"
            yield Finding("names.incomplete-experts", message, file=ref.file, tensor=ref.name, hint=hint, data=data)


# --- the ends ----------------------------------------------------------------------------------------------


def incomplete_model(subject: Subject, found: list[Stack]) -> Iterator[Finding]:
    """``names.incomplete-model``: a language model without token embedding, or without the norm after its layers."""
    own = text_stack(found)
    if own is None or config_value(subject.config, "is_encoder_decoder"):
        return
    part_of, is_norm = draft_part(subject.config), _norms(subject)
    names = [*(cell.first.name for cell in subject.survey.cells.values()), *lost_tensors(subject)]
    parent = f".{own.prefix}".rpartition(".")[0].removeprefix(".")
    tables = {m.name for m in subject.survey.modules if m.kind is Kind.EMBEDDING and not part_of(f"{m.name}.weight")}
    tables.add(embedding_of(names, subject.config) or "")
    # All of a model lies below one name, if its layers do.
    if not any(table and (not parent or _root(table) == _root(parent)) for table in tables):
        message, tensor = f"{own.prefix} has layers, and there is no token embedding", _child(parent, "embed_tokens")
        yield Finding("names.incomplete-model", message, tensor=tensor, hint=_REFETCH)
    ends = [name for name in names if _child(parent, name.split(".")[-2:][0]) == name and is_norm(name)]
    if not ends and not _normed_after(subject.config) and any(map(is_norm, own.layers[min(own.layers)])):
        message = f"no norm follows {own.prefix}: the last layer's output would reach the head as it is"
        yield Finding("names.incomplete-model", message, tensor=_child(parent, "norm"), hint=_REFETCH)


def _root(name: str) -> str:
    return name.partition(".")[0]


def _child(parent: str, module: str) -> str:
    return f"{parent}.{module}.weight".removeprefix(".")


def _normed_after(config: Mapping[str, Any]) -> bool:
    """Models whose layers end with a norm of their own."""
    return "openai-gpt" in model_types(config) or config.get("do_layer_norm_before") is False


def _norms(subject: Subject) -> Callable[[str], bool]:
    """Whether a tensor is a norm's by its name."""
    classify = classifier(subject.config)
    return lambda name: classify(name, (1, 1)) is Kind.NORM
