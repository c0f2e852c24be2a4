"""Where a command reads and writes what it is not told the place of."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import fail
from ..execute.staging import beside as beside_path
from ..execute.staging import locate
from ..files.checkpoint import CONFIG
from ..files.source import short_name
from .making import How


def here(example: str) -> str:
    """The current folder as a source. Raises UserError (``usage.arguments``) if it is no checkpoint."""
    if not Path(CONFIG).is_file():
        raise fail("usage.arguments", f"SRC is missing, and there is no {CONFIG} here", hint=example)
    return "."


def beside(src: str, part: str) -> Path:
    """``<name of SRC>-<part>`` in the current folder; where that is SRC, or lies in it, beside SRC."""
    source = Path(src).resolve()
    inside = Path.cwd().is_relative_to(source)
    name = f"{short_name(src)}-{part}"
    return Path(os.path.relpath(source.parent), name) if inside else Path(name)


@contextlib.contextmanager
def table_place(out: str | None, how: How, name: str) -> Iterator[Path]:
    """Where a file ``name`` lies that a plan reads beside its source: beside OUT for as long as the run may be resumed, or
    beside the plan's own file.

    A dry run that keeps no plan leaves nothing behind.
    """
    suffix = f".{Path(name).stem}"
    if how.plan_path:
        folder = Path(how.plan_path + suffix)
        folder.mkdir(exist_ok=True)
        yield folder / name
    elif out is None or how.dry_run or locate(Path(out)).inside:
        with tempfile.TemporaryDirectory(prefix="ckptkit-") as temporary:
            yield Path(temporary, name)
    else:
        folder = beside_path(Path(out).resolve(), suffix)
        try:
            folder.mkdir(exist_ok=True)
            yield folder / name
        finally:
            if not locate(Path(out)).folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
