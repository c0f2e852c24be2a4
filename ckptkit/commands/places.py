"""Where a command reads and writes what it is not told the place of."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import fail
from ..execute.files import output_faults
from ..execute.parts import TABLES, parts_folder
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
    """Where :func:`keep` is to put a file ``name`` that a plan reads beside its source: beside OUT for as long as the run may be resumed, among
    the parts that are made of it, or beside the plan's own file.

    A dry run that keeps no plan leaves nothing behind.
    """
    suffix = f".{Path(name).stem}"
    if how.plan_path:
        yield _made(Path(how.plan_path + suffix)) / name
    elif out is None or how.dry_run or locate(Path(out)).inside:
        with tempfile.TemporaryDirectory(prefix="ckptkit-") as temporary:
            yield Path(temporary, name)
    elif how.cluster.part or how.cluster.executor != "local":
        yield _made(parts_folder(Path(out)) / TABLES) / name
    else:
        folder = beside_path(Path(out).resolve(), suffix)
        try:
            yield _made(folder) / name
        finally:
            if not locate(Path(out)).folder.exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep(place: Path, content: bytes) -> Path:
    """``content`` as a file at ``place``, in a folder named by its digest, which is given: a run that reads another stays whole.

    One that is there already is left alone, so that a run that goes on finds what it began with.
    """
    path = _made(place.parent / hashlib.sha256(content).hexdigest()[:16]) / place.name
    if not path.is_file() or path.read_bytes() != content:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        with output_faults(path):
            partial.write_bytes(content)
            os.replace(partial, path)
    return path


def _made(folder: Path) -> Path:
    """The folder, made if need be. Raises UserError: ``output.write``, ``output.space``."""
    with output_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
