"""Commands as a program runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.errors import OK

Told = Callable[..., dict[str, Any]]


def teller(capsys: pytest.CaptureFixture[str], *command: str) -> Told:
    """A function that runs ``command`` with further arguments: what it prints under --json, its exit code as expected."""

    def call(*arguments: object, code: int = OK) -> dict[str, Any]:
        got = main([*command, *map(str, arguments), "--json", "--no-progress"])
        out, err = capsys.readouterr()
        assert got == code, out + err
        document: dict[str, Any] = json.loads(out)
        assert (document["exit_code"], document["ok"]) == (code, code == OK)
        assert "Traceback" not in err
        return document

    return call
