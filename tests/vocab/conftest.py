"""What tests of renumbering share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.cli import main

Told = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """A function that runs a command: its exit code, and what it prints under --json."""

    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call
