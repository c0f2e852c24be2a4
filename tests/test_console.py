from __future__ import annotations

import io
import json
import sys

import pytest

from ckptkit import console as module
from ckptkit.console import Console, Settings, Table, finding_text, fmt_bytes, fmt_count, fmt_duration, fmt_parameters
from ckptkit.errors import USAGE, Finding

TABLE = Table(("name", "bytes"), [("a" * 300, "1"), ("b", "1,000")], "<>")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_600_000_000, "1.6 GB"),
        (2 * 10**18, "2000.0 PB"),
    ],
)
def test_bytes_are_decimal(count: int, text: str) -> None:
    assert fmt_bytes(count) == text


def test_numbers_in_words() -> None:
    assert [fmt_parameters(n) for n in (576, 134_515_008, 684_500_000_000)] == ["576", "134.5 M", "684.5 B"]
    assert [fmt_count(n, "shard") for n in (1, 1000)] == ["1 shard", "1,000 shards"]
    assert [fmt_duration(s) for s in (0.4, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_file_and_tensor_come_first_unless_the_message_names_them() -> None:
    subjects = {"file": "x.json", "tensor": "lm_head"}
    assert finding_text(Finding("a.b", "too short", **subjects)) == "x.json: lm_head: too short"
    assert finding_text(Finding("a.b", "x.json: lm_head is short", **subjects)) == "x.json: lm_head is short"
    assert finding_text(Finding("a.b", "x.json is short", **subjects)) == "lm_head: x.json is short"


def test_the_result_goes_to_stdout_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Console(Settings()).result({}, ["line", TABLE], warnings=[Finding("a.b", "careful", severity="warning", hint="do")])
    out, err = capsys.readouterr()
    assert out == f"line\n{'name':300}  bytes\n{'a' * 300}      1\n{'b':300}  1,000\n"
    assert err == "warning: careful\nhint: do\n"


def test_quiet_gives_values_and_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(Settings(quiet=True))
    console.result({}, ["talk"], quiet=["one", "two"], warnings=[Finding("a.b", "careful", severity="warning")])
    console.note("on the way")
    assert capsys.readouterr() == ("one\ntwo\n", "")
    console.failure([Finding("a.b", "broken")], USAGE)
    assert capsys.readouterr() == ("", "error: broken\n")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(Settings(json=True, command="inspect"))
    warning = Finding("a.b", "careful", file="f", severity="warning", data={"n": 1})
    console.result({"output": "x"}, ["talk"], quiet=["x"], warnings=[warning])
    out, err = capsys.readouterr()
    finding = {"id": "a.b", "severity": "warning", "file": "f", "tensor": None, "message": "careful", "hint": None}
    assert json.loads(out) == {
        "schema": 1,
        "command": "inspect",
        "ok": True,
        "exit_code": 0,
        "findings": [finding | {"data": {"n": 1}}],
        "output": "x",
    }
    assert err == ""
    console.failure([warning], USAGE)
    out, err = capsys.readouterr()
    assert (json.loads(out)["ok"], json.loads(out)["exit_code"], err) == (False, USAGE, "")


def test_many_findings_of_one_id_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("a.b", f"message {i}") for i in range(25)] + [Finding("c.d", "other")]
    Console(Settings()).failure(findings, USAGE)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: message")] == [f"error: message {i}" for i in range(20)]
    assert "5 more a.b" in lines[20]
    assert lines[21:] == ["error: other"]
    Console(Settings(verbose=True)).failure(findings, USAGE)
    assert len(capsys.readouterr().err.splitlines()) == 26
    Console(Settings(json=True)).failure(findings, USAGE)
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 26


def test_a_hint_follows_what_it_is_for_and_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("a.b", "1", hint="x"), Finding("a.b", "2", hint="x"), Finding("a.b", "3", hint="y")]
    Console(Settings()).failure(findings, USAGE)
    assert capsys.readouterr().err.splitlines() == ["error: 1", "error: 2", "hint: x", "error: 3", "hint: y"]


@pytest.mark.parametrize(
    ("color", "terminal", "coloured"),
    [("auto", True, True), ("auto", False, False), ("never", True, False), ("always", False, True)],
)
def test_colour(monkeypatch: pytest.MonkeyPatch, color: str, terminal: bool, coloured: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    Console(Settings(color=color)).failure([Finding("a.b", "broken")], USAGE)
    assert ("\x1b[" in stream.getvalue()) is coloured
    assert "error" in stream.getvalue()


def test_what_the_stream_cannot_encode_is_spelled_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Console(Settings()).result({}, ["a → b", "naïve"])
    assert raw.getvalue() == b"a -> b\nna\\xefve\n"


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_without_a_terminal_progress_is_a_line_each_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with Console(Settings()).progress("quantize") as progress:
        progress.start(3, 4_000_000)
        for _ in range(40):
            clock.now += 1
            progress.advance(100_000)
        progress.shard("a")
        progress.done()
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "quantize: 0/3 shards  1.0 MB of 4.0 MB  100.0 kB/s  eta 0:30"
    assert lines[-1] == "quantize: 1/3 shards  4.0 MB of 4.0 MB  100.0 kB/s  in 0:40"
    assert len(lines) == 5


@pytest.mark.parametrize("settings", [Settings(quiet=True), Settings(no_progress=True)])
def test_progress_can_be_silenced(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with Console(settings).progress("quantize") as progress:
        progress.start(1, 10)
        progress.advance(10)
        progress.done()
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_progress_is_a_bar_that_leaves_the_cursor_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")

    def interrupted() -> None:
        with Console(Settings()).progress("quantize") as progress:
            progress.start(2, 2000)
            progress.advance(1000)
            progress.shard("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = stream.getvalue()
    assert "1/2 shards" in shown
    assert "50%" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
