"""The check of a checkpoint against the recipe that it should have been made by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import Finding, UserError
from ..files.header import Spec
from ..plan import Ref
from . import Level, Page, Probe, Seen, Subject
from .folding import fold


def _recipe(subject: Subject) -> Seen:
    from ..planners.quantize import plan_quantize

    assert subject.against is not None
    try:
        planned = plan_quantize(subject.against, subject.recipe, allow=subject.options.get("allow", ())).plan
    except UserError as error:
        return Seen([_refused(finding, subject.against.source.uri) for finding in error.findings], 0)
    wanted = {spec.name: spec for step in planned.steps() for spec in step.outputs}
    return Seen(fold(_differences(wanted, subject.checkpoint.tensors)), len(wanted))


def _refused(finding: Finding, source: str) -> Finding:
    message = f"the recipe makes nothing of {source}: {finding.message} ({finding.id})"
    return Finding("config.recipe", message, file=finding.file, tensor=finding.tensor, hint=finding.hint)


def _differences(wanted: Mapping[str, Spec], found: Mapping[str, Ref]) -> Iterator[Finding]:
    for name, spec in wanted.items():
        ref = found.get(name)
        if ref is None:
            yield _difference(name, None, f"the recipe makes {name}, and it is not there", spec)
        elif ref.spec != spec:
            message = (
                f"the recipe makes {name} {spec.dtype} {list(spec.shape)}, and it is {ref.dtype} {list(ref.shape)}"
            )
            yield _difference(name, ref.file, message, spec)
    for name in sorted(found.keys() - wanted.keys()):
        yield _difference(name, found[name].file, f"{name} is there, and the recipe does not make it", None)


def _difference(name: str, file: str | None, message: str, spec: Spec | None) -> Finding:
    data = {"wanted": spec and {"dtype": spec.dtype, "shape": list(spec.shape)}}
    hint = "ckptkit quantize SRC OUT --recipe RECIPE makes it by this recipe"
    return Finding("config.recipe", message, file=file, tensor=name, hint=hint, data=data)


def _unfit(subject: Subject) -> str | None:
    if subject.recipe is None:
        return "no --recipe"
    return subject.unknown if subject.against is not None else "a recipe needs --against"


PROBES = (Probe(("config.recipe",), Level.STATIC, _recipe, _unfit),)

PAGES = (
    Page(
        "config.recipe",
        Level.STATIC,
        "error",
        "The checkpoint is not what the recipe makes of its source",
        "With --recipe R --against SRC the recipe is planned anew on the source's headers, and every tensor of the plan "
        "is looked for: its name, dtype and shape. A module that the recipe leaves alone and that is quantized here, or "
        "the reverse, another group size, a tensor dropped or added: each is a finding. Values are compared at level "
        "numeric.",
        "the recipe makes lm_head.weight_packed I32 [151936, 640], and it is not there",
        "Make the checkpoint anew: ckptkit quantize SRC OUT --recipe R; or correct the recipe that is compared with.",
    ),
)
