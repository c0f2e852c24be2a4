"""The ``quantization_config`` that a plan writes: derived from what each module becomes, not from the recipe's text.

Targets and ignores are regexes of full module paths (:mod:`.generalise`), groups are disjoint and sorted, and the
ignore list covers every matrix that is left alone. What was written is then read back by each consumer's own rules
(:mod:`ckptkit.consumers`) and must say exactly what lies on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple

from ..consumers import (
    LINEAR_CLASS,
    TORCH_CLASSES,
    Declared,
    by_compressed_tensors,
    by_vllm,
    declared,
    matches,
    vllm_class,
)
from ..errors import Finding
from ..families import Kind, experts_of, fused_set
from ..naming.names import template_of, uniform
from ..recipe.schemes import COMPRESSED_TENSORS_VERSION, Scheme, config_group
from .generalise import by_template, patterns

FOREIGN_PREFIX = "language_model."


class Modules(NamedTuple):
    """Matrices of the result: modules of one template and kind, and the group they belong to (None: left as they are)."""

    template: str
    kind: Kind
    group: str | None
    names: Sequence[str]


def group_names(groups: Iterable[str], present: Mapping[str, Any] | None) -> dict[str, str]:
    """The name each of the recipe's groups has in the written config: its own, unless one there has it already."""
    taken = _groups(present)
    return {group: next(name for name in _numbered(group) if name not in taken) for group in groups}


def _groups(present: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict((present or {}).get("config_groups") or {})


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in count(1))


def build(
    modules: Sequence[Modules], schemes: Mapping[str, Scheme], present: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The config to write for ``modules``, whose groups have the schemes ``schemes``.

    ``present`` is the compressed-tensors config to merge onto: its groups stay as they are, and its ignore list
    loses what is quantized now.
    """
    among = _joined(modules)
    groups = _groups(present)
    for group, scheme in schemes.items():
        others = {m.template for m in modules if m.group not in (group, None)}
        mine = _joined(m for m in modules if m.group == group)
        targets = patterns(mine, among, others, _fused_names(mine))
        groups[group] = config_group(scheme, targets)
    ignore = _ignore(modules, schemes, among, present)
    return _table(dict(sorted(groups.items())), ignore, present)


def _joined(modules: Iterable[Modules]) -> dict[str, list[str]]:
    """Names by template."""
    found: dict[str, list[str]] = defaultdict(list)
    for alike in modules:
        found[alike.template] += alike.names
    return found


def _fused_names(found: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By the template of its first member, the last name of each layer that engines fuse of modules that are all here.

    vLLM looks a fused layer up by its members. SGLang does so only for models that state which these are, and its Qwen2,
    Qwen3 and MiMo do not: it finds their layers by the fused name alone.
    """
    named = {}
    for template in found:
        layer, members = fused_set(template) or ("", ())
        if (
            template in members[:1]
            and not experts_of(template.replace("#", "0"))
            and all(member in found for member in members)
        ):
            parents = [{name.rpartition(".")[0] for name in found[member]} for member in members]
            if all(those == parents[0] for those in parents):
                named[template] = layer.rpartition(".")[2]
    return named


def _ignore(
    modules: Sequence[Modules],
    schemes: Mapping[str, Scheme],
    among: Mapping[str, Sequence[str]],
    present: Mapping[str, Any] | None,
) -> list[str]:
    left_alone = _joined(m for m in modules if m.group is None)
    quantized = {m.template for m in modules if m.group is not None}
    if present is None:
        return patterns(left_alone, among, quantized, _fused_names(left_alone))
    new = [name for m in modules if m.group in schemes for name in m.names]
    kept, opened = [], set()
    for entry in present.get("ignore") or ():
        if any(matches(name, entry) for name in new):
            opened |= {name for name in chain.from_iterable(left_alone.values()) if matches(name, entry)}
        else:
            kept.append(entry)
    left = by_template(opened)
    return kept + patterns(left, among, quantized, _fused_names(left))


def _table(groups: dict[str, Any], ignore: list[str], present: Mapping[str, Any] | None) -> dict[str, Any]:
    known = _format(present)
    formats = {_format(group) or known for group in groups.values()}
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
    table["quantization_status"] = "compressed"
    table["ignore"] = ignore
    return table


def _format(stated: Any) -> str | None:
    """What a config, or a group of one, names as its format."""
    found = stated.get("format") if isinstance(stated, Mapping) else None
    return found if isinstance(found, str) else None


# --- reading it back ---------------------------------------------------------------------------------------


def disagreements(table: Mapping[str, Any], modules: Sequence[Modules]) -> Iterator[Finding]:
    """``plan.config``: modules that a consumer of the written config would take for something else than they are.

    Checked under compressed-tensors' and vLLM's rules, on the checkpoint's names, behind a foreign prefix, and on
    the names of fused layers. Modules that differ only in indices that the patterns do not tell apart are one case.
    """
    config = declared(table)
    present = {name for alike in modules for name in alike.names}
    for module, kind, want in _distinct(modules, config):
        misread = [reading for reading in _readings(config, module, kind) if reading.group != want]
        if misread:
            yield _misread(module, want, misread)
        else:
            yield from _fused(config, module, want, present)


class _Reading(NamedTuple):
    """The group that a consumer gives the module that it knows by ``name``."""

    consumer: str
    name: str
    group: str | None


def _readings(config: Declared, module: str, kind: Kind) -> Iterator[_Reading]:
    torch_class = TORCH_CLASSES.get(kind, LINEAR_CLASS)
    for name in _spellings(module):
        yield _Reading("compressed-tensors", name, by_compressed_tensors(config, name, torch_class))
        yield _Reading("vLLM", name, by_vllm(config, name, vllm_class(kind, torch_class)))


def _spellings(name: str) -> Iterable[str]:
    """The names under which engines may know a module: its own, behind another prefix, with wrappers swapped."""
    first, second = "model.language_model.", "language_model.model."
    swapped = name.replace(first, second, 1) if name.startswith(first) else name
    swapped = name.replace(second, first, 1) if name.startswith(second) else swapped
    return dict.fromkeys((name, FOREIGN_PREFIX + name, swapped))


def _fused(config: Declared, module: str, want: str | None, present: Collection[str]) -> Iterator[Finding]:
    """The layer that vLLM fuses ``module`` and its siblings into, looked at once: from its first member."""
    layer, members = fused_set(module) or ("", (None,))
    if module != members[0] or not all(member in present for member in members):
        return
    try:
        got = by_vllm(config, layer, "QKVParallelLinear", members)
    except ValueError as error:
        yield _disagreement(module, f"vLLM would not load it: {error}", _together(layer))
        return
    if got != want:
        message = f"{module} is {_called(want)}; vLLM would take {layer}, of which it is a part, for {_called(got)}"
        yield _disagreement(module, message, _together(layer))


def _together(layer: str) -> str:
    return f"let one group of the recipe target all parts of {layer}, or ignore them all"


def _distinct(modules: Iterable[Modules], config: Declared) -> Iterator[tuple[str, Kind, str | None]]:
    """One module for each template and group, or each of them where the config's patterns tell indices apart."""
    texts = [text for _, text in config.targets] + list(config.ignore)
    told_apart = {template_of(text) for text in texts if not uniform(text)}
    for alike in modules:
        names = alike.names if _is_behind(alike.template, told_apart) else alike.names[:1]
        yield from ((name, alike.kind, alike.group) for name in names)


def _is_behind(template: str, ends: Collection[str | None]) -> bool:
    return any(end is None or template == end or template.endswith(f".{end}") for end in ends)


def _misread(module: str, want: str | None, misread: Sequence[_Reading]) -> Finding:
    """A module that patterns meant for another one reach, told by the first name under which that happens."""
    _, name, got = misread[0]
    consumers = [reading.consumer for reading in misread if (reading.name, reading.group) == (name, got)]
    known = "" if name == module else f" under the name {name}"
    message = f"{module} is {_called(want)}; {' and '.join(consumers)} would take it{known} for {_called(got)}"
    hint = "its name ends like that of another module: let one group of the recipe target both, or ignore both"
    return replace(_disagreement(module, message, hint), data={"name": name})


def _called(group: str | None) -> str:
    return "unquantized" if group is None else f"one of group {group}"


def _disagreement(module: str, message: str, hint: str) -> Finding:
    return Finding("plan.config", message, file="config.json", tensor=module, hint=hint)
