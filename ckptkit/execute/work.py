"""What every part of a run shares: the threads, how far ahead they may work, and the wish to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import Interrupted
from ..files.parallel import Task, in_order
from ..files.source import Source
from ..ops import Context
from .options import Options, Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A run's means. ``pool`` is None where one thread does it all; ``signals`` holds those that asked to stop,
    ``cached`` what was put into the Hub cache, with sizes."""

    source: Source
    options: Options
    progress: Progress
    pool: ThreadPoolExecutor | None
    signals: list[int]
    cached: list[tuple[Path, int]] = field(default_factory=list)

    @property
    def context(self) -> Context:
        return Context(self.options.device, self.options.nonfinite_error)

    def check(self) -> None:
        """Raise Interrupted once a signal has come."""
        _check(self.signals)

    def in_order(self, tasks: Iterable[Task[T]]) -> Iterator[T]:
        """The tasks' results in the tasks' order, computed by the threads at most two tasks each ahead.

        Between results a wish to stop is heard. However it ends, no task is left running.
        """
        with contextlib.closing(in_order(tasks, self.pool, 2 * self.options.threads)) as results:
            for result in results:
                self.check()
                yield result


@contextlib.contextmanager
def working(source: Source, options: Options, progress: Progress) -> Iterator[Work]:
    """A run's means; in the main thread SIGINT and SIGTERM become a wish to stop, unless they were ignored before."""
    threads = options.threads
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_heard_signals())
        for store in source.stores:
            store.heed(partial(_check, signals))
        pool = stack.enter_context(ThreadPoolExecutor(threads, "ckptkit")) if threads > 1 else None
        yield Work(source, options, progress, pool, signals)


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """A function that raises Interrupted once a signal has come, for a run that has no use for threads."""
    with _heard_signals() as signals:
        yield partial(_check, signals)


def _check(signals: list[int]) -> None:
    if signals:
        raise Interrupted(f"interrupted by {signal.Signals(signals[0]).name}")


@contextlib.contextmanager
def _heard_signals() -> Iterator[list[int]]:
    # A list, not an Event: a second signal may come while the first is being handled, and would wait for its lock.
    heard: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                previous[number] = signal.signal(number, lambda received, frame: heard.append(received))
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
