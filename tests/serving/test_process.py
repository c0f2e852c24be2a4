"""What logs say: the cause of a failed start, not its last line."""

from __future__ import annotations

import re

import pytest

from ckptkit.serving.engine import Rule
from ckptkit.serving.process import classify, root_cause

CHAINED = """\
ERROR Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 21:46:01 [core.py:12] ValueError: Following weights were not initialized from checkpoint: {'a'}
The above exception was the direct cause of the following exception:
RuntimeError: worker 0 failed
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
HANDLED = """\
huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files
During handling of the above exception, another exception occurred:
OSError: no file named model.safetensors
[2026-11-29] Received sigquit from a child process. It usually means the child failed.
"""


def test_the_first_of_a_chain_of_causes() -> None:
    assert root_cause(CHAINED) == "ValueError: Following weights were not initialized from checkpoint: {'a'}"


def test_the_last_of_those_that_were_not_caused_by_another() -> None:
    assert root_cause(HANDLED) == "OSError: no file named model.safetensors"


@pytest.mark.parametrize("log", ["", "INFO loading\nINFO ready", "10 errors: none"])
def test_no_exception(log: str) -> None:
    assert root_cause(log) is None


def test_a_module_that_is_not_there_matters_only_at_the_end() -> None:
    ignored = "Ignore import error when loading x: ModuleNotFoundError: No module named 'x'\n"
    assert classify((), ignored + "ValueError: y", 1).id == "serve.start"
    assert classify((), "ValueError: y\n" + ignored, 1).id == "engine.missing"


def test_names_that_are_left_over_matter_only_at_the_end() -> None:
    rules = (Rule("serve.unknown-tensors", re.compile(r"KeyError: '(?P<tensor>[^']+)'")),)
    assert classify(rules, "KeyError: 'a.b'\nValueError: y", 1).id == "serve.start"
    assert classify(rules, "KeyError: 'a.b'", 1).id == "serve.unknown-tensors"


def test_an_engines_own_rules_come_first() -> None:
    rules = (Rule("serve.unsupported", re.compile(r"no kernel")),)
    found = classify(rules, "CUDA out of memory\nValueError: no kernel", 1)
    assert (found.id, found.data) == ("serve.unsupported", {"code": 1})


@pytest.mark.parametrize(
    "line",
    [
        "worker.py: error: unrecognized arguments: --bogus",
        "vllm serve: error: argument --dtype: invalid choice: 'float23'",
        "error: invalid argument: --bogus",
    ],
)
def test_a_command_line_that_is_refused_is_not_the_checkpoints_fault(line: str) -> None:
    assert classify((), f"usage: engine [-h]\n{line}\n", 2).id == "engine.arguments"
