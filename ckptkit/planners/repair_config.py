"""``config``: keys of a checkpoint's JSON files set, removed, or put right by what its tensors show. No tensor is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from ..drafts import mtp
from ..drafts.configs import with_stages
from ..drafts.layouts import split_stage
from ..drafts.mtp_config import with_layers
from ..errors import Finding, UserError, fail
from ..families import embedding_of, head_of, tie_locations
from ..families.ties import KEY as TIE
from ..files.checkpoint import CONFIG, Checkpoint, parse_json
from ..naming.patterns import nearest
from ..plan import Plan, copy_step
from ..stored import split_name
from .allowing import passed_over
from .documents import json_text, no_config, put
from .draft_source import POLICY, find_draft
from .packing import pack
from .sidecars import sidecars, with_index

COMMAND = "config"

Path = tuple[str, ...]
Documents = dict[str, dict[str, Any]]


class Change(NamedTuple):
    """A key to set, or for ``value`` None to remove: the file, the path of keys in it, and the option as it was written."""

    file: str
    path: Path
    value: Any
    text: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


class Repaired(NamedTuple):
    """A plan, and refusals that were passed over."""

    plan: Plan
    warnings: tuple[Finding, ...]


def setting(text: str) -> Change:
    """``[FILE:]KEY=VALUE``: VALUE is JSON, or else a string; dots in KEY lead into tables. Raises UserError ``usage.set``."""
    left, equals, value = text.partition("=")
    if not equals or not left:
        raise fail("usage.set", f"--set {text}: no KEY=VALUE", hint="--set num_nextn_predict_layers=1")
    file, path = _place(left, f"--set {text}")
    return Change(file, path, _value(value), f"--set {text}")


def removal(text: str) -> Change:
    """``[FILE:]KEY``. Raises UserError ``usage.set``."""
    file, path = _place(text, f"--unset {text}")
    return Change(file, path, None, f"--unset {text}")


def _place(text: str, option: str) -> tuple[str, Path]:
    file, colon, key = text.rpartition(":")
    path = tuple(key.split("."))
    is_text = text.encode("utf-8", "replace").decode() == text  # or else bytes of the command line that are no UTF-8
    if not is_text or not all(path) or (colon and not file.endswith(".json")):
        hint = "a key, or FILE.json:KEY; dots lead into tables: text_config.num_hidden_layers"
        raise fail("usage.set", f"{option.partition(' ')[0]}: {text!r} is no key", hint=hint)
    return file or CONFIG, path


def _value(text: str) -> Any:
    try:
        found = _parsed(text)
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        message = f"{text[:60]!r} is no value of a JSON file: not finite, no UTF-8, or too deep"
        raise fail("usage.set", message, hint="a number, true, false, a list, a table, or else a string") from None
    if found is None:
        raise fail("usage.set", "null is no value that can be set", hint="--unset KEY removes a key")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def plan_config(
    checkpoint: Checkpoint,
    changes: Sequence[Change],
    presets: Sequence[str] = (),
    include: Iterable[str] = (),
    allow: Collection[str] = (),
) -> Repaired:
    """The plan that makes ``changes`` after ``presets`` and takes over every shard as it is.

    ``include`` are file-name patterns of sidecars to take along; ``allow`` ids of refusals to pass over. Raises
    UserError: ``config.missing``, ``config.parse``, ``plan.config-key``, ``plan.config-type``, ``plan.unchanged``, and
    what a preset says of tensors that it can state nothing of.
    """
    if checkpoint.config is None:
        raise UserError(no_config(checkpoint, "what is set"))
    before = _documents(checkpoint, changes)
    after = deepcopy(before)
    found: list[Finding] = []
    for name in presets:
        after[CONFIG] = PRESETS[name].make(checkpoint, after[CONFIG], found)
    found += _mistakes(changes, after)
    for change in changes:
        _refuse_no_table(change, after)
        put(after[change.file], change.path, change.value)
    if after == before:
        found.append(Finding("plan.unchanged", "nothing would change", hint="ckptkit inspect SRC shows what is stated"))
    warnings = passed_over(found, allow, lambda id: id not in _PASSABLE)
    texts = {name: json_text(content) for name, content in after.items() if content != before[name]}
    shards, notes = pack(
        checkpoint, {name: copy_step(ref, "as it is") for name, ref in checkpoint.tensors.items()}, None
    )
    stale: dict[str, str] = {}
    if any(shard.name != shard.source for shard in shards):
        texts, stale = with_index(checkpoint, shards, texts, stale)
    elif checkpoint.index:
        include = [*include, checkpoint.index.file]  # of the same shards: it stays, byte for byte
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    settings = {"preset": list(presets), "changes": [change.text for change in changes]}
    plan = Plan(COMMAND, shards, kept, left_out, (), settings)
    return Repaired(plan, (*checkpoint.warnings, *notes, *warnings))


def _documents(checkpoint: Checkpoint, changes: Iterable[Change]) -> Documents:
    """The files that changes are about, parsed; config.json always."""
    found: Documents = {CONFIG: deepcopy(dict(checkpoint.config or {}))}
    for file in dict.fromkeys(change.file for change in changes if change.file != CONFIG):
        if file not in checkpoint.source.files:
            hint = f"--set KEY=VALUE is about {CONFIG}"
            raise fail("source.missing", f"{checkpoint.source.uri} has no {file}", file=file, hint=hint)
        content = parse_json(checkpoint.source.text(file), file, "config.parse")
        if not isinstance(content, dict):
            raise fail("config.parse", f"{file} holds no table of keys", file=file, hint="only tables have keys to set")
        found[file] = content
    return found


# --- refusals ----------------------------------------------------------------------------------------------

_PASSABLE = POLICY | {"plan.config-key", "plan.config-type", "plan.unchanged"}


def _mistakes(changes: Iterable[Change], documents: Documents) -> Iterator[Finding]:
    """``plan.config-key`` for a key that looks like a misspelled one, ``plan.config-type`` for a value of another type."""
    for change in changes:
        table = _table(change, documents)
        if not isinstance(table, Mapping | None):
            continue  # which is refused when it is made
        if change.path[-1] not in (table or {}):
            yield from _new_key(change, table or documents[change.file])
        elif change.value is not None:
            yield from _other_type(change, (table or {})[change.path[-1]])


def _table(change: Change, documents: Documents) -> Any:
    """What holds the key that is changed: a table, None where it is still to be made, or what is no table."""
    table: Any = documents[change.file]
    for key in change.path[:-1]:
        table = table.get(key) if isinstance(table, Mapping) else table
    return table


def _refuse_no_table(change: Change, documents: Documents) -> None:
    """Raises UserError (``usage.set``) where a dot leads into a value, which an earlier change may have set."""
    if not isinstance(_table(change, documents), Mapping | None):
        message = f"{change.text}: {'.'.join(change.path[:-1])} is no table in {change.file}"
        raise fail("usage.set", message, file=change.file, hint="set all of it at once, as JSON")


def _new_key(change: Change, table: Mapping[str, Any]) -> Iterator[Finding]:
    like = nearest(change.path[-1], list(table))
    if change.value is None:
        message = f"{change.text}: {change.file} has no such key"
        yield Finding("plan.config-key", message, file=change.file, hint=like and f"is {like} meant?")
    elif like is not None:
        message = f"{change.text}: {change.file} has no such key yet, but one called {like}"
        yield Finding("plan.config-key", message, file=change.file, hint=f"set {like}, if it is what is meant")


def _other_type(change: Change, before: Any) -> Iterator[Finding]:
    kinds = [_kind(before), _kind(change.value)]
    if before is not None and kinds[0] != kinds[1]:
        message = f"{change.text}: {change.key} is {json.dumps(before)[:60]}, of another type"
        yield Finding("plan.config-type", message, file=change.file, hint=f"a {kinds[0]}; strings need no quotes")


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "list"
        case _:
            return "table"


# --- presets -----------------------------------------------------------------------------------------------


class Preset(NamedTuple):
    """What a preset states, in a line; ``make`` gives the config, and appends to a list what is wrong."""

    states: str
    make: Callable[[Checkpoint, dict[str, Any], list[Finding]], dict[str, Any]]


def _dspark(checkpoint: Checkpoint, config: dict[str, Any], problems: list[Finding]) -> dict[str, Any]:
    found = find_draft(checkpoint)
    # What is wrong with the config is what this is for; what is wrong with the tensors it cannot mend.
    problems += [finding for finding in found.findings if finding.id != "draft.config" and finding.severity == "error"]
    stands_alone = all(split_stage(name) for name in checkpoint.tensors)
    return with_stages(found.config, found.draft.stages, found.form) if stands_alone else found.config


def _mtp(checkpoint: Checkpoint, config: dict[str, Any], problems: list[Finding]) -> dict[str, Any]:
    found = mtp.find(checkpoint.tensors, config)
    if found is None:
        hint = "--unset the key that counts them, if the checkpoint is to be served without"
        message = f"{checkpoint.source.uri} holds no layers that predict further tokens"
        raise fail("draft.none", message, file=CONFIG, hint=hint)
    return with_layers(config, found, renumber=False)


def _tie(checkpoint: Checkpoint, config: dict[str, Any], problems: list[Finding]) -> dict[str, Any]:
    embedding = embedding_of(checkpoint.tensors, config)
    head = head_of(embedding) if embedding else None
    if head is None:
        message = f"{checkpoint.source.uri} has no token embedding that feeds a head"
        raise fail("config.tie", message, file=CONFIG, hint=f"--set {TIE}=false, if that is known from elsewhere")
    stored = any(split_name(name)[0] == head for name in checkpoint.tensors)
    for location in tie_locations(config):
        put(config, location, not stored)
    return config


PRESETS = {
    "dspark-serving": Preset("sizes, taps, stages and storage of a DSpark draft, as its tensors show them", _dspark),
    "mtp-serving": Preset("how many layers predict further tokens", _mtp),
    "tie": Preset("whether the head is the embedding: it is, where no head is stored", _tie),
}
