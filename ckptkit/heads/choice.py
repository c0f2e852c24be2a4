"""What a rank chooses of its logits, what it sends, and the winner of all. Imports torch: import it only to compute.

Candidate 0 of a rank is the token with the largest logit, of several the one with the smallest id; the others are any
valid top-k without it. Logits are compared as they are, before a softmax, which gives one probability to logits that
differ. +0 and -0 are equal. Rows that pad a slice have -inf and the greatest id; where there is a NaN, nothing wins. All
shapes are fixed by the arguments' shapes and nothing waits for the device, so that a CUDA graph can hold all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = 2**31 - 1  # the token of rows that pad a slice; and the winner where nothing can win


def candidates(logits: Tensor, tokens: Tensor, count: int, ascending: bool = False) -> tuple[Tensor, Tensor]:
    """A rank's candidates: float32 logits and int32 token ids, [states, count]. Candidate 0 is the rank's own winner.

    ``logits`` are float32 [states, rows], ``tokens`` int32 [rows] the tokens of the rows; ``ascending``: they rise from
    row to row, so that the first of equal logits has the smallest id. ``count`` is at most the number of rows.
    """
    first = _first(logits, tokens, ascending)
    if count == 1:
        rows = first
    else:
        rows = logits.topk(count, dim=1).indices
        is_first = rows == first
        # What stood at 0 goes where the first stood; or, if as many are equal to it, to the end, in place of the last.
        place = torch.where(is_first.any(1, keepdim=True), is_first.int().argmax(1, keepdim=True), count - 1)
        rows = rows.scatter(1, place, rows[:, :1])
        rows[:, :1] = first
    return logits.gather(1, rows), tokens[rows]


def _first(logits: Tensor, tokens: Tensor, ascending: bool) -> Tensor:
    """The row of the largest logit with the smallest token id, [states, 1]; of a NaN where there is one."""
    if ascending:  # argmax gives the first of equals
        return logits.argmax(1, keepdim=True)
    largest = (logits == logits.amax(1, keepdim=True)) | logits.isnan()
    return torch.where(largest, tokens, NO_TOKEN).argmin(1, keepdim=True)


def packed(logits: Tensor, tokens: Tensor) -> Tensor:
    """What is sent: int32 [2, states, count], the bits of the logits and the ids.

    As float32 the ids would be denormals, which a device may flush to zero; integers are only ever copied.
    """
    return torch.stack([logits.view(torch.int32), tokens])


def unpacked(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids of all ranks, [states, ranks * count], from payloads [ranks, 2, states, count]."""
    logits, tokens = gathered.movedim(1, 0).movedim(1, 2).flatten(2)
    return logits.view(torch.float32), tokens


def winner(logits: Tensor, tokens: Tensor) -> Tensor:
    """The token with the largest logit, of several the smallest id: int32 [states]; ``NO_TOKEN`` where none can win."""
    wins = logits == logits.amax(1, keepdim=True)
    return torch.where(wins, tokens, NO_TOKEN).amin(1)
