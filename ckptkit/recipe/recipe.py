"""Recipes: what a quantized checkpoint shall be. YAML (schema 1) to frozen data, every problem with its line.

A recipe is a file or the name of a built-in one; ``--set dotted.key=VALUE`` overrides a key of it, and is recorded.
Ids of what is wrong with one, all of them exit 2: ``recipe.not-found``, ``recipe.invalid``, ``recipe.set``,
``recipe.scheme``, ``recipe.pattern``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import Finding, UserError, fail, unreadable
from ..naming.patterns import nearest
from .rules import POLICIES, Problem, overrides, problems, put
from .schemes import Scheme, config_group, resolve
from .yaml_lines import MAX_BYTES, Key, MalformedYaml, parse


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that become one scheme. ``experts`` says how 3-D expert tensors lie: rows, columns, or not touched."""

    name: str
    targets: tuple[str, ...]
    scheme: Scheme
    experts: str | None = None


@dataclass(frozen=True, slots=True)
class Ignore:
    """Modules that are left alone whatever targets them; one that is not ``optional`` must match something."""

    pattern: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A valid recipe after overrides.

    ``origin`` is the file or name it came from, ``sets`` the overrides as given, ``sha256`` the digest of its text.
    """

    name: str
    groups: tuple[Group, ...]
    ignore: tuple[Ignore, ...]
    source: str | None
    output: str | None
    tie: str
    existing: str
    nonfinite: str
    arithmetic: str
    origin: str
    sets: tuple[str, ...]
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """What a manifest records. ``recipe`` is what was meant, spelled out: a recipe that could itself be run."""
        meant = {
            "schema": 1,
            "name": self.name,
            "groups": {group.name: _group_dict(group) for group in self.groups},
            "ignore": [{"pattern": item.pattern, "optional": item.optional} for item in self.ignore],
            **{key: getattr(self, key) for key in POLICIES},
        }
        return {"name": self.name, "sha256": self.sha256, "set": list(self.sets), "recipe": meant}


def _group_dict(group: Group) -> dict[str, Any]:
    scheme = config_group(group.scheme, group.targets)
    return {"targets": scheme.pop("targets"), "scheme": scheme, "experts": group.experts}


# --- where recipes come from -------------------------------------------------------------------------------


def load(name_or_path: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or the built-in one of that name, with the overrides ``sets`` (``KEY=VALUE``) applied.

    A file is what exists as one, has a ``/`` in it, or ends in ``.yaml`` or ``.yml``. Raises UserError.
    """
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isfile(path) or "/" in name_or_path or path.suffix in {".yaml", ".yml"}:
        return load_text(_read(path, name_or_path), name_or_path, sets)
    return load_text(builtin_text(name_or_path), name_or_path, sets)


def builtin_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package, sorted."""
    return tuple(sorted(item.name.removesuffix(".yaml") for item in _folder().iterdir() if item.name.endswith(".yaml")))


def builtin_text(name: str) -> str:
    """The text of a built-in recipe. Raises UserError (``recipe.not-found``)."""
    names = builtin_names()
    if name not in names:
        close = nearest(name, names)
        meant = f"did you mean {close}? " if close else ""
        hint = f"{meant}built in: {', '.join(names)}; a file has a / in its name or ends in .yaml"
        raise fail("recipe.not-found", f"there is no built-in recipe {name!r}", hint=hint)
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _folder() -> Traversable:
    """Beside the modules in a wheel, at the top of a checkout."""
    packaged = files("ckptkit") / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "recipes"


def _read(path: Path, origin: str) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        close = nearest(path.stem, builtin_names())
        hint = f"ckptkit recipes {close} prints a built-in one" if close else "ckptkit recipes lists the built-in ones"
        raise unreadable(error, "recipe.not-found", origin, hint) from None
    if len(content) > MAX_BYTES:
        raise fail("recipe.invalid", f"{origin} is longer than {MAX_BYTES:,} bytes: no recipe", file=origin)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise _malformed(origin, MalformedYaml(what, line)) from None


# --- from text to a recipe ---------------------------------------------------------------------------------

# Where the value at a key was written: the line, or the ``--set`` that put it there.
_Places = dict[Key, int | str]


def load_text(text: str, origin: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe in ``text``, which messages call ``origin``. Raises UserError with every problem found."""
    try:
        data, lines = parse(text)
    except MalformedYaml as error:
        raise _malformed(origin, error) from None
    places: _Places = {**lines}
    if isinstance(data, dict):
        found = [finding for setting in sets if (finding := _override(data, places, setting)) is not None]
        found += [_finding(problem, origin, places) for problem in problems(data)]
    else:
        what = "is empty" if data is None else "must be a mapping of keys to values"
        found = [_finding(Problem((), what), origin, places)]
    if found:
        raise UserError(found)
    return _build(data, origin, tuple(sets), hashlib.sha256(text.encode()).hexdigest())


def _malformed(origin: str, error: MalformedYaml) -> UserError:
    message = f"{origin}, line {error.line}: {error}"
    return fail("recipe.invalid", message, file=origin, data={"line": error.line})


def _override(data: dict[str, Any], places: _Places, setting: str) -> Finding | None:
    """Apply one ``KEY=VALUE`` in place and note where the value came from; or say (``recipe.set``) why it cannot be."""
    dotted, equals, text = setting.partition("=")
    key = tuple(dotted.split("."))
    try:
        problem = put(data, key, parse(text).data) if equals else Problem(key, "must be KEY=VALUE")
    except MalformedYaml as error:
        problem = Problem(key, f"the value is not YAML: {error}")
    if problem is not None:
        message = f"--set {setting}: {problem.message}"
        return Finding("recipe.set", message, hint=problem.hint, data={"key": dotted, "set": setting})
    for stale in [other for other in places if other[: len(key)] == key]:
        del places[stale]
    places[key] = setting
    return None


def _finding(problem: Problem, origin: str, places: _Places) -> Finding:
    key = problem.key
    place = next(places[key[:length]] for length in range(len(key), -1, -1) if key[:length] in places)
    where = f"--set {place}" if isinstance(place, str) else f"{origin}, line {place}"
    dotted = ".".join(map(str, key))
    data = {"key": dotted} | ({"set": place} if isinstance(place, str) else {"line": place})
    message = ": ".join(part for part in (where, dotted, problem.message) if part)
    return Finding(problem.id, message, file=origin, hint=problem.hint, data=data)


def _build(data: Mapping[str, Any], origin: str, sets: tuple[str, ...], sha256: str) -> Recipe:
    groups = [
        Group(name, tuple(group["targets"]), resolve(group["scheme"], overrides(group)), group.get("experts"))
        for name, group in data["groups"].items()
    ]
    ignore = [Ignore(item) if isinstance(item, str) else Ignore(**item) for item in data.get("ignore", ())]
    return Recipe(
        name=data.get("name") or Path(origin).stem,
        groups=tuple(groups),
        ignore=tuple(ignore),
        source=data.get("source"),
        output=data.get("output"),
        **{key: data.get(key, choices[0]) for key, choices in POLICIES.items()},
        origin=origin,
        sets=sets,
        sha256=sha256,
    )


__all__ = ["Group", "Ignore", "Recipe", "builtin_names", "builtin_text", "load", "load_text"]
