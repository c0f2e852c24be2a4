"""Header fixtures of MTP families, in ``mtp/*.json``: each a small model with the true names of its tensors.

``target``, ``shared`` (its embedding and head) and ``reads`` (what a draft's loader asks for besides) are the target's;
``draft`` and ``optional`` are the layers': those that must be there and those that may. Names are templates, as in
:mod:`headers`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from headers import expand

from ckptkit.header import Spec

FOLDER = Path(__file__).parent / "mtp"
FIXTURES = sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(fixture: str) -> dict[str, Any]:
    """The fixture as it is stored."""
    found: dict[str, Any] = json.loads((FOLDER / f"{fixture}.json").read_text())
    return found


def part(fixture: str, *parts: str) -> list[Spec]:
    """The tensors of some parts of the fixture."""
    tensors = [item for name in parts for item in load(fixture).get(name, {}).items()]
    return [Spec(name, dtype, tuple(shape)) for template, (dtype, shape) in tensors for name in expand(template)]


def names(fixture: str, *parts: str) -> list[str]:
    return [spec.name for spec in part(fixture, *parts)]


def everything(fixture: str) -> dict[str, Spec]:
    """Every tensor of the checkpoint by name."""
    return {spec.name: spec for spec in part(fixture, "target", "shared", "reads", "draft", "optional")}
