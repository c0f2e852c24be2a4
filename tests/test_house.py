"""Rules of the house that a test can see."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make import checkpoint, llama, llama_config

from ckptkit.cli import COMMANDS

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "ckptkit").rglob("*.py"))
HEAVY = {"torch", "compressed_tensors", "transformers", "llmcompressor"}
PRINTERS = {"print", "echo", "secho", "breakpoint"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_modules_are_found() -> None:
    assert {"ckptkit/console.py", "ckptkit/cli.py", "ckptkit/plan.py"} <= set(map(relative, MODULES))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 420


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_console_prints_and_only_the_command_line_reads_the_environment(path: Path) -> None:
    name = path.relative_to(ROOT / "ckptkit").as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in PRINTERS or name == "console.py", f"line {node.lineno} prints"
        if isinstance(node, ast.Attribute):
            stream = node.attr in {"stdout", "stderr"} and isinstance(node.value, ast.Name) and node.value.id == "sys"
            assert not stream or name == "console.py", f"line {node.lineno} writes to a stream"
            assert node.attr not in {"environ", "getenv"} or name == "cli.py", f"line {node.lineno} reads a variable"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_the_encoding_of_a_text_file_is_said(path: Path) -> None:
    """Else it is the locale's: what is made and read would differ between machines."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            said = {keyword.arg for keyword in node.keywords} | {f"argument {i}" for i in range(len(node.args))}
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            binary = any(isinstance(text, str) and "b" in text for text in texts)
            assert called != "read_text" or said & {"encoding", "argument 0"}, f"line {node.lineno}"
            assert called != "write_text" or said & {"encoding", "argument 1"}, f"line {node.lineno}"
            of_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "os"
            assert called != "open" or of_os or binary or "encoding" in said, f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_is_left_open(path: Path) -> None:
    text = path.read_text()
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]


def test_planners_and_checks_know_nothing_of_each_other() -> None:
    """But for the check of a recipe, which looks at the plan that it makes."""
    knowing = {
        relative(path)
        for here, there in (("planners", "checks"), ("checks", "planners"))
        for path in MODULES
        if here in path.parts and re.search(rf"^\s*from \.+{there}\b", path.read_text(), re.MULTILINE)
    }
    assert knowing == {"ckptkit/checks/recipe.py"}


# --- what a start costs ------------------------------------------------------------------------------------

LIST_MODULES = """
import json, sys
{action}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})), file=sys.stderr)
"""


def imported(action: str, folder: Path) -> set[str]:
    """The top-level modules that are there after ``action``, some lines of Python, run in ``folder``."""
    command = [sys.executable, "-c", LIST_MODULES.format(action=action)]
    ended = subprocess.run(command, cwd=folder, check=True, timeout=60, capture_output=True, text=True)
    return set(json.loads(ended.stderr.splitlines()[-1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a small checkpoint, ``model``."""
    folder = tmp_path_factory.mktemp("house")
    checkpoint(folder / "model", llama(), llama_config())
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["recipes"],
        ["inspect", "model"],
        ["quantize", "--help"],
        ["quantize", "model", "out", "--recipe", "lm_head-w8a16", "--dry-run"],
        ["quantize", "model", "out", "--recipe", "fp8-dynamic", "--dry-run"],
    ],
    ids=" ".join,
)
def test_planning_and_looking_import_no_torch(folder: Path, arguments: list[str]) -> None:
    found = imported(f"from ckptkit.cli import main; assert main({arguments!r}) == 0", folder)
    assert "ckptkit" in found
    assert not found & HEAVY


def test_importing_the_package_imports_next_to_nothing(folder: Path) -> None:
    found = imported("import ckptkit; assert ckptkit.__version__", folder)
    assert not found & {*HEAVY, "click", "rich", "numpy", "pydantic", "yaml"}


def test_the_public_names_are_there() -> None:
    import ckptkit

    assert all(getattr(ckptkit, name) is not None for name in ckptkit.__all__)
    with pytest.raises(AttributeError):
        ckptkit.no_such_name  # noqa: B018


def test_the_help_page_takes_less_than_a_third_of_a_second() -> None:
    assert min(_cpu_seconds("--help") for _ in range(5)) < 0.3


def _cpu_seconds(*arguments: str) -> float:
    """User and system time of one run of the program."""
    process = subprocess.Popen([sys.executable, "-m", "ckptkit", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


# --- documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_names_every_command(name: str) -> None:
    assert f"ckptkit {name}" in (ROOT / "README.md").read_text()
