"""Where a command that cuts a part out of a checkpoint reads and writes if it is not told."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import fail
from ..files.checkpoint import CONFIG


def here(example: str) -> str:
    """The current folder as a source. Raises UserError (``usage.arguments``) if it is no checkpoint."""
    if not Path(CONFIG).is_file():
        raise fail("usage.arguments", f"SRC is missing, and there is no {CONFIG} here", hint=example)
    return "."


def beside(src: str, part: str) -> Path:
    """``<name of SRC>-<part>`` in the current folder; where that is SRC, or lies in it, beside SRC."""
    source = Path(src).resolve()
    inside = Path.cwd().is_relative_to(source)
    name = f"{source.name.removesuffix('.safetensors')}-{part}"
    return Path(os.path.relpath(source.parent), name) if inside else Path(name)
