"""Whether a draft is whole: what it must hold and does not, what it holds and must not. No I/O.

Engines hardly look: SGLang warns of names that it doesn't know and leaves parameters that no tensor fills as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

from ..errors import Finding
from ..naming.patterns import nearest
from ..plan import Ref
from .identify import Draft
from .layouts import split_stage
from .tables import Expected, Form, Table

CONFIDENCE = "confidence-head-missing"
_MOST_COMPARED = 100  # missing names that a name is compared with: what it may have been meant for
_ROUTED = re.compile(r"mtp\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
_LINEAR = re.compile(r"mtp\.\d+\.(?:attn\.w[qko]\w+|ffn\.shared_experts\.w[123]|main_proj)\.weight")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale_inv")  # what other tools call a scale
_FORMS = {"I8": "fp4", "U8": "fp4", "F4": "fp4", "F8_E4M3": "fp8", "BF16": "bf16", "F32": "bf16", "F16": "bf16"}


class Alien(NamedTuple):
    """A name that other tools put among a draft's tensors, and what is to be said of it."""

    name: re.Pattern[str]
    id: str
    severity: str
    message: str
    hint: str


_ALIENS = (
    Alien(
        re.compile(r"mtp\.\d+\.(?:embed|head)\.weight"),
        "draft.vendor-extra",
        "warning",
        "is a copy of the target's {part} that Ascend checkpoints carry: only SGLang on NPU reads it; it is left out",
        "--embeddings copy takes it along",
    ),
    Alien(
        re.compile(r"mtp\.\d+\.(?:attn\.(?:compressor|indexer)\..+|ffn\.gate\.tid2eid)"),
        "draft.target-tensor",
        "error",
        "belongs to the target's layers: stages attend without compression and route by a learned bias",
        "take the draft from its original: layers of the target are no stages",
    ),
    Alien(
        re.compile(r"mtp\.\d+\.(?:[eh]_proj\.\w+|[eh]norm\.weight)"),
        "draft.mixed",
        "error",
        "belongs to a NextN layer, and the other tensors to a DSpark draft",
        "take one of the two from its original",
    ),
)


def is_vendor_extra(name: str) -> bool:
    """Whether this is a vendor's copy of the target's embedding or head."""
    return _ALIENS[0].name.fullmatch(name) is not None


def stored_form(tensors: Mapping[str, Ref], declared: Form) -> Form:
    """How most of the matrices are stored; ``declared`` gives the block, and what no tensor shows."""
    experts = Counter(_FORMS.get(ref.dtype) for name, ref in tensors.items() if _ROUTED.fullmatch(name))
    linears = Counter(_FORMS.get(ref.dtype) for name, ref in tensors.items() if _LINEAR.fullmatch(name))
    most = [found.most_common(1)[0][0] if found else None for found in (experts, linears)]
    return Form(most[0] or declared.experts, most[1] or declared.linears, declared.block)


def check(draft: Draft, expected: Table) -> Iterator[Finding]:
    """Findings on each tensor that is missing, too much, misplaced, or not of the dtype and shape that it must have.

    ``draft.missing``, ``draft.stage-missing``, ``confidence-head-missing``, ``draft.unknown``, ``draft.misplaced``,
    ``draft.dtype``, ``draft.shape``, ``draft.target-tensor``, ``draft.mixed``, ``draft.vendor-extra`` (a warning).
    """
    absent = [
        stage for stage in range(draft.stages) if not any(name.startswith(f"mtp.{stage}.") for name in draft.tensors)
    ]
    yield from (_no_stage(stage, draft.stages) for stage in absent)
    missing = [name for name, wanted in expected.items() if name not in draft.tensors and not wanted.optional]
    missing = [name for name in missing if (split_stage(name) or (0, ""))[0] not in absent]
    renamed = {name: wanted for name in draft.tensors if (wanted := _meant(name)) and wanted in missing}
    yield from _other_scales(renamed, draft.tensors)
    missing = [name for name in missing if name not in set(renamed.values())]
    yield from (_missing(name, expected[name], draft.tensors) for name in missing)
    homes = _homes(expected)
    twice = {name for name in draft.tensors if name not in expected and _elsewhere(name, homes) in draft.tensors}
    yield from _twice(twice, homes, draft.tensors)
    for name, ref in draft.tensors.items():
        if name not in expected:
            if name not in renamed and name not in twice:
                yield _unexpected(name, ref, homes, missing)
        elif not expected[name].fits(ref.dtype, ref.shape):
            yield _misfit(name, ref, expected[name])


def _homes(expected: Table) -> dict[str, list[int]]:
    """The stages of each tensor, by its name without them."""
    homes: dict[str, list[int]] = {}
    for stage, rest in filter(None, map(split_stage, expected)):
        homes.setdefault(rest, []).append(stage)
    return homes


def _no_stage(stage: int, stages: int) -> Finding:
    message = f"the draft has {stages} stages, and there is no tensor of stage {stage} (mtp.{stage}.*)"
    hint = "fetch the shards that hold it"
    return Finding("draft.stage-missing", message, tensor=f"mtp.{stage}", hint=hint, data={"stage": stage})


def _meant(name: str) -> str | None:
    """The scale that a tensor is by another tool's name for scales."""
    ending = next((ending for ending in _SCALES if name.endswith(ending)), None)
    return f"{name.removesuffix(ending)}.scale" if ending else None


def _other_scales(renamed: Mapping[str, str], tensors: Mapping[str, Ref]) -> Iterator[Finding]:
    """One finding for all scales that one ending would give their names."""
    for ending in _SCALES:
        names = [name for name in renamed if name.endswith(ending) and _meant(name) == renamed[name]]
        names = [name for name in names if next(e for e in _SCALES if name.endswith(e)) == ending]
        if names:
            message = (
                f"scales of the draft that end in {ending}: {len(names)} ({names[0]}); official names end in .scale"
            )
            rule = quote(f"re:^(mtp\\..*){re.escape(ending)}$=\\1.scale")
            hint = f"ckptkit reshard SRC OUT --rename {rule}"
            data = {"tensors": len(names)}
            yield Finding("draft.unknown", message, file=tensors[names[0]].file, tensor=names[0], hint=hint, data=data)


def _elsewhere(name: str, homes: Mapping[str, Sequence[int]]) -> str | None:
    """The name that a tensor would have at the only stage it belongs to."""
    stage, rest = split_stage(name) or (0, name)
    stages = homes.get(rest, ())
    return f"mtp.{stages[0]}.{rest}" if len(stages) == 1 and stage <= max(map(max, homes.values())) else None


def _twice(names: Collection[str], homes: Mapping[str, Sequence[int]], tensors: Mapping[str, Ref]) -> Iterator[Finding]:
    """A finding for each module that is at its own stage and at another one too."""
    modules: dict[str, list[str]] = {}
    for name in names:
        stage, rest = split_stage(name) or (0, name)
        modules.setdefault(f"mtp.{stage}.{rest.partition('.')[0]}", []).append(name)
    for module, mine in sorted(modules.items()):
        first = min(mine)
        message = (
            f"{module} is at its own stage too, as {_elsewhere(first, homes)}: engines keep whichever they read last"
        )
        hint = f"ckptkit reshard SRC OUT --drop {quote(module + '.*' if module not in mine else module)}"
        yield Finding("draft.misplaced", message, file=tensors[first].file, tensor=first, hint=hint)


def _missing(name: str, wanted: Expected, tensors: Mapping[str, Ref]) -> Finding:
    if ".confidence_head." in name:
        message = f"{name} is missing: SGLang asks for it where the length of a draft is verified adaptively"
        hint = f"--allow {CONFIDENCE} makes a draft without one"
        return Finding(CONFIDENCE, message, tensor=name, hint=hint)
    hint = "take it from the original of the draft; engines would serve what is in memory there"
    if name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in tensors:
        hint = "take it from the original: without its scale the weight's numbers mean nothing"
    message = f"{name} is missing ({wanted.dtypes[0]} {list(wanted.shape)})"
    return Finding("draft.missing", message, tensor=name, hint=hint)


def _unexpected(name: str, ref: Ref, homes: Mapping[str, Sequence[int]], missing: Sequence[str]) -> Finding:
    stage, rest = split_stage(name) or (0, name)
    about: dict[str, Any] = {"file": ref.file, "tensor": name}
    for alien in _ALIENS:
        if alien.name.fullmatch(name):
            part = "head" if rest.startswith("head") else "embedding"
            message = f"{name} {alien.message.format(part=part)}"
            return Finding(alien.id, message, hint=alien.hint, severity=alien.severity, **about)
    elsewhere = homes.get(rest, ())
    if elsewhere and stage <= max(map(max, homes.values())):
        message = f"{name} belongs to stage {elsewhere[0]}, not to stage {stage}"
        hint = f"ckptkit reshard SRC OUT --rename {name}=mtp.{elsewhere[0]}.{rest}"
        return Finding("draft.misplaced", message, hint=hint, **about)
    like = nearest(name, missing) if len(missing) <= _MOST_COMPARED else None
    hint = f"did you mean {like}?" if like else f"ckptkit reshard SRC OUT --drop {name} leaves it out"
    return Finding("draft.unknown", f"{name} is no tensor of a DSpark stage", hint=hint, **about)


def _misfit(name: str, ref: Ref, wanted: Expected) -> Finding:
    id = "draft.dtype" if ref.dtype not in wanted.dtypes else "draft.shape"
    message = (
        f"{name} is {ref.dtype} {list(ref.shape)}; the config and the other tensors ask for"
        f" {' or '.join(wanted.dtypes)} {list(wanted.shape)}"
    )
    hint = "take it from the original of the draft"
    return Finding(id, message, file=ref.file, tensor=name, hint=hint)
