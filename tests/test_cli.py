from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.core import ParameterSource

import ckptkit.commands.recipes
from ckptkit import __version__, cli
from ckptkit.cli import COMMANDS, explain, main
from ckptkit.console import Console, Settings
from ckptkit.errors import ACCESS, BUG, INTERRUPTED, OK, OUTPUT, SOURCE, USAGE, Finding, Interrupted, UserError

VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CKPTKIT_COLOR", "CKPTKIT_JSON", "CKPTKIT_QUIET")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make ``ckptkit recipes`` raise ``error``."""

    def builtin_names() -> tuple[str, ...]:
        raise error

    monkeypatch.setattr(ckptkit.commands.recipes, "builtin_names", builtin_names)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The JSON document on stdout, nothing else being there."""
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, object] = json.loads(out)
    return found


# --- exit codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        (["recipe.scheme"], USAGE),
        (["output.exists", "recipe.scheme"], OUTPUT),
        (["recipe.scheme", "output.exists", "layout.truncated"], SOURCE),
    ],
)
def test_findings_decide_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ids: list[str], code: int
) -> None:
    raising(monkeypatch, UserError(Finding(id, f"about {id}") for id in ids))
    assert main(["recipes"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"error: about {id}" for id in ids]
    assert main(["recipes", "--json"]) == code
    told = document(capsys)
    assert (told["ok"], told["exit_code"], told["command"], told["schema"]) == (False, code, "recipes", 1)
    assert [finding["id"] for finding in told["findings"]] == ids


def test_an_unexpected_exception_is_a_bug_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, RuntimeError("boom"))
    assert main(["recipes"]) == BUG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "boom" in lines[0]
    assert lines[1].endswith("ckptkit --debug recipes")
    assert main(["recipes", "--debug"]) == BUG
    assert "Traceback" in capsys.readouterr().err
    assert main(["recipes", "--json"]) == BUG
    assert document(capsys)["findings"][0]["id"] == "bug.unexpected"


def test_what_the_system_forbids_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, PermissionError(13, "Permission denied", "/etc/shadow"))
    assert main(["recipes", "--json"]) == ACCESS
    finding = document(capsys)["findings"][0]
    assert (finding["id"], finding["file"]) == ("access.denied", "/etc/shadow")


def test_an_interrupted_run_gives_the_command_that_goes_on() -> None:
    arguments = ["quantize", "a b", "out", "--recipe", "w4a16", "--overwrite"]
    findings, code = explain(Interrupted("interrupted by SIGTERM"), arguments)
    assert code == INTERRUPTED
    assert [finding.id for finding in findings] == ["run.interrupted"]
    assert findings[0].hint == "ckptkit quantize 'a b' out --recipe w4a16 --resume"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_anywhere_else_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    raising(monkeypatch, error)
    assert main(["recipes"]) == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_windows_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "os", SimpleNamespace(name="nt", environ={}))
    assert main(["recipes"]) == USAGE
    assert "Windows" in capsys.readouterr().err.splitlines()[0]


# --- usage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["recipe"], "recipes"),
        (["--jsno", "recipes"], "--json"),
        (["inspect", "x", "--tensor"], "--tensors"),
        (["inspect", "x", "--group", "layers"], "layer"),
        (["inspect"], "SRC"),
    ],
)
def test_a_usage_error_says_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    assert main(arguments) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert meant in err
    assert err.splitlines()[-1].startswith("hint: ckptkit")


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--verb"]) == USAGE
    assert main(["recipes", "--verbose"]) == OK
    capsys.readouterr()


@pytest.mark.parametrize(
    "arguments", [["recipes", "--json", "--bogus"], ["recipes", "--bogus", "--json"], ["--json", "bogus"]]
)
def test_usage_errors_are_json_too(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == USAGE
    told = document(capsys)
    assert (told["ok"], told["exit_code"]) == (False, USAGE)
    assert [finding["id"] for finding in told["findings"]] == ["usage.arguments"]


def test_after_two_dashes_json_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--", "a", "--json"]) == USAGE
    assert capsys.readouterr().out == ""


def test_no_arguments_show_the_help_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: ckptkit")


# --- global options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--json", "recipes"], ["recipes", "--json"], ["--json", "recipes", "--json"]])
def test_global_options_stand_before_or_after_the_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == OK
    assert document(capsys)["ok"] is True


def test_variables_set_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CKPTKIT_JSON", "1")
    assert main(["recipes"]) == OK
    assert document(capsys)["command"] == "recipes"
    monkeypatch.setenv("CKPTKIT_INSPECT_GROUP", "nonsense")
    assert main(["inspect", "x"]) == USAGE


def test_a_variable_of_its_name_sets_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are spelled here from those on the help page, and from nothing else."""
    everywhere = {option.name for option in cli.cli.params}
    number = 0
    with click.Context(cli.cli, info_name="ckptkit", obj=Console(Settings()), auto_envvar_prefix="CKPTKIT") as parent:
        for name in COMMANDS:
            command = cli.cli.get_command(parent, name)
            assert command is not None
            options = [p for p in command.params if isinstance(p, click.Option) and p.name not in everywhere]
            for option in options:
                spelled = f"ckptkit_{name}_{max(option.opts, key=len).removeprefix('--')}".replace("-", "_").upper()
                monkeypatch.setenv(spelled, _value(option))
            words = [
                {"schema": "report", "bench": "topk"}.get(name, "a")
                for p in command.params
                if isinstance(p, click.Argument)
            ]
            context = command.make_context(name, words, parent=parent)
            for option in options:
                number += 1
                assert context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT, option.opts
                assert not option.is_flag or context.params[str(option.name)] is True
    assert number > 60


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return str(option.type.choices[-1])
    return "1"


@pytest.mark.parametrize(
    ("variables", "arguments", "coloured"),
    [
        ({}, ["recipes"], False),
        ({"FORCE_COLOR": "1"}, ["recipes"], True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, ["recipes"], False),
        ({"NO_COLOR": "1"}, ["--color", "always", "recipes"], True),
        ({"NO_COLOR": "1", "CKPTKIT_COLOR": "always"}, ["recipes"], True),
        ({"CKPTKIT_COLOR": "always"}, ["recipes", "--color", "never"], False),
        ({}, ["--color", "never", "recipes", "--color", "always"], True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, ["recipes"], False),
    ],
)
def test_who_decides_about_colour(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    arguments: list[str],
    coloured: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == OK
    assert ("\x1b[" in capsys.readouterr().out) is coloured


@pytest.mark.parametrize("arguments", [["--version"], ["recipes", "--version"], ["inspect", "--version"]])
def test_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == OK
    assert capsys.readouterr() == (f"ckptkit {__version__}\n", "")


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_the_help_page_groups_every_command(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == OK
    page = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert page.index(f"\n{entry.section}:\n") < page.index(f"\n  {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_on_a_help_page_can_be_parsed(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--help"]) == OK
    lines = capsys.readouterr().out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    commands = [shlex.split(re.split(r" [|>] |;", line)[0]) for line in lines]
    assert len(commands) >= 2
    assert any(command[1] == name for command in commands)
    with click.Context(cli.cli, info_name="ckptkit", obj=Console(Settings())) as parent:
        for program, used, *arguments in commands:
            assert program == "ckptkit"
            found = cli.cli.get_command(parent, used)
            assert found is not None
            found.make_context(used, arguments, parent=parent)


# --- streams -----------------------------------------------------------------------------------------------


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptkit", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


# What prints: results short and long, in each form, and the pages that click would print by itself.
PRINTING = [
    ["recipes"],
    ["recipes", "--json"],
    ["recipes", "--quiet"],
    ["checks"],
    ["--help"],
    ["recipes", "-h"],
    ["--version"],
]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        ended = run(*arguments, stdout=stdout)
    assert (ended.returncode, ended.stderr) == (OK, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_full_stdout_is_an_output_fault(arguments: list[str]) -> None:
    with open("/dev/full", "w") as stdout:
        ended = run(*arguments, stdout=stdout)
    assert ended.returncode == OUTPUT
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_closed_stdout_is_an_output_fault(arguments: list[str]) -> None:
    ended = run(*arguments, preexec_fn=lambda: os.close(1))
    assert ended.returncode == OUTPUT
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "code"), [(["recipes"], OK), (["recipe"], USAGE), ([], USAGE)])
def test_without_stderr_the_run_is_the_same(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "ckptkit", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), timeout=60)
    assert ended.returncode == code
    assert bool(ended.stdout) is (code == OK)


def test_the_module_can_be_run() -> None:
    assert run("--version", stdout=subprocess.PIPE).stdout == f"ckptkit {__version__}\n"
