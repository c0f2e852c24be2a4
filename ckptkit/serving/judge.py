"""What figures of a server mean. Pure functions: logprobs and tokens in, findings out.

Two questions are kept apart. *Does the engine compute what is stored?* Its logprobs of given texts against those of the
checkpoint's own values, run in float32: the difference is rounding, and small. *What did the conversion cost?* The same
against the source: the difference is the format's, and has a tolerance by format. That greedy texts are equal proves
neither: a whole missing layer may leave them as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from ..errors import Finding
from .engine import Answer, Speculation
from .recording import Item, Recording

# Nats. Good servers of bfloat16 models were measured at 0.007 and 0.024, the mildest broken one at 0.150 and 0.399.
MEAN, LARGEST = 0.02, 0.08
ROUNDINGS = 2.0  # as far off as bfloat16 puts the same model, times this, is an engine in bfloat16 allowed to be
GAP = 0.5  # nats by which a source's best token leads where another one is no near-tie
SPREADS = 4.0  # that many p99 of the differences explain a gap
UNIFORM = 1e-3  # nats around -ln V
LEAST_POSITIONS = 10  # of logprobs that are compared
LEAST_TOKENS = 8  # of a completion that is called degenerate
LEAST_ACCEPTED = 20


class Difference(NamedTuple):
    """Absolute differences of logprobs, in nats, over ``positions``; ``nan`` of them are no numbers and not counted."""

    mean: float
    largest: float
    p99: float
    positions: int
    nan: int


class Divergence(NamedTuple):
    """The first token of a completion that is another than the reference's, and by how much that one led there.

    ``gap`` is None where it is not known.
    """

    prompt: str
    at: int
    ours: int
    theirs: int
    gap: float | None


def difference(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> Difference | None:
    """Over the positions that both have, text by text; None where they are too few to say anything."""
    pairs = [pair for name in ours.keys() & theirs.keys() for pair in zip(ours[name], theirs[name], strict=False)]
    off = sorted(abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b))
    nan = len(pairs) - len(off)
    if len(pairs) < LEAST_POSITIONS:
        return None
    if not off:
        return Difference(math.inf, math.inf, math.inf, len(pairs), nan)
    p99 = off[min(len(off) - 1, int(0.99 * len(off)))]
    return Difference(sum(off) / len(off), off[-1], p99, len(pairs), nan)


def logprobs_of(recording: Recording) -> dict[str, Sequence[float]]:
    return {item.name: item.logprobs for item in recording.items}


# --- does the engine compute what is stored? ---------------------------------------------------------------


def limits(rounding: tuple[float, float], is_exact: bool) -> tuple[float, float]:
    """The mean and the largest difference that are rounding; ``is_exact``: the engine computes in float32."""
    if is_exact:
        return MEAN, LARGEST
    return max(MEAN, ROUNDINGS * rounding[0]), max(LARGEST, ROUNDINGS * rounding[1])


def stored(found: Difference, limit: tuple[float, float]) -> Iterator[Finding]:
    """``serve.logprob`` and ``serve.nan``: what is no number is not off by any number of nats."""
    data = {**found._asdict(), "limit_mean": limit[0], "limit_largest": limit[1]}
    if found.nan:
        yield Finding("serve.nan", f"{found.nan} of {found.positions} logprobs are no numbers", data=data)
    if found.nan < found.positions and (found.mean > limit[0] or found.largest > limit[1]):
        message = (
            f"logprobs are {found.mean:.3f} nat off what is stored, {found.largest:.3f} at most,"
            f" over {found.positions} positions; rounding allows {limit[0]:.3f} and {limit[1]:.3f}"
        )
        yield Finding("serve.logprob", message, data=data)


# --- what did the conversion cost? -------------------------------------------------------------------------


def tolerance(bits: str) -> float:
    """The mean difference from the source, in nats, that a format may cost; measured ones, see docs/serving.md."""
    table: dict[str, float] = json.loads((files(__package__) / "data" / "tolerances.json").read_text("utf-8"))
    return table[bits]


def converted(found: Difference, allowed: float) -> Iterator[Finding]:
    """``serve.tolerance``."""
    if found.mean > allowed:
        message = f"logprobs are {found.mean:.3f} nat off the source's; the format may cost {allowed:.3f}"
        yield Finding("serve.tolerance", message, data={**found._asdict(), "tolerance": allowed})


def divergences(answers: Mapping[str, Answer], recording: Recording) -> Iterator[Divergence]:
    """Where completions leave those of a recording."""
    for item in recording.items:
        answer = answers.get(item.name)
        at = first_difference(answer.tokens, item.tokens) if answer and answer.tokens else None
        if answer and answer.tokens and at is not None:
            yield Divergence(item.name, at, answer.tokens[at], item.tokens[at], item.gap(at))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where they have different tokens; None where the shorter one is how the longer begins."""
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def greedy(found: Iterable[Divergence], spread: float) -> Iterator[Finding]:
    """``serve.greedy-flip``, where the source's own gap was no near-tie; ``spread`` is p99 of the differences."""
    limit = max(GAP, SPREADS * spread)
    for flip in found:
        if flip.gap is not None and flip.gap > limit:
            message = (
                f"{flip.prompt}: token {flip.at + 1} is {flip.ours} and not {flip.theirs}, which leads by"
                f" {flip.gap:.2f} nat in the source; near-ties end at {limit:.2f}"
            )
            yield Finding("serve.greedy-flip", message, data=flip._asdict())


# --- what is wrong whatever the reference ------------------------------------------------------------------


def degenerate(name: str, answer: Answer, expected: Item | None) -> Iterator[Finding]:
    """``serve.decode``: nothing, one token for ever, bytes that are no text; ``serve.nan``: logprobs that are no numbers.

    What the reference says too is no fault.
    """
    wanted = expected.tokens if expected else ()
    tokens = answer.tokens or ()
    if answer.tokens is not None and not tokens:
        yield Finding("serve.decode", f"{name}: no token was decoded")
    elif len(tokens) >= LEAST_TOKENS and len(set(tokens)) == 1 and len(set(wanted)) != 1:
        yield Finding("serve.decode", f"{name}: token {tokens[0]} for ever", data={"token": tokens[0]})
    elif not tokens and not answer.text:
        yield Finding("serve.decode", f"{name}: an empty text")
    elif answer.text and set(answer.text.strip()) == {"\ufffd"}:
        yield Finding("serve.decode", f"{name}: the text is no valid UTF-8")
    nan = sum(not math.isfinite(value) for value in answer.logprobs or ())
    if nan:
        yield Finding("serve.nan", f"{name}: {nan} of {len(tokens)} logprobs are no numbers", data={"nan": nan})


def uniform(answers: Mapping[str, Answer], vocabulary: int | None) -> Iterator[Finding]:
    """``serve.uniform``: one token repeated at exactly -ln V: all logits are equal, as without a head."""
    for name, answer in answers.items():
        if not vocabulary or not answer.logprobs or not answer.tokens or len(set(answer.tokens)) > 1:
            continue
        if all(abs(value + math.log(vocabulary)) < UNIFORM for value in answer.logprobs):
            message = f"{name}: every token is {answer.tokens[0]} at -ln {vocabulary}: the logits are all equal"
            yield Finding("serve.uniform", message, data={"token": answer.tokens[0], "vocabulary": vocabulary})


# --- speculation -------------------------------------------------------------------------------------------


def against_plain(
    answers: Mapping[str, Answer], plain: Mapping[str, Answer], reference: Recording | None
) -> Iterator[Divergence]:
    """Where a speculating server leaves what the same checkpoint decodes without; near-ties too.

    The gap is the plain run's own, or else the reference's where it went the same way.
    """
    items = {item.name: item for item in reference.items} if reference else {}
    for name, ours in answers.items():
        theirs = plain.get(name)
        if not theirs or ours.tokens is None or theirs.tokens is None:
            continue
        at = first_difference(ours.tokens, theirs.tokens)
        if at is not None:
            lead = theirs.gaps[at] if theirs.gaps else _lead(items.get(name), theirs.tokens, at)
            yield Divergence(name, at, ours.tokens[at], theirs.tokens[at], lead)


def _lead(item: Item | None, tokens: Sequence[int], at: int) -> float | None:
    return item.gap(at) if item and item.tokens[: at + 1] == tuple(tokens[: at + 1]) else None


def mismatches(found: Iterable[Divergence], gap: float) -> Iterator[Finding]:
    """``serve.spec-mismatch`` for every divergence that is no near-tie, or not known to be one."""
    for flip in found:
        if flip.gap is None or flip.gap > gap:
            lead = "by an unknown lead" if flip.gap is None else f"leading by {flip.gap:.2f} nat"
            message = f"{flip.prompt}: token {flip.at + 1} is {flip.ours}; without speculation {flip.theirs}, {lead}"
            yield Finding("serve.spec-mismatch", message, data=flip._asdict())


def accept_length(found: Speculation | None, least: float | None) -> Iterator[Finding]:
    """``serve.accept-length``: below what was asked for; without that, no better than no speculation."""
    length = found.accept_length if found else None
    if found is None or length is None:
        yield Finding("serve.accept-length", "nothing was speculated: the engine counted no verification")
    elif least is not None and length < least:
        yield Finding(
            "serve.accept-length", f"{length:.3f} tokens a verification, less than {least:g}", data=found._asdict()
        )
    elif least is None and found.accepted < LEAST_ACCEPTED:
        message = (
            f"{found.accepted} drafted tokens were accepted in {found.steps} verifications, fewer than"
            f" {LEAST_ACCEPTED}: the draft is of no use, or --max-tokens too few to tell"
        )
        yield Finding("serve.accept-length", message, data=found._asdict())
