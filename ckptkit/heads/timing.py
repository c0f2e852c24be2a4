"""How long it takes to choose candidates on a device. Imports torch: import it only to compute.

On CUDA every operation is captured in a graph, once for each of several sets of logits, so that neither launches nor
one set that stays in the cache are what is timed; a replay is timed by events on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .choice import candidates

SETS = 8  # of logits
WARM = 3
CUDA: Any = torch.cuda  # parts of it are not typed

Run = Callable[[], Any]
Operation = Callable[[Tensor, Tensor, int], Any]


class Case(NamedTuple):
    """Logits [states, rows], of which ``k`` are chosen for each state."""

    rows: int
    states: int
    k: int


class Timing(NamedTuple):
    """Microseconds of one operation: the median, and the quartiles on both sides of it."""

    what: str
    rows: int
    states: int
    k: int
    median: float
    low: float
    high: float


def _topk(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, rows = logits.topk(count, dim=1)
    return values, tokens[rows]


def _max(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, rows = logits.max(dim=1, keepdim=True)
    return values, tokens[rows]


OPERATIONS: Mapping[str, Operation] = {
    "topk": _topk,
    "tie-safe topk": lambda logits, tokens, count: candidates(logits, tokens, count, ascending=True),
    "tie-safe topk, reordered": candidates,
    "max": _max,
}


def timings(device: torch.device, cases: Iterable[Case], replays: int) -> Iterator[Timing]:
    """Every operation for every case, each with the gather of the ids; ``max`` where one is chosen."""
    for case in cases:
        sets = [torch.randn(case.states, case.rows, device=device) for _ in range(SETS if device.type == "cuda" else 1)]
        tokens = torch.arange(case.rows, dtype=torch.int32, device=device)
        for what, operation in OPERATIONS.items():
            if what == "max" and case.k > 1:
                continue
            run = captured(partial(_on_all, operation, sets, tokens, case.k), device)
            found = [microseconds / len(sets) for microseconds in timed(run, device, replays)]
            yield timing(what, case, found)


def _on_all(operation: Operation, sets: list[Tensor], tokens: Tensor, count: int) -> list[Any]:
    return [operation(logits, tokens, count) for logits in sets]


def timing(what: str, case: Case, microseconds: list[float]) -> Timing:
    low, median, high = np.percentile(microseconds, (25, 50, 75)).tolist()
    return Timing(what, *case, *(round(value, 2) for value in (median, low, high)))


def captured(run: Run, device: torch.device) -> Run:
    """``run`` as the replay of a CUDA graph; elsewhere as it is."""
    if device.type != "cuda":
        return run
    stream: torch.cuda.Stream = CUDA.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    replay: Run = graph.replay
    return replay


def timed(run: Run, device: torch.device, replays: int) -> list[float]:
    """Microseconds of each of some runs, after some that are not counted."""
    for _ in range(WARM):
        run()
    if device.type != "cuda":
        return [_seconds(run) * 1e6 for _ in range(replays)]
    pairs = [tuple(CUDA.Event(enable_timing=True) for _ in range(2)) for _ in range(replays)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
