"""``unpack``: the same values in another layout; or every reason why not, at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import layout_config
from ..errors import Finding, UserError
from ..families import LINEAR_LIKE, Kind, classifier
from ..families.experts import MERGED, STACKED, STACKED_DENSE, is_of
from ..files.checkpoint import CONFIG, Checkpoint
from ..layout_config import Change, facts_of
from ..naming.names import to_template
from ..plan import Plan, Ref, Shard, Step, copy_step
from ..recipe.schemes import resolve
from ..stored import split_name
from .documents import json_text, no_config
from .existing import quantized_modules
from .layouts.experts import join, miscounted, split
from .layouts.fp4 import to_alone, to_codes, to_packed, to_together
from .layouts.rearranged import Rearranged
from .packing import as_whole
from .quant_config import Modules, build
from .sidecars import sidecars, with_index

_WAYS = {
    "codes": to_codes,
    "packed": to_packed,
    "per-expert": split,
    "fused": join,
    "mxfp4-ct": to_alone,
    "gpt-oss": to_together,
    "dsv4": to_alone,
}
LAYOUTS = tuple(_WAYS)
_WANTED = {"codes": "FP4 weights", "packed": "codes", "per-expert": "stacked experts", "fused": "experts one by one"}
# The models whose experts engines find in a layout.
_LOADED = {"per-expert": MERGED, "fused": (*MERGED, *STACKED, *STACKED_DENSE)}
# What gpt-oss' own checkpoints declare.
_GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Unpacked(NamedTuple):
    """A plan, and what a reader should know."""

    plan: Plan
    warnings: tuple[Finding, ...]


def plan_unpack(checkpoint: Checkpoint, layout: str, include: Iterable[str] = ()) -> Unpacked:
    """The plan that brings ``checkpoint`` into ``layout``, one of :data:`LAYOUTS`.

    ``include`` are file-name patterns of sidecars to take along. Raises UserError with all findings: ``unpack.*``,
    ``config.missing``.
    """
    if checkpoint.config is None:
        raise UserError(no_config(checkpoint, "the layout"))
    _check(checkpoint, layout)
    base = layout_config.original(checkpoint.config)
    facts = facts_of(str(base.get("model_type")), layout_config.noted(checkpoint.config))
    made = _WAYS[layout](checkpoint, layout, facts)
    problems = made.problems or ([] if made.steps else [_nothing(checkpoint, layout)])
    if problems:
        raise UserError(problems)
    shards = as_whole(checkpoint, list(_shards(checkpoint, made.steps)))
    config, warnings = layout_config.changed(checkpoint.config, _change(checkpoint, layout, made, base))
    texts, stale = with_index(checkpoint, shards, {CONFIG: json_text(config)}, {})
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    plan = Plan("unpack", shards, kept, left_out, settings={"layout": layout})
    return Unpacked(plan, (*checkpoint.warnings, *warnings))


def _check(checkpoint: Checkpoint, layout: str) -> None:
    """Raises UserError where the config cannot be believed: ``config.layout``, ``names.incomplete-experts``."""
    config = checkpoint.config or {}
    problems: list[Finding] = []
    wrong = layout_config.fault(config)
    if wrong:
        hint = "take config.json from the result of the unpack that wrote it"
        problems.append(Finding("config.layout", f"{CONFIG}: {wrong}", file=CONFIG, hint=hint))
    if layout in {"per-expert", "fused", "gpt-oss"}:
        problems += miscounted(checkpoint)
    if problems:
        raise UserError(problems)


def _nothing(checkpoint: Checkpoint, layout: str) -> Finding:
    message = f"{checkpoint.source.uri} has no {_WANTED.get(layout, 'MXFP4 weights')} that --layout {layout} changes"
    hint = f"ckptkit inspect {checkpoint.source.uri} shows how its weights are stored"
    return Finding("unpack.nothing", message, hint=hint)


# --- shards ------------------------------------------------------------------------------------------------


def _shards(checkpoint: Checkpoint, replaced: Mapping[str, Sequence[Step]]) -> Iterator[Shard]:
    """The shards, but for those whose tensors all went into others."""
    for name, header in checkpoint.shards.items():
        refs = checkpoint.shard_tensors(name)
        steps = [step for ref in refs for step in replaced.get(ref.name, [copy_step(ref, "already so")])]
        if steps or not refs:
            linked = replaced.keys().isdisjoint(ref.name for ref in refs)
            yield Shard(name, name, header.metadata, tuple(steps), linked)


# --- the config --------------------------------------------------------------------------------------------


def _change(checkpoint: Checkpoint, layout: str, made: Rearranged, base: Mapping[str, Any]) -> Change:
    """What the result is to be declared as: by a table that engines read where there is one for it."""
    quantized = {split_name(name)[0] for name in made.steps}
    others = quantized_modules(checkpoint).keys() - quantized
    declared: Mapping[str, Any] | None = None
    match layout:
        case "per-expert" | "fused":
            loadable = is_of(base, *_LOADED[layout])
        case "gpt-oss" if base.get("model_type") == "gpt_oss" and not others:
            declared, loadable = _GPT_OSS, True
        case "mxfp4-ct" if not is_of(base, *STACKED) and not others:
            declared, loadable = _compressed_tensors(checkpoint, made), True
        case _:
            loadable = False
    back = "packed" if layout == "codes" else made.origin.partition(" ")[0]
    if _is_strange_otherwise(checkpoint.config or {}, layout):
        declared, loadable = None, False
    return Change(made.origin, made.made, back, made.facts._asdict(), declared, loadable)


def _is_strange_otherwise(config: Mapping[str, Any], layout: str) -> bool:
    """Whether no engine reads the checkpoint for what ``layout`` does not change: FP4 or experts of floats."""
    experts = layout_config.EXPERTS
    is_strange = config.get("model_type") == layout_config.NO_MODEL
    return is_strange and (layout_config.noted(config).get("to") in experts) != (layout in experts)


def _compressed_tensors(checkpoint: Checkpoint, made: Rearranged) -> dict[str, Any]:
    """The table that says of every Linear of the result whether it is MXFP4."""
    scheme = resolve("MXFP4A16")
    outputs = (spec.name for steps in made.steps.values() for step in steps for spec in step.outputs)
    packed = {name.removesuffix(".weight_packed") for name in outputs if name.endswith(".weight_packed")}
    kind_of = classifier(checkpoint.config)
    left: dict[tuple[str, Kind], list[str]] = defaultdict(list)
    for ref in _matrices(checkpoint, made.steps):
        kind = kind_of(ref.name, ref.shape)
        if kind in LINEAR_LIKE or kind is Kind.EMBEDDING:
            module = split_name(ref.name)[0]
            left[to_template(module), kind].append(module)
    modules = [Modules(template, kind, None, names) for (template, kind), names in left.items()]
    by_form: dict[str, list[str]] = defaultdict(list)
    for module in sorted(packed):
        by_form[to_template(module)].append(module)
    modules += [Modules(template, Kind.LINEAR, "experts", names) for template, names in by_form.items()]
    return build(modules, {"experts": scheme}, None)


def _matrices(checkpoint: Checkpoint, replaced: Collection[str]) -> Iterator[Ref]:
    refs = (ref for name, ref in checkpoint.tensors.items() if name not in replaced)
    return (ref for ref in refs if len(ref.shape) == 2 and ref.name.endswith(".weight"))
