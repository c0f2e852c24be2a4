"""Engine lint: what a serving engine refuses in a checkpoint, or misreads without a word, and in which versions.

The rules are data, one file per engine in ``data/engines``. A file gives the versions that its rules were verified
for, the speculative algorithms that can be named, and the rules. A rule has a stable id, a version range, the
algorithms it concerns (none: it always applies), ``when`` (predicates of :mod:`.predicates`, all of which must hold;
the last one tells what the finding is about), what the engine does, the way round it, and where that is known from:
``measured`` on a running engine, ``read`` in its source, or ``reported`` in a public thread.

A rule is an error where the engine stops or computes something else without saying so, and a warning where it depends
on how the engine is started, or costs speed only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import Finding, UserError, fail, unreadable
from ..naming.patterns import nearest
from . import Level, Page, Probe, Seen, Subject
from .hits import Hit
from .predicates import PREDICATES

ENGINES = ("sglang", "vllm", "transformers", "llama.cpp")

_EXAMPLES = 5
# libyaml's loader where it is there: the rules are read whenever checks are listed.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Rule(NamedTuple):
    """One thing that an engine does not take as it is meant."""

    id: str
    title: str
    versions: SpecifierSet
    when: Mapping[str, Mapping[str, Any]]
    severity: str
    effect: str
    repair: str
    example: str
    source: str
    speculative: tuple[str, ...] = ()


class Engine(NamedTuple):
    """An engine, the versions that its rules are known to be right for, and the algorithms that can be named."""

    name: str
    label: str
    versions: SpecifierSet
    newest: Version
    speculative: tuple[str, ...]
    rules: tuple[Rule, ...]


class Chosen(NamedTuple):
    """What ``--engine`` and ``--speculative`` say."""

    engine: Engine
    version: Version
    speculative: frozenset[str]

    def text(self, rule: Rule) -> str:
        """The engine as a finding names it: ``SGLang 0.5.23 with NEXTN``."""
        named = [name for name in rule.speculative if name in self.speculative]
        return f"{self.engine.label} {self.version}" + (f" with {', '.join(named)}" if named else "")


@cache
def engine(name: str) -> Engine:
    """The engine ``name``, one of :data:`ENGINES`, from its file."""
    return _engine(name, (files("ckptkit") / "data" / "engines" / f"{name}.yaml").read_text("utf-8"))


def engine_by(path: str, name: str) -> Engine:
    """The engine ``name`` by a file of rules of the user's own.

    Raises UserError: ``source.missing``, ``access.denied``, ``usage.lint-data`` for one that is no such file.
    """
    try:
        found = _engine(name, Path(path).read_text("utf-8"))
    except OSError as error:
        raise unreadable(error, "source.missing", path) from None
    except (yaml.YAMLError, UnicodeDecodeError, InvalidSpecifier, InvalidVersion) as error:
        raise _no_data(path, " ".join(str(error).split())) from None
    except KeyError as error:
        raise _no_data(path, f"{error} is missing") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise _no_data(path, str(error)) from None
    if found.label.lower() in set(ENGINES) - {name}:
        raise _no_data(path, f"it holds those of {found.label}, not of {name}")
    unknown = sorted({name for rule in found.rules for name in rule.when} - PREDICATES.keys())
    if unknown:
        raise _no_data(path, f"no predicate is called {unknown[0]}")
    for name, arguments in (item for rule in found.rules for item in rule.when.items()):
        try:
            signature(PREDICATES[name]).bind(None, **arguments)
        except TypeError as error:
            raise _no_data(path, f"{name}: {error}") from None
    return found


def _no_data(path: str, why: str) -> UserError:
    hint = "a file of the form of ckptkit/data/engines/sglang.yaml"
    return fail("usage.lint-data", f"{path} is no file of engine rules: {why}", file=path, hint=hint)


def _engine(name: str, text: str) -> Engine:
    table = yaml.load(text, _LOADER)
    if not isinstance(table, dict):
        raise ValueError("it holds no table")
    rules = tuple(_rule(entry) for entry in table.pop("rules"))
    versions, newest = SpecifierSet(table.pop("versions")), Version(str(table.pop("newest")))
    return Engine(name=name, versions=versions, newest=newest, rules=rules, **_tuples(table))


def _rule(entry: Mapping[str, Any]) -> Rule:
    if entry["severity"] not in {"error", "warning"}:
        raise ValueError(f"{entry['id']} has severity {entry['severity']!r}, which is neither error nor warning")
    return Rule(**_tuples({**entry, "versions": SpecifierSet(entry["versions"])}))


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


@lru_cache(maxsize=8)
def choose(text: str, speculative: tuple[str, ...] = (), data: str | None = None) -> Chosen:
    """The engine, version and algorithms that a command line names: ``vllm==0.33`` and ``("mtp",)``.

    Without a version it is the newest known. ``data`` names a file of rules instead of the packaged one. Raises UserError (``usage.engine``) for names that are not known and
    for versions that no rule was verified for.
    """
    name, given, number = text.partition("==")
    if name not in ENGINES:
        hint = f"--engine {nearest(name, ENGINES) or ENGINES[0]}"
        raise fail("usage.engine", f"engine {name!r} is not known: {', '.join(ENGINES)}", hint=hint)
    found = engine_by(data, name) if data else engine(name)
    version = _version(found, number) if given else found.newest
    return Chosen(found, version, frozenset(_algorithm(found, algorithm) for algorithm in speculative))


def _version(found: Engine, number: str) -> Version:
    try:
        version = Version(number.removeprefix("b"))  # llama.cpp names its builds b11434
    except InvalidVersion:
        raise _unknown(found, f"{number!r} is no version") from None
    if not found.versions.contains(version, prereleases=True):
        raise _unknown(
            found, f"nothing is known of {found.label} {number}: its rules hold for {_shown(found.versions)}"
        )
    return version


def _unknown(found: Engine, message: str) -> UserError:
    return fail("usage.engine", message, hint=f"--engine {found.name}=={found.newest}")


def _shown(versions: SpecifierSet) -> str:
    return ",".join(sorted(map(str, versions), reverse=True))


def _algorithm(found: Engine, name: str) -> str:
    """The engine's own spelling of a speculative algorithm."""
    spelled = {_plain(known): known for known in found.speculative}
    if _plain(name) not in spelled:
        message = f"{found.label} has no speculative algorithm {name!r}: {', '.join(found.speculative)}"
        raise fail("usage.engine", message, hint=f"--speculative {nearest(name, found.speculative) or '…'}")
    return spelled[_plain(name)]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


# --- looking -----------------------------------------------------------------------------------------------


def problems(chosen: Chosen, subject: Subject) -> Iterator[Finding]:
    """What the chosen engine refuses in a checkpoint or misreads, by its rules."""
    for rule in chosen.engine.rules:
        if _unconcerned(rule, chosen) is None:
            yield from _look(rule, subject, chosen)


def boundaries(found: Engine) -> list[Version]:
    """The versions between which the rules are the same, ascending: the first and the newest, and where rules begin or end."""
    named = (item for rule in found.rules for item in rule.versions if item.operator in {">=", "<"})
    lowest = (item for item in found.versions if item.operator in {">=", "=="})
    versions = {Version(item.version.removesuffix(".*")) for item in (*named, *lowest)} | {found.newest}
    return sorted(version for version in versions if found.versions.contains(version, prereleases=True))


def _unconcerned(rule: Rule, chosen: Chosen) -> str | None:
    """Why a rule has nothing to say of what is chosen."""
    if not rule.versions.contains(chosen.version, prereleases=True):
        return f"concerns {chosen.engine.label} {_shown(rule.versions)}"
    if rule.speculative and chosen.speculative.isdisjoint(rule.speculative):
        return f"concerns --speculative {', '.join(rule.speculative)}"
    return None


def _look(rule: Rule, subject: Subject, chosen: Chosen) -> Sequence[Finding]:
    hits: Sequence[Hit] = ()
    for name, arguments in rule.when.items():
        hits = PREDICATES[name](subject, **arguments)
        if not hits:
            break
    return (_finding(rule, chosen, hits),) if hits else ()


def _chosen(subject: Subject) -> Chosen | None:
    text = subject.options.get("engine")
    return choose(text, tuple(subject.options.get("speculative") or ())) if text else None


def _unfit(name: str, rule: Rule, subject: Subject) -> str | None:
    chosen = _chosen(subject)
    if chosen is None:
        return "no --engine"
    if chosen.engine.name != name:
        return f"concerns {engine(name).label}"
    return _unconcerned(rule, chosen) or subject.unknown


def _run(rule: Rule, subject: Subject) -> Seen:
    chosen = _chosen(subject)
    return Seen(_look(rule, subject, chosen) if chosen else (), len(subject.survey.modules))


def _finding(rule: Rule, chosen: Chosen, hits: Sequence[Hit]) -> Finding:
    first = hits[0]
    number = sum(hit.number for hit in hits)
    more = f" (and {number - first.number:,} more)" if number > first.number else ""
    data = {
        "engine": chosen.engine.name,
        "version": str(chosen.version),
        "count": number,
        "examples": [hit.about for hit in hits[:_EXAMPLES]],
        "source": rule.source,
    }
    return Finding(
        rule.id,
        f"{first.text}{more}: {chosen.text(rule)} {rule.effect}",
        file=first.file,
        tensor=first.tensor,
        hint=rule.repair,
        severity=rule.severity,
        data=data,
    )


def _page(found: Engine, rule: Rule) -> Page:
    concerned = f" with {', '.join(rule.speculative)}" if rule.speculative else ""
    meaning = f"{found.label} {_shown(rule.versions)}{concerned} {rule.effect}.\n\nKnown from: {rule.source}"
    return Page(rule.id, Level.STATIC, rule.severity, rule.title, meaning, rule.example, rule.repair)


def _rules() -> Iterator[tuple[Engine, Rule]]:
    return ((found, rule) for found in map(engine, ENGINES) for rule in found.rules)


PROBES = tuple(
    Probe((rule.id,), Level.STATIC, partial(_run, rule), partial(_unfit, found.name, rule)) for found, rule in _rules()
)
PAGES = tuple(_page(found, rule) for found, rule in _rules())
