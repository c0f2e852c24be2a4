from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.errors import OK

from .capture import DSPARK, config

Told = Callable[..., dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """The report of ``check-features`` under --json, its exit code being as expected."""

    def call(folder: Path, *options: object, code: int = OK, draft: dict[str, Any] | None = None) -> dict[str, Any]:
        path = config(tmp_path, **(draft or DSPARK))
        arguments = ["check-features", folder, "--draft-config", path, *options, "--json", "--no-progress"]
        assert main([str(argument) for argument in arguments]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        report: dict[str, Any] = json.loads(out)
        assert (report["schema"], report["command"], report["exit_code"]) == (1, "check-features", code)
        return report

    return call
