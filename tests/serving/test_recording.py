"""Golden files, prompts, and how a golden file stands in for a checkpoint or for its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint, llama, llama_config

from ckptkit.errors import UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.serving import reference
from ckptkit.serving.matrix import Making, bits, references
from ckptkit.serving.prompts import prompts
from ckptkit.serving.recording import Recording, Weights, digest, read, write

from .fakes import recording
from .replying import always, replying


def test_a_golden_file_comes_back(tmp_path: Path) -> None:
    known = recording()._replace(rounding=(0.01, 0.05))
    write(known, tmp_path / "golden.json")
    assert read(str(tmp_path / "golden.json")) == known
    assert json.loads((tmp_path / "golden.json").read_text("utf-8"))["schema"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("schema"),
        lambda content: content.update(schema=2),
        lambda content: content["items"][0]["logprobs"].pop(),
        lambda content: content["items"][0].update(prompt=[]),
        lambda content: content["items"][0]["top"][0].pop(),
        lambda content: content.pop("items"),
        lambda content: content["items"].clear(),
    ],
)
def test_what_is_no_golden_file(tmp_path: Path, change: object) -> None:
    path = tmp_path / "golden.json"
    write(recording(), path)
    content = json.loads(path.read_text("utf-8"))
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(UserError) as raised:
        read(str(path))
    assert (raised.value.findings[0].id, raised.value.exit_code) == ("usage.golden", 2)


def test_our_own_prompts_differ_in_length() -> None:
    lengths = [len(str(prompt.body)) for prompt in prompts()]
    assert len(lengths) >= 5
    assert max(lengths) > 20 * min(lengths)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        '{"name": "a", "text": ""}',
        '{"name": "a", "messages": []}',
        '{"name": "a", "messages": ["Hi"]}',
        '{"name": "a", "messages": [{"role": "user"}]}',
        "text",
    ],
)
def test_what_is_no_prompt(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, "utf-8")
    with pytest.raises(UserError) as raised:
        prompts(str(path))
    assert raised.value.findings[0].id == "usage.prompts"


# --- references --------------------------------------------------------------------------------------------


def making(tmp_path: Path) -> Making:
    from ckptkit.console import Progress

    return Making(prompts(), 4, tmp_path, 1.0, Progress(lambda meter, last: None), lambda text: None)


def test_a_golden_file_of_the_checkpoint_itself_is_its_own_reference(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", llama(), llama_config())
    with open_source(str(folder)) as source:
        opened = open_checkpoint(source)
        golden = Recording({**recording().about, "source": digest(opened)}, recording().items)
        refs = references({"model": opened}, None, golden, making(tmp_path))
    assert (refs.source, refs.own["model"], refs.texts["model"]) == (None, golden, golden)


def test_a_golden_file_is_what_a_url_is_judged_by(tmp_path: Path) -> None:
    golden = recording()
    refs = references({"url": None}, None, golden, making(tmp_path))
    assert refs.own["url"] is golden


def test_the_digest_sees_headers_and_config(tmp_path: Path) -> None:
    found = set()
    for number, config in enumerate([llama_config(), llama_config() | {"rope_theta": 5.0}]):
        with open_source(str(checkpoint(tmp_path / f"model{number}", llama(), config))) as source:
            found.add(digest(open_checkpoint(source)))
    assert len(found) == 2


def test_the_digest_of_a_gguf_sees_its_size_and_its_beginning(tmp_path: Path) -> None:
    found = set()
    for number, content in enumerate([b"GGUF", b"GGUF\0", b"GGUG", b"GGUF"]):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        found.add(digest(file))
    assert len(found) == 3


def test_a_gguf_is_allowed_what_eight_bits_cost_and_a_checkpoint_what_bfloat16_does(tmp_path: Path) -> None:
    """The server is off by 0.5 once it was told to round."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    folder = checkpoint(tmp_path / "model", llama(), llama_config())
    with open_source(str(folder)) as source:
        assert [rounded(file), rounded(open_checkpoint(source))] == [{"block": 32}, {"dtype": "bfloat16"}]


def rounded(weights: Weights) -> Any:
    told: list[Any] = []

    def score(body: Any) -> tuple[int, Any]:
        values = [-1.5 if told else -1.0] * (len(body["ids"]) - 1)
        best = [[-1.0, -2.0]] * len(values)
        return 200, {"logprobs": values, "top_ids": [[1, 2]] * len(values), "top": best}

    def rounds(body: Any) -> tuple[int, Any]:
        told.append(body)
        return 200, body

    replies = {
        "/about": always({"vocabulary": 64, "chat": True}),
        "/v1/completions": always({"choices": [{"text": "c", "token_ids": [7]}]}),
        "/score": score,
        "/round": rounds,
    }
    with replying(replies) as (server, _):
        found = reference.record(server, weights, [reference.Rendered("a", (5, 6), "ab")], 1)
    assert found.rounding == (0.5, 0.5)
    assert (found.about["vocabulary"], found.about["chat"]) == (64, True)
    [body] = told
    return body


def test_formats_by_their_narrowest_weights(tmp_path: Path) -> None:
    groups = {"head": {"targets": ["lm_head"], "weights": {"num_bits": 8}}}
    both = groups | {"body": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    tables = [None, groups, both]
    found = []
    for number, table in enumerate(tables):
        quantization = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": table}}
        config = llama_config() | (quantization if table else {})
        with open_source(str(checkpoint(tmp_path / f"model{number}", llama(), config))) as source:
            found.append(bits(open_checkpoint(source)))
    assert found == ["dense", "8", "4"]
