"""SGLang: ``python -m sglang.launch_server``, asked through its own ``/generate``, which takes and gives token ids.

Nothing here trusts its health: it answers 200 with whole layers missing, and up to 0.5.17 it drops a packed head with
three warnings. It ends by killing its own process group, so that its exit status tells nothing.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import installed
from .client import Failed, get, post
from .engine import NONE, Answer, Engine, Launch, Method, Server, Speculation, words
from .logs import rules
from .replies import leads, nats, understood

METHODS = {
    NONE: "",
    "mtp": "NEXTN",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "domino": "DFLASH",
    "ngram": "NGRAM",
    "draft": "STANDALONE",
}
# Steps from one line of the decode log to the next: SGLang's own 40 leave short requests without any.
INTERVAL = 10

_ACCEPT = re.compile(r"Decode batch.*?(?<!block )accept len: (?P<length>\d+\.\d+)")


def command(launch: Launch) -> list[str]:
    """The words that start a server: one order of events, one seed, a request at a time alone on its batch."""
    program = launch.program or (launch.python or sys.executable, "-m", "sglang.launch_server")
    own = [
        "--model-path", str(launch.checkpoint), "--host", "127.0.0.1", "--port", str(launch.port),
        "--random-seed", "0", "--disable-overlap-schedule", "--decode-log-interval", str(INTERVAL),
    ]  # fmt: skip
    asked = [*_speculation(launch.method), *launch.arguments, *launch.method.arguments]
    return words([*program, *own, *asked], HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")


def _speculation(method: Method) -> list[str]:
    """SGLang's flags. Blocks: ``--speculative-num-draft-tokens`` is the whole block of DFLASH; DSpark adds its anchor."""
    if method.name == NONE:
        return []
    counts = {
        "num-steps": method.steps,
        "eagle-topk": method.topk,
        "num-draft-tokens": method.draft_tokens if method.name != "dspark" else None,
        "dspark-block-size": method.block if method.name == "dspark" else None,
    }
    if METHODS[method.name] == "DFLASH":
        counts["num-draft-tokens"] = method.block
    flags = ["--speculative-algorithm", METHODS[method.name]]
    if method.draft is not None:
        flags += ["--speculative-draft-model-path", str(method.draft)]
    for name, count in counts.items():
        flags += [] if count is None else [f"--speculative-{name}", str(count)]
    return flags


def version(launch: Launch) -> str:
    """The installed version; empty where ``--engine-cmd`` hides whose it is."""
    return "" if launch.program else installed.of_python(launch.python, "sglang")


def ready(server: Server) -> bool:
    """SGLang's health is a token that it generated."""
    try:
        get(server, "/health", timeout=30)
    except Failed:
        return False
    return True


def complete(server: Server, ids: Sequence[int], count: int) -> Answer:
    """``count`` greedy tokens; without logprobs where the algorithm refuses them, as DFLASH and DSpark do."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
    }
    began = time.monotonic()
    try:
        answer = post(server, "/generate", {**body, "return_logprob": True, "top_logprobs_num": 2})
    except Failed as error:
        if not _refuses_logprobs(error):
            raise
        began = time.monotonic()
        answer = post(server, "/generate", body)
    seconds = time.monotonic() - began
    with understood("/generate"):
        meta = answer["meta_info"]
        told = meta.get("output_token_logprobs")
        logprobs = nats(value for value, *_ in told) if told else None
        tops = meta.get("output_top_logprobs")
        gaps = leads([value for value, *_ in top] for top in tops) if tops else None
        return Answer(answer["text"], tuple(answer["output_ids"]), logprobs, seconds, _counts(meta), gaps)


def _refuses_logprobs(error: Failed) -> bool:
    return error.status == 400 and "logprob" in str(error)


def _counts(meta: Mapping[str, Any]) -> Speculation | None:
    """``spec_accept_length`` is left alone: it counts the token of the prefill, so that a dead draft has more than 1."""
    if "spec_verify_ct" not in meta:
        return None
    histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []
    places = tuple(sum(histogram[at:]) for at in range(1, len(histogram)))
    accepted, drafted = meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"]
    return Speculation(meta["spec_verify_ct"], accepted, drafted, places)


def score(server: Server, ids: Sequence[int]) -> tuple[float, ...] | None:
    """Logprobs of ``ids[1:]``; None where the algorithm refuses them."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        answer = post(server, "/generate", body)
    except Failed as error:
        if _refuses_logprobs(error):
            return None
        raise
    with understood("/generate"):
        told = answer["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in told] != list(ids):
            raise ValueError("logprobs of other tokens than were sent")
        return nats(value for value, *_ in told[1:])


def windows(log: str) -> list[float]:
    """The ``accept len`` of each line of the decode log, which is that of :data:`INTERVAL` steps."""
    return [float(found["length"]) for found in _ACCEPT.finditer(log)]


ENGINE = Engine(
    name="sglang",
    label="SGLang",
    lint="sglang",
    methods=METHODS,
    version=version,
    command=command,
    ready=ready,
    complete=complete,
    score=score,
    windows=windows,
    interval=INTERVAL,
    rules=rules(
        # What ends a server on a machine or for a file stands before the heads that it dropped on its way there.
        ("engine.memory", r"Loaded weights leave no GPU memory for the KV cache|Not enough memory\. |out of memory"),
        ("serve.corrupt", r"SafetensorError: "),
        ("engine.port", r"port .* is not available|Port is already in use"),
        ("serve.unsupported", r"Unable to find matching target for (?P<tensor>\S+) in the compressed-tensors config"),
        ("serve.unsupported", r"Unknown speculative algorithm name: "),
        # MiMo and others that look every name up: a packed head ends them, where Qwen only warns.
        ("serve.unsupported", r"KeyError: '(?P<tensor>(?:\w+\.)*lm_head\.weight_\w+)'"),
        warnings=(
            ("serve.head-dropped", r"Parameter (?P<tensor>(?:\w+\.)*lm_head\.\w+) not found in params_dict"),
            ("serve.unknown-tensors", r"Parameter (?P<tensor>\S+) not found in params_dict"),
        ),
    ),
    kernels=re.compile(
        r"\b(?:attention|sampling|grammar|speculative_draft_attention)_backend='\w+'"
        r"|Using hybrid attention backend.+|Using \w*(?:CompressedTensors|Marlin|Mxfp4)\w*.*"
    ),
)
