"""Windows over ranges: the bytes of the file whatever is expected and read, each window fetched once."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import UserError, fail
from ckptkit.remote import windows
from ckptkit.remote.windows import Window, Windows

CONTENT = random.Random(0).randbytes(5000)
Ranges = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900)).map(lambda t: (t[0], min(5000, t[0] + t[1]))))


class Server:
    """Serves :data:`CONTENT` and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def fetch(self, file: str, start: int, view: memoryview) -> None:
        self.asked.append((start, start + len(view)))
        view[:] = CONTENT[start : start + len(view)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW", 256)


@given(Ranges)
def test_windows_cover_what_is_expected_and_nothing_else(ranges: list[tuple[int, int]]) -> None:
    planned = windows.windows(ranges)
    covered = [at for window in planned for at in range(window.start, window.stop)]
    assert covered == sorted({at for start, stop in ranges for at in range(start, stop)})
    assert all(window.stop - window.start <= windows.WINDOW for window in planned)


@given(Ranges, Ranges, Ranges)
def test_reads_give_the_bytes_of_the_file(
    first: list[tuple[int, int]], second: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:
    server = Server()
    found = Windows(server.fetch)
    found.expect("file", first)
    found.expect("file", second)
    for start, stop in reads:
        buffer = bytearray(stop - start)
        found.read_into("file", start, memoryview(buffer))
        assert buffer == CONTENT[start:stop]


def test_neighbours_are_fetched_together_and_once_by_many_threads() -> None:
    server = Server()
    found = Windows(server.fetch)
    tensors = [(at, at + 16) for at in range(0, 512, 16)] + [(1000, 1016)]
    found.expect("file", tensors)

    def read(span: tuple[int, int]) -> bytes:
        buffer = bytearray(span[1] - span[0])
        found.read_into("file", span[0], memoryview(buffer))
        return bytes(buffer)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(read, tensors)] == [CONTENT[a:b] for a, b in tensors]
    assert sorted(server.asked) == [(0, 256), (256, 512), (1000, 1016)]


def test_memory_is_bounded_and_what_was_let_go_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "HELD", 2)
    server = Server()
    found = Windows(server.fetch)
    found.expect("file", [(0, 1024)])
    for at in (0, 256, 512, 512, 0):
        found.read_into("file", at, memoryview(bytearray(10)))
    assert server.asked == [(0, 256), (256, 512), (512, 768), (0, 256)]
    assert len(found._held) == 2


def test_a_failed_window_is_tried_again_by_the_next_read() -> None:
    fails = [True]

    def fetch(file: str, start: int, view: memoryview) -> None:
        if fails.pop():
            raise fail("source.read", "cut", file=file)
        view[:] = CONTENT[start : start + len(view)]

    found, view = Windows(fetch), memoryview(bytearray(4))
    found.expect("file", [(0, 100)])
    with pytest.raises(UserError):
        found.read_into("file", 8, view)
    fails.append(False)
    found.read_into("file", 8, view)
    assert view == CONTENT[8:12]


def test_expecting_the_same_again_plans_nothing_new() -> None:
    found = Windows(Server().fetch)
    for _ in range(3):
        found.expect("file", [(10, 20), (20, 600)])
    assert found._planned["file"] == [Window(10, 266), Window(266, 522), Window(522, 600)]
