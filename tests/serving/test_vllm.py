"""vLLM's adapter on what vLLM logged and replied (``recorded/``): logs of 0.26 on an H200, the rest of 0.32 on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import UserError
from ckptkit.serving.client import Failed
from ckptkit.serving.engine import Launch, Method, since
from ckptkit.serving.process import classify, signs
from ckptkit.serving.speculative import parse
from ckptkit.serving.vllm import ENGINE

from .replying import always, replying

RECORDED = Path(__file__).parent / "recorded"
REPLIES = json.loads((RECORDED / "vllm_replies.json").read_text("utf-8"))
# A model that drafts for itself, as it was measured.
METRICS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="q3"} 68.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="q3"} 204.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="q3"} 188.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="q3",position="0"} 65.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="q3",position="1"} 62.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="q3",position="2"} 61.0
"""


def log(name: str) -> str:
    return (RECORDED / f"vllm_{name}.log").read_text("utf-8")


def command(**changes: Any) -> list[str]:
    return list(ENGINE.command(Launch(Path("ck/w4"), 31000, Path("scratch"), python="py")._replace(**changes)))


def speculation(method: Method) -> dict[str, Any]:
    words = command(method=method)
    read: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return read


# --- the command ---------------------------------------------------------------------------------------------


def test_a_plain_server_tracks_the_weights_that_it_loads() -> None:
    words = command()
    assert words[words.index("py") :] == [
        "py", "-m", "vllm.entrypoints.cli.main", "serve", "ck/w4", "--host", "127.0.0.1", "--port", "31000",
        "--seed", "0", "--model-loader-extra-config", '{"enable_weights_track": true}',
    ]  # fmt: skip
    assert "--speculative-config" not in words


@pytest.mark.parametrize("program", [("numactl", "vllm"), ("numactl", "vllm", "serve")])
def test_a_program_of_ones_own_with_or_without_serve(program: tuple[str, ...]) -> None:
    words = command(program=program, arguments=("--enforce-eager",))
    at = words.index("numactl")
    assert words[at : at + 4] == ["numactl", "vllm", "serve", "ck/w4"]
    assert words[-1] == "--enforce-eager"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (parse("mtp"), {"method": "mtp", "num_speculative_tokens": 3}),
        (parse("draft:draft=small,steps=5"), {"method": "draft_model", "model": "small", "num_speculative_tokens": 5}),
        (parse("dflash:draft=d,block=16"), {"method": "dflash", "model": "d", "num_speculative_tokens": 15}),
        (parse("dspark:draft=d,block=7"), {"method": "dspark", "model": "d", "num_speculative_tokens": 7}),
        (
            parse("ngram"),
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_speculation_in_its_config(method: Method, expected: dict[str, Any]) -> None:
    assert speculation(method) == expected


@pytest.mark.parametrize(
    ("method", "id"),
    [
        ("domino:draft=d", "serve.unsupported"),
        ("mtp:topk=2,draft-tokens=4", "serve.unsupported"),
        ("dspark:draft=d", "usage.speculative"),
    ],
)
def test_what_it_cannot_be_asked_for(method: str, id: str) -> None:
    with pytest.raises(UserError) as raised:
        command(method=parse(method))
    assert raised.value.findings[0].id == id


# --- replies -------------------------------------------------------------------------------------------------


def test_a_completion_with_ids_logprobs_and_leads() -> None:
    with replying({"/v1/completions": always(REPLIES["completion"])}, "smollm2") as (server, asked):
        answer = ENGINE.complete(server, [33, 216, 34], 4)
    assert (answer.text, answer.tokens) == (" 5 6", (216, 37, 216, 38))
    assert answer.logprobs == pytest.approx((-0.814045, -0.085603, -0.675983, -0.212712), abs=1e-6)
    assert answer.gaps == pytest.approx((1.561737, 3.651627, 1.238949, 2.031717), abs=1e-6)
    expected = {"model": "smollm2", "prompt": [33, 216, 34], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert expected.items() <= asked[0].body.items()
    assert asked[0].body["return_token_ids"] is True


def test_an_answer_without_ids_is_a_failure() -> None:
    reply = {"choices": [{"text": "ab", "logprobs": None}]}
    with replying({"/v1/completions": always(reply)}) as (server, _), pytest.raises(Failed):
        ENGINE.complete(server, [1, 2], 2)


def test_scores_are_those_of_the_tokens_sent() -> None:
    """Not those of the likeliest: the first has rank 39."""
    with replying({"/v1/completions": always(REPLIES["score"])}) as (server, _):
        assert ENGINE.score(server, [33, 216, 34]) == pytest.approx((-5.991424, -1.312888), abs=1e-6)
        with pytest.raises(Failed):
            ENGINE.score(server, [33, 216, 35])
        with pytest.raises(Failed):
            ENGINE.score(server, [33, 216])


def test_where_scores_are_refused_there_are_none() -> None:
    refusal = {"error": {"message": "prompt_logprobs are not supported here"}}
    with replying({"/v1/completions": always(refusal, 400)}) as (server, _):
        assert ENGINE.score(server, [4, 5]) is None
    with replying({"/v1/completions": always("EngineDeadError", 500)}) as (server, _), pytest.raises(Failed):
        ENGINE.score(server, [4, 5])


def test_logprobs_that_are_no_numbers() -> None:
    """As vLLM 0.26 refused to tell them, of a head without scales."""
    message = "Out of range float values are not JSON compliant: nan"
    refusal = (400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
    reply = {"choices": [{"text": "!!", "logprobs": None, "token_ids": [0, 0]}]}
    with replying({"/v1/completions": lambda body: refusal if "logprobs" in body else (200, reply)}) as (server, _):
        answer = ENGINE.complete(server, [4, 5], 2)
    assert answer.tokens == (0, 0)
    assert answer.logprobs is not None
    assert [math.isnan(value) for value in answer.logprobs] == [True, True]
    with replying({"/v1/completions": always(refusal[1], 400)}) as (server, _):
        scores = ENGINE.score(server, [4, 5, 6])
        assert scores is not None
        assert [math.isnan(value) for value in scores] == [True, True]
        with pytest.raises(Failed):
            ENGINE.complete(server, [4, 5], 2)


def test_counters_are_read_from_the_page_that_a_server_gave() -> None:
    """It holds times of creation under names that are nearly the same."""
    page = (RECORDED / "vllm_metrics.txt").read_text("utf-8")
    with replying({"/metrics": always(page)}) as (server, _):
        assert ENGINE.counters(server) == (16, 3, 48, (3, 0, 0))


def test_the_accept_length_is_that_of_what_was_measured() -> None:
    """After 68 drafts 10 more, which were right to the last token."""
    later = METRICS.replace(" 68.0", " 78.0").replace(" 188.0", " 218.0").replace(" 204.0", " 234.0")
    pages = iter([METRICS, later])
    with replying({"/metrics": lambda body: (200, next(pages))}) as (server, _):
        before, after = ENGINE.counters(server), ENGINE.counters(server)
    assert before == (68, 188, 204, (65, 62, 61))
    assert before is not None
    assert before.accept_length == pytest.approx(1 + 188 / 68)
    measured = since(before, after)
    assert measured is not None
    assert measured[:3] == (10, 30, 30)
    assert measured.accept_length == 4.0


def test_engines_of_one_server_are_counted_together() -> None:
    other = METRICS.replace('engine="0"', 'engine="1"')
    with replying({"/metrics": always(METRICS + other)}) as (server, _):
        assert ENGINE.counters(server) == (136, 376, 408, (130, 124, 122))


def test_without_speculation_there_are_no_counters() -> None:
    with replying({"/metrics": always("vllm:prompt_tokens_total 40.0\n")}) as (server, _):
        assert ENGINE.counters(server) is None


# --- the log -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "id", "names"),
    [
        (log("missing"), "serve.missing-tensors", "model.layers.3.post_attention_layernorm.weight"),
        (log("unknown"), "serve.unknown-tensors", "lm_head.weight_packed"),
        (log("no_kernel"), "serve.unsupported", "Unsupported quant type uint8b128"),
        ("RuntimeError: Failed to infer device type", "engine.device", "device type"),
    ],
    ids=["missing", "unknown", "no kernel", "no device"],
)
def test_a_failed_start_is_told_by_its_cause(text: str, id: str, names: str) -> None:
    """Each ends with "Engine core initialization failed", and begins with a warning that quotes an OSError."""
    finding = classify(ENGINE.rules, text, 1)
    assert finding.id == id
    assert names in finding.message


def test_a_healthy_log_shows_nothing_but_its_kernels() -> None:
    assert signs(ENGINE.rules, log("healthy")) == []
    assert ENGINE.kernels is not None
    assert [found[0] for found in ENGINE.kernels.finditer(log("healthy"))] == [
        "Using MacheteLinearKernel for CompressedTensorsWNA16",
        "Using FLASH_ATTN attention backend",
        "Using FlashAttention version 3",
    ]


def test_a_shutdown_shows_nothing() -> None:
    """Stopped with SIGTERM, it logs a traceback that ends in EngineDeadError."""
    assert "EngineDeadError" in log("shutdown")
    assert signs(ENGINE.rules, log("shutdown")) == []
