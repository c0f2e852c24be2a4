"""Evaluations by programs of other projects, through the URL of a served model: lm-eval, and SGLang's own GSM8K."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import gsm8k, installed, process
from .cell import Ran
from .engine import Server, words
from .temporary import temporary

GRACE = 5.0
_SGLANG_SCORE = re.compile(r"^Score: (\d\.\d+)$", re.M)


class Measured(NamedTuple):
    """A score of ``n`` samples, and how it is told; without a value ``told`` says why there is none."""

    value: float | None
    told: str
    n: int | None = None


def python_of(distribution: str, python: str | None) -> str:
    """The interpreter that has ``distribution``, this one where none is given.

    Raises UserError (``engine.missing``).
    """
    installed.of_python(
        python, distribution, option="--eval-runner" if distribution == "lm_eval" else "--engine-python"
    )
    return python or sys.executable


def lm_eval(python: str, task: str, server: Server, ran: Ran) -> Measured:
    """A task of lm-eval, or one that a YAML file describes, asked through ``/v1/completions``.

    Prompts are sent as ids of the checkpoint's own tokenizer, or as texts where it has none that transformers reads. Of
    several metrics the first counts.
    """
    tokenizer = {"tokenizer": str(ran.cell.path)} if (ran.cell.path / "tokenizer_config.json").is_file() else {}
    model = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface" if tokenizer else "None",
        **tokenizer,
        "num_concurrent": "1",
        "max_retries": "3",
    }
    with temporary("eval") as (folder, _):
        command = [
            python, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", task, "--seed", "0",
            "--model_args", ",".join(f"{key}={value}" for key, value in model.items()),
            "--output_path", str(folder),
        ]  # fmt: skip
        code, said = _run(words(command, TOKENIZERS_PARALLELISM="false"), folder)
        results = sorted(folder.rglob("results_*.json"))
        if code or not results:
            return Measured(None, _reason(said, code))
        return _of_lm_eval(json.loads(results[-1].read_text("utf-8")))


def _of_lm_eval(content: Mapping[str, Any]) -> Measured:
    """The first metric of the first task of a file of results."""
    for task, metrics in content.get("results", {}).items():
        sizes = content.get("n-samples", {}).get(task, {})
        for key, value in metrics.items():
            metric = key.partition(",")[0]
            if not isinstance(value, int | float) or "," not in key or metric.endswith("_stderr"):
                continue
            if not math.isfinite(value):
                return Measured(None, f"{metric} is no number")
            n = sizes.get("effective")
            return Measured(float(value), f"{metric} {value:.3f} (n={n})", n)
    return Measured(None, "lm-eval's results hold no metric")


def sglang_gsm8k(python: str, questions: Path, server: Server, ran: Ran) -> Measured:
    """GSM8K as SGLang's ``run_eval`` asks it, of the same questions in the same way as :mod:`.gsm8k`."""
    command = [
        python, "-m", "sglang.test.run_eval", "--base-url", server.url, "--model", server.model,
        "--eval-name", "gsm8k", "--api", "chat", "--gsm8k-data-path", str(questions.resolve()),
        "--num-shots", str(gsm8k.SHOTS), "--num-threads", "1",
        "--max-tokens", str(gsm8k.MAX_TOKENS), "--temperature", "0",
    ]  # fmt: skip
    with temporary("eval") as (folder, _):
        code, said = _run(command, folder)
    found = _SGLANG_SCORE.search(said)
    return Measured(float(found[1]), found[1]) if found and not code else Measured(None, _reason(said, code))


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and output of a program that ends by itself; nothing is left of it however this ends."""
    log = folder / "log"
    return process.run(command, log, GRACE), process.read_log(log)


def _reason(said: str, code: int) -> str:
    return process.root_cause(said) or f"ended with status {code}: {process.last_line(said)}"
