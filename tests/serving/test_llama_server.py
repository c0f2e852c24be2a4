"""llama-server's adapter on what build 11434 replied and logged (``recorded/``), and on replies of its shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import UserError
from ckptkit.serving.client import Failed
from ckptkit.serving.engine import Launch
from ckptkit.serving.llama_server import ENGINE
from ckptkit.serving.process import classify
from ckptkit.serving.speculative import parse

from .replying import always, replying

RECORDED = Path(__file__).parent / "recorded"
REPLIES = json.loads((RECORDED / "llama_server_replies.json").read_text("utf-8"))
METRICS = """\
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 198
llamacpp:spec_decode_num_accepted_tokens_total 196
llamacpp:spec_decode_num_drafts_total 52
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 52
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 50
"""


def command(checkpoint: Path, **changes: Any) -> list[str]:
    return list(ENGINE.command(Launch(checkpoint, 31000, Path("scratch"))._replace(**changes)))


def place(id: int, logprob: float, *others: float) -> dict[str, Any]:
    """A token with its candidates: itself, and the others."""
    tops = [{"id": at, "logprob": value} for at, value in enumerate((logprob, *others))]
    return {"id": id, "logprob": logprob, "top_logprobs": tops}


# --- the command ---------------------------------------------------------------------------------------------


def test_a_plain_server_keeps_the_weights_as_they_are_stored() -> None:
    assert command(Path("a.gguf")) == [
        "llama-server", "-m", "a.gguf", "--host", "127.0.0.1", "--port", "31000", "--seed", "0", "--metrics",
        "--no-repack",
    ]  # fmt: skip
    assert command(Path("a.gguf"), program=("nice", "/b/llama-server"))[:2] == ["nice", "/b/llama-server"]


def test_a_folder_stands_for_the_one_model_in_it(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").touch()
    (tmp_path / "m-00002-of-00002.gguf").touch()
    assert command(tmp_path)[2] == str(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(UserError) as raised:
        command(tmp_path)
    assert raised.value.findings[0].id == "usage.arguments"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("draft:draft=s.gguf,steps=4", ["draft-simple", "--spec-draft-model", "s.gguf", "--spec-draft-n-max", "4"]),
        ("mtp", ["draft-mtp", "--spec-draft-n-max", "3"]),
        ("dspark:draft=d.gguf,block=7", ["draft-dspark", "--spec-draft-model", "d.gguf", "--spec-draft-n-max", "7"]),
        ("ngram", ["ngram-simple", "--spec-ngram-simple-size-m", "3"]),
    ],
)
def test_a_draft_is_never_given_without_its_type(method: str, expected: list[str]) -> None:
    words = command(Path("a.gguf"), method=parse(method))
    assert words[words.index("--spec-type") + 1 :] == expected


@pytest.mark.parametrize("method", ["eagle:draft=e", "domino:draft=d", "mtp:topk=2,draft-tokens=4"])
def test_what_it_cannot_be_asked_for(method: str) -> None:
    with pytest.raises(UserError) as raised:
        command(Path("a.gguf"), method=parse(method))
    assert raised.value.findings[0].id == "serve.unsupported"


def test_a_program_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        ENGINE.version(Launch(tmp_path, 1, tmp_path, program=(str(tmp_path / "llama-server"),)))
    assert raised.value.findings[0].id == "engine.missing"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("version: 11434 (a1b2c3d)", "11434"),
        ("version: 0.6.0-dev (build 11434, commit a1b2c3d)", "11434"),
        (
            "version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU",
            "version: 0.6.0-dev (build 0, commit unknown)",
        ),
    ],
)
def test_the_version_is_the_build(tmp_path: Path, said: str, version: str) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(0o755)
    assert ENGINE.version(Launch(tmp_path, 1, tmp_path, program=(str(program),))) == version


# --- replies -------------------------------------------------------------------------------------------------


def test_a_completion_with_ids_logprobs_and_leads() -> None:
    reply = {"content": "ab", "tokens": [5, 9], "completion_probabilities": [place(5, -0.25, -1.5), place(9, -0.5, -1)]}
    with replying({"/completion": always(reply)}) as (server, asked):
        answer = ENGINE.complete(server, [1, 2], 2)
    assert (answer.text, answer.tokens, answer.logprobs, answer.gaps) == ("ab", (5, 9), (-0.25, -0.5), (1.25, 0.5))
    expected = {"prompt": [1, 2], "n_predict": 2, "temperature": 0, "return_tokens": True}
    assert expected.items() <= asked[0].body.items()


def test_logprobs_that_it_made_up_are_not_taken() -> None:
    """Tokens that a draft had right came with a logprob of 0 and no candidates."""
    with replying({"/completion": always(REPLIES["drafted"])}) as (server, _):
        answer = ENGINE.complete(server, [33, 216, 34, 216, 35, 216, 36], 5)
    assert (answer.text, answer.tokens) == (" 5 6 ", (216, 37, 216, 38, 216))
    assert answer.logprobs is None
    assert answer.gaps is None


def test_a_forced_token_tells_its_own_logprob() -> None:
    """The likeliest was another one: token 33, at -1.1."""
    with replying({"/completion": always(REPLIES["forced"])}) as (server, _):
        assert ENGINE.score(server, [216, 34]) == pytest.approx((-1.327204,), abs=1e-6)


def test_each_token_is_forced_to_learn_its_logprob() -> None:
    def reply(body: Any) -> tuple[int, Any]:
        (token, bias), *_ = body["logit_bias"]
        assert bias > 1000
        return 200, {"completion_probabilities": [place(token, -float(len(body["prompt"])), 0.0)]}

    with replying({"/completion": reply}) as (server, asked):
        assert ENGINE.score(server, [4, 5, 6]) == (-1.0, -2.0)
    assert [(it.body["prompt"], it.body["n_predict"]) for it in asked] == [([4], 1), ([4, 5], 1)]
    assert all("ignore_eos" not in it.body for it in asked)  # it would ban the token that ends a text


def test_a_token_that_could_not_be_forced_is_a_failure() -> None:
    reply = {"completion_probabilities": [place(8, -0.1, -3.0)]}
    with replying({"/completion": always(reply)}) as (server, _), pytest.raises(Failed):
        ENGINE.score(server, [4, 5])


def test_counters_tell_what_was_speculated() -> None:
    with replying({"/metrics": always(METRICS)}) as (server, _):
        counted = ENGINE.counters(server)
    assert counted == (52, 196, 198, (52, 50))
    assert counted is not None
    assert counted.accept_length == pytest.approx(1 + 196 / 52)


def test_a_draft_that_is_silently_not_used_counts_nothing() -> None:
    """``-md`` without ``--spec-type``: counters stay at nought."""
    idle = "llamacpp:spec_decode_num_drafts_total 0\nllamacpp:spec_decode_num_draft_tokens_total 0\n"
    with replying({"/metrics": always(idle)}) as (server, _):
        assert ENGINE.counters(server) is None


# --- the log -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("gguf_init_from_file_impl: failed to read magic", "serve.corrupt"),
        ("tensor 'blk.0.ffn_up.weight' data is not within the file bounds, model is corrupted", "serve.corrupt"),
        ("llama_model_load: error loading model: missing tensor 'blk.3.attn_q.weight'", "serve.missing-tensors"),
        ("error loading model: unknown model architecture: 'new'", "serve.unsupported"),
        ("srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 31000", "engine.port"),
        ("llama_kv_cache: failed to allocate buffer for kv cache", "engine.memory"),
        ("error loading model: something else", "serve.start"),
    ],
)
def test_a_failed_start_is_told_by_its_cause(line: str, id: str) -> None:
    said = f"load_model: loading\n{line}\nfailed to load model, 'a.gguf'\nexiting due to model loading error\n"
    finding = classify(ENGINE.rules, said, 1)
    assert finding.id == id
    assert finding.message.endswith(line.split("impl: ")[-1])


def test_a_file_cut_off_is_told_by_the_tensor_that_it_lacks() -> None:
    finding = classify(ENGINE.rules, (RECORDED / "llama_server_truncated.log").read_text("utf-8"), 1)
    assert finding.id == "serve.corrupt"
    assert "token_embd.weight" in finding.message


def test_a_segmentation_fault_is_no_fault_of_the_file() -> None:
    assert classify(ENGINE.rules, "init: llama threadpool init\n", -11).id.startswith("engine.")
