"""A plan as JSON lines: a header, then one line a step. For readers, and for ``ckptkit apply``.

The file names source tensors; it holds no offsets. Reading it back derives every spec from the source's headers
anew, so a file that no longer fits its source is noticed before a tensor byte is read. The header holds a seal over
the whole file: a plan is read, not edited. The lines are ASCII, since names and texts may hold what some readers take
for the end of a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .errors import UserError, fail, unreadable
from .files.checkpoint import Checkpoint
from .files.header import DTYPE_BITS, Spec, nbytes
from .files.origins import Identity, differing, origins
from .ops import operation
from .plan import COPY, LeftOut, Plan, Ref, Shard, Sidecar, Step, canonical

SCHEMA = 1
_AGAIN = "write the plan again with --plan"


class PlanFile(NamedTuple):
    """A plan file as it was written: its header, and the step lines with their line numbers."""

    path: str
    header: Mapping[str, Any]
    steps: tuple[tuple[int, Mapping[str, Any]], ...]


def lines(plan: Plan, checkpoint: Checkpoint) -> Iterator[str]:
    """The lines, without line ends, of the file that holds ``plan``, which was made on ``checkpoint``."""
    header = {
        "schema": SCHEMA,
        "command": plan.command,
        "source": checkpoint.source.location,
        "digest": plan.digest,
        "version": __version__,
        "settings": dict(plan.settings),
        "shards": [_shard(shard) for shard in plan.shards],
        "sidecars": [[item.name, item.text] for item in plan.sidecars],
        "left_out": [[item.name, item.reason] for item in plan.left_out],
        "dropped": [[item.name, item.reason] for item in plan.dropped],
        "made_from": origins(checkpoint, [item.name for item in plan.sidecars]),
    }
    if checkpoint.others:
        others = checkpoint.source.others
        header["others"] = {key: other.location for key, other in others.items()}
    steps = [json.dumps(_line(shard, step, checkpoint)) for shard in plan.shards for step in shard.steps]
    yield json.dumps(header | {"seal": _seal(header, steps)})
    yield from steps


def _shard(shard: Shard) -> list[Any]:
    header = [] if shard.header is None else [shard.header]
    return [shard.name, shard.source, shard.metadata, shard.linked, *header]


def _line(shard: Shard, step: Step, checkpoint: Checkpoint) -> dict[str, Any]:
    inputs = [[ref.name, ref.dtype, ref.shape, ref.span, *_key_of(ref, checkpoint)] for ref in step.inputs]
    line = {"shard": shard.name, "op": step.op, "rule": step.rule, "inputs": inputs, "outputs": step.outputs}
    return line | ({"args": dict(step.args)} if step.args else {})


def _key_of(ref: Ref, checkpoint: Checkpoint) -> list[str]:
    """The key of the checkpoint beside this one that the tensor is of; nothing for its own."""
    return [key for key in checkpoint.others if ref.file.startswith(f"{key}:")]


def _seal(header: Mapping[str, Any], steps: Iterable[str]) -> str:
    """sha256 (hex) of the header's other fields and of the step lines."""
    fields = canonical({key: value for key, value in header.items() if key != "seal"})
    digest = hashlib.sha256(fields.encode("utf-8", "surrogatepass"))
    for line in steps:
        digest.update(f"\n{line}".encode())
    return digest.hexdigest()


def read(path: str) -> PlanFile:
    """Parse a plan file.

    Raises UserError: ``plan.file`` with the line number where it is none, ``source.plan-differs`` where it was edited,
    ``access.denied`` where it may not be read.
    """
    numbered = [(number, line) for number, line in enumerate(_text(path).split("\n"), 1) if line.strip()]
    parsed = [(number, _parsed(line, f"{path}, line {number}")) for number, line in numbered]
    header = parsed[0][1] if parsed else None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise fail("plan.file", f"{path} does not begin with the header of a plan file (schema {SCHEMA})", file=path)
    if header.get("seal") != _seal(header, (line for _, line in numbered[1:])):
        message = f"{path} is not as it was written: its seal does not fit"
        raise fail("source.plan-differs", message, file=path, hint=_AGAIN)
    return PlanFile(path, header, tuple(parsed[1:]))


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except FileNotFoundError:
        raise fail("plan.file", f"{path} does not exist", file=path, hint="--plan FILE writes a plan") from None
    except UnicodeDecodeError as error:
        raise fail("plan.file", f"{path} is not UTF-8 text (byte {error.start})", file=path) from None
    except OSError as error:
        raise unreadable(error, "plan.file", path) from None


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise fail("plan.file", f"{where} is not JSON", hint=_AGAIN) from None


def derive(file: PlanFile, checkpoint: Checkpoint) -> Plan:
    """The plan of ``file`` on ``checkpoint``, with every spec derived anew.

    Raises UserError: ``plan.unknown-op`` for an operation this version does not have, ``source.plan-differs`` where
    the source is not what the plan was made for, ``plan.file`` where a line makes no sense to this version.
    """
    try:
        _check_origins(file.header, checkpoint)
        by_shard: dict[str, list[Step]] = {name: [] for name, *_ in file.header["shards"]}
        for number, line in file.steps:
            by_shard[line["shard"]].append(_step(line, checkpoint, f"{file.path}, line {number}"))
        plan = _plan(file.header, by_shard)
    except (LookupError, TypeError, ValueError, AttributeError):
        version = file.header.get("version")
        message = f"{file.path} is not a plan file as this version writes it; it was written by version {version}"
        raise fail("plan.file", message, file=file.path, hint=_AGAIN) from None
    if plan.digest != file.header["digest"]:
        message = f"{file.path} is of plan {file.header['digest']}, derived anew it is {plan.digest}"
        raise fail("source.plan-differs", message, file=file.path, hint=_AGAIN)
    return plan


def _check_origins(header: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    planned = {name: Identity(*identity) for name, identity in header["made_from"].items()}
    changed = list(differing(planned, origins(checkpoint, [name for name, _ in header["sidecars"]])))
    if changed:
        raise UserError(changed)


def _plan(header: Mapping[str, Any], steps: Mapping[str, Sequence[Step]]) -> Plan:
    return Plan(
        header["command"],
        tuple(Shard(name, src, meta, tuple(steps[name]), *more) for name, src, meta, *more in header["shards"]),
        tuple(Sidecar(name, text) for name, text in header["sidecars"]),
        tuple(LeftOut(name, reason) for name, reason in header["left_out"]),
        tuple(LeftOut(name, reason) for name, reason in header["dropped"]),
        header["settings"],
    )


def _step(line: Mapping[str, Any], checkpoint: Checkpoint, where: str) -> Step:
    inputs = tuple(_ref(item, checkpoint, where) for item in line["inputs"])
    args = line.get("args", {})
    planned = tuple(Spec(name, dtype, tuple(shape)) for name, dtype, shape in line["outputs"])
    if line["op"] == COPY:
        outputs: tuple[Spec, ...] = (Spec(planned[0].name, inputs[0].dtype, inputs[0].shape),)
    else:
        outputs = tuple(operation(line["op"]).specs([ref.spec for ref in inputs], args))
    if outputs != planned:
        raise _differs(where, f"{line['op']} makes {_told(*outputs)}; planned was {_told(*planned)}")
    return Step(line["op"], inputs, outputs, line["rule"], args)


def _ref(item: Any, checkpoint: Checkpoint, where: str) -> Ref:
    name, dtype, shape, span, *key = item
    ref = (checkpoint.others[key[0]] if key else checkpoint).tensors.get(name)
    if ref is None:
        raise _differs(where, f"the source has no tensor {name}")
    if span is None:
        if (ref.dtype, list(ref.shape)) != (dtype, shape):
            raise _differs(where, f"the source has {_told(ref.spec)}; planned was {dtype} {shape}")
        return ref
    start, stop = (ref.start + element * DTYPE_BITS[ref.dtype] // 8 for element in span)
    if ref.dtype != dtype or not ref.start <= start <= stop <= ref.stop or nbytes(dtype, shape) != stop - start:
        raise _differs(where, f"the source has {_told(ref.spec)}, with no {dtype} {shape} at elements {span}")
    return Ref(ref.file, name, dtype, tuple(shape), start, stop, tuple(span))


def _told(*specs: Spec) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in specs)


def _differs(where: str, what: str) -> UserError:
    return fail("source.plan-differs", f"{where}: {what}", hint=_AGAIN)


__all__ = ["PlanFile", "derive", "lines", "read"]
