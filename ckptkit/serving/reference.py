"""The reference: a checkpoint's own values, dequantized and run in float32, with nothing missing.

Its formats are read by :mod:`ckptkit.decode` and not by the library that an engine reads them with, so that an engine
that misreads them differs; a GGUF file's by transformers. A process of its own computes it: what it takes in memory is free again before a server
starts.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Finding, UserError
from ..execute import Options, execute
from ..execute.options import Progress
from ..files.checkpoint import Checkpoint
from ..planners.dequantize import Wanted, plan_dequantize
from ..stored import declared_quantization
from . import client, installed, process, transformers
from .engine import Server
from .prompts import Prompt
from .recording import Item, Recording, Weights, about

# How llama.cpp computes with quantized matrices: by inputs in eight bits, a scale for each 32.
EIGHT_BITS = {"block": 32}


class Unavailable(Exception):
    """A checkpoint whose values cannot be run; ``findings`` say what of it is at fault, if anything is."""

    def __init__(self, reason: str, findings: Sequence[Finding] = ()):
        super().__init__(reason)
        self.findings = findings


class Rendered(NamedTuple):
    """A prompt as a tokenizer has it: its ids, and the text that they give back."""

    name: str
    ids: tuple[int, ...]
    text: str


@contextlib.contextmanager
def running(
    weights: Weights, scratch: Path, timeout: float, progress: Progress, say: Callable[[str], None]
) -> Iterator[Server]:
    """A server of the reference; what it needs in ``scratch`` is gone afterwards. Raises Unavailable."""
    try:
        place = weights if isinstance(weights, Path) else floats(weights, scratch, progress)
        own_head = isinstance(weights, Checkpoint) and has_own_head(weights)
        with _serving(place, own_head, scratch, timeout, say) as server:
            yield server
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _serving(
    place: Path, own_head: bool, scratch: Path, timeout: float, say: Callable[[str], None]
) -> Iterator[Server]:
    port = process.free_port()
    command = transformers.reference_command(place, port, own_head)
    server = Server(f"http://127.0.0.1:{port}", str(place), timeout)
    with process.serving(command, scratch / "reference.log", transformers.ENGINE.grace) as started:
        try:
            process.wait_ready(started, transformers.ENGINE, server, timeout, say)
        except process.NotReady as error:
            raise Unavailable(f"the reference did not start: {error.finding.message}", _lacking(started.log)) from None
        yield server


def _lacking(log: Path) -> list[Finding]:
    """The tensors without which it would not run, from its log."""
    found = process.signs(transformers.ENGINE.rules, process.read_log(log))
    return [
        Finding(rule.id, f"{match['tensor']} is not there", tensor=match["tensor"])
        for rule, match, _ in found
        if rule.id == "serve.missing-tensors"
    ]


def floats(checkpoint: Checkpoint, scratch: Path, progress: Progress) -> Path:
    """A folder with the checkpoint's values as floats: its own, or one in ``scratch``. Raises Unavailable."""
    if declared_quantization(checkpoint.config or {})[0] is None:
        return checkpoint.source.root
    try:
        planned = plan_dequantize(checkpoint, Wanted("fp32", (), False, "error", "error"), (), frozenset())
        options = Options(verify=False, link="symlink", nonfinite_error=False)
        return execute(planned.plan, checkpoint.source, scratch / "floats", options, progress, {}).path
    except UserError as error:
        raise Unavailable(f"its values cannot be dequantized: {error.findings[0].message}") from None


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a head is stored, whatever the config says of ties."""
    return any("lm_head" in name.split(".") for name in checkpoint.tensors)


# --- what it is asked --------------------------------------------------------------------------------------


def rendered(server: Server, prompts: Sequence[Prompt]) -> list[Rendered]:
    """The prompts as the server's tokenizer and chat template have them; without a template, only the texts.

    Raises client.Failed.
    """
    has_template = client.get_json(server, "/about")["chat"]
    asked = [prompt for prompt in prompts if "prompt" in prompt.body or has_template]
    found = [client.post(server, "/tokenize", prompt.body) for prompt in asked]
    return [Rendered(p.name, tuple(f["ids"]), f["text"]) for p, f in zip(asked, found, strict=True)]


def record(server: Server, weights: Weights, prompts: Sequence[Rendered], max_tokens: int) -> Recording:
    """Greedy continuations of the prompts, with their logprobs, and what bfloat16 would make of these."""
    answers = [transformers.complete(server, prompt.ids, max_tokens) for prompt in prompts]
    items = [
        _scored(server, Item(p.name, p.ids, a.tokens or (), (), (), p.text, a.text))
        for p, a in zip(prompts, answers, strict=True)
    ]
    return _recording(server, weights, items)


def follow(server: Server, weights: Weights, recording: Recording) -> Recording:
    """The same texts as those of another recording, with the logprobs of this server."""
    return _recording(server, weights, [_scored(server, item) for item in recording.items])


def _scored(server: Server, item: Item) -> Item:
    found = client.post(server, "/score", {"ids": item.ids})
    logprobs = tuple(float("nan") if value is None else value for value in found["logprobs"])
    top = tuple(_best(*best) for best in zip(found["top_ids"], found["top"], strict=True))
    return item._replace(logprobs=logprobs, top=top)


def _best(ids: Sequence[int], values: Sequence[float | None]) -> tuple[tuple[int, float], ...]:
    return tuple((id, float("nan") if value is None else value) for id, value in zip(ids, values, strict=True))


def _recording(server: Server, weights: Weights, items: Sequence[Item]) -> Recording:
    """With the rounding measured: the server computes as its engines do afterwards."""
    version = installed.of_python(None, "transformers")
    client.post(server, "/round", EIGHT_BITS if isinstance(weights, Path) else {"dtype": "bfloat16"})
    off = [abs(a - b) for item in items for a, b in zip(_logprobs(server, item), item.logprobs, strict=True)]
    known = [value for value in off if math.isfinite(value)] or [0.0]
    rounding = (sum(known) / len(known), max(known))
    told = client.get_json(server, "/about")
    return Recording(about(weights, told, "float32", "transformers", version), tuple(items), rounding)


def _logprobs(server: Server, item: Item) -> Sequence[float]:
    return transformers.score(server, item.ids) or ()
