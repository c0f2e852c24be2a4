"""What may not be read is said as such: exit code 4."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import ACCESS, OUTPUT

NOBODY = 65534
COMMANDS = {
    "inspect": ["inspect", "{}/model"],
    "verify": ["verify", "{}/model"],
    "data": ["verify", "{}/model", "--level", "data"],
    "diff": ["diff", "{}/model", "{}/model"],
    "quantize": ["quantize", "{}/model", "--dry-run", "--recipe", "w4a16"],
    "reshard": ["reshard", "{}/model", "--dry-run"],
    "hash": ["hash", "{}/model", "--check", "{}/model/SUMS"],
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter, with a checkpoint that everybody may read."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name) / "model", llama(), llama_config())
        (Path(name) / "model" / "extra").mkdir()
        (Path(name) / "model" / "SUMS").write_text("0" * 64 + "  extra/file\n" + "0" * 64 + "  model.safetensors\n")
        (Path(name) / "model" / "extra" / "file").write_text("x")
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield Path(name)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def refused(capsys: pytest.CaptureFixture[str], command: list[str], shut: Path) -> tuple[int, set[str]]:
    """Exit code and ids of a command while ``shut`` may not be read. It is run before, so that all is imported."""
    arguments = [*command, "--json", "--no-progress"]
    main([*arguments, "--dry-run"] if "--recipe" in command else arguments)
    capsys.readouterr()
    shut.chmod(0)
    with without_rights():
        code = main(arguments)
    return code, {finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("shut", ["", "model", "model/extra", "model/model.safetensors"])
def test_a_source_that_may_not_be_read(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, shut: str
) -> None:
    arguments = [text.format(folder) for text in COMMANDS[command]]
    assert refused(capsys, arguments, folder / shut) == (ACCESS, {"access.denied"})


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "quantize", "reshard"])
def test_a_config_that_may_not_be_read(capsys: pytest.CaptureFixture[str], folder: Path, command: str) -> None:
    arguments = [text.format(folder) for text in COMMANDS[command]]
    assert refused(capsys, arguments, folder / "model" / "config.json") == (ACCESS, {"access.denied"})


def test_a_single_file_that_may_not_be_read(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    shut = folder / "model" / "model.safetensors"
    assert refused(capsys, ["inspect", str(shut)], shut) == (ACCESS, {"access.denied"})


@pytest.mark.parametrize("shut", ["extra", "extra/file"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "{}/model", "{}/out", "--recipe", "{}/model/extra/file"],
        ["apply", "{}/model/extra/file", "{}/out"],
        ["hash", "{}/model", "--check", "{}/model/extra/file"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_another_file_that_may_not_be_read(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], shut: str
) -> None:
    filled = [text.format(folder) for text in arguments]
    assert refused(capsys, filled, folder / "model" / shut) == (ACCESS, {"access.denied"})


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--resume"]])
@pytest.mark.parametrize("out", ["shut", "shut/out", "shut/a/b"])
def test_an_output_that_may_not_be_looked_at_is_an_output_fault(
    capsys: pytest.CaptureFixture[str], folder: Path, out: str, more: list[str]
) -> None:
    (folder / "shut").mkdir()
    command = ["quantize", str(folder / "model"), str(folder / out), "--recipe", "w4a16", *more]
    assert refused(capsys, command, folder / "shut") == (OUTPUT, {"output.write"})


def test_what_a_filesystem_keeps_for_itself_is_passed_over(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "model" / "lost+found").mkdir()
    assert main(["inspect", str(folder / "model")]) == 0
    capsys.readouterr()
    (folder / "model" / "lost+found").chmod(0)
    with without_rights():
        assert main(["inspect", str(folder / "model")]) == 0
