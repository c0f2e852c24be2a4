"""SGLang's adapter on what SGLang 0.5.17 replied and logged on an H200 (``recorded/``), and on replies of its shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ckptkit.serving.cell import log_findings
from ckptkit.serving.client import Failed
from ckptkit.serving.engine import Launch, Method, added
from ckptkit.serving.process import classify, signs
from ckptkit.serving.sglang import ENGINE, INTERVAL
from ckptkit.serving.speculative import parse

from .replying import always, replying

RECORDED = Path(__file__).parent / "recorded"
# Refused by 0.5.17 under DFLASH and DSPARK.
NO_LOGPROBS = {"error": {"message": "DFLASH speculative decoding does not support return_logprob yet."}}


def log(name: str) -> str:
    return (RECORDED / f"sglang_{name}.log").read_text("utf-8")


def launch(**changes: Any) -> Launch:
    return Launch(Path("ck/q3"), 31000, Path("scratch"), python="py")._replace(**changes)


def flags(method: Method) -> list[str]:
    words = list(ENGINE.command(launch(method=method)))
    return words[words.index("--speculative-algorithm") :]


# --- the command ---------------------------------------------------------------------------------------------


def test_a_plain_server_has_one_order_of_events_and_one_seed() -> None:
    words = list(ENGINE.command(launch()))
    assert words[0] == "env"
    assert "HF_HUB_OFFLINE=1" in words
    assert words[words.index("py") :] == [
        "py", "-m", "sglang.launch_server", "--model-path", "ck/q3", "--host", "127.0.0.1", "--port", "31000",
        "--random-seed", "0", "--disable-overlap-schedule", "--decode-log-interval", str(INTERVAL),
    ]  # fmt: skip


def test_what_is_given_stands_behind_what_is_ours_so_that_it_wins() -> None:
    method = parse("mtp:arg='--decode-log-interval 40'")
    words = list(ENGINE.command(launch(program=("run", "sglang"), arguments=("--disable-cuda-graph",), method=method)))
    assert words[words.index("run") + 1] == "sglang"
    assert "py" not in words
    assert words[-3:] == ["--disable-cuda-graph", "--decode-log-interval", "40"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (parse("mtp"), ["NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
                        "--speculative-num-draft-tokens", "4"]),
        (parse("ngram:draft-tokens=5"), ["NGRAM", "--speculative-num-draft-tokens", "5"]),
        (parse("draft:draft=small,steps=2"), ["STANDALONE", "--speculative-draft-model-path", "small",
                                              "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
                                              "--speculative-num-draft-tokens", "3"]),
        (parse("eagle3:draft=e,topk=4,draft-tokens=8"), ["EAGLE3", "--speculative-draft-model-path", "e",
                                                         "--speculative-num-steps", "3", "--speculative-eagle-topk", "4",
                                                         "--speculative-num-draft-tokens", "8"]),
        (parse("dflash:draft=d,block=16"), ["DFLASH", "--speculative-draft-model-path", "d",
                                            "--speculative-num-draft-tokens", "16"]),
        (parse("domino:draft=d"), ["DFLASH", "--speculative-draft-model-path", "d"]),
        (parse("dspark:block=7"), ["DSPARK", "--speculative-dspark-block-size", "7"]),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)  # fmt: skip
def test_speculation_in_its_flags(method: Method, expected: list[str]) -> None:
    assert flags(method) == ["--speculative-algorithm", *expected]


# --- replies -------------------------------------------------------------------------------------------------


def generated(**meta: Any) -> dict[str, Any]:
    return {"text": " a b", "output_ids": [5, 9], "meta_info": {"completion_tokens": 2, **meta}}


def test_a_completion_with_logprobs_and_leads() -> None:
    tops = [[[-0.25, 5, None], [-1.5, 7, None]], [[-0.5, 9, None], [-0.625, 3, None]]]
    reply = generated(output_token_logprobs=[[-0.25, 5, None], [-0.5, 9, None]], output_top_logprobs=tops)
    with replying({"/generate": always(reply)}) as (server, asked):
        answer = ENGINE.complete(server, [1, 2, 3], 2)
    assert (answer.text, answer.tokens, answer.logprobs, answer.gaps) == (" a b", (5, 9), (-0.25, -0.5), (1.25, 0.125))
    assert answer.speculation is None
    assert answer.seconds > 0
    body = asked[0].body
    assert body["input_ids"] == [1, 2, 3]
    assert body["return_logprob"]
    assert body["sampling_params"] == {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}


def test_a_logprob_that_is_no_number_stays_none() -> None:
    with replying({"/generate": always(generated(output_token_logprobs=[[None, 5, None], [-1.0, 9, None]]))}) as at:
        answer = ENGINE.complete(at[0], [1], 2)
    assert answer.logprobs is not None
    assert math.isnan(answer.logprobs[0])
    assert answer.logprobs[1] == -1.0


def test_where_logprobs_are_refused_the_tokens_come_without() -> None:
    def reply(body: Any) -> tuple[int, Any]:
        return (400, NO_LOGPROBS) if body.get("return_logprob") else (200, generated())

    with replying({"/generate": reply}) as (server, asked):
        answer = ENGINE.complete(server, [1], 2)
        assert answer.tokens == (5, 9)
        assert answer.logprobs is None
        assert answer.gaps is None
        assert ENGINE.score(server, [1, 2]) is None
    assert len(asked) == 3


def test_another_refusal_is_not_taken_for_that_one() -> None:
    with replying({"/generate": always({"error": {"message": "too long"}}, 400)}) as (server, asked):
        with pytest.raises(Failed, match="too long"):
            ENGINE.complete(server, [1], 2)
        with pytest.raises(Failed, match="too long"):
            ENGINE.score(server, [1, 2])
    assert len(asked) == 2


@pytest.mark.parametrize(
    "reply", [{"text": "a"}, [], generated(output_token_logprobs=[3])], ids=["less", "list", "flat"]
)
def test_a_reply_of_another_shape_is_a_failure(reply: Any) -> None:
    with replying({"/generate": always(reply)}) as (server, _), pytest.raises(Failed):
        ENGINE.complete(server, [1], 2)


def test_scores_are_those_of_the_tokens_sent() -> None:
    told = [[None, 4, None], [-2.0, 5, None], [-0.5, 6, None]]
    with replying({"/generate": always({"meta_info": {"input_token_logprobs": told}})}) as (server, asked):
        assert ENGINE.score(server, [4, 5, 6]) == (-2.0, -0.5)
        with pytest.raises(Failed):
            ENGINE.score(server, [4, 5, 7])
    assert asked[0].body["logprob_start_len"] == 0


def test_the_accept_length_is_counted_from_drafts_not_from_tokens() -> None:
    """What an ngram server replied; its own ``spec_accept_length`` is 48 tokens / 45 steps = 1.067."""
    metas = json.loads((RECORDED / "sglang_meta_info.json").read_text("utf-8"))
    counts = []
    for meta in metas:
        with replying({"/generate": always(generated(**meta))}) as (server, _):
            counts.append(ENGINE.complete(server, [1], 2).speculation)
    first, second, plain = counts
    assert first is not None
    assert second is not None
    assert plain is None
    assert first == (45, 2, 135, (2,))
    assert first.accept_length == pytest.approx(1 + 2 / 45)
    # 32 steps accepted nothing, 5 one, 1 two, 1 three: 7 had the first right, 2 the second, 1 the third.
    assert second == (39, 10, 117, (7, 2, 1))
    assert sum(second.by_position) == second.accepted
    pooled = added(counts)
    assert pooled is not None
    assert pooled.accept_length == pytest.approx(1 + 12 / 84)


# --- the log -------------------------------------------------------------------------------------------------


def test_windows_are_the_lines_of_a_speculative_server() -> None:
    assert ENGINE.windows(log("ngram")) == [1.5, 1.0]
    assert ENGINE.windows(log("healthy")) == []
    dspark = (
        "Decode batch [7], #running-req: 1, accept len: 3.25, accept rate: 0.75, block accept len: 4.00, cuda graph"
    )
    assert ENGINE.windows(dspark) == [3.25]


@pytest.mark.parametrize(
    ("name", "code", "id", "names"),
    [
        ("import", 1, "engine.missing", "xgrammar"),
        ("memory", -9, "engine.memory", "Loaded weights leave no GPU memory"),
        ("no_target", -9, "serve.unsupported", "model.layers.0.self_attn.qkv_proj"),
        ("first_forward", -9, "serve.start", "mat1 and mat2 shapes cannot be multiplied (1x512 and 768x256)"),
        ("truncated", -9, "serve.corrupt", "file not fully covered"),
        ("packed_head", -9, "serve.unsupported", "lm_head.weight_packed"),
    ],
)
def test_a_failed_start_is_told_by_its_cause(name: str, code: int, id: str, names: str) -> None:
    """Each log ends with the child's death, and each server with SIGKILL but one."""
    finding = classify(ENGINE.rules, log(name), code)
    assert finding.id == id
    assert names in finding.message


def test_a_dropped_head_shows_in_a_log_without_errors() -> None:
    names = ["lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_shape"]
    found = log_findings(ENGINE, log("compiling"))
    assert [(finding.id, finding.tensor) for finding in found] == [("serve.head-dropped", name) for name in names]


@pytest.mark.parametrize(
    ("error", "id"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "engine.memory"),
        ("safetensors._safetensors_rust.SafetensorError: incomplete metadata", "serve.corrupt"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x512 and 768x256)", "serve.start"),
    ],
)
def test_a_dropped_head_is_not_what_ended_a_server(error: str, id: str) -> None:
    assert classify(ENGINE.rules, f"{log('compiling')}{error}\n", -9).id == id


def test_a_healthy_log_shows_nothing() -> None:
    """Of a server that lacked a whole layer: the log tells nothing of it."""
    assert signs(ENGINE.rules, log("healthy")) == []


def test_the_attention_backend_is_in_the_arguments_that_it_logs() -> None:
    line = "[2026-11-29 21:16:30] server_args=ServerArgs(attention_backend='triton', decode_attention_backend=None)"
    assert ENGINE.kernels is not None
    assert [found[0] for found in ENGINE.kernels.finditer(line)] == ["attention_backend='triton'"]


def test_health_is_a_token() -> None:
    with replying({"/health": always("")}) as (server, _):
        assert ENGINE.ready(server)
    with replying({"/health": always("", 503)}) as (server, _):
        assert not ENGINE.ready(server)
    assert not ENGINE.ready(server)  # nobody there any more
