"""What figures mean, on figures made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ckptkit.serving import judge
from ckptkit.serving.cell import Cell, Ran
from ckptkit.serving.engine import Answer, Method, Speculation, added, since
from ckptkit.serving.matrix import Judged, Limits, References, judge_cell
from ckptkit.serving.recording import Item

from .fakes import engine, item, recording

EXACT = (judge.MEAN, judge.LARGEST)


def answer(*tokens: int, logprobs: tuple[float, ...] | None = None, gaps: tuple[float, ...] | None = None) -> Answer:
    return Answer(" ".join(map(str, tokens)), tokens, logprobs, 1.0, None, gaps)


# --- differences -------------------------------------------------------------------------------------------


def test_a_difference_over_all_texts() -> None:
    ours = {"a": [-1.0] * 8 + [-2.0], "b": [-3.0]}
    found = judge.difference(ours, {"a": [-1.1] * 8 + [-2.0], "b": [-2.8], "c": [-9.0]})
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.largest == pytest.approx(0.2)
    assert (found.positions, found.nan) == (10, 0)


@pytest.mark.parametrize("count", [0, judge.LEAST_POSITIONS - 1])
def test_too_few_positions_are_no_difference(count: int) -> None:
    assert judge.difference({"a": [-1.0] * count}, {"a": [-1.0] * count}) is None


def test_what_is_no_number_is_counted_apart() -> None:
    found = judge.difference({"a": [math.nan] + [-1.0] * 9}, {"a": [-1.0] * 10})
    assert found is not None
    assert (found.mean, found.nan) == (0.0, 1)
    assert [f.id for f in judge.stored(found, EXACT)] == ["serve.nan"]


# Measured on servers of W4A16 bodies and packed heads, in nats: mean, largest.
@pytest.mark.parametrize("figures", [(0.0064, 0.0233), (0.0067, 0.0208), (0.0069, 0.0217), (0.0066, 0.0199)])
def test_good_servers_pass(figures: tuple[float, float]) -> None:
    assert list(judge.stored(judge.Difference(*figures, figures[1], 126, 0), EXACT)) == []


@pytest.mark.parametrize("figures", [(0.150, 0.399), (0.68, 1.96), (0.70, 2.8), (0.01, 0.399), (math.inf, math.inf)])
def test_broken_ones_do_not(figures: tuple[float, float]) -> None:
    found = judge.Difference(*figures, figures[1], 126, 0)
    assert [f.id for f in judge.stored(found, EXACT)] == ["serve.logprob"]


def test_limits_grow_with_what_bfloat16_costs_the_model_unless_the_engine_is_exact() -> None:
    assert judge.limits((0.073, 0.18), True) == EXACT
    assert judge.limits((0.073, 0.18), False) == (0.146, 0.36)
    assert judge.limits((0.001, 0.002), False) == EXACT


@pytest.mark.parametrize(
    ("command", "is_exact"),
    [(["--dtype", "float32"], True), (["--dtype=float32"], True), (["--dtype=bfloat16"], False), ([], False)],
)
def test_an_engine_that_computes_in_float32_is_exact(command: list[str], is_exact: bool) -> None:
    assert engine("good").is_exact(command) == is_exact


def test_the_cost_of_a_conversion() -> None:
    found = judge.Difference(0.1, 0.3, 0.3, 100, 0)
    assert list(judge.converted(found, 0.15)) == []
    assert [f.id for f in judge.converted(found, 0.05)] == ["serve.tolerance"]


# --- greedy ------------------------------------------------------------------------------------------------


def test_a_flip_is_judged_by_the_sources_own_gap() -> None:
    source = recording()
    answers = {"a": answer(4, 5, 63, 7), "b": answer(21, 22)}
    [found] = judge.divergences(answers, source)
    assert found == judge.Divergence("a", 2, 63, 6, pytest.approx(3.0))
    assert [f.id for f in judge.greedy([found], 0.1)] == ["serve.greedy-flip"]
    assert list(judge.greedy([found], 0.8)) == []  # four times 0.8 explain a lead of 3
    assert list(judge.greedy([found._replace(gap=0.4)], 0.0)) == []


def test_speculation_is_judged_by_the_plain_runs_own_gap() -> None:
    plain = {"a": answer(4, 5, 6, gaps=(3.0, 0.1, 3.0)), "b": answer(21, 22, 23, gaps=(3.0, 3.0, 3.0))}
    ours = {"a": answer(4, 9, 6), "b": answer(21, 22, 9)}
    found = list(judge.against_plain(ours, plain, None))
    assert [(flip.prompt, flip.at, flip.gap) for flip in found] == [("a", 1, 0.1), ("b", 2, 3.0)]
    [mismatch] = judge.mismatches(found, 0.5)
    assert (mismatch.id, mismatch.data["prompt"]) == ("serve.spec-mismatch", "b")


def test_without_gaps_the_references_count_where_it_went_the_same_way() -> None:
    plain = {"a": answer(4, 5, 6), "b": answer(21, 9, 23)}
    found = list(judge.against_plain({"a": answer(4, 5, 7), "b": answer(21, 9, 24)}, plain, recording()))
    assert [flip.gap for flip in found] == [pytest.approx(3.0), None]
    assert [f.data["prompt"] for f in judge.mismatches(found, 5.0)] == ["b"]  # unknown is no near-tie


# --- degenerate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (answer(*[0] * 8), ["serve.decode"]),
        (answer(*[7] * 8), ["serve.decode"]),
        (answer(*[7] * 4), []),
        (answer(1, 2, 1, 2, 1, 2, 1, 2), []),
        (answer(), ["serve.decode"]),
        (Answer("", None, None, 1.0), ["serve.decode"]),
        (Answer("\ufffd\ufffd", (1, 2), None, 1.0), ["serve.decode"]),
        (Answer("text", None, None, 1.0), []),
    ],
)
def test_degenerate_texts(given: Answer, ids: list[str]) -> None:
    assert [f.id for f in judge.degenerate("a", given, item("a", 3, 8))] == ids


def test_a_source_that_repeats_itself_makes_it_no_fault() -> None:
    expected = Item("a", (1,), (7,) * 8, (), ())
    assert list(judge.degenerate("a", answer(*[7] * 8), expected)) == []


def test_a_head_of_zeros_shows_in_logprobs() -> None:
    flat = -math.log(32768)
    assert [f.id for f in judge.uniform({"a": answer(0, 0, logprobs=(flat, flat))}, 32768)] == ["serve.uniform"]
    assert list(judge.uniform({"a": answer(0, 0, logprobs=(flat, -0.5))}, 32768)) == []
    assert list(judge.uniform({"a": answer(0, 1, logprobs=(flat, flat))}, 32768)) == []


# --- speculation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counted", "least", "ids"),
    [
        (Speculation(112, 336), None, []),
        (Speculation(543, 0), None, ["serve.accept-length"]),
        (Speculation(224, 19), None, ["serve.accept-length"]),
        (Speculation(224, 20), None, []),
        (Speculation(100, 100), 2.5, ["serve.accept-length"]),
        (Speculation(100, 150), 2.5, []),
        (Speculation(0, 0), None, ["serve.accept-length"]),
        (None, None, ["serve.accept-length"]),
    ],
)
def test_accept_length(counted: Speculation | None, least: float | None, ids: list[str]) -> None:
    assert [f.id for f in judge.accept_length(counted, least)] == ids


def test_counts_are_pooled() -> None:
    total = added([Speculation(10, 5, 30, (3, 2)), None, Speculation(30, 25, 90, (20, 4, 1))])
    assert total == Speculation(40, 30, 120, (23, 6, 1))
    assert total.accept_length == pytest.approx(1.75)  # and not the mean of 1.5 and 1.83
    assert since(Speculation(10, 5, 30, (3, 2)), Speculation(40, 30, 120, (23, 7))) == Speculation(30, 25, 90, (20, 5))


# --- cells -------------------------------------------------------------------------------------------------


def judged(ran: Ran, plain: Ran | None = None, source: bool = False, own: bool = True) -> Judged:
    known = recording()
    refs = References({"model": known}, known if source else None, {"model": known} if own else {}, {}, {})
    return judge_cell(ran, plain or ran, refs, Limits())


def ran(method: str = "none", off: float = 0.0, scores: bool = True, speculation: Speculation | None = None) -> Ran:
    known = recording()
    cell = Cell("model", Path("model"), None, engine("good"), Method(method))
    answers = {i.name: Answer(i.completion, i.tokens, None, 1.0, speculation, (3.0,) * 8) for i in known.items}
    told = {i.name: [value - off for value in i.logprobs] for i in known.items} if scores else {}
    return Ran(cell, "1", ("engine",), None, (), answers, told, speculation)


def test_a_good_cell() -> None:
    found = judged(ran(), source=True)
    assert (found.findings, found.skipped) == ([], {})
    assert found.own is not None
    assert found.own.mean == 0.0


def test_greedy_agreement_alone_never_passes() -> None:
    found = judged(ran(scores=False), source=True)
    assert found.findings == []
    assert set(found.skipped) == {"serve.logprob", "serve.tolerance"}


def test_equal_tokens_with_other_logprobs_fail() -> None:
    assert {f.id for f in judged(ran(off=0.15)).findings} == {"serve.logprob"}


def test_without_a_reference_nothing_passes() -> None:
    assert set(judged(ran(), own=False).skipped) == {"serve.logprob"}


def test_logprobs_of_the_plain_server_where_speculation_refuses_them() -> None:
    counted = Speculation(10, 30)
    found = judged(ran("ngram", scores=False, speculation=counted), plain=ran())
    assert (found.findings, found.skipped) == ([], {})
    worse = judged(ran("ngram", scores=False, speculation=counted), plain=ran(off=0.2))
    assert {f.id for f in worse.findings} == {"serve.logprob"}


def test_logprobs_of_completions_count_where_no_others_are_given() -> None:
    plain = ran(scores=False)
    with_values = {name: given._replace(logprobs=(-0.1,) * 4 + (-0.5,) * 4) for name, given in plain.answers.items()}
    found = judged(plain._replace(answers=with_values))
    assert found.own is not None
    assert (found.own.positions, found.own.mean) == (16, pytest.approx(0.2))
