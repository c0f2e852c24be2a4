"""One rank of a vocabulary-parallel head: python -m ckptkit.heads.rank FOLDER RANK

FOLDER holds what :func:`ckptkit.heads.ranks.run_ranks` wrote: ``job.json``, the states and the tokens of all rows. The
rank reads its own rows of the checkpoint, computes their logits, and exchanges candidates with the others: NCCL and a
GPU of its own, or gloo. It writes its logits, what it was sent, and whom it takes for the winner.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..files.checkpoint import open_checkpoint
from ..files.source import open_source
from .choice import NO_TOKEN, candidates, packed, unpacked, winner
from .head import find_head, logits
from .ranks import JOB, STATES, TOKENS

if TYPE_CHECKING:
    from ..decode.numbers import Floats

MEETING = "meeting"
TIMEOUT = timedelta(minutes=10)  # ranks read their slices before they meet


def main(folder: Path, rank: int) -> None:
    job = json.loads((folder / JOB).read_text("utf-8"))
    start, stop = job["bounds"][rank : rank + 2]
    with open_source(job["location"]) as source:
        checkpoint = open_checkpoint(source)
        mine = logits(find_head(checkpoint), checkpoint, np.load(folder / STATES), start, stop, job["dtype"])
    np.save(folder / f"logits-{rank}.npy", mine)
    tokens = np.load(folder / TOKENS)[start:stop]
    ranks = len(job["held"])
    backend, device = ("nccl", f"cuda:{rank}") if torch.cuda.device_count() >= ranks else ("gloo", "cpu")
    join(folder, backend, rank, ranks)
    own, ids = (part.to(device) for part in padded(mine, tokens, job["held"][rank]))
    gathered = exchanged(own, ids, job["count"], ranks)
    found, ids = unpacked(gathered)
    chosen = winner(found, ids)
    dist.destroy_process_group()
    sent: dict[str, Any] = {"logits": found.cpu(), "tokens": ids.cpu(), "winners": chosen.cpu(), "backend": backend}
    np.savez(folder / f"sent-{rank}.npz", **sent)


def join(folder: Path, backend: str, rank: int, ranks: int) -> None:
    """Meet the other ranks, by a file in ``folder``: no port is needed, and any path will do."""
    store = dist.FileStore(str(folder / MEETING), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, timeout=TIMEOUT, world_size=ranks, rank=rank)


def padded(mine: Floats, tokens: Any, held: int) -> tuple[Tensor, Tensor]:
    """Logits [states, held] and tokens [held] of a slice with the rows that pad it, which are never chosen."""
    logits = torch.full((len(mine), held), -torch.inf)
    logits[:, : mine.shape[1]] = torch.from_numpy(mine)
    ids = torch.full((held,), NO_TOKEN, dtype=torch.int32)
    ids[: len(tokens)] = torch.from_numpy(tokens)
    return logits, ids


def exchanged(logits: Tensor, tokens: Tensor, count: int, ranks: int) -> Tensor:
    """The payloads of all ranks, int32 [ranks, 2, states, count]: one gather of one shape."""
    payload = packed(*candidates(logits, tokens, count, bool((tokens.diff() >= 0).all())))
    gathered = payload.new_empty((ranks * len(payload), *payload.shape[1:]))
    dist.all_gather_into_tensor(gathered, payload)
    return gathered.view(ranks, *payload.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
