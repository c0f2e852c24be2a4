"""``ckptkit verify --serve`` as it is typed, on the fake engine."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.commands import serving_job
from ckptkit.errors import BUG, ENGINE, FOUND, INTERRUPTED, OK, OUTPUT, SOURCE, USAGE
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.serving import matrix, process, reference
from ckptkit.serving.engine import Launch, Server
from ckptkit.serving.recording import digest, write

from . import fakes
from .fakes import cell


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small checkpoint with a golden file of its own beside it."""
    folder = checkpoint(tmp_path / "model", llama(), llama_config() | {"vocab_size": fakes.VOCABULARY})
    with open_source(str(folder)) as source:
        golden = fakes.recording()
        write(golden._replace(about={**golden.about, "source": digest(open_checkpoint(source))}), tmp_path / "own.json")
    write(golden, tmp_path / "source.json")
    of_another = golden.items[0]._replace(prompt=(1, 2, fakes.VOCABULARY))  # a token more than there are
    write(golden._replace(items=(of_another,)), tmp_path / "larger.json")
    return folder


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, mode: str, *arguments: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(serving_job, "engine", lambda name: fakes.engine(mode))
    given = () if "--golden" in arguments else ("--golden", str(model.parent / "own.json"))
    code = main(["verify", str(model), "--serve", "--no-static", "--max-tokens", "8", *given, *arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    return code, document


def found(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


@pytest.mark.parametrize(
    ("mode", "code", "ids"),
    [
        ("good", OK, set()),
        ("off", FOUND, {"serve.logprob"}),
        ("one-token", FOUND, {"serve.decode"}),
        ("uniform", FOUND, {"serve.decode", "serve.uniform"}),
        ("empty", FOUND, {"serve.decode"}),
        ("nan", FOUND, {"serve.nan"}),
        ("no-text", FOUND, {"serve.decode"}),
        ("dies", FOUND, {"serve.start"}),
        ("dies-on-request", FOUND, {"serve.crash"}),
        ("segfault", ENGINE, {"engine.crashed"}),
        ("killed", ENGINE, {"engine.killed"}),
    ],
)
def test_one_cell(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    mode: str,
    code: int,
    ids: set[str],
) -> None:
    exit_code, document = run(monkeypatch, capsys, model, mode)
    assert (exit_code, found(document)) == (code, ids)
    assert document["level"] == "serve"


def test_a_flip_from_the_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    """Where the checkpoint's own values cannot be run, that is said: it is no pass."""

    monkeypatch.setattr(reference, "running", unavailable)
    golden = str(model.parent / "source.json")
    code, document = run(monkeypatch, capsys, model, "flipped", "--golden", golden)
    assert (code, found(document)) == (FOUND, {"serve.greedy-flip"})
    results = {check["id"]: check["result"] for check in document["checks"]}
    assert (results["serve.greedy-flip"], results["serve.logprob"], results["serve.tolerance"]) == (
        "fail",
        "skip",
        "ok",
    )
    assert run(monkeypatch, capsys, model, "good", "--golden", golden)[0] == FOUND
    assert run(monkeypatch, capsys, model, "good", "--golden", golden, "--allow-skipped")[0] == OK


@pytest.mark.parametrize(("mode", "code"), [("speculates", OK), ("useless-draft", FOUND)])
def test_a_matrix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, mode: str, code: int
) -> None:
    exit_code, document = run(monkeypatch, capsys, model, mode, "--speculative", "ngram")
    cells = document["figures"]["serve"]["cells"]
    assert (exit_code, [cell["speculation"] for cell in cells]) == (code, ["none", "ngram"])
    assert cells[1]["equal"] == [2, 2]
    assert cells[1]["speculated"]["accept_length"] == (4.0 if mode == "speculates" else 1.0)
    assert found(document) == (set() if code == OK else {"serve.accept-length"})


def test_a_way_to_speculate_that_the_engine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    code, document = run(monkeypatch, capsys, model, "good", "--speculative", "mtp")
    assert (code, found(document)) == (FOUND, {"serve.unsupported"})


def test_one_cell_that_could_not_be_run_beside_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    code, document = run(monkeypatch, capsys, model, "killed", "--speculative", "mtp")
    assert (code, found(document)) == (FOUND, {"engine.killed", "serve.unsupported"})


def test_a_probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    get = f"{sys.executable} -c \"import sys, urllib.request as u; u.urlopen(sys.argv[1] + '/health')\" $CKPTKIT_URL"
    assert run(monkeypatch, capsys, model, "good", "--probe", get)[0] == OK
    code, document = run(monkeypatch, capsys, model, "good", "--probe", "test $CKPTKIT_MODEL = other")
    assert (code, found(document)) == (FOUND, {"serve.probe"})


def test_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """The fake engine answers every chat with ``ok``, which is no number: right of none."""
    tasks = tmp_path / "tasks.jsonl"
    line = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"})
    tasks.write_text(f"{line}\n" * 7, "utf-8")
    given = ("--eval", f"gsm8k:{tasks}")
    code, document = run(monkeypatch, capsys, model, "good", *given)
    assert (code, document["figures"]["serve"]["cells"][0]["score"]) == (OK, 0.0)
    code, document = run(monkeypatch, capsys, model, "good", *given, "--min-score", "0.5")
    assert (code, found(document)) == (FOUND, {"serve.score"})


def test_an_allowed_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert run(monkeypatch, capsys, model, "off", "--allow", "serve.logprob")[0] == OK
    assert run(monkeypatch, capsys, model, "off", "--ignore", "serve.logprob")[0] == OK


def test_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    page, junit = tmp_path / "report.html", tmp_path / "junit.xml"
    run(monkeypatch, capsys, model, "off", "--report", str(page), "--junit", str(junit))
    failures = {case.name for suite in JUnitXml.fromfile(str(junit)) for case in suite if not case.is_passed}
    assert failures == {"serve.logprob"}
    text = page.read_text("utf-8")
    assert "<h2>Serving</h2>" in text
    assert text.count("<svg") >= 2  # a line of differences for each prompt


@pytest.mark.parametrize(
    "arguments",
    [
        ["--golden", "a", "--record", "b"],
        ["--golden", "a", "--against", "b"],
        ["--min-score", "0.5"],
        ["--journal", "replies"],
        ["--eval-runner", "sglang"],
        ["--url", "not-a-url"],
        ["--url", "http://127.0.0.1:1", "other"],
        ["--url", "http://127.0.0.1:1", "--speculative", "ngram"],
        ["--url", "http://127.0.0.1:1", "--engine-arg=--tp=2"],
        ["--url", "http://127.0.0.1:1", "--keep-serving"],
        ["hf://org/name"],
        ["--golden", "larger.json"],
        ["--tolerance", "-1"],
        ["--tolerance", "0.1"],
        ["--min-score", "60", "--eval", "tasks"],
        ["--min-accept-length", "2"],
        ["--draft", "eagle3=model", "--speculative", "ngram"],
        ["--timeout", "soon"],
        ["--draft", "eagle3=no-such-folder", "--golden", "own.json"],
        ["--speculative", "eagle3", "--golden", "own.json"],
        ["--engine", "no-such-engine"],
        ["--eval", "no-such:file"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str]
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["verify", "model", "--serve", *arguments, "--json"]) == USAGE


def test_a_url_without_anything_to_judge_by() -> None:
    assert main(["verify", "--serve", "--url", "http://127.0.0.1:1", "--json"]) == USAGE


def test_a_file_of_a_checkpoint_is_no_folder_to_serve(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = model.glob("*.safetensors")
    assert main(["verify", str(file), "--serve", "--json"]) == USAGE


@pytest.mark.parametrize("option", ["--record", "--report", "--junit"])
def test_a_file_that_could_not_be_written_stops_it_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, option: str
) -> None:
    monkeypatch.setattr(reference, "running", unexpected)
    path = tmp_path / "no-such-folder" / "file.json"
    assert main(["verify", str(model), "--serve", option, str(path), "--json"]) == OUTPUT


def test_nothing_runs_in_float32_where_no_engine_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    monkeypatch.setattr(reference, "running", unexpected)
    arguments = ["--engine-python", "no-such-python", "--no-static"]
    assert main(["verify", str(model), "--serve", *arguments, "--json"]) == ENGINE
    assert found(json.loads(capsys.readouterr().out)) == {"engine.missing"}


def test_accept_length_behind_a_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    """The fake engine accepts 30 tokens in 10 verifications of each request: 4 tokens a verification."""
    started = cell("speculates")
    port = process.free_port()
    command = started.engine.command(Launch(started.path, port, tmp_path))
    given = ("--url", f"http://127.0.0.1:{port}", "--engine", "transformers")
    with process.serving(command, tmp_path / "log", 2.0) as running:
        process.wait_ready(running, started.engine, Server(f"http://127.0.0.1:{port}", ""), 30.0)
        code, document = run(monkeypatch, capsys, model, "good", *given, "--min-accept-length", "3.9")
        assert (code, found(document)) == (OK, set())
        code, document = run(monkeypatch, capsys, model, "good", *given, "--min-accept-length", "4.1")
        assert (code, found(document)) == (FOUND, {"serve.accept-length"})


def test_a_tolerance_of_nought(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    """It is a tolerance, and not the default."""
    golden = str(model.parent / "source.json")
    monkeypatch.setattr(reference, "running", unavailable)
    _, document = run(monkeypatch, capsys, model, "good", "--golden", golden, "--tolerance", "0")
    assert document["figures"]["serve"]["cells"][0]["tolerance"] == 0


def unexpected(*arguments: object) -> None:
    raise AssertionError("nothing should be run")


def unavailable(*arguments: object) -> None:
    raise reference.Unavailable("no tokenizer")


@pytest.mark.parametrize(("ckpt", "code"), [("no-such.gguf", SOURCE), ("model", USAGE)])
def test_what_llama_server_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, ckpt: str, code: int
) -> None:
    """A file that is not there, and a folder without one."""
    monkeypatch.chdir(model.parent)
    assert main(["verify", ckpt, "--serve", "--engine", "llama-server", "--json"]) == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["--golden", "a"],
        ["--min-accept-length", "2"],
        ["--keep-serving"],
        ["--timeout", "20m"],
        ["--select", "serve.logprob"],
        ["other"],
    ],
    ids=" ".join,
)
def test_what_needs_serve(capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str]) -> None:
    assert main(["verify", str(model), *arguments, "--json"]) == USAGE
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "usage.arguments"


def test_labels(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    given = ["w8=models/x", "models/y", "other/y", str(tmp_path / "a=b")]
    assert serving_job.labelled(given) == {
        "w8": "models/x",
        "y": "models/y",
        "y'": "other/y",
        "a=b": str(tmp_path / "a=b"),
    }


@pytest.mark.parametrize("how", ["sigterm", "error", "good"])
def test_nothing_is_left_in_temporary_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, how: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    if how == "good":
        assert run(monkeypatch, capsys, model, "good")[0] == OK
    else:
        monkeypatch.setattr(matrix, "run_matrix", lambda *arguments: ends(how))
        assert run(monkeypatch, capsys, model, "good")[0] == (INTERRUPTED if how == "sigterm" else BUG)
    assert list(scratch.iterdir()) == []


def ends(how: str) -> None:
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("a bug")
