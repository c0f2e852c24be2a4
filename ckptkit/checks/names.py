"""Checks of the tensors' names against each other: weights and scales, layers, experts, drafts, leftovers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ..errors import Finding
from ..families import Kind, classifier, declared_drafts, draft_part
from ..files.checkpoint import CONFIG
from ..inspecting.survey import Cell, Key, keyed
from ..plan import Ref
from ..stored import COMPANIONS, SCALES, WEIGHTS, split_name
from . import Level, Probe, Seen, Subject
from .completeness import incomplete_experts, incomplete_layers, incomplete_model
from .config import generates
from .folding import fold
from .names_pages import PAGES
from .stacks import lost_tensors, stacks
from .weights import CODES, Place, place_of

__all__ = ["PAGES", "PROBES"]

# --- weights and scales ------------------------------------------------------------------------------------

# The last parts of names that stand for nothing but a companion of a weight; others do with a certain dtype only.
_SURE = frozenset(
    {"weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2", "weight_zero_point", "weight_shape"}
)
_SURE_OF_DTYPE = frozenset({("scale", "F8_E8M0"), ("qzeros", "I32"), ("scales", "U8")})
_PARAMETER = "parameter"  # neither a weight nor a companion
_LIKE_A_SCALE = re.compile(r"(?!(?:input|output|act|[kvq])_).*(?:scale|amax).*", re.IGNORECASE)

IsExperts = Callable[[Ref], bool]
Parts = Mapping[str, Ref]


def _scales(subject: Subject) -> Seen:
    """Names are looked at only in those places (template and layer) where numbers of weights and scales differ."""
    classify = classifier(subject.config)
    part = partial(_part, is_experts=lambda ref: classify(ref.name, ref.shape) is Kind.EXPERTS)
    places: dict[Place, list[tuple[str, Cell]]] = defaultdict(list)
    for cell in subject.survey.cells.values():
        module, last = part(cell.first)
        places[place_of(module)].append((last, cell))
    odd = {cell.key for cells in places.values() if not _even(cells) for _, cell in cells}
    findings = fold(_unpaired(subject, odd, part)) if odd else ()
    return Seen(findings, len(subject.survey.modules))


def _part(ref: Ref, is_experts: IsExperts) -> tuple[str, str]:
    """A tensor as (module, what it is there); one that is the whole of its module keeps its name."""
    module, last = split_name(ref.name)
    if last in WEIGHTS or last in COMPANIONS:
        return module, last
    return ref.name, "weight" if is_experts(ref) else _PARAMETER


def _is_codes(last: str, ref: Ref) -> bool:
    return last in WEIGHTS and (last != "weight" or ref.dtype in CODES)


def _is_sure(last: str, ref: Ref) -> bool:
    return last in _SURE or (last, ref.dtype) in _SURE_OF_DTYPE


def _even(cells: Iterable[tuple[str, Cell]]) -> bool:
    """Whether, by their numbers, every quantized weight of a place has its scale and every scale its weight."""
    numbers: dict[str, int] = defaultdict(int)
    codes = weights = 0
    for last, cell in cells:
        numbers[last] += cell.number
        codes += cell.number if _is_codes(last, cell.first) else 0
        weights += cell.number if last in WEIGHTS or last == _PARAMETER else 0
    sure = max((numbers[last] for last, cell in cells if _is_sure(last, cell.first)), default=0)
    return codes <= max(numbers[scale] for scale in SCALES) and sure <= weights


def _unpaired(subject: Subject, odd: set[Key], part: Callable[[Ref], tuple[str, str]]) -> Iterator[Finding]:
    modules: dict[str, dict[str, Ref]] = defaultdict(dict)
    for ref, key in keyed(subject.survey.tensors):
        if key in odd:
            module, last = part(ref)
            modules[module][last] = ref
    lost: dict[str, set[str]] = defaultdict(set)
    for name in lost_tensors(subject):
        module, last = split_name(name)
        lost[module].add(last)
    lacking = {module: parts for module, parts in modules.items() if _lacks_scale(parts, lost[module])}
    unknown = _unknown_scales(subject, lacking)
    for module, parts in modules.items():
        if module in unknown:
            yield _named_otherwise(_codes(parts), unknown[module])
        elif module in lacking:
            yield _without_scale(_codes(parts))
        elif not parts.keys() & {*WEIGHTS, _PARAMETER} and not lost[module] & WEIGHTS:
            sure = [ref for last, ref in parts.items() if _is_sure(last, ref)]
            yield from (_without_weight(ref, module) for ref in sure[:1])


def _codes(parts: Parts) -> Ref:
    return next(ref for last, ref in parts.items() if _is_codes(last, ref))


def _lacks_scale(parts: Parts, lost: set[str]) -> bool:
    """Whether a module has codes, and nothing says what they are multiplied by."""
    return any(_is_codes(last, ref) for last, ref in parts.items()) and not {*parts, *lost}.intersection(SCALES)


def _unknown_scales(subject: Subject, lacking: Mapping[str, Parts]) -> dict[str, Ref]:
    """Beside weights that lack a scale, tensors that are called like one."""
    found: dict[str, Ref] = {}
    for ref in subject.survey.tensors if lacking else ():
        module, _, last = ref.name.rpartition(".")
        if module in lacking and last not in COMPANIONS and _LIKE_A_SCALE.fullmatch(last):
            found[module] = ref
    return found


def _named_otherwise(codes: Ref, scale: Ref) -> Finding:
    message = f"{scale.name} looks like the scale of {codes.name} ({codes.dtype}), under a name that no format has"
    last = scale.name.rpartition(".")[2]
    hint = rf"ckptkit reshard SRC OUT --rename 're:\.{re.escape(last)}$=.weight_scale', if it is what weights are multiplied by"
    data = {"weight": codes.name, "suffix": last}
    return Finding("names.unknown-scale", message, file=scale.file, tensor=scale.name, hint=hint, data=data)


def _without_scale(codes: Ref) -> Finding:
    message = f"{codes.name} ({codes.dtype}) has no scale"
    hint = "take the scale from the source: whatever dropped it, the codes alone are not the weight"
    return Finding("names.weight-without-scale", message, file=codes.file, tensor=codes.name, hint=hint)


def _without_weight(ref: Ref, module: str) -> Finding:
    message = f"{ref.name} has no weight: nothing is stored of {module} but what says how to read it"
    hint = f"take the weight from the source, or ckptkit reshard SRC OUT --drop {ref.name}"
    return Finding("names.scale-without-weight", message, file=ref.file, tensor=ref.name, hint=hint)


# --- layers, experts, the model ----------------------------------------------------------------------------


def _whole(subject: Subject) -> Seen:
    found = stacks(subject)
    findings = [*incomplete_layers(subject, found), *incomplete_experts(subject, found)]
    if generates(subject.config):
        findings += incomplete_model(subject, found)
    return Seen(fold(findings), sum(len(stack.layers) for stack in found))


# --- drafts ------------------------------------------------------------------------------------------------

# Keys that a target declares its own draft layers by; others are those of a checkpoint that is a draft itself.
_OWN_DRAFTS = re.compile(r"(?:.*\.)?(?:num_nextn|num_mtp|n_mtp|mtp|dspark).*")
_DRAFT_MODEL = re.compile(r"draft|eagle|dspark|dflash|medusa|mtp|nextn", re.IGNORECASE)


def _drafts(subject: Subject) -> Seen:
    declared = {key: value for key, value in declared_drafts(subject.config).items() if _OWN_DRAFTS.fullmatch(key)}
    architectures = subject.config.get("architectures")
    itself = isinstance(architectures, list) and any(_DRAFT_MODEL.search(str(name)) for name in architectures)
    part_of = draft_part(subject.config)
    names = (*(cell.first.name for cell in subject.survey.cells.values()), *lost_tensors(subject))
    if not declared or itself or any(part_of(name) for name in names):
        return Seen((), len(declared))
    message = f"{CONFIG} declares draft layers ({', '.join(declared)}), and no tensor of theirs is stored"
    hint = f"take them from the model that this one was made from, or set {next(iter(declared))} to 0"
    return Seen([Finding("names.draft-missing", message, file=CONFIG, hint=hint, data=declared)], len(declared))


# --- leftovers ---------------------------------------------------------------------------------------------

_WRAPPER = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.|^(?:module|base_model\.model)\."
)
_ADAPTER = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\.|$)|\.(?:base_layer|modules_to_save)\.")
_TRAINING = re.compile(
    r"(?:^|\.)(?:optimizer|optim|exp_avg|exp_avg_sq|momentum_buffer|grad_scaler|lr_scheduler|master_weights?|_extra_state)(?:\.|$)"
)


def _orphans(subject: Subject) -> Seen:
    # Some models are shipped with adapters of their own, and say so.
    adapters = any("lora" in key and isinstance(value, dict) for key, value in subject.config.items())
    findings = []
    for cell in subject.survey.cells.values():
        ref, wrapped = cell.first, _WRAPPER.search(cell.first.name)
        if wrapped:
            findings.append(_wrapped(ref, wrapped[0]))
        elif _TRAINING.search(ref.name):
            findings.append(_left_over(ref, "is a state of training"))
        elif _ADAPTER.search(ref.name) and not adapters:
            findings.append(_left_over(ref, "belongs to an adapter that is not merged into the weights"))
    return Seen(fold(findings), len(subject.survey.tensors))


def _wrapped(ref: Ref, wrapper: str) -> Finding:
    inner = wrapper.startswith(".")
    plain = ref.name.replace(wrapper, "." if inner else "", 1)
    message = f"{ref.name} has the name of a wrapper in it: engines look for {plain}"
    rule = f"re:{re.escape(wrapper)}=." if inner else f"{wrapper}="
    hint = f"ckptkit reshard SRC OUT --rename '{rule}'"
    return Finding("names.orphan", message, file=ref.file, tensor=ref.name, hint=hint)


def _left_over(ref: Ref, what: str) -> Finding:
    hint = f"ckptkit reshard SRC OUT --drop '{ref.name}'"
    message = f"{ref.name} {what}: engines leave it out"
    return Finding("names.orphan", message, file=ref.file, tensor=ref.name, hint=hint, severity="warning")


def _unknown(subject: Subject) -> str | None:
    return subject.unknown


PROBES = (
    Probe(
        ("names.weight-without-scale", "names.scale-without-weight", "names.unknown-scale"),
        Level.STATIC,
        _scales,
        _unknown,
    ),
    Probe(
        ("names.incomplete-layer", "names.incomplete-experts", "names.incomplete-model"), Level.STATIC, _whole, _unknown
    ),
    Probe(("names.draft-missing",), Level.STATIC, _drafts, _unknown),
    Probe(("names.orphan",), Level.STATIC, _orphans, _unknown),
)
