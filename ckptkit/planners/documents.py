"""JSON files as plans write them: config.json and others that declare something."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import Finding
from ..files.checkpoint import CONFIG, Checkpoint


def json_text(content: Mapping[str, Any]) -> str:
    """The text of a file, indented as transformers does it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set (or, for None, remove) the value at ``path``, () being all of it; keys that are there keep their order.

    Tables on the way are made where there is none, or null.
    """
    if not path:
        document.clear()
        document.update(value or {})
        return
    *parents, last = path
    for key in parents:
        if document.get(key) is None:
            if value is None:
                return
            document[key] = {}
        document = document[key]
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


def no_config(checkpoint: Checkpoint, what: str) -> Finding:
    """``config.missing``: there is no config.json to declare ``what`` in."""
    message = f"{checkpoint.source.uri} has no {CONFIG}: {what} could not be declared anywhere"
    return Finding("config.missing", message, file=CONFIG, hint="give the folder that holds config.json")
