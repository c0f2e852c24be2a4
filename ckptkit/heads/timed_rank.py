"""One rank of the timed exchange: python -m ckptkit.heads.timed_rank FOLDER RANK

Choice, gather and winner are captured once in a CUDA graph, with rows that pad the slice, and so is the dense gather of
all logits with its argmax. The graphs are replayed with logits that came after: of which every rank in turn holds the
winner, and of which all ranks hold one that ties. With gloo nothing is captured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .choice import NO_TOKEN, candidates, packed, unpacked, winner
from .rank import join
from .ranks import JOB
from .timing import Case, captured, timed, timing

PADDED = 64  # rows that pad the slice of the last rank


def main(folder: Path, rank: int) -> None:
    job = json.loads((folder / JOB).read_text("utf-8"))
    ranks, device = job["ranks"], torch.device("cuda", rank) if job["cuda"] else torch.device("cpu")
    if job["cuda"]:
        torch.cuda.set_device(device)
    join(folder, "nccl" if job["cuda"] else "gloo", rank, ranks)
    found = [_timed(Case(*case), rank, ranks, device, job["replays"]) for case in job["cases"]]
    dist.destroy_process_group()
    (folder / f"timed-{rank}.json").write_text(json.dumps([line for lines in found for line in lines]), "utf-8")


def _timed(case: Case, rank: int, ranks: int, device: torch.device, replays: int) -> list[dict[str, object]]:
    """The two exchanges of one case: timings, and whether every winner was right."""
    held = -(-case.rows // ranks)
    tokens = torch.arange(rank * held, (rank + 1) * held, dtype=torch.int32, device=device)
    if rank == ranks - 1:
        tokens[-PADDED:] = NO_TOKEN
    logits = torch.empty(case.states, held, device=device)
    lines: list[dict[str, object]] = []
    for what, exchange in (("candidates", _sparse), ("dense gather", _dense)):
        chosen = torch.empty(case.states, dtype=torch.int32, device=device)
        _fill(logits, tokens, rank, ranks, 0)
        run = captured(partial(_into, chosen, partial(exchange, logits, tokens, case.k, ranks)), device)
        right = [_is_right(run, chosen, logits, tokens, rank, ranks, turn) for turn in range(ranks + 1)]
        lines.append({**timing(what, case, timed(run, device, replays))._asdict(), "right": all(right)})
    return lines


def _into(chosen: Tensor, exchange: Callable[[], Tensor]) -> None:
    chosen.copy_(exchange())


def _sparse(logits: Tensor, tokens: Tensor, count: int, ranks: int) -> Tensor:
    payload = packed(*candidates(logits, tokens, count, ascending=True))
    gathered = payload.new_empty((ranks * len(payload), *payload.shape[1:]))
    dist.all_gather_into_tensor(gathered, payload)
    return winner(*unpacked(gathered.view(ranks, *payload.shape)))


def _dense(logits: Tensor, tokens: Tensor, count: int, ranks: int) -> Tensor:
    """All logits in bfloat16, as engines gather them; the first of the largest. Slices are equally long."""
    mine = logits.bfloat16()
    gathered = mine.new_empty((ranks * len(mine), mine.shape[1]))
    dist.all_gather_into_tensor(gathered, mine)
    return gathered.view(ranks, *mine.shape).movedim(0, 1).flatten(1).argmax(1).int()


def _is_right(
    run: Callable[[], None], chosen: Tensor, logits: Tensor, tokens: Tensor, rank: int, ranks: int, turn: int
) -> bool:
    expected = _fill(logits, tokens, rank, ranks, turn)
    chosen.fill_(-1)
    run()
    return chosen.tolist() == expected


def _fill(logits: Tensor, tokens: Tensor, rank: int, ranks: int, turn: int) -> list[int]:
    """New logits in place: rank ``turn`` has the winners, or all tie if there is no such rank. Gives the winners."""
    states, held = logits.shape
    logits.copy_(torch.rand(states, held, generator=torch.Generator().manual_seed(1000 * turn + rank)))
    logits.masked_fill_(tokens == NO_TOKEN, -torch.inf)
    places = [(7 * state + turn) % (held - PADDED) for state in range(states)]
    if turn in (rank, ranks):
        logits[torch.arange(states), places] = 2.0
    return [(turn % ranks) * held + place for place in places]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
