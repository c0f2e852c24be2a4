"""What a folder's ``ckptkit.json`` says of serving it.

A checkpoint is served as it is; a draft that was cut out of one is served beside that one, with the launch flags that
were recorded when it was made.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import fail
from .engine import Engine, Method
from .speculative import parse

# By the command that made a draft, how engines speculate with it.
_METHODS = {"extract-dspark": "dspark", "extract-mtp": "mtp"}
# Flags of a recorded line that adapters write themselves.
_WRITTEN = {"--speculative-algorithm", "--speculative-draft-model-path", "--speculative-config"}


class Implied(NamedTuple):
    """What is to be served, and how to speculate, if at all."""

    checkpoint: str
    method: Method | None = None


def implied(folder: Path, manifest: Mapping[str, Any] | None, engine: Engine) -> Implied:
    """What ``folder`` stands for. Raises UserError (``usage.arguments``) for a draft whose target is not there."""
    name = _METHODS.get(str((manifest or {}).get("command")))
    if manifest is None or name is None:
        return Implied(str(folder))
    target = str((manifest.get("source") or {}).get("uri"))
    if not Path(target).is_dir():
        message = f"{folder.resolve()} is a draft for {target}, which is not there"
        raise fail(
            "usage.arguments", message, hint=f"ckptkit verify TARGET --serve --speculative {name}:draft={folder}"
        )
    launch = {key.lower(): line for key, line in ((manifest.get("settings") or {}).get("launch") or {}).items()}
    method = parse(name)._replace(draft=folder.resolve(), arguments=_arguments(launch.get(engine.label.lower(), "")))
    return Implied(target, method)


def _arguments(line: str) -> tuple[str, ...]:
    """The pairs of flag and value of a recorded line that an adapter does not write."""
    pairs = pairwise(shlex.split(line))
    return tuple(word for pair in pairs if pair[0].startswith("--") and pair[0] not in _WRITTEN for word in pair)
