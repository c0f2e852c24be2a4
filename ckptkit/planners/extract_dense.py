"""``extract-dspark`` for dense drafts: stand-alone ones between their layouts, MiniMax-M3.1's out of its target."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..drafts.dense import Dense, check, served_as
from ..drafts.dense_config import Fields, fields_of, home_of, lacking, layers_config, written
from ..drafts.fingerprint import KEY
from ..drafts.identify import Layout
from ..errors import Finding, fail
from ..files.checkpoint import CONFIG, INDEX, Checkpoint
from ..plan import LeftOut, Plan, Ref, Shard, Step, copy_step
from .documents import json_text
from .draft_source import raise_errors
from .extract_dspark import COMMAND, Extracted, Wanted, left_of_target
from .sidecars import index_text, sidecars


def plan_dense(
    checkpoint: Checkpoint,
    draft: Dense,
    wanted: Wanted,
    *,
    target: Mapping[str, str] | None = None,
    include: Iterable[str] = (),
    allow: Collection[str] = (),
) -> Extracted:
    """The plan that writes ``draft`` with its bytes as they are. Raises UserError with all findings, as for V4's."""
    if checkpoint.config is None:
        hint = "give the folder that holds config.json"
        raise fail("config.missing", f"{checkpoint.source.uri} has no {CONFIG}", file=CONFIG, hint=hint)
    fields = fields_of(checkpoint.config)
    layers = checkpoint.config if draft.family.inside else layers_config(checkpoint.config)
    found = [*lacking(checkpoint.config, fields), *check(draft, fields, layers)]
    found += [*_refusals(draft, wanted), *_vocabulary(checkpoint, draft, layers)]
    warnings = raise_errors(found, allow)
    steps = tuple(_steps(draft, wanted))
    shard = Shard("model.safetensors", steps[0].inputs[0].file, {"format": "pt"}, steps)
    config = _config(checkpoint.config, draft, fields, wanted)
    config |= {KEY: dict(target)} if target else {}
    texts = {CONFIG: json_text(config), INDEX: index_text([shard], {})}
    files, left_out = sidecars(checkpoint, texts, {}, include)
    launch = _launch(draft, fields)
    settings = _settings(checkpoint.config, draft, fields, wanted, launch, target)
    gone = tuple(_dropped(checkpoint, draft, steps))
    plan = Plan(COMMAND, (shard,), files, left_out, gone, settings=settings)
    return Extracted(plan, (*checkpoint.warnings, *warnings), launch)


def _refusals(draft: Dense, wanted: Wanted) -> Iterator[Finding]:
    if draft.family.inside and wanted.layout is not Layout.SERVING:
        message = f"--layout {wanted.layout}: {draft.family.name} has the names of its target alone"
        yield Finding("extract.layout", message, hint="--layout serving")
    if wanted.dequantize:
        message = f"--dequantize {wanted.dequantize} is for DeepSeek-V4's formats"
        yield Finding("extract.form", message, hint="ckptkit dequantize SRC OUT, before or after")
    if wanted.stages:
        message = "--stages takes stages of DeepSeek-V4's drafts; layers of this one follow on each other"
        yield Finding("extract.stages", message, hint="leave it out")


def _vocabulary(checkpoint: Checkpoint, draft: Dense, config: Mapping[str, Any]) -> Iterator[Finding]:
    """``extract.draft-vocab`` where the draft speaks a vocabulary of its own, which only speculators' layout has."""
    ref = draft.maps.get("d2t")
    if ref is None:
        return
    data = checkpoint.source.read(ref.file, ref.start, ref.stop)
    if any(data) or ref.shape != (config.get("vocab_size"),):
        message = f"{ref.name} maps a vocabulary of {ref.shape[0]:,} tokens: SGLang's and vLLM's DSpark drafts have the target's"
        yield Finding("extract.draft-vocab", message, tensor=ref.name, hint="serve it with speculators' own runtime")


def _steps(draft: Dense, wanted: Wanted) -> Iterator[Step]:
    for name, ref in draft.tensors.items():
        yield copy_step(ref, "as it is", ref.name if draft.family.inside else name)
    for name, ref in draft.shared.items() if wanted.copy_embeddings else ():
        yield copy_step(ref, "--embeddings copy", name)


def _config(config: Mapping[str, Any], draft: Dense, fields: Fields, wanted: Wanted) -> dict[str, Any]:
    """Of a draft within a target the target's, in which SGLang finds the draft's fields."""
    if draft.family.inside:
        return {**json.loads(json.dumps(config)), "architectures": ["DSparkMiniMaxDraftModel"]}
    model_type = layers_config(config).get("model_type")
    return written(config, fields, wanted.layout, draft.layers, served_as(model_type))


def _launch(draft: Dense, fields: Fields) -> dict[str, str]:
    told = json.dumps({"method": "dspark", "model": "{out}", "num_speculative_tokens": fields.block_size})
    sglang = "--speculative-algorithm DSPARK --speculative-draft-model-path {out}"
    return {"SGLang": sglang, "vLLM": "none known" if draft.family.inside else f"--speculative-config '{told}'"}


def _settings(
    config: Mapping[str, Any],
    draft: Dense,
    fields: Fields,
    wanted: Wanted,
    launch: Mapping[str, str],
    target: Mapping[str, str] | None,
) -> dict[str, Any]:
    says = {"stages": {"tensors": draft.layers}}
    says |= {key: {CONFIG: value} for key, value in fields._asdict().items() if value is not None}
    told = {"kind": draft.family.name, "from": str(home_of(config)), "stages": draft.layers, "says": says}
    return {
        "layout": str(wanted.layout),
        "embeddings": "copy" if wanted.copy_embeddings else "none",
        "draft": told,
        "target": dict(target or {}),
        "launch": dict(launch) if wanted.layout is Layout.SERVING else {},
    }


def _dropped(checkpoint: Checkpoint, draft: Dense, steps: Iterable[Step]) -> Iterator[LeftOut]:
    taken = {ref.name for step in steps for ref in step.inputs}
    named: dict[str, Ref] = {**draft.shared, **draft.maps}
    for ref in (ref for ref in named.values() if ref.name not in taken):
        yield LeftOut(ref.name, "the target's own, or a map that changes nothing")
    known = taken | {ref.name for ref in named.values()}
    yield from left_of_target(name for name in checkpoint.tensors if name not in known)
