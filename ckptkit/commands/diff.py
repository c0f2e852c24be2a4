"""``ckptkit diff``: what differs between two checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

import click

from ..comparing.config_diff import ConfigDiff, compare_configs, shown
from ..comparing.diffing import Diff, Level, Pair, Verdict, compare
from ..console import Console, Table
from ..errors import FOUND, OK, Finding, UserError, fail
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.source import open_source
from ..naming.names import Matcher, split
from ..naming.patterns import meant, pattern
from ..naming.renaming import rename, rename_rule
from ..options import command
from ..plan import Ref

LEVELS = click.Choice([level.name.lower() for level in Level])


class Asked(NamedTuple):
    """The options as they were given."""

    level: Level
    renames: tuple[str, ...]
    rtol: float
    atol: float
    top: int
    jobs: int


@command
@click.argument("a")
@click.argument("b")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--level", type=LEVELS, default="specs", help="How deep to look (default: specs).")
@click.option("--rename", "--map", "renames", multiple=True, metavar="RULE", help="A's names become B's: OLD=NEW.")
@click.option("--rtol", type=click.FloatRange(0), default=0.0, metavar="X", help="Tolerance, relative to A's values.")
@click.option("--atol", type=click.FloatRange(0), default=0.0, metavar="X", help="Tolerance, absolute.")
@click.option("--top", type=click.IntRange(0), default=20, metavar="N", help="Lines of each list (default: 20).")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def diff(console: Console, a: str, b: str, patterns: tuple[str, ...], **given: Any) -> int:
    """Show what differs between two checkpoints, whatever their sharding. Exit code 1 if anything does.

    A and B are folders, .safetensors files, Hub repositories or URLs. Levels, each with those before it: names only
    here or there; specs: dtypes and shapes; digests: bytes, read only where ckptkit.json does not know them;
    values: floats compared as float32, whatever their dtypes, and equal within the tolerance |a - b| <= atol + rtol
    * |a|.

    A PATTERN (a name in A or B, a glob, or re: and a regex) restricts what is compared to the tensors that it
    matches; config.json and tokenizer files are compared when there is none. A RULE is OLD=NEW, whole parts of a name
    from its beginning, or re:REGEX=NEW.

    \b
    Examples:
      ckptkit diff ./model ./model-w8
      ckptkit diff ./model ./finetuned --level values --top 5
      ckptkit diff ./model ./copy --level digests --json | jq .summary
      ckptkit diff ./a ./b --rename model.language_model.=model. '*.mlp.*'
    """
    asked = Asked(**given | {"level": Level[given["level"].upper()]})
    if (asked.rtol or asked.atol) and asked.level is not Level.VALUES:
        raise fail("usage.arguments", "--rtol and --atol are for values", hint="add --level values")
    rules = [*map(rename_rule, asked.renames)]
    with open_source(a) as one, open_source(b) as other:
        sides = open_checkpoint(one), open_checkpoint(other)
        renamed, misnamed = rename(sides[0].tensors, rules)
        wanted, unmatched = _selection(patterns, sides)
        if misnamed or unmatched:
            raise UserError([*misnamed, *unmatched])
        called = {old: new.name for old, new in renamed.items()}
        found = _compare(console, sides, called, wanted, asked)
        config = None if patterns else compare_configs(*sides)
    code = OK if found.is_empty and (config is None or config.is_empty) else FOUND
    warnings = [warning for side in sides for warning in side.warnings]
    human = _lines(found, config, asked.top)
    console.result(_data(a, b, found, config, sides), human, _differing(found, config), warnings, code)
    return code


def _selection(
    patterns: Sequence[str], sides: tuple[Checkpoint, Checkpoint]
) -> tuple[Callable[[str], bool], list[Finding]]:
    """A function from name to whether it is asked for, and findings for patterns that match no name of either side."""
    if not patterns:
        return lambda name: True, []
    matcher = Matcher(patterns)
    matched = {text for side in sides for name in side.tensors for text in matcher.all(name)}
    findings = [_unmatched(text, sides) for text in patterns if text not in matched]
    return lambda name: bool(matcher.all(name)), findings


def _unmatched(text: str, sides: tuple[Checkpoint, Checkpoint]) -> Finding:
    like = meant(pattern(text), {**sides[0].tensors, **sides[1].tensors})
    hint = f"{quote(like)} in its place" if like else f"ckptkit inspect {sides[0].source.uri} --group module"
    return Finding("usage.pattern-unmatched", f"pattern {text!r} matches no tensor of A or B", hint=hint)


def _compare(
    console: Console,
    sides: tuple[Checkpoint, Checkpoint],
    called: Mapping[str, str],
    wanted: Callable[[str], bool],
    asked: Asked,
) -> Diff:
    if asked.level < Level.DIGESTS:
        return compare(*sides, called, asked.level, wanted)
    tolerance = None
    if asked.level is Level.VALUES:
        from ..comparing.closeness import Tolerance

        tolerance = Tolerance(asked.rtol, asked.atol)
    with console.progress("diff") as progress:
        found = compare(*sides, called, asked.level, wanted, tolerance, asked.top, asked.jobs, progress)
        progress.done()
    return found


# --- for programs ------------------------------------------------------------------------------------------


def _data(
    a: str, b: str, found: Diff, config: ConfigDiff | None, sides: tuple[Checkpoint, Checkpoint]
) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "level": found.level.name.lower(),
        "summary": _summary(found, config) | {"tensors_a": len(sides[0].tensors), "tensors_b": len(sides[1].tensors)},
        "only_a": [_spec_data(ref) for ref in found.only_a],
        "only_b": [_spec_data(ref) for ref in found.only_b],
        "changed": [_changed_data(pair, what) for pair, what in _changed(found)],
        "worst": [_worst_data(verdict) for verdict in found.worst],
        "config": config
        and {
            "added": config.added,
            "removed": config.removed,
            "changed": {key: {"a": old, "b": new} for key, (old, new) in config.changed.items()},
            "files": config.files,
        },
    }


def _summary(found: Diff, config: ConfigDiff | None) -> dict[str, Any]:
    """Counts; null for what the level does not look at."""
    changed = Counter(key for pair in found.respecified for key in pair.changed)
    specs, content = found.level >= Level.SPECS, found.level >= Level.DIGESTS
    return {
        "only_a": len(found.only_a),
        "only_b": len(found.only_b),
        "shape": changed["shape"] if specs else None,
        "dtype": changed["dtype"] if specs else None,
        "equal": found.equal if content else None,
        "differ": len(found.differ) if content else None,
        "unread": found.unread if content else None,
        "config": None if config is None else sum(map(len, config)),
    }


def _changed(found: Diff) -> Iterator[tuple[Pair, tuple[str, ...]]]:
    """Every tensor of both that differs, and in what: dtype, shape, and bytes or values."""
    content = {verdict.pair.a.name: "values" if verdict.sums else "bytes" for verdict in found.differ}
    for pair in found.pairs:
        what = pair.changed if found.level >= Level.SPECS else ()
        what += (content[pair.a.name],) if pair.a.name in content else ()
        if what:
            yield pair, what


def _spec_data(ref: Ref) -> dict[str, Any]:
    return {"name": ref.name, "dtype": ref.dtype, "shape": ref.shape, "bytes": ref.nbytes, "shard": ref.file}


def _changed_data(pair: Pair, what: Sequence[str]) -> dict[str, Any]:
    return {"name": pair.a.name, "differs": what, "a": _spec_data(pair.a), "b": _spec_data(pair.b)}


def _worst_data(verdict: Verdict) -> dict[str, Any]:
    assert verdict.sums is not None
    sums = verdict.sums
    figures = {"max_abs": sums.max_abs, "rel_rms": sums.rel_rms, "cosine": sums.cosine}
    finite = {key: value if value is not None and math.isfinite(value) else None for key, value in figures.items()}
    counts = {"beyond": sums.beyond, "nonfinite": sums.odd, "values": math.prod(verdict.pair.a.shape)}
    return {"name": verdict.pair.a.name, "name_b": verdict.pair.b.name, "within": verdict.same, **finite, **counts}


def _differing(found: Diff, config: ConfigDiff | None) -> list[str]:
    """What ``--quiet`` prints: names of tensors, keys of config.json, names of files."""
    names = [ref.name for ref in (*found.only_a, *found.only_b)] + [pair.a.name for pair, _ in _changed(found)]
    return names + [key for part in config or () for key in part]


# --- for people --------------------------------------------------------------------------------------------


def _lines(found: Diff, config: ConfigDiff | None, top: int) -> Iterator[str | Table]:
    summary = _summary(found, config)
    keys = ("only_a", "only_b", "shape", "dtype", "equal", "differ")
    cells = ["–" if summary[key] is None else f"{summary[key]:,}" for key in keys]
    header = ("", "only in A", "only in B", "shape", "dtype", "equal", "differ")
    yield Table(header, [("names", *cells[:2], *"––––"), ("tensors", *"––", *cells[2:])], "<>>>>>>")
    for title, refs in (("only in A", found.only_a), ("only in B", found.only_b)):
        yield from _listed(title, ("tensors", "spec"), Counter((_template(ref), _spec(ref)) for ref in refs), top)
    shown = Counter(
        (_template(pair.a), f"{_spec(pair.a)} → {_spec(pair.b)}" if pair.changed else "bytes")
        for pair, what in _changed(found)
        if what != ("values",)
    )
    yield from _listed("changed", ("tensors", "how"), shown, top)
    if found.worst:
        yield ""
        yield Table(("worst", "max|a−b|", "rel rms", "cos", "beyond"), [*map(_worst_row, found.worst)], "<>>>>")
    if config is not None and not config.is_empty:
        yield ""
        yield Table(("config", "A", "B"), _cut(list(_config_rows(config)), top), "<<<")


def _listed(title: str, columns: tuple[str, str], counts: Mapping[tuple[str, str], int], top: int) -> Iterator[Any]:
    """Names with their numbers replaced by ``#``, one line for all that are alike."""
    if counts:
        yield ""
        rows = [(name, f"{count:,}", detail) for (name, detail), count in counts.items()]
        yield Table((title, *columns), _cut(rows, top), "<><")


def _cut(rows: Sequence[tuple[str, ...]], top: int) -> list[tuple[str, ...]]:
    shown = list(rows[:top])
    if len(rows) > top:
        shown.append((f"… {len(rows) - top:,} more lines (--top, --json)", "", ""))
    return shown


def _template(ref: Ref) -> str:
    return split(ref.name)[0]


def _spec(ref: Ref) -> str:
    return f"{ref.dtype} {list(ref.shape)}"


def _worst_row(verdict: Verdict) -> tuple[str, ...]:
    data = _worst_data(verdict)
    figures = [_figure(data["max_abs"], ".3g"), _figure(data["rel_rms"], ".3g"), _figure(data["cosine"], ".6f")]
    odd = f" ({data['nonfinite']:,} NaN or Inf)" if data["nonfinite"] else ""
    return (data["name"], *figures, f"{data['beyond']:,}{odd}")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _config_rows(config: ConfigDiff) -> Iterable[tuple[str, str, str]]:
    yield from ((key, "–", shown(value)) for key, value in config.added.items())
    yield from ((key, shown(value), "–") for key, value in config.removed.items())
    yield from ((key, shown(old), shown(new)) for key, (old, new) in config.changed.items())
    for name, how in config.files.items():
        yield (name, *{"only in A": ("there", "–"), "only in B": ("–", "there")}.get(how, ("differs", "differs")))
