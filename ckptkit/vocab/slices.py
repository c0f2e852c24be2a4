"""How engines cut the rows of an output head among devices, and how a draft vocabulary spreads over the slices.

Rules, as the engines' own code has them:

* ``sglang``, ``vllm`` (vocab_parallel_embedding.py): rows are padded to a multiple of 64, or of 64 x devices where 64
  will not do, and cut evenly; padding is no row of the checkpoint.
* ``lightllm`` (embedding_weight.py): ``floor(V * j / N)``.
* ``llama.cpp`` with ``-sm tensor``: the same sizes, but they go to the devices from number ``n_layer % N`` on, so that
  the last size, which has the remainder, need not be the last device's.
* ``even``: what all of them come to where ``64 * N`` divides the rows, or where there is one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import fail

ENGINES = ("sglang", "vllm", "lightllm", "llama.cpp")
EVEN = "even"
_PAD = 64  # rows, DEFAULT_VOCAB_PADDING_SIZE of SGLang and vLLM


def engines_agree(n_rows: int, slices: int) -> bool:
    """Whether the bounds are the same under every rule."""
    return slices == 1 or n_rows % (_PAD * slices) == 0


def rule_of(engine: str | None, n_rows: int, slices: int) -> str:
    """The rule to cut by: the engine's, or ``even`` where none is named.

    Raises UserError ``usage.engine`` where none is named and the rules differ.
    """
    if engine is None and not engines_agree(n_rows, slices):
        message = f"engines cut {n_rows:,} rows into {slices} slices differently, and none is named"
        raise fail("usage.engine", message, hint=f"--engine {'|'.join(ENGINES)}")
    return engine or EVEN


def bounds(engine: str, n_rows: int, slices: int, n_layer: int = 0) -> tuple[int, ...]:
    """Where the slices begin, and ``n_rows`` at the end: slice j is rows [b[j], b[j + 1])."""
    match engine:
        case "sglang" | "vllm":
            padded = _up(n_rows, _PAD)
            padded = _up(n_rows, _PAD * slices) if padded % slices else padded
            return tuple(min(padded // slices * j, n_rows) for j in range(slices + 1))
        case "llama.cpp":
            return (0, *accumulate(_rotated(n_rows, slices, n_layer)))
        case "lightllm" | "even":
            return tuple(n_rows * j // slices for j in range(slices + 1))
    raise ValueError(f"no engine is called {engine!r}")


def list_counts(engine: str, n_list: int, found: Sequence[int], n_layer: int = 0) -> tuple[int, ...]:
    """How many tokens of a list of ``n_list`` each slice of the bounds ``found`` takes; together all of them.

    In proportion to its rows, ``floor(n_list * b / V)`` up to every bound; llama.cpp cuts the list as it cuts rows.
    Raises UserError ``vocab.slice`` for a slice that would take more tokens than it has rows.
    """
    slices = len(found) - 1
    upto = [n_list * bound // found[-1] for bound in found]
    counts = _rotated(n_list, slices, n_layer) if engine == "llama.cpp" else [b - a for a, b in pairwise(upto)]
    for number, (count, (start, stop)) in enumerate(zip(counts, pairwise(found), strict=True)):
        if count > stop - start:
            message = f"slice {number} has {stop - start:,} rows, and {count:,} tokens of the list would be its"
            raise fail("vocab.slice", message, hint="take a shorter list, or fewer slices")
    return tuple(counts)


def _rotated(count: int, slices: int, n_layer: int) -> list[int]:
    """Sizes by device: those of ``floor(count * j / slices)``, the first of them for device ``n_layer % slices``."""
    sizes = [count * (j + 1) // slices - count * j // slices for j in range(slices)]
    return [sizes[(device - n_layer) % slices] for device in range(slices)]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
