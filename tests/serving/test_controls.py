"""The controls are what they are said to be: their greedy text, their gaps and logprobs, what of each draft is accepted.

transformers and a plain reading of the drafts' published layers say so, not the code that made them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, normalize

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK

from .drafting import (
    NEW,
    accept_length,
    block_draft,
    eagle3_draft,
    follow,
    model,
    model_draft,
    mtp_draft,
    ngram_draft,
    qwen35_draft,
    scored,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
MADE = (
    "closed",
    "walk",
    "walk-w4h8c",
    "closed-w4h8g",
    "mimo",
    "mimo-w4",
    "qwen35",
    "draft",
    "eagle3",
    "dflash",
    "dspark",
)


@pytest.fixture(scope="module")
def controls() -> Iterator[ModuleType]:
    """``fixtures/controls.py``, which is a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FIXTURES)
        spec = importlib.util.spec_from_file_location("controls", FIXTURES / "controls.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "controls", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def folder(controls: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controls")
    controls.make(folder, (*MADE, *controls.BROKEN))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """The prompts as ids, which give the text back."""
    tokenizer, found = _tokenizer(folder / "walk"), []
    for line in (folder / "prompts.jsonl").read_text("utf-8").splitlines():
        text = json.loads(line)["text"]
        found.append(tokenizer(text)["input_ids"])
        assert tokenizer.decode(found[-1]) == text
    return found


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


# --- the cycle ---------------------------------------------------------------------------------------------


def test_every_token_has_one_before_it_and_drafts_go_once_around_no_cycle(expected: dict[str, Any]) -> None:
    follows = expected["follows"]
    assert sorted(follows) == list(range(2048))
    around = [next(n for n in range(1, 2049) if follow(follows, token, n)[-1] == token) for token in range(0, 2048, 7)]
    assert min(around) > 3
    longest = max(each.get("steps", each.get("block", 0)) for each in expected["accept_length"].values())
    assert sorted(around)[len(around) // 10] > longest


def test_prompts_end_with_more_than_a_cycle(prompts: list[list[int]], expected: dict[str, Any]) -> None:
    """So that the completion's words have all been seen."""
    for ids in prompts:
        assert set(follow(expected["follows"], ids[-1], NEW)) <= set(ids)


def test_a_chat_begins_with_what_may_be_printed(folder: Path, expected: dict[str, Any]) -> None:
    tokenizer = _tokenizer(folder / "walk-w4h8c")
    chat = [{"role": "user", "content": "Überall 1, 2, 3?\n"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nÜberall 1, 2, 3?\n<|im_end|>\n<|im_start|>assistant\n"
    answer = tokenizer.decode(follow(expected["follows"], ids[-1], NEW))
    assert answer.isascii()
    assert len(answer) == NEW


# --- targets -----------------------------------------------------------------------------------------------


def closed_form(path: Path) -> torch.Tensor:
    """Logprobs after each token, of a model that has embeddings, a norm of ones and a head, and nothing else."""
    tensors = load_file(path / "model.safetensors")
    embeddings, head = (
        next(tensors[name].double() for name in tensors if name.endswith(end))
        for end in ("embed_tokens.weight", "lm_head.weight")
    )
    hidden = normalize(embeddings, dim=1) * embeddings.shape[1] ** 0.5
    return log_softmax(hidden @ head.T, -1)


@pytest.mark.parametrize("name", ["closed", "mimo", "qwen35", "draft"])
def test_logits_depend_on_the_last_token_alone(
    folder: Path, name: str, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    loaded, logprobs = model(folder / name), closed_form(folder / name)
    for ids in prompts:
        assert torch.allclose(scored(loaded, ids), logprobs[ids].float(), atol=2e-4)
    assert logprobs.argmax(-1).tolist() == expected["follows"]


def test_gaps_are_wide_and_logprobs_not_saturated(folder: Path) -> None:
    best = closed_form(folder / "closed").topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 7
    assert -0.2 < best[:, 0].min() < best[:, 0].max() < -0.05


@pytest.mark.parametrize("name", ["walk", "walk-w4h8c", "closed-w4h8g"])
def test_greedy_text_is_the_cycle(folder: Path, name: str, prompts: list[list[int]], expected: dict[str, Any]) -> None:
    loaded = model(folder / name)
    for ids in prompts:
        whole = [*ids, *follow(expected["follows"], ids[-1], NEW)]
        best = scored(loaded, whole)[len(ids) - 1 : -1].topk(2)
        assert best.indices[:, 0].tolist() == whole[len(ids) :]
        assert (best.values[:, 0] - best.values[:, 1]).min() > 4


def test_a_layer_of_a_walk_shows_in_logprobs_and_not_in_the_text(folder: Path, prompts: list[list[int]]) -> None:
    loaded = model(folder / "walk")
    before = [scored(loaded, ids) for ids in prompts]
    for name, weight in loaded.named_parameters():
        if name.startswith("model.layers.2.") and "_proj." in name:
            weight.data.zero_()
    told, said = [], []
    for ids, whole in zip(prompts, before, strict=True):
        without, places = scored(loaded, ids), torch.arange(len(ids) - 1)
        told.append((without - whole)[places, torch.tensor(ids[1:])].abs())
        said.append(without.argmax(-1).equal(whole.argmax(-1)))
    assert all(said)
    assert torch.cat(told).mean() > 0.15
    assert torch.cat(told).max() > 0.4


def test_they_are_small(folder: Path) -> None:
    for name in MADE:
        assert sum(file.stat().st_size for file in (folder / name).iterdir()) < 20 << 20


# --- drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "draft", "eagle3", "mtp", "mtp-qwen35", "dflash", "dspark"])
def test_accept_length(folder: Path, prompts: list[list[int]], expected: dict[str, Any], method: str) -> None:
    asked = expected["accept_length"][method.partition("-")[0]]
    draft = {
        "ngram": lambda: ngram_draft(asked["draft-tokens"] - 1),
        "draft": lambda: model_draft(folder / "draft", asked["steps"]),
        "eagle3": lambda: eagle3_draft(folder / "eagle3", folder / "walk", asked["steps"]),
        "mtp": lambda: mtp_draft(folder / "mimo", asked["steps"]),
        "mtp-qwen35": lambda: qwen35_draft(folder / "qwen35", asked["steps"]),
        "dflash": lambda: block_draft(folder / "dflash", folder / "walk", asked["block"] - 1, False),
        "dspark": lambda: block_draft(folder / "dspark", folder / "walk", asked["block"], True),
    }[method]()
    assert accept_length(draft, expected["follows"], prompts[:3]) == asked["length"]


# --- static checks -----------------------------------------------------------------------------------------

SEEN = {
    "bad-layer": {"config.layers"},
    "bad-linears": {"names.incomplete-layer"},
    "bad-head-scale": {"names.weight-without-scale"},
    "bad-no-head": {"config.quant-target-unmatched", "config.tie"},
    "bad-tied": {"config.tie"},
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_good_passes(folder: Path, name: str) -> None:
    assert main(["verify", str(folder / name), "--allow-skipped"]) == OK


def test_what_headers_show_of_the_broken_ones(
    folder: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest has the right names and shapes, and only serving shows it."""
    shown = {}
    for name in expected["broken"]:
        code = main(["verify", str(folder / name), "--json"])
        document = json.loads(capsys.readouterr().out)
        if document["findings"]:
            shown[name] = {finding["id"] for finding in document["findings"]}
            errors = any(finding["severity"] == "error" for finding in document["findings"])
            assert code == (FOUND if errors else OK)
    assert shown == SEEN
