"""How a quantization config reaches modules, by name, as serving engines read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from ..consumers import matches
from ..naming.patterns import looks_like_class
from ..stored import Quantization

# Config keys that list modules left unquantized, of the methods that have no groups (fp8, ModelOpt, AWQ).
_EXCLUDES = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")


def reach(quantization: Quantization | None, prefix: str = "") -> Callable[[str], str | None]:
    """How a compressed-tensors config reaches a module, by its name; None if there is none.

    Ignores win. Without a ``prefix`` a plain pattern may be the end of the name, as SGLang reads it.
    """
    declared = quantization.declared if quantization else None
    if declared is None:
        return lambda module: None
    targets = [target for _, target in declared.targets]
    ignored, targeted = _named(declared.ignore, not prefix), _named(targets, not prefix)
    otherwise = "class" if any(map(looks_like_class, targets)) else "nothing"

    def reached_by(module: str) -> str:
        name = prefix + module
        return "ignored" if ignored(name) else "name" if targeted(name) else otherwise

    return reached_by


def _named(patterns: Sequence[str], by_end: bool) -> Callable[[str], bool]:
    """Whether one of ``patterns`` names a module: in full, as a regex, or (``by_end``) as the end of its path."""
    plain = {pattern for pattern in patterns if not pattern.startswith("re:")}
    regexes = [pattern for pattern in patterns if pattern.startswith("re:")]

    def named(name: str) -> bool:
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) if by_end else 1))
        return any(end in plain for end in ends) or any(matches(name, regex) for regex in regexes)

    return named


def excluded(quantization: Quantization | None) -> Callable[[str], bool]:
    """Whether the config says that a module is not quantized."""
    if quantization is None:
        return lambda module: True
    if quantization.declared is not None:
        reached_by = reach(quantization)
        return lambda module: reached_by(module) in {"ignored", "nothing"}
    lists = [quantization.table.get(key) for key in _EXCLUDES]
    listed = [str(name) for names in lists if isinstance(names, list) for name in names]
    return lambda module: any(_within(module, name) for name in listed)


def _within(module: str, listed: str) -> bool:
    """Whether ``listed``, a name, a part of one, a glob or a regex, covers ``module``."""
    if listed.startswith("re:"):
        return matches(module, listed)
    return fnmatchcase(module, listed) or f".{listed}." in f".{module}."
