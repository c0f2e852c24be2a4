"""GSM8K asked of a served model: worked examples, a question, and the last number of the reply.

One user message through chat completions, greedy, of :data:`MAX_TOKENS` tokens and without stop strings; its text is
what ``sglang.test.run_eval --eval-name gsm8k --api chat`` sends, so that scores can be compared. A request that fails is
no wrong answer: it leaves the score unmeasured.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, fail

SHOTS = 5
MAX_TOKENS = 512
TRIES = 3

_NUMBER = re.compile(r"-?\d+\.?\d*")
_Z = 1.959964  # of the normal distribution, for an interval of 95 %


class Task(NamedTuple):
    """One question as it is sent, and the number that answers it."""

    message: str
    answer: Decimal


class Score(NamedTuple):
    """Of ``n`` questions ``correct`` were answered rightly; ``failure`` says why the rest was not asked."""

    correct: int
    n: int
    failure: str | None = None

    @property
    def value(self) -> float | None:
        """The share that is right, 0 to 1; None where it was not measured."""
        return None if self.failure or not self.n else self.correct / self.n

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's interval of 95 % for :attr:`value`."""
        return None if self.value is None else wilson(self.correct, self.n)


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % for ``correct`` of ``n``: where the true share lies."""
    share, square = correct / n, _Z * _Z / n
    middle = share + square / 2
    reach = _Z * math.sqrt(share * (1 - share) / n + square / (4 * n))
    low, high = (middle - reach) / (1 + square), (middle + reach) / (1 + square)
    return max(0.0, min(share, low)), min(1.0, max(share, high))


def number(text: str) -> Decimal | None:
    """The last number of ``text``, commas left out; None where there is none."""
    found = _NUMBER.findall(text.replace(",", ""))
    return Decimal(found[-1]) if found else None


def load(path: Path, limit: int | None = None) -> list[Task]:
    """The tasks of a local JSON-lines file: its first five lines are the examples, the rest up to ``limit`` is asked.

    Raises ``usage.eval`` where the file has no questions or a line is no GSM8K line.
    """
    examples = []
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise fail("usage.eval", f"{path} cannot be read: {error}", file=str(path)) from error
    for at, line in enumerate(lines, 1):
        examples.append(_example(line, f"{path}, line {at}", str(path)))
    if len(examples) <= SHOTS:
        message = f"{path} has {len(examples)} lines; the first {SHOTS} are examples and are not asked"
        raise fail("usage.eval", message, file=str(path))
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer, _ in examples[:SHOTS])
    asked = examples[SHOTS:] if limit is None else examples[SHOTS : SHOTS + limit]
    return [Task(f"{shots}Question: {question}\nAnswer:", value) for question, _, value in asked]


def _example(line: str, where: str, file: str) -> tuple[str, str, Decimal]:
    """Question, worked answer and its number."""
    try:
        read = json.loads(line)
        question, answer = read["question"], read["answer"]
        value = number(answer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_line(where, file) from error
    if value is None or not isinstance(question, str):
        raise _no_line(where, file)
    return question, answer, value


def _no_line(where: str, file: str) -> UserError:
    message = f'{where} is no GSM8K line: an object with "question" and "answer", which ends in a number'
    return fail("usage.eval", message, file=file)


def run(
    tasks: Sequence[Task],
    ask: Callable[[str], str],
    failures: tuple[type[Exception], ...],
    *,
    read: Callable[[str], Decimal | None] = number,
    journal: Path | None = None,
    about: str = "",
    workers: int = 1,
    pause: float = 1.0,
    told: Callable[[int, int], None] = lambda correct, n: None,
) -> Score:
    """The score of ``tasks``, each message given to ``ask``, ``workers`` at a time; ``read`` finds a reply's number.

    An answer that ends in one of ``failures`` is tried again after ``pause`` seconds, twice; a third failure ends the
    run, unmeasured. Replies are kept in ``journal``, and those that a former run kept for the same tasks and the same
    ``about`` (what is asked: checkpoint, engine, launch) are not asked again. ``told`` hears the count so far.
    """
    replies = _kept(journal, _key(tasks, about))
    correct = sum(read(reply) == tasks[index].answer for index, reply in replies.items())
    waiting = [index for index in range(len(tasks)) if index not in replies]
    done = len(replies)
    for index, reply, failure in _asked(tasks, waiting, ask, failures, workers, pause):
        if failure is not None:
            return Score(correct, done, failure)
        _keep(journal, {"index": index, "reply": reply})
        correct += read(reply) == tasks[index].answer
        done += 1
        told(correct, done)
    return Score(correct, done)


def _asked(
    tasks: Sequence[Task],
    waiting: Iterable[int],
    ask: Callable[[str], str],
    failures: tuple[type[Exception], ...],
    workers: int,
    pause: float,
) -> Iterator[tuple[int, str, str | None]]:
    """Index, reply and, of the one that failed for good, why; whoever stops listening leaves the rest unasked."""
    over = threading.Event()

    def answered(index: int, tries: int = TRIES) -> str | None:
        if over.is_set():
            return None
        try:
            return ask(tasks[index].message)
        except failures:
            if tries == 1:
                over.set()
                raise
        time.sleep(pause)
        return answered(index, tries - 1)

    pool = ThreadPoolExecutor(workers)
    try:
        indices = {pool.submit(answered, index): index for index in waiting}
        for future in as_completed(indices):
            try:
                reply = future.result()
            except failures as error:
                yield indices[future], "", f"question {indices[future] + 1} failed {TRIES} times: {error}"
            else:
                if reply is not None:
                    yield indices[future], reply, None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- what was answered before --------------------------------------------------------------------------------


def _key(tasks: Sequence[Task], about: str) -> str:
    """What a journal's replies are replies to, and of whom."""
    said = json.dumps([about, MAX_TOKENS, [[task.message, str(task.answer)] for task in tasks]])
    return hashlib.sha256(said.encode()).hexdigest()


def _kept(journal: Path | None, key: str) -> dict[int, str]:
    """Replies of a former run; the journal is begun anew where it has another key. Its last line may be cut off."""
    if journal is None:
        return {}
    lines = list(_lines(journal)) if journal.is_file() else []
    same = bool(lines) and lines[0].get("key") == key
    kept = {line["index"]: line["reply"] for line in lines[1:] if line.keys() >= {"index", "reply"}} if same else {}
    journal.write_text(json.dumps({"key": key}) + "\n", "utf-8")
    for index, reply in kept.items():
        _keep(journal, {"index": index, "reply": reply})
    return kept


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    for line in journal.read_text("utf-8", errors="replace").splitlines():
        try:
            read = json.loads(line)
        except ValueError:
            return
        if isinstance(read, dict):
            yield read


def _keep(journal: Path | None, line: Mapping[str, Any]) -> None:
    if journal is not None:
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
