"""The GSM8K runner: what is sent, what counts as right, and what a failure makes of the score."""

from __future__ import annotations

import json
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from ckptkit.errors import UserError
from ckptkit.serving.gsm8k import SHOTS, TRIES, Score, load, number, run, wilson


class Down(Exception):
    pass


def lines(count: int) -> list[dict[str, str]]:
    """Question i is answered by i thousand and something, with a comma."""
    return [{"question": f"Q{i}?", "answer": f"So {i}.\n#### 1,00{i}"} for i in range(count)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(SHOTS + 4)), "utf-8")
    return path


def knowing(*wrong: int) -> object:
    """One who answers question i with 1,00i in a sentence, but for those of ``wrong``."""

    def ask(message: str) -> str:
        asked = int(message.rpartition("Q")[2].partition("?")[0])
        return f"First 7, then the answer is {'-3' if asked in wrong else f'1,00{asked}.0'}."

    return ask


def test_the_message_is_five_examples_and_the_question(data: Path) -> None:
    first, *rest = load(data)
    assert first.message == (
        "Question: Q0?\nAnswer: So 0.\n#### 1,000\n\n"
        "Question: Q1?\nAnswer: So 1.\n#### 1,001\n\n"
        "Question: Q2?\nAnswer: So 2.\n#### 1,002\n\n"
        "Question: Q3?\nAnswer: So 3.\n#### 1,003\n\n"
        "Question: Q4?\nAnswer: So 4.\n#### 1,004\n\n"
        "Question: Q5?\nAnswer:"
    )
    assert first.answer == 1005
    assert len(rest) == 3
    assert len(load(data, limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", "72"), ("so 1,234,567 of them", "1234567"), ("3 and then -2.50 dollars.", "-2.5"), ("it is 18.", "18"),
        ("$5-10", "-10"), ("none", None), ("", None), ("007", "7"),
    ],
)  # fmt: skip
def test_the_last_number_counts(text: str, value: str | None) -> None:
    assert number(text) == (None if value is None else Decimal(value))


def test_answers_are_compared_as_numbers(data: Path) -> None:
    score = run(load(data), knowing(6), (Down,))
    assert score == Score(3, 4)
    assert score.value == 0.75


@pytest.mark.parametrize(("correct", "n"), [(3, 4), (0, 10), (10, 10), (640, 1314)])
def test_wilsons_interval(correct: int, n: int) -> None:
    """Bounds solve (p̂ - p)² = z² p(1 - p)/n, from which the formula comes, and lie about the share."""
    low, high = wilson(correct, n)
    assert 0 <= low <= correct / n <= high <= 1
    assert high - low > 0.05
    for bound in (low, high):
        assert (correct / n - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n, abs=1e-12)


def test_a_request_that_fails_once_is_asked_again(data: Path) -> None:
    failing = iter([True, False] * 4)

    def ask(message: str) -> str:
        if next(failing):
            raise Down("busy")
        return "1,005"

    assert run(load(data, limit=2), ask, (Down,), pause=0) == Score(1, 2)


def test_a_request_that_fails_for_good_leaves_the_score_unmeasured(data: Path, tmp_path: Path) -> None:
    asked = []

    def ask(message: str) -> str:
        asked.append(message)
        if "Q7" in message:
            raise Down("gone")
        return knowing()(message)  # type: ignore[operator]

    tasks, journal = load(data), tmp_path / "journal.jsonl"
    score = run(tasks, ask, (Down,), journal=journal, pause=0)
    assert (score.correct, score.n, score.value, score.interval) == (2, 2, None, None)
    assert score.failure is not None
    assert "gone" in score.failure
    assert len(asked) == 2 + TRIES
    # What was answered is not asked again; the rest is.
    again: list[str] = []
    score = run(tasks, lambda message: again.append(message) or "1,007", (Down,), journal=journal)  # type: ignore[func-returns-value]
    assert [message.rpartition("Q")[2][0] for message in again] == ["7", "8"]
    assert score == Score(3, 4)


def test_another_error_is_nobodys_failure(data: Path) -> None:
    def ask(message: str) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(load(data), ask, (Down,), pause=0)


def test_a_journal_of_something_else_is_begun_anew(data: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    tasks = load(data)
    assert run(tasks, knowing(), (Down,), journal=journal, about="one").correct == 4
    assert run(tasks, knowing(5, 6, 7, 8), (Down,), journal=journal, about="one").correct == 4
    assert run(tasks, knowing(5, 6, 7, 8), (Down,), journal=journal, about="another").correct == 0
    assert run(load(data, limit=3), knowing(), (Down,), journal=journal, about="another").correct == 3


def test_a_line_cut_off_is_asked_again(data: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    tasks = load(data)
    run(tasks, knowing(), (Down,), journal=journal)
    journal.write_text(journal.read_text("utf-8")[:-10], "utf-8")
    asked: list[str] = []
    score = run(tasks, lambda message: asked.append(message) or "0", (Down,), journal=journal)  # type: ignore[func-returns-value]
    assert len(asked) == 1
    assert score == Score(3, 4)


def test_several_are_asked_at_a_time(data: Path) -> None:
    """Each waits until all four are there."""
    together = threading.Barrier(4, timeout=10)
    told: list[tuple[int, int]] = []

    def ask(message: str) -> str:
        together.wait()
        return knowing(8)(message)  # type: ignore[operator]

    assert run(load(data), ask, (Down,), workers=4, told=lambda *counts: told.append(counts)) == Score(3, 4)
    assert [n for _, n in told] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "text",
    ["", "\n".join(json.dumps(line) for line in lines(SHOTS)), "{", '["question"]\n' * 6, '{"question": "Q"}\n' * 6,
     '{"question": "Q", "answer": "none"}\n' * 6],
    ids=["empty", "only examples", "no JSON", "no object", "no answer", "no number"],
)  # fmt: skip
def test_a_file_that_is_no_benchmark(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError) as raised:
        load(path)
    assert raised.value.findings[0].id == "usage.eval"
    assert raised.value.exit_code == 2
