"""How a compressed-tensors ``quantization_config`` reads each weight, under compressed-tensors' and vLLM's rules.

The rules themselves are in :mod:`ckptkit.consumers`. Names in a config may be those of the checkpoint or those that an
engine gives modules (``language_model.model.layers`` or ``model.language_model.layers``): where nothing in the config
names a module as it is stored, its other spellings are tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..consumers import LINEAR_CLASS, TORCH_CLASSES, Declared, by_compressed_tensors, by_vllm, matches, vllm_class
from ..families import LINEAR_LIKE, Kind
from ..naming.names import template_of, uniform, unwrapped
from ..plan import Ref
from ..recipe.schemes import presets
from ..stored import Quantization
from .expected import Expected, of_group
from .methods import Reading
from .weights import Weight

_QUANTIZABLE = LINEAR_LIKE - {Kind.ROUTER} | {Kind.EMBEDDING}
_WRAPPED = ("model.", "model.language_model.", "language_model.model.")


def spellings(name: str) -> tuple[str, ...]:
    """``name``, and the other names that engines have for such a module. A name without a path is the only one."""
    core = unwrapped(name)
    if "." not in core:
        return (name,)
    return tuple(dict.fromkeys((name, core, *(wrap + core for wrap in _WRAPPED))))


class Seen(NamedTuple):
    """What of the config finds a module.

    The group under each consumer's rules, the targets that name it, whether an ignore does, and which of its
    :func:`spellings` they name.
    """

    compressed_tensors: str | None
    vllm: str | None
    named_by: tuple[str, ...]
    ignored: bool
    spelling: int = 0


@dataclass(frozen=True)
class Groups:
    """A config's targets and ignores, laid out for being asked about thousands of names."""

    quantization: Quantization
    declared: Declared
    _known: dict[Hashable, Seen] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Every pattern of the config."""
        return (*(target for _, target in self.declared.targets), *self.declared.ignore)

    @cached_property
    def _exact_targets(self) -> Mapping[str, int]:
        """Names with a path, and where they stand. All other targets may find any name."""
        return {target: at for at, (_, target) in enumerate(self.declared.targets) if _is_exact(target)}

    @cached_property
    def _loose_targets(self) -> list[int]:
        return [at for at, (_, target) in enumerate(self.declared.targets) if not _is_exact(target)]

    @cached_property
    def _exact_ignores(self) -> frozenset[str]:
        return frozenset(filter(_is_exact, self.declared.ignore))

    @cached_property
    def _loose_ignores(self) -> tuple[str, ...]:
        return tuple(ignore for ignore in self.declared.ignore if not _is_exact(ignore))

    @cached_property
    def _telling(self) -> list[Callable[[str], object]]:
        return [re.compile(text[3:]).match for text in self.texts if text.startswith("re:") and not uniform(text)]

    def narrowed(self, *names: str) -> Declared:
        """The part of the config that can find one of ``names``."""
        found = self._loose_targets + [self._exact_targets[name] for name in names if name in self._exact_targets]
        ignores = (*self._loose_ignores, *(name for name in names if name in self._exact_ignores))
        return Declared(tuple(self.declared.targets[at] for at in sorted(found)), ignores)

    def told_by(self, name: str) -> Hashable:
        """What of the config tells a module from others of its template: exact names, and regexes that see digits."""
        names = spellings(name)
        exact = tuple((self._exact_targets.get(spelling), spelling in self._exact_ignores) for spelling in names)
        return exact, tuple(match(spelling) is not None for match in self._telling for spelling in names)

    def seen(self, weight: Weight) -> Seen:
        """How the config finds a weight, by the first of its spellings that something in the config names."""
        key = weight.template, weight.kind, weight.quantized, self.told_by(weight.name)
        if key not in self._known:
            self._known[key] = self._find(weight)
        return self._known[key]

    def _find(self, weight: Weight) -> Seen:
        for spelling, name in enumerate(spellings(weight.name)):
            narrow = self.narrowed(name)
            named_by = tuple(target for _, target in narrow.targets if matches(name, target))
            ignored = any(matches(name, ignore) for ignore in narrow.ignore)
            if named_by or ignored:
                return Seen(*_groups(narrow, name, weight.kind), named_by, ignored, spelling)
        if weight.kind is Kind.HEAD and not weight.quantized and unwrapped(weight.name) in self.declared.ignore:
            return Seen(None, None, (), True)
        return Seen(*_groups(self.narrowed(weight.name), weight.name, weight.kind), (), False)

    @cached_property
    def _weights(self) -> Mapping[str, Mapping[str, Any]]:
        """The arguments of each group's weights; a group that is a list of targets has its name's preset."""
        found = {}
        for group, table in self.quantization.table["config_groups"].items():
            table = presets().get(group.upper()) if isinstance(table, list) else table
            weights = table.get("weights") if isinstance(table, Mapping) else None
            found[group] = weights if isinstance(weights, Mapping) else {}
        return found

    def scheme(self, group: str | None) -> Mapping[str, Any] | None:
        """What makes two groups the same to a reader: their weights' arguments, None for no quantization."""
        return (self._weights[group] or None) if group is not None else None

    def expected(self, group: str) -> Expected:
        """The scheme of a group."""
        table = self.quantization.table["config_groups"][group]
        format = table.get("format") if isinstance(table, Mapping) else None
        label = f"{group} ({self.quantization.label(group) or group})"
        return of_group(self._weights[group], format or self.quantization.format, label)

    def reading(self, weight: Weight, seen: Seen) -> Reading:
        """What the config says of a weight that it finds so. Patterns may reach what no reader quantizes."""
        if not weight.quantized and weight.kind not in _QUANTIZABLE:
            return Reading(None)
        groups = [group for group in dict.fromkeys((seen.compressed_tensors, seen.vllm)) if group is not None]
        schemes = tuple(self.expected(group) for group in groups if self._weights[group])
        if schemes:
            return Reading(True, f"config.json puts it into {groups[0]}", schemes)
        if weight.kind is Kind.EXPERTS and LINEAR_CLASS in self.texts:
            return Reading(None)
        why = "config.json ignores it" if seen.ignored else "no target of config.json reaches it"
        return Reading(False, why)

    def tells_apart(self, template: str) -> bool:
        """Whether the config may say different things of modules of one template and layer (experts)."""
        return any(_sees_inner(text, template) for text in self.texts)


def _is_exact(text: str) -> bool:
    return "." in text and not text.startswith("re:")


def _groups(config: Declared, name: str, kind: Kind) -> tuple[str | None, str | None]:
    """The groups under both rule sets. Routers are no Linear in transformers, and vLLM quantizes none."""
    torch_class = LINEAR_CLASS if kind in LINEAR_LIKE - {Kind.ROUTER} else TORCH_CLASSES.get(kind, "Parameter")
    vllm = by_vllm(config, name, vllm_class(kind, torch_class))
    return by_compressed_tensors(config, name, torch_class), vllm


def _sees_inner(text: str, template: str) -> bool:
    """Whether a pattern tells indices after the first apart in names of ``template``."""
    if text.startswith("re:") and uniform(text):
        return False
    own = template_of(text)
    if own is None:
        return True
    if own.count("#") < 2 or not (template == own or template.endswith(f".{own}")):
        return False
    return not text.startswith("re:") or _fixes_inner(text)


def _fixes_inner(pattern: str) -> bool:
    """Of a pattern as ckptkit writes it: whether an index after the first is not any number."""
    parts = [part for part in pattern.split(r"\.") if part == r"\d+" or part[:1].isdigit() or part.startswith("(?:")]
    return any(part != r"\d+" for part in parts[1:])


def distinct(groups: Groups, weight: Weight, members: Sequence[Ref]) -> Iterator[tuple[Weight, Seen]]:
    """The weights of one place, ``members`` the tensors of all of them, gathered by what the config says of each."""
    alike: dict[Hashable, list[Ref]] = {}
    for ref in members:
        alike.setdefault(groups.told_by(ref.name.removesuffix(f".{weight.part}")), []).append(ref)
    for same in alike.values():
        first = weight._replace(name=same[0].name.removesuffix(f".{weight.part}"), number=len(same), ref=same[0])
        yield first, groups.seen(first)
