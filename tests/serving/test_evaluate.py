"""Evaluations: questions asked here, and programs of others, for which a script stands in."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import UserError
from ckptkit.serving import evaluate, gsm8k
from ckptkit.serving.cell import Also, Ran
from ckptkit.serving.engine import Server
from ckptkit.serving.evaluate import Evaluation, evaluation

from .fakes import cell
from .replying import Asked, Reply, always, replying

REPO = Path(__file__).parents[2]
# An interpreter that has lm-eval and SGLang, as far as they are asked.
STAND_IN = """\
#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
if arguments[0] == "-c":
    print("1.0")
elif arguments[1] == "lm_eval":
    given = dict(zip(arguments[3::2], arguments[4::2]))
    if given["--tasks"] == "broken":
        sys.exit("RuntimeError: API request failed")
    task = {{"alias": "t", "acc,none": 0.25, "acc_stderr,none": 0.1, "acc_norm,none": 0.75}}
    result = {{"results": {{given["--tasks"]: task}}, "n-samples": {{given["--tasks"]: {{"effective": 8}}}}}}
    folder = pathlib.Path(given["--output_path"]) / "model"
    folder.mkdir()
    (folder / "results_2026.json").write_text(json.dumps(result))
else:
    print("Total latency: 3.0 s")
    print("Score: 0.900")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable), "utf-8")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Five examples and two questions, of which :func:`sum_of` answers both."""
    path = tmp_path / "test.jsonl"
    lines = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(7)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def sum_of(body: Any) -> tuple[int, Any]:
    n = int(re.findall(r"(\d+) \+ 1\?", body["messages"][0]["content"])[-1])
    return 200, {"choices": [{"message": {"content": f"It is {n + 1}."}}]}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asked(wanted: Evaluation, replies: dict[str, Reply], ran: Ran | None = None) -> tuple[Also, list[Asked]]:
    with replying(replies) as (server, said):
        return evaluation(wanted)(server, ran or Ran(cell("good"), "1.0", (), None, ())), said


def ids(found: Also) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in found.findings]


# --- the package's own tasks -----------------------------------------------------------------------------------


def test_the_packaged_tasks_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("generate_tasks", REPO / "scripts" / "generate_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "OUT", tmp_path / "tasks.jsonl")
    script.main()
    assert (tmp_path / "tasks.jsonl").read_bytes() == evaluate.TASKS.read_bytes()


def right(question: str) -> int:
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    return numbers[0] if question.startswith("Copy") else 2 * numbers[-1] - numbers[-2]


def test_the_packaged_tasks_have_the_right_answers() -> None:
    lines = [json.loads(line) for line in evaluate.TASKS.read_text("utf-8").splitlines()]
    assert len({line["question"] for line in lines}) == len(lines)
    assert [int(line["answer"]) for line in lines] == [right(line["question"]) for line in lines]


def test_tasks_are_texts_and_their_first_number_counts() -> None:
    """A model that goes on with questions of its own answered the first one."""

    def reply(body: Any) -> tuple[int, Any]:
        question = body["prompt"].rpartition("Question: ")[2].removesuffix("\nAnswer:")
        return 200, {"choices": [{"text": f" {right(question)}\n\nQuestion: Copy the number 7"}]}

    found, said = asked(Evaluation("tasks", 1.0), {TEXT: reply})
    assert (found.score, ids(found)) == (1.0, [])
    assert len(said) == len(gsm8k.load(evaluate.TASKS))


# --- resumed ---------------------------------------------------------------------------------------------------


def test_replies_that_are_kept_are_not_asked_for_again(questions: Path, tmp_path: Path) -> None:
    """Until what answers is another: an option, a version, a file of the checkpoint."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", "utf-8")
    ran = Ran(cell("good")._replace(path=model), "1.0", ("serve", "--port", "1"), None, ())
    wanted = Evaluation(f"gsm8k:{questions}", journal=tmp_path / "kept" / "here")
    changed = [
        (ran, 2),
        (ran, 0),
        (ran._replace(version="1.1"), 2),
        (ran._replace(command=("serve", "--port", "1", "--dtype=float16")), 2),
    ]
    counts = []
    for other, _ in changed:
        found, said = asked(wanted, {CHAT: sum_of}, other)
        assert found.score == 1.0
        counts.append(len(said))
    assert counts == [count for _, count in changed]
    (model / "config.json").write_text("{ }", "utf-8")
    assert len(asked(wanted, {CHAT: sum_of}, changed[-1][0])[1]) == 2


def test_a_run_that_failed_goes_on_where_it_was(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gsm8k.time, "sleep", lambda seconds: None)
    wanted = Evaluation(f"gsm8k:{questions}", journal=tmp_path)
    count = 0

    def fails_after_one(body: Any) -> tuple[int, Any]:
        nonlocal count
        count += 1
        return sum_of(body) if count == 1 else (500, {})

    ran = Ran(cell("good"), "1.0", ("serve",), None, ())
    found, _ = asked(wanted, {CHAT: fails_after_one}, ran)
    assert (found.score, ids(found)) == (None, [("serve.score", "error")])
    found, said = asked(wanted, {CHAT: sum_of}, ran)
    assert (found.score, len(said)) == (1.0, 1)


# --- programs of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "found_ids"), [(None, []), (0.2, []), (0.5, [("serve.score", "error")])])
def test_lm_eval(stand_in: str, least: float | None, found_ids: list[tuple[str, str]]) -> None:
    found, _ = asked(Evaluation("lm-eval:arc_easy", least, stand_in), {})
    assert (found.score, ids(found)) == (0.25, found_ids)
    assert found.told is not None
    assert "n=8" in found.told


def test_lm_eval_that_fails_measures_nothing(stand_in: str) -> None:
    found, _ = asked(Evaluation("lm-eval:broken", runner=stand_in), {})
    assert (found.score, ids(found)) == (None, [("serve.score", "error")])
    assert "RuntimeError: API request failed" in found.findings[0].message


def test_the_engines_own_gsm8k_beside_ours(stand_in: str, questions: Path) -> None:
    """It says 0.900. Of two questions, both right, the interval is 0.34 to 1; of none right, 0 to 0.66."""
    wanted = Evaluation(f"gsm8k:{questions}", runner="sglang", python=stand_in)
    found, _ = asked(wanted, {CHAT: sum_of})
    assert (found.score, ids(found)) == (1.0, [])
    found, _ = asked(wanted, {CHAT: always({"choices": [{"message": {"content": "no"}}]})})
    assert (found.score, ids(found)) == (0.0, [("serve.score", "warning")])


@pytest.mark.parametrize(
    ("wanted", "id"),
    [
        (Evaluation("lm-eval:arc_easy", runner="/no/such/python"), "engine.missing"),
        (Evaluation("gsm8k:{questions}", runner="sglang", python="/no/such/python"), "engine.missing"),
        (Evaluation("gsm8k:{questions}", runner="other"), "usage.eval"),
        (Evaluation("tasks", runner="sglang"), "usage.eval"),
        (Evaluation("lm-eval:"), "usage.eval"),
        (Evaluation("gsm8k:no-such-file"), "usage.eval"),
        (Evaluation("tasks:x"), "usage.eval"),
    ],
    ids=lambda value: getattr(value, "text", value),
)
def test_what_cannot_be_run(questions: Path, wanted: Evaluation, id: str) -> None:
    with pytest.raises(UserError) as raised:
        evaluation(wanted._replace(text=wanted.text.format(questions=questions)))
    assert [finding.id for finding in raised.value.findings] == [id]


def test_a_journal_that_was_spoilt(questions: Path, tmp_path: Path) -> None:
    """Lines that are no replies are passed over; of the file's end a run that was killed may have left a part."""
    ran = Ran(cell("good"), "1.0", ("serve",), None, ())
    wanted = Evaluation(f"gsm8k:{questions}", journal=tmp_path / "kept")
    asked(wanted, {CHAT: sum_of}, ran)
    [kept] = (tmp_path / "kept").iterdir()
    key, first, second = kept.read_text("utf-8").splitlines()
    kept.write_text(f'{key}\n{{"other": 1}}\n{first}\n{second[:9]}', "utf-8")
    found, said = asked(wanted, {CHAT: sum_of}, ran)
    assert (found.score, len(said)) == (1.0, 1)


def test_replies_that_cannot_be_kept(questions: Path) -> None:
    with pytest.raises(UserError) as raised:
        asked(Evaluation(f"gsm8k:{questions}", journal=questions / "folder"), {CHAT: sum_of})
    assert [finding.id for finding in raised.value.findings] == ["output.write"]


def test_a_server_that_is_gone_leaves_the_score_unmeasured(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsm8k.time, "sleep", lambda seconds: None)
    found = evaluation(Evaluation(f"gsm8k:{questions}", 0.0))(
        Server("http://127.0.0.1:1", "m", 1.0), Ran(cell("good"), None, (), None, ())
    )
    assert (found.score, ids(found)) == (None, [("serve.score", "error")])
