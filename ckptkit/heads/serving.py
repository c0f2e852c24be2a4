"""A head as ranks would serve it, against the whole head. Imports numpy: import it only to compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..checks import Subject
from ..checks.bounds import same_numbers
from ..errors import Finding
from ..vocab.order_file import read_order
from .agreement import Agreement, Drift, Whole, agreements, broken, drift, lost, received, whole
from .cut import Cut
from .head import Head, find_head, logits
from .ranks import Sent, run_ranks
from .states import kinds_of, places

if TYPE_CHECKING:
    from ..decode.numbers import Floats
    from ..vocab.order import Order

ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}
USABLE = (
    "greedy requests only (temperature 0 or top_k 1): a request with penalties, a logit bias, a token mask or grammar, "
    "min_tokens, logprobs or a reward reads or changes logits that are not sent, and needs the dense gather"
)


class Served(NamedTuple):
    """What ranks chose. ``agreement`` by kind of states; ``alone``: against logits of one device, of ``compared``."""

    cut: Cut
    candidates: int
    dtype: str
    backend: str
    states: int
    agreement: Mapping[str, Agreement]
    alone: Drift
    compared: str
    findings: list[Finding]

    def figures(self) -> dict[str, Any]:
        """For a report."""
        sizes = [stop - start for start, stop in pairwise(self.cut.bounds)]
        return {
            "engine": self.cut.engine, "ranks": self.cut.ranks, "slice_rows": sizes, "held": [*self.cut.held],
            "candidates": self.candidates, "logits": self.dtype, "backend": self.backend, "states": self.states,
            "kinds": {kind: found._asdict() for kind, found in self.agreement.items()},
            "received": received(self.cut, self.candidates, ITEMSIZE[self.dtype])._asdict(),
            "one_device": {"of": self.compared, **self.alone._asdict()}, "usable": USABLE,
        }  # fmt: skip


@np.errstate(all="ignore")  # logits may overflow; what comes of it is told
def serve(
    subject: Subject, head: Head, cut: Cut, order: Order | None, topk: int, dtype: str, hidden: str | None
) -> Served:
    """Run the ranks. Findings: ``head.nan``, ``head.greedy``, ``head.candidates``, ``head.logits``."""
    from ..decode.numbers import rounded

    kinds = kinds_of(subject.checkpoint, head.view, hidden, _edges(cut, order))
    states = rounded(np.concatenate([*kinds.values()]), dtype)
    count = cut.at_most(topk)
    alone, compared = _alone(subject, head, cut, states, dtype)  # first, as it says best what cannot be read
    sent = run_ranks(subject.checkpoint.source.location, cut, states, count, dtype)
    dense = whole(sent.own, cut)
    where = places(kinds)
    drifted = drift(dense, alone, dtype)
    findings = [*_findings(head, sent, dense, cut, count), *_off(head, drifted, compared, len(states))]
    found = agreements(where, sent, dense, cut)
    return Served(cut, count, dtype, sent.backend, len(states), found, drifted, compared, findings)


def _edges(cut: Cut, order: Order | None) -> list[int]:
    """The first and the last row of each slice, and of the list's rows in it."""
    starts = [*cut.bounds[:-1]]
    stops = [*cut.bounds[1:]]
    if order is not None:
        first = [*accumulate(order.slice_rows, initial=0)][:-1]
        starts += first
        stops += [start + count for start, count in zip(first, order.slice_list_rows, strict=True)]
    return [row for row in {*starts, *(stop - 1 for stop in stops)} if 0 <= row < len(cut.tokens)]


def _alone(subject: Subject, head: Head, cut: Cut, states: Floats, dtype: str) -> tuple[Floats, str]:
    """Logits that one device computes, in the order of tokens: of the source's head where it has the same numbers."""
    if subject.against is not None:
        source = find_head(subject.against)
        if same_numbers(head.view.stored, source.view.stored) and head.view.shape == source.view.shape:
            order = read_order(subject.against.source)
            found = logits(source, subject.against, states, 0, source.view.rows, dtype)
            return (found if order is None else found[:, order.token_to_row]), "source"
    found = logits(head, subject.checkpoint, states, 0, head.view.rows, dtype)
    by_token = np.empty_like(found)
    by_token[:, cut.tokens] = found
    return by_token, "checkpoint"


# --- findings ----------------------------------------------------------------------------------------------


def _findings(head: Head, sent: Sent, dense: Whole, cut: Cut, count: int) -> Iterator[Finding]:
    states = len(dense.nan)
    if dense.nan.any():
        tokens = np.flatnonzero(np.isnan(dense.logits).any(axis=0))
        message = (
            f"{head.view.name} gives NaN for {int(dense.nan.sum()):,} of {states:,} hidden states: no token can be chosen;"
            f" token {tokens[0]:,} is the first of {len(tokens):,} that have it"
        )
        yield _finding("head.nan", head, message, {"states": int(dense.nan.sum()), "tokens": len(tokens)})
    wrong = np.flatnonzero(lost(sent, dense))
    if len(wrong):
        chosen = [int(winners[wrong[0]]) for winners in sent.winners]
        message = (
            f"for {len(wrong):,} of {states:,} hidden states ranks choose another token than the whole head: {chosen} by"
            f" rank, and {dense.winners[wrong[0]]} wins"
        )
        yield _finding("head.greedy", head, message, {"states": len(wrong), "chosen": chosen})
    bad = int(broken(sent, dense, cut, count).sum())
    if bad:
        message = f"for {bad:,} of {states:,} hidden states the candidates are not the largest logits of their ranks"
        yield _finding("head.candidates", head, message, {"states": bad, "candidates": count})


def _off(head: Head, found: Drift, compared: str, states: int) -> Iterator[Finding]:
    if found.off:
        message = (
            f"for {found.off:,} of {states:,} hidden states the ranks' logits are not those of the {compared}'s head on one"
            f" device: off by up to {found.largest:.3g}, and {found.flips:,} first tokens differ"
        )
        yield _finding("head.logits", head, message, {"of": compared, **found._asdict()})


def _finding(id: str, head: Head, message: str, data: Mapping[str, Any]) -> Finding:
    return Finding(id, message, file=head.view.stored.codes.file, tensor=head.view.name, data=data)
