"""Tasks on threads, their results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

Task = Callable[[], T]


def threads(jobs: int = 0) -> int:
    """``jobs``, or for 0 as many threads as there are processors, at most four."""
    return jobs or min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_order(tasks: Iterable[Task[T]], pool: ThreadPoolExecutor | None, ahead: int) -> Generator[T, None, None]:
    """The tasks' results in the tasks' order, computed by the pool's threads at most ``ahead`` tasks before their turn.

    Without a pool each is computed when it is asked for. However it ends, no task is left running.
    """
    if pool is None:
        yield from (task() for task in tasks)
        return
    pending: deque[Future[T]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(task))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def on_threads(tasks: Iterable[Task[T]], jobs: int = 0) -> Iterator[T]:
    """The tasks' results in order, from a pool of its own."""
    count = threads(jobs)
    if count == 1:
        yield from in_order(tasks, None, 1)
        return
    with ThreadPoolExecutor(count, "ckptkit") as pool:
        yield from in_order(tasks, pool, 2 * count)
