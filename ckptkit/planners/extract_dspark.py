"""``extract-dspark``: a DeepSeek-V4 or V4.1 DSpark draft as a checkpoint of its own; or every reason why not, at once."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..drafts.completeness import is_vendor_extra
from ..drafts.configs import SERVING_CONFIG, configs
from ..drafts.fingerprint import KEY
from ..drafts.identify import Kind, Layout
from ..drafts.layouts import SHARED, split_stage, to_hf
from ..drafts.tables import BF16, Form, dspark, form_of, taps
from ..errors import Finding
from ..families.config import config_value
from ..files.checkpoint import CONFIG, INDEX, Checkpoint
from ..plan import LeftOut, Plan, Ref, Shard, Step, copy_step
from .documents import json_text
from .draft_source import Found, raise_errors
from .draft_steps import Original, converted, dense_shape, pair_of, to_native
from .sidecars import index_text, sidecars

COMMAND = "extract-dspark"


class Wanted(NamedTuple):
    """What is asked for. ``dequantize``: ``bf16``, ``fp8`` or None; ``stages``: the first and last of them, None for all."""

    layout: Layout = Layout.SERVING
    dequantize: str | None = None
    stages: tuple[int, int] | None = None
    copy_embeddings: bool = False


class Extracted(NamedTuple):
    """A plan, what a reader should know, and how engines load the result (``{out}`` stands for its folder)."""

    plan: Plan
    warnings: tuple[Finding, ...]
    launch: Mapping[str, str]


def plan_extract(
    checkpoint: Checkpoint,
    found: Found,
    wanted: Wanted,
    original: tuple[Found, Original] | None = None,
    *,
    target: Mapping[str, str] | None = None,
    include: Iterable[str] = (),
    allow: Collection[str] = (),
) -> Extracted:
    """The plan that writes the draft ``found`` in ``checkpoint``.

    ``original`` is the draft that it was made of, for the way back from floats; ``target`` digests of the target it was
    cut from. Raises UserError with all findings: ``draft.*``, ``confidence-head-missing``, ``target-mismatch``, ``extract.*``.
    """
    form = _form(found, wanted, original and original[0])
    other = other_original(found, original[0]) if original else ()
    warnings = raise_errors([*found.findings, *_refusals(found, wanted, form), *other], allow)
    config = original[0].config if original else found.config
    tensors, stages = _chosen(found, wanted)
    table = dspark(config, stages, form)
    if wanted.layout is Layout.HF:
        made = to_native(tensors, table, found.form)
    else:
        made = ((step.outputs[0].name, step) for step in converted(tensors, table, form, original and original[1]))
    by_stage: dict[int, list[Step]] = defaultdict(list)
    for name, step in [*made, *_shared(found, wanted, stages)]:
        by_stage[(split_stage(name) or (0, ""))[0]].append(step)
    shards = tuple(_shard(number, stages, by_stage[number]) for number in range(stages))
    texts = dict(_texts(found, wanted, config, stages, form, target))
    stale = {} if SERVING_CONFIG in texts else {SERVING_CONFIG: "is config.json now"}
    files, left_out = sidecars(checkpoint, {**texts, INDEX: index_text(shards, {})}, stale, include)
    launch = _launch(config, form)
    settings = _settings(found, wanted, stages, form, launch, target)
    gone = tuple(_dropped(checkpoint, found, shards, wanted))
    plan = Plan(COMMAND, shards, files, left_out, gone, settings=settings)
    return Extracted(plan, (*checkpoint.warnings, *warnings), launch)


# --- what is asked for -------------------------------------------------------------------------------------


def _form(found: Found, wanted: Wanted, original: Found | None) -> Form:
    """How the result is stored: floats on demand, else as the original, as the serving config says, as it is."""
    if wanted.layout is Layout.HF or wanted.dequantize == "bf16":
        return BF16._replace(block=found.form.block)
    if original is not None:
        return original.form
    if wanted.dequantize == "fp8" and found.form.experts == "fp4":
        return found.form._replace(experts="fp8")
    is_dense = found.form[:2] == BF16[:2]
    goes_back = is_dense and wanted.layout is Layout.SERVING and found.draft.layout is not Layout.SERVING
    return form_of(found.config) if goes_back else found.form


def _refusals(found: Found, wanted: Wanted, form: Form) -> Iterator[Finding]:
    """``extract.*``, ``extract.stages`` where SGLang would build another number of stages than there are."""
    if wanted.stages and not wanted.stages[0] <= wanted.stages[1] < found.draft.stages:
        first, last = wanted.stages
        message = f"--stages {first}-{last}: the draft has stages 0 to {found.draft.stages - 1}"
        yield Finding("extract.stages", message, hint=f"--stages 0-{found.draft.stages - 1}")
    elif wanted.layout is Layout.SERVING and _count(found, wanted) != len(taps(found.config)):
        count, number = _count(found, wanted), len(taps(found.config))
        message = f"the result would have {number} taps, and of stages {count}: SGLang counts stages by taps"
        yield Finding("extract.stages", message, hint="--layout specforge, to train it further; or take all stages")
    if found.draft.kind is Kind.DSPARK_V41 and wanted.layout is not Layout.SERVING:
        message = f"--layout {wanted.layout} is a layout of DeepSeek-V4's draft; V4.1's has other heads"
        yield Finding("extract.layout", message, hint="--layout serving")
    if wanted.dequantize == "fp8":
        yield from _fp8(found, wanted, form)
    missing = [name for name in SHARED if name not in found.draft.shared]
    if wanted.copy_embeddings and missing and not any(map(is_vendor_extra, found.draft.tensors)):
        message = f"--embeddings copy: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the source"
        yield Finding("extract.embeddings", message, tensor=missing[0], hint="extract from the target itself")


def _fp8(found: Found, wanted: Wanted, form: Form) -> Iterator[Finding]:
    if wanted.layout is Layout.HF:
        message = "--layout hf is in floats, --dequantize fp8 asks for FP8"
        yield Finding("extract.layout", message, hint="leave out --dequantize")
    elif found.form.linears == "bf16":
        message = "--dequantize fp8 makes FP8 of FP4, and the draft is stored in floats"
        yield Finding("extract.form", message, hint="leave out --dequantize")
    elif form.block != (128, 128):
        message = f"--dequantize fp8 makes blocks of 128 x 128, and {CONFIG} declares {list(form.block)}"
        yield Finding("extract.form", message, hint="--dequantize bf16")


def other_original(found: Found, original: Found) -> Iterator[Finding]:
    """``extract.base`` where the draft cannot have been cut from the original."""
    hint = "--base names the checkpoint that the draft was cut from"
    if found.draft.stages != original.draft.stages:
        message = f"the draft has {found.draft.stages} stages, --base {original.draft.stages}"
        yield Finding("extract.base", message, hint=hint)
        return
    mine, theirs = found.draft.tensors, original.draft.tensors
    for name in (name for name in mine if name in theirs and not name.endswith(".scale")):
        shapes = [dense_shape(pair_of(tensors, name)) for tensors in (mine, theirs)]
        if shapes[0] != shapes[1]:
            message = f"{name} is {list(shapes[0])}, that of --base {list(shapes[1])}"
            yield Finding("extract.base", message, tensor=name, hint=hint)


def _count(found: Found, wanted: Wanted) -> int:
    return wanted.stages[1] - wanted.stages[0] + 1 if wanted.stages else found.draft.stages


def _chosen(found: Found, wanted: Wanted) -> tuple[dict[str, Ref], int]:
    """The tensors of the stages that are taken, counted anew; what only the first or last one has stays at that end."""
    first, last = wanted.stages or (0, found.draft.stages - 1)
    if not wanted.stages:
        return dict(found.draft.tensors), found.draft.stages
    blocks = {split[1] for name in found.draft.tensors if (split := split_stage(name)) and _is_block(split[1])}
    chosen = {}
    for name, ref in found.draft.tensors.items():
        stage, rest = split_stage(name) or (0, name)
        if rest not in blocks:
            stage = first if stage == 0 else last
        if first <= stage <= last:
            chosen[f"mtp.{stage - first}.{rest}"] = ref
    return chosen, last - first + 1


def _is_block(rest: str) -> bool:
    return rest.startswith(("attn", "ffn", "hc_attn", "hc_ffn"))


def _shared(found: Found, wanted: Wanted, stages: int) -> Iterator[tuple[str, Step]]:
    """Copies of the target's embedding and head, and what a vendor keeps as such, each with a name of its stage."""
    if not wanted.copy_embeddings:
        return
    is_hf = wanted.layout is Layout.HF
    for name, ref in found.draft.shared.items():
        place = to_hf(name) if is_hf else None
        stage = 0 if name.startswith("embed") else stages - 1
        yield f"mtp.{stage}.{name}", copy_step(ref, "--embeddings copy", place.name if place else name)
    extras = {name: ref for name, ref in found.draft.tensors.items() if is_vendor_extra(name)}
    yield from ((name, copy_step(ref, "--embeddings copy")) for name, ref in extras.items() if not is_hf)


# --- what is written ---------------------------------------------------------------------------------------


def _shard(number: int, stages: int, steps: Sequence[Step]) -> Shard:
    """A file for each stage: the same for all that hold the same draft, whatever files it came from."""
    name = f"model-{number + 1:05d}-of-{stages:05d}.safetensors"
    return Shard(name, steps[0].inputs[0].file, {"format": "pt"}, tuple(steps))


def _texts(
    found: Found,
    wanted: Wanted,
    config: Mapping[str, Any],
    stages: int,
    form: Form,
    target: Mapping[str, str] | None,
) -> Iterator[tuple[str, str]]:
    has_confidence = any(".confidence_head." in name for name in found.draft.tensors)
    known = {KEY: dict(target)} if target else {}
    for name, content in configs(config, wanted.layout, stages, form, has_confidence).items():
        yield name, json_text(content | known)


def _launch(config: Mapping[str, Any], form: Form) -> dict[str, str]:
    """How engines are started with the result, by engine."""
    size = config_value(config, "dspark_block_size")
    told = json.dumps({"method": "dspark", "model": "{out}", "num_speculative_tokens": size})
    sglang = "--speculative-algorithm DSPARK --speculative-draft-model-path {out}"
    if form.linears != "bf16":
        return {"SGLang": sglang, "vLLM": f"--speculative-config '{told}'"}
    sglang += " --speculative-draft-model-quantization unquant"
    return {"SGLang": sglang, "vLLM": f"--speculative-config '{told}': not loadable beside a quantized target"}


def _settings(
    found: Found, wanted: Wanted, stages: int, form: Form, launch: Mapping[str, str], target: Mapping[str, str] | None
) -> dict[str, Any]:
    is_served = wanted.layout is Layout.SERVING
    return {
        "layout": str(wanted.layout),
        "dequantize": wanted.dequantize,
        "stages": list(wanted.stages) if wanted.stages else None,
        "embeddings": "copy" if wanted.copy_embeddings else "none",
        "draft": {
            "kind": str(found.draft.kind),
            "from": str(found.draft.layout),
            "stages": stages,
            "experts": form.experts,
            "linears": form.linears,
            "says": {fact.what: dict(fact.said) for fact in found.facts},
        },
        "target": dict(target or {}),
        "launch": dict(launch) if is_served else {},
    }


def _dropped(checkpoint: Checkpoint, found: Found, shards: Iterable[Shard], wanted: Wanted) -> Iterator[LeftOut]:
    """What of the source is not in the result: the target's tensors, by where they are, and single ones of the draft."""
    taken = {ref.name for shard in shards for step in shard.steps for ref in step.inputs}
    left = [name for name in checkpoint.tensors if name not in taken]
    of_draft = {ref.name for ref in found.draft.tensors.values()} | ({found.bias} if found.bias else set())
    yield from left_of_target(name for name in left if name not in of_draft)
    for name in (name for name in left if name in of_draft):
        yield LeftOut(name, _why(name, found, wanted))


def left_of_target(names: Iterable[str]) -> Iterator[LeftOut]:
    """The tensors of a target that a draft is cut out of, by where they are: there may be 70,000."""
    groups = Counter(name.partition(".")[0] for name in names)
    for group, count in sorted(groups.items()):
        yield LeftOut(f"{group}.* ({count:,} tensors)" if count > 1 else group, "the target's own")


def _why(name: str, found: Found, wanted: Wanted) -> str:
    if name == found.bias:
        return "zero, and the model has no such bias"
    if is_vendor_extra(name):
        return "a vendor's copy of what is the target's"
    return (
        f"not of --stages {wanted.stages[0]}-{wanted.stages[1]}" if wanted.stages else "as the original has it (--base)"
    )
