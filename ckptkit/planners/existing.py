"""A ``quantization_config`` that is already there: refused, merged onto, or replaced, as the recipe says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from ..consumers import by_compressed_tensors, declared
from ..declarations import DECLARATIONS
from ..errors import Finding
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..recipe.recipe import Recipe
from ..stored import COMPANIONS, WEIGHTS, Declaration, declaration, declared_quantization, split_name
from .selection import Choice

COMPRESSED_TENSORS = "compressed-tensors"


def quantized_modules(checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> a tensor that shows it is quantized on disk: a scale, packed codes, a weight that is no float."""
    found: dict[str, str] = {}
    for name, ref in checkpoint.tensors.items():
        if name.endswith(".weight") and ref.dtype in FLOATS:
            continue  # most tensors: not worth taking the name apart
        module, last = split_name(name)
        if last in _SHOWING or (last == "weight" and ref.dtype not in FLOATS):
            found.setdefault(module, name)
    return found


# A parameter named just "scale" may belong to anything; beside codes the codes show it.
_SHOWING = (WEIGHTS | COMPANIONS) - {"weight", "scale"}


def refusals(
    recipe: Recipe, checkpoint: Checkpoint, choices: Iterable[Choice], quantized: Mapping[str, str]
) -> Iterator[Finding]:
    """``plan.existing`` findings for this recipe's policy."""
    present = declaration(checkpoint.config or {})
    declarations = [name for name in DECLARATIONS if name in checkpoint.source.files]
    if present is None and not declarations:
        if quantized:
            yield _undeclared(quantized)
        return
    method = present.method if present else "unknown"
    file = "config.json" if present else declarations[0]
    if recipe.existing == "merge" and present is not None and method == COMPRESSED_TENSORS:
        _, unreadable = declared_quantization(checkpoint.config or {})
        yield from map(_unreadable, unreadable) if unreadable else _merge_conflicts(present, choices)
    elif recipe.existing == "replace":
        yield from _still_old(method, quantized)
    else:
        yield _refuse(recipe, method, file)


def _refuse(recipe: Recipe, method: str, file: str) -> Finding:
    message = f"the checkpoint is quantized already ({file}: {method})"
    if method == COMPRESSED_TENSORS:
        hint = "--set existing=merge adds to it; --set existing=replace if nothing on disk is quantized any more"
    else:
        message += "; only a compressed-tensors config can be merged onto" if recipe.existing == "merge" else ""
        hint = "ckptkit dequantize SRC OUT makes it dense first"
    return Finding("plan.existing", message, file=file, hint=hint, data={"quant_method": method})


def _undeclared(quantized: Mapping[str, str]) -> Finding:
    name = next(iter(quantized.values()))
    message = f"{len(quantized):,} modules are quantized on disk ({name}) and no config says how"
    hint = "ckptkit dequantize SRC OUT makes them dense first"
    return Finding("plan.existing", message, tensor=name, hint=hint, data={"modules": len(quantized)})


def _still_old(method: str, quantized: Mapping[str, str]) -> Iterator[Finding]:
    if quantized:
        name = next(iter(quantized.values()))
        message = f"existing: replace, but {len(quantized):,} modules are still in the old format ({method}: {name})"
        yield Finding("plan.existing", message, tensor=name, hint="ckptkit dequantize SRC OUT makes them dense first")


def _unreadable(found: Finding) -> Finding:
    hint = "correct the groups in config.json, or make the checkpoint dense first: ckptkit dequantize SRC OUT"
    return Finding("plan.existing", found.message, file=found.file, hint=hint)


def _merge_conflicts(present: Declaration, choices: Iterable[Choice]) -> Iterator[Finding]:
    """Modules to be quantized that the existing config says are quantized already, though they lie there dense."""
    config = declared(present.table)
    groups: dict[str, list[str]] = defaultdict(list)
    for module in chain.from_iterable(choice.modules for choice in choices if choice.group is not None):
        group = by_compressed_tensors(config, module)
        if group is not None:
            groups[group].append(module)
    for group, modules in groups.items():
        message = f"config.json already puts {len(modules):,} of these modules into {group}, yet they lie there dense"
        hint = "its ignore list does not cover them: correct the config, or leave these modules out of the recipe"
        yield Finding("plan.existing", message, file="config.json", tensor=f"{modules[0]}.weight", hint=hint)
