"""A plan as JSON lines: a header, then one line a step. For readers, and for ``ckptkit apply``.

The file names source tensors; it holds no offsets. Reading it back derives every spec from the source's headers
anew, so a file that no longer fits its source is noticed before a tensor byte is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .checkpoint import Checkpoint, parse_json
from .errors import UserError, fail
from .header import DTYPE_BITS, Spec, nbytes
from .ops import operation
from .plan import COPY, LeftOut, Plan, Ref, Shard, Sidecar, Step

SCHEMA = 1


class PlanFile(NamedTuple):
    """A parsed plan file: its header, and the step lines with their line numbers."""

    path: str
    header: Mapping[str, Any]
    steps: tuple[tuple[int, Mapping[str, Any]], ...]


def lines(plan: Plan, source: str) -> Iterator[str]:
    """The plan file's lines, without line ends."""
    header = {
        "schema": SCHEMA,
        "command": plan.command,
        "source": source,
        "digest": plan.digest,
        "version": __version__,
        "settings": dict(plan.settings),
        "shards": [[shard.name, shard.source, shard.metadata, shard.linked] for shard in plan.shards],
        "sidecars": [[item.name, item.text] for item in plan.sidecars],
        "left_out": [[item.name, item.reason] for item in plan.left_out],
        "dropped": [[item.name, item.reason] for item in plan.dropped],
    }
    yield json.dumps(header, ensure_ascii=False)
    for shard in plan.shards:
        for step in shard.steps:
            yield json.dumps(_line(shard, step), ensure_ascii=False)


def _line(shard: Shard, step: Step) -> dict[str, Any]:
    inputs = [[ref.name, ref.dtype, ref.shape, ref.span] for ref in step.inputs]
    line = {"shard": shard.name, "op": step.op, "rule": step.rule, "inputs": inputs, "outputs": step.outputs}
    return line | ({"args": dict(step.args)} if step.args else {})


def read(path: str) -> PlanFile:
    """Parse a plan file. Raises UserError ``plan.file`` with the line number where it is none."""
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError:
        raise fail("plan.file", f"{path} does not exist", file=path, hint="--plan FILE writes a plan") from None
    except (OSError, UnicodeDecodeError) as error:
        raise fail("plan.file", f"{path} cannot be read as text: {error}", file=path) from None
    parsed = [(number, parse_json(line, f"{path}, line {number}", "plan.file")) for number, line in _numbered(text)]
    header = parsed[0][1] if parsed else None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA or not isinstance(header.get("shards"), list):
        raise fail("plan.file", f"{path} does not begin with the header of a plan file (schema {SCHEMA})", file=path)
    return PlanFile(path, header, tuple(parsed[1:]))


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def derive(file: PlanFile, checkpoint: Checkpoint) -> Plan:
    """The plan of ``file`` on ``checkpoint``, with every spec derived anew.

    Raises UserError: ``plan.unknown-op`` for an operation this version does not have, ``source.plan-differs`` where
    the source is not what the plan was made for, ``plan.file`` where a line makes no sense.
    """
    by_shard: dict[str, list[Step]] = {}
    try:
        shards = [
            (str(name), source, metadata, bool(linked)) for name, source, metadata, linked in file.header["shards"]
        ]
        by_shard = {name: [] for name, *_ in shards}
        for number, line in file.steps:
            by_shard[line["shard"]].append(_step(line, checkpoint, f"{file.path}, line {number}"))
        plan = Plan(
            file.header["command"],
            tuple(Shard(name, src, meta, tuple(by_shard[name]), linked) for name, src, meta, linked in shards),
            tuple(Sidecar(name, text) for name, text in file.header["sidecars"]),
            tuple(LeftOut(name, reason) for name, reason in file.header["left_out"]),
            tuple(LeftOut(name, reason) for name, reason in file.header["dropped"]),
            file.header["settings"],
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise fail(
            "plan.file", f"{file.path} is not a plan file as ckptkit writes it ({error!r})", file=file.path
        ) from None
    if plan.digest != file.header.get("digest"):
        message = f"{file.path} says its plan's digest is {file.header.get('digest')}, derived anew it is {plan.digest}"
        hint = "the file was edited, or the source is another: write the plan again with --plan"
        raise fail("source.plan-differs", message, file=file.path, hint=hint)
    return plan


def _step(line: Mapping[str, Any], checkpoint: Checkpoint, where: str) -> Step:
    inputs = tuple(_ref(item, checkpoint, where) for item in line["inputs"])
    args = line.get("args", {})
    planned = tuple(Spec(name, dtype, tuple(shape)) for name, dtype, shape in line["outputs"])
    if line["op"] == COPY:
        outputs: tuple[Spec, ...] = (Spec(planned[0].name, inputs[0].dtype, inputs[0].shape),)
    else:
        outputs = tuple(operation(line["op"]).specs([ref.spec for ref in inputs], args))
    if outputs != planned:
        raise _differs(where, f"{line['op']} makes {outputs}, planned were {planned}")
    return Step(line["op"], inputs, outputs, line["rule"], args)


def _ref(item: Any, checkpoint: Checkpoint, where: str) -> Ref:
    name, dtype, shape, span = item
    ref = checkpoint.tensors.get(name)
    if ref is None:
        raise _differs(where, f"the source has no tensor {name}")
    if span is None:
        if (ref.dtype, list(ref.shape)) != (dtype, shape):
            raise _differs(where, f"{name} is {ref.dtype} {list(ref.shape)}, planned was {dtype} {shape}")
        return ref
    size = DTYPE_BITS[ref.dtype] // 8
    start, stop = ref.start + span[0] * size, ref.start + span[1] * size
    if ref.dtype != dtype or not ref.start <= start <= stop <= ref.stop or nbytes(dtype, shape) != stop - start:
        raise _differs(where, f"{name} is {ref.dtype} {list(ref.shape)}, which has no {dtype} {shape} at {span}")
    return Ref(ref.file, name, dtype, tuple(shape), start, stop, tuple(span))


def _differs(where: str, what: str) -> UserError:
    return fail("source.plan-differs", f"{where}: {what}", hint="write the plan again with --plan")
