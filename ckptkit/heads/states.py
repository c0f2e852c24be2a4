"""Hidden states to put before a head: some that need no run of the model, and files of real ones. Imports numpy.

===========  ==================================================================================================
noise        normal noise through the final norm: logits are nearly flat, so it is the severe test
rows         rows of the head, as long as a hidden state: its own token wins, so rows that were lost or moved show
embeddings   rows of the embedding through the final norm: directions that the model knows
hidden       states of a file: what the model's last norm gave for real text
===========  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.heads import embedding, final_norm
from ..checks.viewing import values
from ..checks.views import View, whole
from ..decode.numbers import Floats, to_float32
from ..errors import UserError, fail
from ..files.checkpoint import Checkpoint, scan
from ..files.header import FLOATS
from ..files.source import Source, open_source

COUNTS = {"noise": 32, "rows": 64, "embeddings": 32, "hidden": 256}


def kinds_of(
    checkpoint: Checkpoint, head: View, path: str | None = None, also: Iterable[int] = ()
) -> dict[str, Floats]:
    """States by kind, each [n, width], for the ``head`` of a checkpoint; those of a file if there is a ``path``.

    ``also``: rows of the head to take besides. Raises UserError ``usage.hidden``.
    """
    found_norm = final_norm(checkpoint, head.cols)
    norm = np.ones(head.cols, np.float32) if found_norm is None else found_norm
    kinds = {"noise": noise(norm)}
    kinds["rows"] = as_long(picked(head, checkpoint.source, "rows", also), kinds["noise"])
    tokens = embedding(checkpoint)
    if tokens is not None and tokens.cols == head.cols:
        kinds["embeddings"] = normalized(picked(whole(tokens), checkpoint.source, "embeddings"), norm)
    if path is not None:
        kinds["hidden"] = hidden(path, head.cols)
    return kinds


def places(kinds: Mapping[str, Floats]) -> dict[str, slice]:
    """Where the states of each kind are when all are one after the other."""
    ends = accumulate(map(len, kinds.values()), initial=0)
    return {kind: slice(*part) for kind, part in zip(kinds, pairwise(ends), strict=True)}


def noise(norm: Floats) -> Floats:
    x = np.random.default_rng(0).standard_normal((COUNTS["noise"], len(norm)), np.float32)
    return normalized(x, norm)


def normalized(x: Floats, norm: Floats) -> Floats:
    """Through an RMS norm of that weight."""
    found: Floats = x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + np.float32(1e-12)) * norm
    return found


def as_long(x: Floats, states: Floats) -> Floats:
    """``x`` with rows as long as those of ``states`` are in the mean; rows of zeros stay."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    found: Floats = x * (np.linalg.norm(states, axis=1).mean() / np.maximum(lengths, np.float32(1e-30)))
    return found


def picked(view: View, source: Source, kind: str, also: Iterable[int] = ()) -> Floats:
    """Rows of a weight, evenly spread, the first and the last among them, ``also`` some: float32 [n, cols]."""
    places = sorted({*spread(view.rows, COUNTS[kind]), *also})
    return np.concatenate([values(view, source, row, row + 1) for row in places])


def spread(length: int, most: int) -> list[int]:
    """At most so many places of ``length``, evenly spread, the first and the last among them."""
    count = min(most, length)
    return sorted({round(at * (length - 1) / max(count - 1, 1)) for at in range(count)})


def hidden(path: str, width: int) -> Floats:
    """States of a file, float32 [n, width]; where it holds many, some that are evenly spread.

    A ``.npy`` of floats [..., width], or a ``.safetensors`` with one tensor like that (or one called
    ``hidden_states``). Raises UserError: ``usage.hidden``, and what reading the file gives.
    """
    found = _npy(path) if Path(path).suffix == ".npy" else _safetensors(path)
    if found.ndim < 2 or found.shape[-1] != width or not found.size:
        message = f"{path} holds {list(found.shape)}, and the head reads states of [n, {width}]"
        raise fail("usage.hidden", message, file=path, hint="save what the final norm gives, before the head")
    states = found.reshape(-1, width)
    states = np.ascontiguousarray(states[spread(len(states), COUNTS["hidden"])], np.float32)
    if not np.isfinite(states).all():
        raise fail("usage.hidden", f"{path} holds NaN or Inf", file=path, hint="capture the states in bfloat16")
    return states


def _npy(path: str) -> np.ndarray[Any, Any]:
    try:
        found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise fail("usage.hidden", f"{path} cannot be read as .npy: {error}", file=path) from None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        raise fail("usage.hidden", f"{path} holds no array of floats", file=path, hint="numpy.save of float32")
    return found


def _safetensors(path: str) -> np.ndarray[Any, Any]:
    with open_source(path) as source:
        checkpoint, findings = scan(source)
        broken = [finding for finding in findings if finding.severity == "error"]
        if broken:
            raise UserError(broken)
        tensors = checkpoint.tensors
        named = [name for name in tensors if name == "hidden_states"] or [*tensors]
        ref = tensors[named[0]] if len(named) == 1 else None
        if ref is None or ref.dtype not in FLOATS or len(ref.shape) < 2:
            message = f"{path} holds no single tensor of floats [n, width], nor one called hidden_states"
            raise fail("usage.hidden", message, file=path, hint='save_file({"hidden_states": states}, path)')
        raw = source.read(ref.file, ref.start, ref.stop)
        return to_float32(np.frombuffer(raw, np.uint8), ref.dtype).reshape(ref.shape)
