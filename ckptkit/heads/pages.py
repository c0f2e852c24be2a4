"""The checks ``head.*``: a head under vocabulary-parallel serving (``ckptkit verify --head``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import Level, Page, Probe, Seen, Subject
from ..checks.bounds import same_numbers
from ..errors import Finding
from ..families import config_value
from ..files.checkpoint import VOCAB_ORDER
from ..vocab.marks import KEY
from ..vocab.order import Order
from ..vocab.slices import bounds, rule_of
from .cut import Cut, cut
from .head import Head, find_head

if TYPE_CHECKING:
    from ..vocab.order import Ids
    from .proof import Misplaced

RANKS = 2  # where nothing says how many
SHOWN = 5  # rows that a finding names


class Asked(NamedTuple):
    """The options of ``--head``. ``engine``: by whose rule the head is cut; ``dtype``: of logits (BF16, F16, F32)."""

    ranks: int | None
    topk: int
    engine: str | None
    dtype: str | None


def _asked(subject: Subject) -> Asked | None:
    """What was asked with --head; None without it."""
    asked: Asked | None = subject.options.get("head")
    return asked


def _order(subject: Subject) -> Order | None:
    from ..vocab.order_file import read_order

    return read_order(subject.checkpoint.source)


def _tokens(head: Head, order: Order | None) -> Ids:
    """The token of each row, int32 [rows]."""
    import numpy as np

    return np.arange(head.view.rows, dtype=np.int32) if order is None else order.row_to_token


# --- the order of rows -------------------------------------------------------------------------------------


def _exact(subject: Subject) -> Seen:
    head, order = find_head(subject.checkpoint), _order(subject)
    if _misfit(head, order):
        return Seen([_finding("head.order", head, str(_misfit(head, order)))], head.view.rows)
    asked = _asked(subject)
    findings = [*_slice_findings(head, order, asked)] if order and asked else []
    reason = _unproved(subject, head)
    if reason is None:
        findings += _order_findings(subject, head, _tokens(head, order))
    return Seen(findings, head.view.rows, partly={"head.order": reason} if reason else {})


def _misfit(head: Head, order: Order | None) -> str | None:
    """Why the order cannot be that of the head, if so."""
    if order is None or order.n_rows == head.view.rows:
        return None
    return f"the head has {head.view.rows:,} rows, and the order that comes with it is of {order.n_rows:,}"


def _slice_findings(head: Head, order: Order, asked: Asked) -> Iterator[Finding]:
    """``head.slices``"""
    engine, ranks = asked.engine or order.engine, asked.ranks or order.slices
    found = bounds(engine, order.n_rows, ranks, order.n_layer)
    sizes = tuple(stop - start for start, stop in pairwise(found))
    if sizes != order.slice_rows:
        message = (
            f"the rows are in the order of {order.slices} slices by {order.engine}'s rule, {[*order.slice_rows]}, and"
            f" {engine} cuts them into {[*sizes]}: the draft head is no view of these"
        )
        yield _finding("head.slices", head, message, {"slices": [*sizes], "made_for": [*order.slice_rows]})


def _unproved(subject: Subject, head: Head) -> str | None:
    """Why rows cannot be compared with the source's bit by bit, if so."""
    if subject.against is None:
        return "concerns a source, and --against gives none"
    is_expanded = _facts_of_head(subject).get("expanded_blocks")
    if not (is_expanded or same_numbers(head.view.stored, find_head(subject.against).view.stored)):
        return "concerns heads that hold their source's numbers, and this one was converted (numeric.head)"
    return None


def _facts_of_head(subject: Subject) -> Mapping[str, Any]:
    """What is recorded of a head in an order of its own: with ``expanded_blocks`` its values are the source's all the same."""
    found = subject.config.get(KEY)
    head = found.get("head") if isinstance(found, Mapping) else None
    return head if isinstance(head, Mapping) else {}


def _order_findings(subject: Subject, head: Head, tokens: Ids) -> Iterator[Finding]:
    """``head.order``"""
    import numpy as np

    from ..vocab.order_file import read_order
    from .proof import bias_differs, digests, misplaced

    assert subject.against is not None
    source, jobs = find_head(subject.against), subject.options.get("jobs", 0)
    if source.view.shape != head.view.shape:
        message = f"the head is {[*head.view.shape]}, its source {source.view.name} {[*source.view.shape]}"
        yield _finding("head.order", head, message)
        return
    mine, theirs = (digests(a.view, b.source, jobs) for a, b in ((head, subject.checkpoint), (source, subject.against)))
    origin = read_order(subject.against.source)
    # The source's row of each token.
    row_of = np.arange(len(theirs), dtype=np.int32) if origin is None else origin.token_to_row
    wrong = misplaced(mine, theirs[row_of], tokens)
    if wrong:
        yield _finding("head.order", head, _misplaced(wrong), {"rows": len(wrong), "first": [*wrong[:SHOWN]]})
    if bias_differs(head, subject.checkpoint, source, subject.against, row_of[tokens]):
        yield _finding("head.order", head, "the bias is not the source's, each number at its token's row")


def _misplaced(wrong: list[Misplaced]) -> str:
    first = wrong[0]
    what = "a row that the source does not have" if first.found is None else f"the row of token {first.found:,}"
    return f"{len(wrong):,} rows are not their tokens': row {first.row:,} is token {first.token:,}'s, and holds {what}"


# --- served ------------------------------------------------------------------------------------------------


def _served(subject: Subject) -> Seen:
    from .serving import serve

    asked, head, order = _asked(subject), find_head(subject.checkpoint), _order(subject)
    assert asked is not None
    if reason := _misfit(head, order):
        return Seen((), 0, partly=dict.fromkeys(_SERVED, reason))
    found = serve(
        subject, head, _cut(subject, head, order, asked), order, asked.topk, asked.dtype or head.dtype,
        subject.options.get("hidden"),
    )  # fmt: skip
    about: dict[str, Any] = {"tensor": head.view.name, "rows": head.view.rows, "width": head.view.cols}
    about |= {"softcap": head.softcap, "order": order and {"engine": order.engine, "slices": order.slices}}
    return Seen(found.findings, found.states, {"head": about | found.figures()})


def _cut(subject: Subject, head: Head, order: Order | None, asked: Asked) -> Cut:
    """How the head is cut. Raises UserError: ``usage.engine``, ``usage.slices``."""
    ranks = asked.ranks or (order.slices if order else RANKS)
    named = asked.engine or (order.engine if order else None)
    said = config_value(subject.config, "num_hidden_layers")
    layers = order.n_layer if order else said if type(said) is int else 0
    return cut(rule_of(named, head.view.rows, ranks), _tokens(head, order), ranks, layers)


def _finding(id: str, head: Head, message: str, data: dict[str, Any] | None = None) -> Finding:
    return Finding(id, message, file=head.view.stored.codes.file, tensor=head.view.name, data=data or {})


def _unfit(subject: Subject) -> str | None:
    return subject.unknown if _asked(subject) else "no --head"


def _unfit_order(subject: Subject) -> str | None:
    """A head in an order of its own is compared with its source's also where --head was not asked for."""
    sides = [side for side in (subject.checkpoint, subject.against) if side and VOCAB_ORDER in side.source.files]
    if subject.against is None or len(sides) != 1:
        return _unfit(subject)
    return subject.unknown or ("concerns whole heads, not samples" if subject.sample.of > 1 else None)


_SERVED = ("head.nan", "head.greedy", "head.candidates", "head.logits")

PROBES = (
    Probe(("head.slices", "head.order"), Level.NUMERIC, _exact, _unfit_order),
    Probe(_SERVED, Level.NUMERIC, _served, _unfit),
)

_RANKS = "ckptkit verify ./model --head --ranks 2 --engine sglang"

PAGES = (
    Page(
        "head.slices", Level.NUMERIC, "error", "The head was put in order for other slices",
        "The draft head is the first rows of each slice, so an order is good for one way of cutting the head: the "
        "engine's rule and the number of devices. Cut otherwise, the target's tokens are still right, and the view of "
        "the first rows holds other tokens than the list says.",
        "the rows are in the order of 2 slices by even's rule, [76032, 75904], and lightllm cuts them into [75968, 75968]",
        "Ask with the --ranks and --engine it was made for, or make it for these.",
    ),
    Page(
        "head.order", Level.NUMERIC, "error", "A row of the head is not its token's row of the source",
        "With --against the digest of every row of the head (xxh3-128 of its values as float32) is compared with that "
        "of its token's row of the source, in the order that the checkpoint gives or, without one, in the order of "
        "tokens. That proves the whole permutation without any activation. The report names the first rows and whose "
        "rows they hold. Heads that were converted hold other numbers: numeric.head compares those. A head that was put in "
        "another order is compared so without --head too.",
        "lm_head.weight: 2 rows are not their tokens': row 128 is token 128's, and holds the row of token 129",
        "Make the checkpoint again from the source; if --against is another model, give the right one.",
    ),
    Page(
        "head.nan", Level.NUMERIC, "error", "The head gives NaN",
        "A NaN among the logits of one rank is the largest for some comparisons and the smallest for others, so ranks "
        "and engines choose different tokens. Here none is chosen. Weights, scales or bias of the tokens that are named "
        "hold NaN, Inf, or numbers whose products overflow.",
        "lm_head.weight gives NaN for 128 of 128 hidden states: token 7 is the first of 1 that have it",
        "ckptkit verify ./model --level data tells which tensor holds NaN or Inf. Make it again.",
    ),
    Page(
        "head.greedy", Level.NUMERIC, "error", "Ranks choose another token than the whole head",
        "Each rank, a process of its own, reads its slice of the head and sends its first --topk candidates in one "
        "gather of one shape: float32 logits, and int32 ids as bits. Its first candidate is, among its rows with the "
        "largest logit, the one with the smallest token id. Every rank must then take the token for the winner that "
        "the first of the largest of all logits is, in the order of tokens, computed in numpy from the ranks' own "
        "logits: for noise, rows of the head, rows of the embedding, and the states of --hidden. Logits are those of "
        "the model's dtype, rounded and capped as the engine would, so that they tie often.",
        "for 3 of 134 hidden states ranks choose another token than the whole head: [17, 17] by rank, and 5 wins",
        "This is a fault of the exchange, not of the checkpoint: run it again, then look at the transport (--json).",
    ),
    Page(
        "head.candidates", Level.NUMERIC, "error", "Candidates are not the largest logits of their ranks",
        "Of each rank the candidates must be different tokens of its own rows, with exactly the bits of their logits, "
        "the first its own winner, and no logit left out that is larger than one that was sent; rows that pad a slice "
        "are -inf. There are as many as --topk says, or as the smallest slice has rows. What is computed from them, a "
        "top-k of all for one, is wrong otherwise.",
        "for 2 of 134 hidden states the candidates are not the largest logits of their ranks",
        "This is a fault of the exchange, not of the checkpoint: run it again, then look at the transport (--json).",
    ),
    Page(
        "head.logits", Level.NUMERIC, "error", "Ranks compute other logits than one device",
        "The logits of all ranks, put in the order of tokens, are compared with those of the whole head on one device: "
        "of the source's head, with --against, where it has the same numbers, else of the checkpoint's. They may differ "
        "by the order in which products are summed up: by two roundings of the logits' dtype and 2**-12 of the largest "
        "logit. Rows in the wrong place differ by about the logit itself.",
        "for 134 of 134 hidden states the ranks' logits are not those of the source's head on one device: off by up to 3.1",
        f"head.order names the rows that are in the wrong place, if any: {_RANKS} --against ./source",
    ),
)  # fmt: skip
