"""Which version of an engine is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptkit.errors import ENGINE, UserError
from ckptkit.serving.installed import of_program, of_python


def test_the_first_distribution_that_is_there_counts() -> None:
    assert of_python(None, "no-such-engine", "pytest") == pytest.__version__
    assert of_python(sys.executable, "pytest") == pytest.__version__


@pytest.mark.parametrize("python", [None, "/no/such/python"])
def test_an_engine_that_is_not_there_is_missing(python: str | None) -> None:
    with pytest.raises(UserError) as raised:
        of_python(python, "no-such-engine")
    assert raised.value.findings[0].id == "engine.missing"
    assert raised.value.exit_code == ENGINE


def test_a_program_says_its_version(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text('#!/bin/sh\n[ "$2" = --version ] && echo "engine 1.2.3 of today"\n', "utf-8")
    program.chmod(0o755)
    assert of_program([str(program), "serve"], r"(\d+\.\S+)") == "1.2.3"
    assert of_program([str(program), "serve"], r"v(\d+)") == "engine 1.2.3 of today"
