"""The ``quantization_config`` that a plan writes: derived from what each module becomes, not from the recipe's text.

Targets and ignores are regexes of full module paths (:mod:`.generalise`), groups are disjoint and sorted, and the
ignore list covers every matrix that is left alone. What was written is then read back by each consumer's own rules
(:mod:`ckptkit.consumers`) and must say exactly what lies on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from ..consumers import LINEAR_CLASS, Declared, by_compressed_tensors, by_vllm, declared, matches
from ..errors import Finding
from ..families import Kind, fused_set
from ..names import Indices, split, uniform
from ..schemes import COMPRESSED_TENSORS_VERSION, Scheme, config_group
from .generalise import patterns, template_of, templates

FOREIGN_PREFIX = "language_model."
# The classes vLLM gives these modules: a head's and an embedding's name no Linear, so a class target passes them by.
VLLM_CLASSES = {Kind.HEAD: "ParallelLMHead", Kind.EMBEDDING: "VocabParallelEmbedding"}
TORCH_CLASSES = {Kind.EMBEDDING: "Embedding", Kind.POSITION: "Embedding", Kind.NORM: "RMSNorm", Kind.CONV: "Conv1d"}


class Module(NamedTuple):
    """A matrix of the result: its module, its kind, and the group it belongs to (None: left as it is)."""

    name: str
    kind: Kind
    group: str | None


def group_names(groups: Iterable[str], present: Mapping[str, Any] | None) -> dict[str, str]:
    """The name each of the recipe's groups has in the written config: its own, unless one there has it already."""
    taken = set(present["config_groups"]) if present else set()
    return {group: next(name for name in _numbered(group) if name not in taken) for group in groups}


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in count(1))


def build(
    modules: Sequence[Module], schemes: Mapping[str, Scheme], present: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The config to write for ``modules``, whose groups have the schemes ``schemes``.

    ``present`` is the compressed-tensors config to merge onto: its groups stay as they are, and its ignore list
    loses what is quantized now.
    """
    among = templates(module.name for module in modules)
    groups = dict(present["config_groups"]) if present else {}
    for group, scheme in schemes.items():
        others = templates(m.name for m in modules if m.group not in (group, None))
        targets = patterns((m.name for m in modules if m.group == group), among, others)
        groups[group] = config_group(scheme, targets)
    ignore = _ignore(modules, schemes, among, present)
    return _table(dict(sorted(groups.items())), ignore, present)


def _ignore(
    modules: Sequence[Module],
    schemes: Mapping[str, Scheme],
    among: Mapping[str, set[Indices]],
    present: Mapping[str, Any] | None,
) -> list[str]:
    left_alone = {module.name for module in modules if module.group is None}
    quantized = templates(module.name for module in modules if module.group is not None)
    if present is None:
        return patterns(left_alone, among, quantized)
    new = [module.name for module in modules if module.group in schemes]
    kept, opened = [], set()
    for entry in present.get("ignore") or ():
        if any(matches(name, entry) for name in new):
            opened |= {name for name in left_alone if matches(name, entry)}
        else:
            kept.append(entry)
    return kept + patterns(opened, among, quantized)


def _table(groups: dict[str, Any], ignore: list[str], present: Mapping[str, Any] | None) -> dict[str, Any]:
    formats = {group.get("format") or (present or {}).get("format") for group in groups.values()}
    table: dict[str, Any] = (
        dict(present)
        if present
        else {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "transform_config": {},
            "version": COMPRESSED_TENSORS_VERSION,
        }
    )
    table["config_groups"] = groups
    table["format"] = formats.pop() if len(formats) == 1 else "mixed-precision"
    table["ignore"] = ignore
    return table


# --- reading it back ---------------------------------------------------------------------------------------


def disagreements(table: Mapping[str, Any], modules: Sequence[Module]) -> Iterator[Finding]:
    """``plan.config``: modules that a consumer of the written config would take for something else than they are.

    Checked under compressed-tensors' and vLLM's rules, on the checkpoint's names, behind a foreign prefix, and on
    the names of fused layers. Modules that differ only in indices that the patterns do not tell apart are one case.
    """
    config = declared(table)
    present = {module.name for module in modules}
    for module in _distinct(modules, config):
        want = module.group
        torch_class = TORCH_CLASSES.get(module.kind, LINEAR_CLASS)
        vllm_class = VLLM_CLASSES.get(module.kind, "LinearBase" if torch_class == LINEAR_CLASS else torch_class)
        for name in _spellings(module.name):
            readings = {
                "compressed-tensors": by_compressed_tensors(config, name, torch_class),
                "vLLM": by_vllm(config, name, vllm_class),
            }
            for reader, got in readings.items():
                if got != want:
                    yield _disagreement(reader, name, want, got)
        yield from _fused(config, module, present)


def _spellings(name: str) -> set[str]:
    """The names under which engines may know a module: its own, behind another prefix, with wrappers swapped."""
    first, second = "model.language_model.", "language_model.model."
    swapped = name.replace(first, second, 1) if name.startswith(first) else name
    swapped = name.replace(second, first, 1) if name.startswith(second) else swapped
    return {name, FOREIGN_PREFIX + name, swapped}


def _fused(config: Declared, module: Module, present: Collection[str]) -> Iterator[Finding]:
    """The layer that vLLM fuses ``module`` and its siblings into, looked at once: from its first member."""
    layer, members = fused_set(module.name) or ("", (None,))
    if module.name != members[0] or not all(member in present for member in members):
        return
    try:
        got = by_vllm(config, layer, "QKVParallelLinear", members)
    except ValueError as error:
        yield _disagreement("vLLM", layer, module.group, str(error))
        return
    if got != module.group:
        yield _disagreement("vLLM", layer, module.group, got)


def _distinct(modules: Iterable[Module], config: Declared) -> Iterator[Module]:
    """One module for each template and group, or each of them where the config's patterns tell indices apart."""
    texts = [text for _, text in config.targets] + list(config.ignore)
    told_apart = {template_of(text) for text in texts if not uniform(text)}
    seen: set[tuple[str, str | None]] = set()
    for module in modules:
        template, _ = split(module.name)
        if _is_behind(template, told_apart) or (template, module.group) not in seen:
            seen.add((template, module.group))
            yield module


def _is_behind(template: str, ends: Collection[str | None]) -> bool:
    return any(end is None or template == end or template.endswith(f".{end}") for end in ends)


def _disagreement(reader: str, name: str, want: str | None, got: str | None) -> Finding:
    message = f"{reader} would take {name} for {got or 'unquantized'}; it is {want or 'unquantized'}"
    hint = "two modules have names of which one ends in the other: ignore one of them in the recipe"
    return Finding("plan.config", message, file="config.json", tensor=name, hint=hint)
