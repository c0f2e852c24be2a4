"""``unpack``: the same values in another layout; or every reason why not, at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import layout_config
from ..checkpoint import CONFIG, INDEX, Checkpoint
from ..errors import Finding, UserError
from ..families import LINEAR_LIKE, Kind, classifier
from ..layout_config import Change, facts_of
from ..names import to_template
from ..plan import Plan, Ref, Shard, Step, copy_step
from ..schemes import resolve
from ..stored import split_name
from .existing import quantized_modules
from .layouts.experts import join, split
from .layouts.fp4 import to_alone, to_codes, to_packed, to_together
from .layouts.rearranged import Rearranged
from .packing import as_whole
from .quant_config import Modules, build
from .sidecars import index_text, sidecars

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
        message = f"{checkpoint.source.uri} has no {CONFIG}: the layout could not be declared anywhere"
        raise UserError(
            [Finding("config.missing", message, file=CONFIG, hint="give the folder that holds config.json")]
        )
    base = layout_config.original(checkpoint.config)
    facts = facts_of(str(base.get("model_type")), layout_config.noted(checkpoint.config))
    made = _WAYS[layout](checkpoint, layout, facts)
    problems = made.problems or ([] if made.steps else [_nothing(checkpoint, layout)])
    if problems:
        raise UserError(problems)
    shards = as_whole(checkpoint, list(_shards(checkpoint, made.steps)))
    config, warnings = layout_config.changed(checkpoint.config, _change(checkpoint, layout, made, base))
    texts = {CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if checkpoint.index is not None or len(shards) > 1:
        file = checkpoint.index.file if checkpoint.index else INDEX
        texts[file] = index_text(shards, checkpoint.index.metadata if checkpoint.index else {})
    kept, left_out = sidecars(checkpoint, texts, {}, include)
    plan = Plan("unpack", shards, kept, left_out, settings={"layout": layout})
    return Unpacked(plan, (*checkpoint.warnings, *warnings))


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
            loadable = True
        case "gpt-oss" if base.get("model_type") == "gpt_oss" and not others:
            declared, loadable = _GPT_OSS, True
        case "mxfp4-ct" if base.get("model_type") != "gpt_oss" and not others:
            declared, loadable = _compressed_tensors(checkpoint, made), True
        case _:
            loadable = False
    back = "packed" if layout == "codes" else made.origin.partition(" ")[0]
    return Change(made.origin, made.made, back, made.facts._asdict(), declared, loadable)


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
