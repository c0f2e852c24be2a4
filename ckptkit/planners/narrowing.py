"""Declarations of quantization after some of what they speak of became dense, or another format: narrowed, or gone.

Each method has a list of modules that it leaves alone, under a name of its own; compressed-tensors has groups besides,
GPTQ rules. Lists are read as names and as prefixes by transformers, as names or globs by vLLM and SGLang, so what is
added to them are whole names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from ..consumers import LINEAR_CLASS, declared, matches
from ..declarations import AWQ, CT, FP8, GPTQ, MODELOPT, MXFP4, Declaration, group_of
from ..errors import Finding
from ..families import Kind, experts_of, fused_set
from ..families.config import text_configs
from ..files.checkpoint import CONFIG
from ..naming.names import to_template
from ..naming.patterns import REGEX
from ..recipe.schemes import Scheme, resolve
from ..stored import declared_quantization
from .documents import json_text, put
from .generalise import by_template, patterns
from .quant_config import Modules, build, disagreements, group_names

Table = Mapping[str, Any]

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EXPERT_DTYPE = "expert_dtype"  # DeepSeek-V4's word for the format of its routed experts
_WHOLE = "dequantize all of it: without --only and --experts, to a dense dtype"
_ALL_PARTS = "dequantize all parts of a fused layer, or none"
_STALE = "declares a quantization that the result does not have"
# The lists of modules that a method leaves alone, the name that new entries go under first.
_LISTS: Mapping[str, tuple[str, ...]] = {
    FP8: ("modules_to_not_convert", "ignored_layers"),
    AWQ: ("modules_to_not_convert",),
    MXFP4: ("modules_to_not_convert",),
    MODELOPT: ("ignore", "exclude_modules"),
}


class Became(NamedTuple):
    """What the quantized modules of the source are in the result, with the kind of each.

    ``recast``: FP4 that is block FP8 now. ``others``: matrices that were dense before. ``fp4_experts``: whether any
    of the ``kept`` are routed experts in FP4.
    """

    dense: Mapping[str, Kind]
    kept: Mapping[str, Kind]
    recast: Mapping[str, Kind]
    others: Sequence[str] = ()
    fp4_experts: bool = False


class Narrowed(NamedTuple):
    """Files to be written anew, files to be left out and why, and where a reader would be misled."""

    texts: dict[str, str]
    stale: dict[str, str]
    findings: list[Finding]


def narrowed(config: Table | None, found: Sequence[Declaration], became: Became, dtype: str | None = None) -> Narrowed:
    """``config`` and the files that declare quantization, as they are true of the result.

    ``dtype`` is that of most dense weights where it is to be stated.
    """
    made = Narrowed({}, {}, [])
    left = bool(became.kept or became.recast)
    documents = {declaration.file: deepcopy(dict(declaration.document)) for declaration in found}
    if config is not None:
        documents.setdefault(CONFIG, deepcopy(dict(config)))
    for declaration in found:
        if left:
            table, findings = _narrow(declaration, became)
            put(documents[declaration.file], declaration.path, table)
            made.findings.extend(findings)
        elif declaration.file == CONFIG:
            put(documents[CONFIG], declaration.path, None)
        else:
            made.stale[declaration.file] = _STALE
    if config is not None:
        made.findings.extend(_restate_experts(documents[CONFIG], found, became))
        _restate_dtype(documents[CONFIG], dtype)
    originals = {CONFIG: config, **{declaration.file: declaration.document for declaration in found}}
    for file, document in documents.items():
        if file not in made.stale and document != originals[file]:
            made.texts[file] = json_text(document)
    return made


def _narrow(declaration: Declaration, became: Became) -> tuple[Table, list[Finding]]:
    narrow = _NARROW.get(declaration.method)
    if narrow is not None:
        return narrow(declaration, became)
    if not became.dense and not became.recast:
        return declaration.table, []
    message = f"{declaration.file} declares {declaration.method}, which has no known way to leave single modules out"
    return declaration.table, [Finding("plan.config", message, file=declaration.file, hint=_WHOLE)]


# --- lists and rules ---------------------------------------------------------------------------------------


def _listed(declaration: Declaration, became: Became) -> tuple[Table, list[Finding]]:
    """The modules that became dense, on the method's list or lists."""
    keys, table = _LISTS[declaration.method], dict(declaration.table)
    if declaration.path == ("quantization",):  # ModelOpt's own file has the other name
        keys = keys[::-1]
    entries = list(_entries(became))
    for key in ([key for key in keys if key in table] or keys[:1]) if entries else ():
        listed = list(table.get(key) or ())
        table[key] = listed + [entry for entry in entries if entry not in listed]
    layers = table.get("quantized_layers")  # ModelOpt's mixed precision
    if isinstance(layers, Mapping):
        table["quantized_layers"] = {name: of for name, of in layers.items() if name not in became.dense}
    return table, [*_overreach(declaration, entries, became.kept), *_halves(declaration, became)]


def _entries(became: Became) -> Iterator[str]:
    """Names for a list: an experts' path where all that lies in it is dense, else each module's."""
    left = {_path(module) for module in [*became.kept, *became.recast]}
    yield from dict.fromkeys(path if (path := _path(module)) not in left else module for module in became.dense)


def _path(module: str) -> str:
    parent = module.rpartition(".")[0]
    return experts_of(module) or (parent if parent.split(".")[-1] == "experts" else module)


def _overreach(declaration: Declaration, entries: Sequence[str], kept: Iterable[str]) -> Iterator[Finding]:
    """``plan.config``: modules that stay quantized, and that transformers would take for listed."""
    listed = tuple(entries)
    for module in kept:
        if module.startswith(listed) or module.endswith(listed):
            message = f"transformers would take {module} for dense: its name begins or ends like one that is"
            hint = f"dequantize it too: --only '{module}.*'"
            yield Finding("plan.config", message, file=declaration.file, tensor=module, hint=hint)


def _ruled(declaration: Declaration, became: Became) -> tuple[Table, list[Finding]]:
    """GPTQModel's ``dynamic`` rules: the first that matches counts, ``-:`` leaves a module out."""
    among = by_template([*became.dense, *became.kept, *became.others])
    found = patterns(by_template(became.dense), among, set(map(to_template, became.kept)))
    rules: dict[str, Table] = {f"-:{text.removeprefix(REGEX)}": {} for text in found}
    table = {**declaration.table, "dynamic": {**rules, **(declaration.table.get("dynamic") or {})}}
    if Kind.HEAD in became.dense.values() and "lm_head" in table:
        table["lm_head"] = False
    return table, list(_halves(declaration, became))


def _halves(declaration: Declaration, became: Became) -> Iterator[Finding]:
    """``plan.config``: layers that engines fuse, of which a part became dense; told once for each."""
    parted: dict[str, str] = {}
    for module in became.dense:
        layer, members = fused_set(module) or ("", ())
        if not became.kept.keys().isdisjoint(members):
            parted.setdefault(layer, module)
    for layer, module in parted.items():
        message = f"vLLM makes one layer of {module}, which would be dense, and others that stay quantized ({layer})"
        yield Finding("plan.config", message, file=declaration.file, tensor=module, hint=_ALL_PARTS)


# --- compressed-tensors ------------------------------------------------------------------------------------


def _grouped(declaration: Declaration, became: Became) -> tuple[Table, list[Finding]]:
    """Groups without those that nothing is left of, with one for what was recast; the ignore list with what is dense."""
    table = declaration.table
    _, unreadable = declared_quantization({"quantization_config": table})
    if unreadable:
        return table, [replace(finding, id="plan.config", severity="error", hint=_WHOLE) for finding in unreadable]
    config = declared(table)
    groups = {module: group_of(config, module) for module in [*became.dense, *became.kept, *became.recast]}
    among = by_template([*groups, *became.others])
    left = {to_template(module) for module in [*became.kept, *became.recast]}
    ignore = [*(table.get("ignore") or ()), *patterns(by_template(became.dense), among, left)]
    present = {**table, "config_groups": dict(_groups_left(table, groups, among, became)), "ignore": ignore}
    name = group_names(["fp8_block"], present)["fp8_block"]
    schemes = {name: _block_fp8(table, groups[next(iter(became.recast))])} if became.recast else {}
    now = {
        **dict.fromkeys(became.dense),
        **{module: groups[module] for module in became.kept},
        **dict.fromkeys(became.recast, name),
    }
    made = build([*_modules(now, became), *_modules(dict.fromkeys(became.others), became)], schemes, present)
    # What was misread under a name already is no worse for being taken for something else.
    known = set(map(_misread, disagreements(table, _modules(groups, became))))
    found = [item for item in disagreements(made, _modules(now, became)) if _misread(item) not in known]
    return made, [replace(finding, hint=_ALL_PARTS) for finding in found]


def _misread(finding: Finding) -> tuple[str | None, str]:
    """The module that is misread, and under which of its names; or else how."""
    return finding.tensor, finding.data.get("name", finding.message)


def _groups_left(
    table: Table, groups: Mapping[str, str | None], among: Mapping[str, list[str]], became: Became
) -> Iterator[tuple[str, Any]]:
    """The groups that something is left of, without targets that name what is gone.

    A target that also reaches what has a group of its own now gives way to patterns of what is left.
    """
    gone = [*became.dense, *became.recast]
    for name, group in (table.get("config_groups") or {}).items():
        members = [module for module in became.kept if groups[module] == name]
        if members:
            targets = [target for target in group["targets"] if _still(target, members, gone)]
            clear = [target for target in targets if not _reaches(target, became.recast)]
            named = patterns(by_template(members), among, set(map(to_template, gone))) if clear != targets else []
            yield name, {**group, "targets": clear + named}


def _still(target: str, members: Iterable[str], gone: Iterable[str]) -> bool:
    """Whether a target is more than a name of what is gone."""
    return _reaches(target, members) or not _reaches(target, gone)


def _reaches(target: str, modules: Iterable[str]) -> bool:
    """Whether a target can mean any of these: by name, or as a class. vLLM takes a fused layer's class before names."""
    return any(target == LINEAR_CLASS or matches(module, target) for module in modules)


def _block_fp8(table: Table, group: str | None) -> Scheme:
    """FP8 in blocks; with activations as they are if the group that it comes from has them so."""
    scheme = resolve("FP8_BLOCK")
    before = (table.get("config_groups") or {}).get(group or "") or {}
    return scheme if before.get("input_activations") else replace(scheme, input_activations=None)


def _modules(groups: Mapping[str, str | None], became: Became) -> list[Modules]:
    """Modules by template, kind and group."""
    kinds = {**became.dense, **became.kept, **became.recast}
    found: dict[tuple[str, Kind, str | None], list[str]] = defaultdict(list)
    for module, group in groups.items():
        found[to_template(module), kinds.get(module, Kind.LINEAR), group].append(module)
    return [Modules(*key, names) for key, names in found.items()]


_NARROW: Mapping[str, Callable[[Declaration, Became], tuple[Table, list[Finding]]]] = {
    CT: _grouped,
    GPTQ: _ruled,
    **dict.fromkeys(_LISTS, _listed),
}


# --- what is said of dense weights, and of DeepSeek-V4's experts ------------------------------------------


def _restate_dtype(config: dict[str, Any], dtype: str | None) -> None:
    """State this dtype of weights wherever one is stated, if none of them is it."""
    stated = {
        (*path, key): holder[key]
        for path, holder in text_configs(config)
        for key in ("dtype", "torch_dtype")
        if str(holder.get(key)).removeprefix("torch.") in _TORCH_NAMES.values()
    }
    name = _TORCH_NAMES.get(dtype or "")
    if name and name not in {value.removeprefix("torch.") for value in stated.values()}:
        for place, value in stated.items():
            put(config, place, f"torch.{name}" if value.startswith("torch.") else name)


def _restate_experts(config: dict[str, Any], found: Sequence[Declaration], became: Became) -> Iterator[Finding]:
    """``expert_dtype`` as it is true of the result, wherever it stands: in the model's config or the table."""
    holders: list[Any] = [config, *(inner for path, inner in text_configs(config) if path)]
    holders += [_at(config, declaration.path) for declaration in found if declaration.file == CONFIG]
    stating = [holder for holder in holders if isinstance(holder, dict) and EXPERT_DTYPE in holder]
    is_deepseek = any(declaration.method == FP8 for declaration in found)
    if became.fp4_experts and became.recast and is_deepseek:
        message = f"{EXPERT_DTYPE} says one format of all routed experts; some would be FP8, and others FP4"
        yield Finding("plan.config", message, file=CONFIG, hint="--experts reaches all of them")
    if became.fp4_experts or (not became.recast and any(_path(module) != module for module in became.kept)):
        return
    for holder in stating:
        del holder[EXPERT_DTYPE]
    if became.recast and is_deepseek:
        (stating[0] if stating else config)[EXPERT_DTYPE] = "fp8"


def _at(config: Table, path: Sequence[str]) -> Any:
    for key in path:
        config = config.get(key, {})
    return config
