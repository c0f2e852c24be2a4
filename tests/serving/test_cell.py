"""Whole cells on the fake engine: each way of failing gives its finding, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.errors import Finding
from ckptkit.serving import process
from ckptkit.serving.cell import Ran, Setting, run_cell

from .fakes import PROGRAM, cell, recording


def ran(
    tmp_path: Path, mode: str, *lines: str, timeout: float = 20.0, request: float = 20.0, grace: float = 2.0
) -> Ran:
    setting = Setting(tmp_path, timeout=timeout, request=request)
    return run_cell(cell(mode, *lines, grace=grace), setting, recording(), 8, lambda text: None)


def ids(found: Ran) -> set[str]:
    return {finding.id for finding in found.findings}


def test_a_server_that_is_well(tmp_path: Path) -> None:
    found = ran(tmp_path, "good")
    assert found.findings == ()
    assert {name: answer.tokens for name, answer in found.answers.items()} == {
        "a": (4, 5, 6, 7, 8, 9, 10, 11),
        "b": (21, 22, 23, 24, 25, 26, 27, 28),
    }
    assert {len(values) for values in found.scores.values()} == {10}
    assert found.tokens_per_second == pytest.approx(16 / 0.02)


def test_a_server_that_starts_slowly(tmp_path: Path) -> None:
    found = ran(tmp_path, "slow")
    assert found.findings == ()
    assert found.started is not None
    assert found.started >= 0.5


@pytest.mark.parametrize(
    ("mode", "lines", "id"),
    [
        ("dies", (), "serve.start"),
        ("dies", ("ValueError: no such thing",), "serve.start"),
        ("dies", ("torch.OutOfMemoryError: CUDA out of memory. Tried",), "engine.memory"),
        ("dies", ("OSError: [Errno 98] Address already in use",), "engine.port"),
        ("dies", ("RuntimeError: No CUDA GPUs are available",), "engine.device"),
        ("dies", ("ModuleNotFoundError: No module named 'vllm'",), "engine.missing"),
        ("dies", ("SafetensorError: Error while deserializing header: incomplete metadata",), "serve.corrupt"),
        ("dies", ("ValueError: Failed to find a kernel that can implement",), "serve.unsupported"),
        ("segfault", (), "engine.crashed"),
        ("killed", (), "engine.killed"),
        ("killed", ("ValueError: SGLang ends itself so",), "serve.start"),
        ("dies-on-request", (), "serve.crash"),
        ("dies-after-500", (), "serve.crash"),
        ("garbage", (), "serve.request"),
        ("refuses", (), "serve.request"),
        ("cut-stream", (), "serve.api"),
        ("good", ("Parameter lm_head.weight_packed not found in params_dict",), "serve.head-dropped"),
    ],
)
def test_what_goes_wrong(tmp_path: Path, mode: str, lines: tuple[str, ...], id: str) -> None:
    assert ids(ran(tmp_path, mode, *lines)) == {id}


def test_a_stream_that_stalls(tmp_path: Path) -> None:
    assert ids(ran(tmp_path, "stalls", request=1.0)) == {"serve.api"}


def test_a_server_that_is_never_ready_hangs(tmp_path: Path) -> None:
    found = ran(tmp_path, "never", timeout=0.6)
    assert ids(found) == {"serve.hang"}
    assert not is_alive(child_of(found))


def test_a_compiler_at_work_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cicc"
    compiler.symlink_to("/bin/sleep")
    running = process.start([str(compiler), "20"], tmp_path / "log", 1.0)
    try:
        assert running.pid is not None
        deadline = time.monotonic() + 5
        while not (found := process.compilers(running)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == ["cicc"]
        assert process.timed_out(running.log, 1.0, found).id == "engine.timeout"
    finally:
        process.stop(running)


@pytest.mark.parametrize(("compiles", "id"), [(True, "engine.timeout"), (False, "serve.hang")])
def test_a_first_token_that_does_not_come(tmp_path: Path, compiles: bool, id: str) -> None:
    """Healthy is not ready: kernels are compiled on the first request, in a process group of its own or not."""
    compiler = tmp_path / "ptxas"
    compiler.symlink_to("/bin/sleep")
    found = ran(tmp_path, "never-decodes", *([str(compiler)] if compiles else []), timeout=1.5)
    assert ids(found) == {id}
    assert found.started is not None


def test_a_refusal_in_the_log_of_one_that_lives_on(tmp_path: Path) -> None:
    assert ids(ran(tmp_path, "good", "ValueError: Failed to find a kernel that can implement")) == set()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    running = process.start([str(tmp_path / "no-such-program")], tmp_path / "log", 1.0)
    assert running.pid is None
    ended = process.stop(running)
    assert process.classify((), process.read_log(running.log), ended.code).id == "engine.missing"


# --- nothing is left behind --------------------------------------------------------------------------------


def test_sigterm_that_is_ignored(tmp_path: Path) -> None:
    found = ran(tmp_path, "ignores-sigterm", grace=0.5)
    assert found.findings == (Finding("serve.stop", "SIGTERM did not end it within 0.5 s", severity="warning"),)


def test_workers_in_sessions_of_their_own(tmp_path: Path) -> None:
    found = ran(tmp_path, "leaves-a-child")
    assert found.serves
    assert not is_alive(child_of(found))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphans_when_ckptkit_ends(tmp_path: Path, number: int) -> None:
    program = (
        "import sys, time; from pathlib import Path; from ckptkit.serving import process;"
        f"running = process.start([sys.executable, {str(PROGRAM)!r}, 'leaves-a-child', str(process.free_port())],"
        f" Path({str(tmp_path / 'log')!r}), 1.0); print(running.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    child = wait_for_child(tmp_path / "log")
    assert is_alive(server)
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + 10
    while (is_alive(server) or is_alive(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(server)
    assert not is_alive(child)


def wait_for_child(log: Path) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if log.exists() and (found := re.search(r"child (\d+)\n", log.read_text("utf-8"))):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError("the fake engine started no child")


def child_of(found: Ran) -> int:
    line = next(line for line in found.log_end if line.startswith("child "))
    return int(line.split()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False


def test_a_server_that_is_kept(tmp_path: Path) -> None:
    kept = cell("good")
    found = run_cell(kept, Setting(tmp_path), recording(), 8, lambda text: None, keep=True)
    try:
        again = run_cell(kept, Setting(tmp_path, url=found.url), recording(), 8, lambda text: None)
        assert again.findings == ()
        assert again.answers["a"].tokens == found.answers["a"].tokens
    finally:
        assert found.pid is not None
        os.killpg(found.pid, signal.SIGKILL)


def test_a_url_where_nobody_answers(tmp_path: Path) -> None:
    setting = Setting(tmp_path, url=f"http://127.0.0.1:{process.free_port()}")
    assert ids(run_cell(cell("good"), setting, recording(), 8, lambda text: None)) == {"engine.unreachable"}
