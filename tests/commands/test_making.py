"""What all commands that make files share: options, the dry run, links, what is left out, names that are long."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE
from ckptkit.options import resume_command

RECIPE = ("--recipe", "lm_head-w8a16")
UNTOUCHED = "model-00001-of-00002.safetensors"
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A Llama in two shards, of which only the second holds what the recipe is about."""
    tensors = llama()
    names = list(tensors)
    parts = [{n: tensors[n] for n in names[:8]}, {n: tensors[n] for n in names[8:]}]
    return checkpoint(tmp_path / "src", parts, llama_config())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, arguments), "--json", "--no-progress"])
        document = json.loads(capsys.readouterr().out)
        assert document["exit_code"] == code
        return code, document

    return call


def ids(document: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in document["findings"]]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "id"),
    [
        (["--resume", "--overwrite"], "usage.arguments"),
        (["--device", "mps"], "usage.device"),
        (["--device", "cuda:x"], "usage.device"),
        (["--include", "*.none"], "usage.pattern-unmatched"),
        (["--include", "config.json", "--include", "re:x"], "usage.pattern-unmatched"),
        (["--allow", "shapes.confog"], "usage.pattern-unmatched"),
        (["--allow", "foo"], "usage.pattern-unmatched"),
        (["--allow", "plan.divide,foo.bar"], "usage.pattern-unmatched"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    src: Path, tmp_path: Path, run: Run, options: list[str], id: str
) -> None:
    for more in ([], ["--dry-run"]):
        code, document = run("quantize", src, tmp_path / "out", *RECIPE, *options, *more)
        assert (code, ids(document)) == (USAGE, [id])
    assert not (tmp_path / "out").exists()


def test_an_empty_name_is_not_the_current_folder(src: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a script passes whose variable is not set."""
    monkeypatch.chdir(src)
    for command in (["inspect", ""], ["config", "", "../out", "--set", "a=1"], ["verify", ""]):
        code, document = run(*command)
        assert (code, ids(document)) == (USAGE, ["usage.source"])


def test_a_url_is_no_folder_to_make(src: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, document = run("quantize", src, "s3://bucket/out", *RECIPE)
    assert (code, ids(document)) == (USAGE, ["usage.arguments"])
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_an_id_that_passes_over_nothing_is_a_warning(src: Path, tmp_path: Path, run: Run) -> None:
    allow = ["--allow", "plan.divide,shapes.config"]
    code, document = run("quantize", src, tmp_path / "out", *RECIPE, *allow)
    assert (code, ids(document)) == (OK, ["usage.allow-unused"])


def test_what_to_type_again_is_the_run_without_its_display() -> None:
    again = resume_command(["quantize", "a b", "out", "--no-progress", "--overwrite", "--jobs", "2"])
    assert shlex.split(again) == ["ckptkit", "quantize", "a b", "out", "--jobs", "2", "--resume"]


# --- the dry run -----------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_then_what_blocks_it(
    src: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    line = ["quantize", str(src), str(tmp_path / "out"), *RECIPE, "--dry-run"]
    code, document = run(*line)
    assert (code, ids(document), document["ok"]) == (OUTPUT, ["output.space"], False)
    assert document["plan"]["shards"] == 2
    digest = document["plan"]["digest"]
    assert main(line) == OUTPUT
    out, err = capsys.readouterr()
    assert digest[:16] in out
    assert err.startswith("error: ")
    assert main([*line, "--quiet"]) == OUTPUT
    out, err = capsys.readouterr()
    assert out == f"{digest}\n"
    assert err.startswith("error: ")


# --- what is left out ------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_told_at_the_end(
    src: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (src / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    (src / "folder").symlink_to(tmp_path)
    os.mkfifo(src / "pipe")
    for name in ("pytorch_model.bin", "md5sums.txt", "checksums.sha256"):
        (src / name).write_text("x")
    code, document = run("quantize", src, tmp_path / "out", *RECIPE)
    assert (code, [f["file"] for f in document["findings"]]) == (OK, ["tokenizer.json"])
    assert ids(document) == ["source.dangling"]
    expected = ["checksums.sha256", "folder", "md5sums.txt", "pipe", "pytorch_model.bin", "tokenizer.json"]
    assert [item["name"] for item in document["plan"]["left_out"]] == expected
    assert not {path.name for path in (tmp_path / "out").iterdir()} & set(expected)
    assert main(["quantize", str(src), str(tmp_path / "again"), *RECIPE, "--include", "md5sums.txt"]) == OK
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert [line.split()[2].rstrip(":") for line in told] == [name for name in expected if name != "md5sums.txt"]
    assert (tmp_path / "again" / "md5sums.txt").read_text() == "x"


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of its own."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def same_filesystem_twice(tmp_path: Path) -> Iterator[Path]:
    """A folder of the source's filesystem that is mounted once more: no link goes from the one mount to the other."""
    folder = tmp_path / "bound"
    (tmp_path / "other").mkdir()
    folder.mkdir()
    how = ["mount", "--bind", str(tmp_path / "other"), str(folder)]
    if os.geteuid() or subprocess.run(how, capture_output=True).returncode:
        pytest.skip("no folder can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("where", ["elsewhere", "same_filesystem_twice"])
def test_a_link_that_cannot_be_made_is_told_before_the_run(
    src: Path, where: str, request: pytest.FixtureRequest, run: Run
) -> None:
    folder = request.getfixturevalue(where)
    size = (src / UNTOUCHED).stat().st_size
    for more in (["--dry-run"], []):
        code, document = run("quantize", src, folder / "out", *RECIPE, "--link", "hard", *more)
        assert (code, ids(document)) == (OK, ["output.link"])
        assert document["findings"][0]["severity"] == "warning"
        assert document["findings"][0]["data"] == {"shards": 1, "bytes": size}
    assert (folder / "out" / UNTOUCHED).stat().st_nlink == 1
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_a_link_that_works_is_no_news(src: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run("quantize", src, tmp_path / "out", *RECIPE, "--link", "hard")
    assert (code, ids(document)) == (OK, [])
    assert os.path.samefile(tmp_path / "out" / UNTOUCHED, src / UNTOUCHED)
    assert main(["quantize", str(src), str(tmp_path / "copied"), *RECIPE, "--link", "auto"]) == OK
    assert "--link hard" in capsys.readouterr().err


def test_what_a_link_would_save_is_not_promised_where_it_does_not_work(
    src: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["quantize", str(src), str(elsewhere / "out"), *RECIPE]) == OK
    assert "--link hard" not in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    code, document = run("quantize", src, elsewhere / "more", *RECIPE)
    assert (code, ids(document)) == (OUTPUT, ["output.space"])
    assert "--link" not in document["findings"][0]["hint"]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_that_is_too_long_is_an_output_fault(src: Path, tmp_path: Path, run: Run) -> None:
    for more in ([], ["--dry-run"], ["--resume"]):
        code, document = run("quantize", src, tmp_path / ("x" * 256), *RECIPE, *more)
        assert (code, ids(document)) == (OUTPUT, ["output.write"])
    code, document = run("quantize", src, *RECIPE, "--dry-run", "--plan", tmp_path / ("x" * 256))
    assert (code, ids(document)) == (OUTPUT, ["output.write"])
    code, document = run("inspect", tmp_path / ("x" * 256))
    assert (code, ids(document)) == (SOURCE, ["source.read"])


@pytest.mark.parametrize("name", ["x" * 255, "x" * 248, "€" * 85])
def test_a_name_as_long_as_the_filesystem_takes(src: Path, tmp_path: Path, run: Run, name: str) -> None:
    (src / ("y" * 255)).write_text("kept")
    assert run("quantize", src, tmp_path / name, *RECIPE)[0] == OK
    assert run("quantize", src, tmp_path / name, *RECIPE, "--overwrite")[0] == OK
    assert (tmp_path / name / ("y" * 255)).read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "src"])


def test_names_that_are_no_text(src: Path, tmp_path: Path, run: Run) -> None:
    odd = os.fsdecode(b"a\xff")
    (src / f"{odd}.txt").write_text("kept")
    assert run("quantize", src, *RECIPE, "--dry-run", "--plan", tmp_path / f"{odd}.jsonl")[0] == OK
    assert run("apply", tmp_path / f"{odd}.jsonl", tmp_path / odd, "--hash", "sha256")[0] == OK
    assert (tmp_path / odd / f"{odd}.txt").read_text() == "kept"
    if shutil.which("sha256sum"):
        command = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
        assert subprocess.run(command, cwd=tmp_path / odd, capture_output=True).returncode == 0
    assert run("hash", tmp_path / odd, "--check", tmp_path / odd / "SHA256SUMS")[0] == OK
    assert run("hash", src)[0] == OK
    assert run("hash", src, "--check", src / "SHA256SUMS")[0] == OK


# --- resuming what is finished ---------------------------------------------------------------------------------------


def test_sums_are_made_for_a_result_that_is_there(src: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run("quantize", src, out, *RECIPE)[0] == OK
    assert not (out / "SHA256SUMS").exists()
    assert run("quantize", src, out, *RECIPE, "--resume", "--hash", "sha256")[0] == OK
    assert run("quantize", src, tmp_path / "plain", *RECIPE, "--hash", "sha256")[0] == OK
    assert (out / "SHA256SUMS").read_text() == (tmp_path / "plain" / "SHA256SUMS").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain", "src"]
