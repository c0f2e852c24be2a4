"""How engines read a compressed-tensors ``quantization_config``: which group a module gets, by their own rules.

Two rule sets, of compressed-tensors 0.19 (also transformers') and of vLLM 0.26-0.33:

* compressed-tensors: ignore wins; then the targets of all groups together, exact names first, then ``re:`` patterns
  in alphabetical order, then class names.
* vLLM: ignore wins; then the first target in file order that equals or matches the name, then one whose text is in
  the module's class name, then, for a fused module, the first target that matches each of its parts. In 0.33 the
  parts come before the class name.

Both match ``re:`` patterns at the start of the name (``re.match``), and a target that stands in two groups belongs to
the later one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .families import Kind
from .naming.regexes import compiled

LINEAR_CLASS = "Linear"
TORCH_CLASSES = {Kind.EMBEDDING: "Embedding", Kind.POSITION: "Embedding", Kind.NORM: "RMSNorm", Kind.CONV: "Conv1d"}
# The classes vLLM gives these modules: a head's and an embedding's name no Linear, so a class target passes them by.
_VLLM_CLASSES = {Kind.HEAD: "ParallelLMHead", Kind.EMBEDDING: "VocabParallelEmbedding"}


class Declared(NamedTuple):
    """The parts of a ``quantization_config`` that decide a module's group: (group, target) in file order, ignores."""

    targets: tuple[tuple[str, str], ...]
    ignore: tuple[str, ...]


def declared(config: Mapping[str, Any]) -> Declared:
    """Targets and ignores of a compressed-tensors ``quantization_config``."""
    groups = config.get("config_groups") or {}
    owners = {target: name for name, group in groups.items() for target in _targets(group)}
    targets = tuple((name, target) for target, name in owners.items())
    return Declared(targets, tuple(config.get("ignore") or ()))


def _targets(group: Any) -> Sequence[str]:
    return tuple(group.get("targets", ()) if isinstance(group, Mapping) else group)


def matches(name: str, target: str) -> bool:
    """``target`` names ``name``: equal, or ``re:`` and the pattern matches at the start."""
    return _compiled(target[3:])(name) is not None if target.startswith("re:") else target == name


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    return compiled(pattern).match


def vllm_class(kind: Kind, torch_class: str) -> str:
    """The class vLLM gives a module of that kind, which is a ``torch_class`` in transformers."""
    return _VLLM_CLASSES.get(kind, "LinearBase" if torch_class == LINEAR_CLASS else torch_class)


def by_compressed_tensors(config: Declared, module: str, class_name: str | None = LINEAR_CLASS) -> str | None:
    """The group that compressed-tensors gives ``module`` (of torch class ``class_name``), or None."""
    if any(matches(module, ignore) or ignore == class_name for ignore in config.ignore):
        return None
    by_name = _first(_in_order(config.targets), lambda target: matches(module, target))
    return by_name or _first(config.targets, lambda target: target == class_name)


@lru_cache(maxsize=64)
def _in_order(targets: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Targets as compressed-tensors tries them; sorted once, not for each module."""
    return sorted(targets, key=lambda item: ("re:" in item[1], item[1]))


def by_vllm(
    config: Declared, module: str, class_name: str, parts: Sequence[str] = (), parts_first: bool = False
) -> str | None:
    """The group that vLLM gives ``module``; ``parts`` are the checkpoint modules that a fused one is made of.

    ``parts_first``: as vLLM 0.33 does it, not 0.26. Raises ValueError where vLLM refuses: parts of which some are
    ignored and some are not.
    """
    ignored = {any(matches(part, ignore) for ignore in config.ignore) for part in (parts or (module,))}
    if len(ignored) > 1:
        raise ValueError(f"some parts of {module} are ignored and some are not")
    if ignored == {True}:
        return None
    lowered = class_name.lower()
    found = _first(config.targets, lambda target: matches(module, target))
    by_class = _first(config.targets, lambda target: not target.startswith("re:") and target.lower() in lowered)
    if found or not parts or (by_class and not parts_first):
        return found or by_class
    each = [_first(config.targets, lambda target, part=part: matches(part, target)) for part in parts]  # type: ignore[misc]
    return each[0] if all(each) else by_class


def _first(targets: Iterable[tuple[str, str]], test: Callable[[str], bool]) -> str | None:
    return next((group for group, target in targets if test(target)), None)
