"""The whole way with nothing faked, on a model of two small layers: worker, reference, golden file, command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model`` with a tokenizer of words, its packed head ``w8``, and prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    _save(folder / "model")
    assert main(["quantize", str(folder / "model"), str(folder / "w8"), "--recipe", "lm_head-w8a16"]) == OK
    lines = [{"name": "short", "text": "w3 w4 w5"}, {"name": "long", "text": " ".join(f"w{at}" for at in range(1, 41))}]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return folder


def _save(folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    made: Any = transformers
    torch.manual_seed(0)
    config = made.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    made.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def serve(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    few = ("--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "8", "--timeout", "3m")
    code = main(["verify", *arguments, "--serve", *few, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def test_record_and_judge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = folder / "golden.json"
    code, recorded = serve(capsys, folder, str(folder / "model"), "--record", str(golden))
    assert (code, recorded["findings"]) == (OK, [])
    content = json.loads(golden.read_text("utf-8"))
    assert (content["dtype"], content["vocabulary"], content["chat"]) == ("float32", WORDS, False)
    assert [len(item["prompt"]) for item in content["items"]] == [3, 40]
    assert all(len(item["tokens"]) == 8 for item in content["items"])

    code, judged = serve(capsys, folder, str(folder / "w8"), "--golden", str(golden), "--speculative", "ngram")
    plain, speculated = judged["figures"]["serve"]["cells"]
    assert plain["stored"]["mean"] < 1e-4
    assert 0 < plain["source"]["mean"] < 0.15
    assert speculated["equal"] == [2, 2]
    assert {finding["id"] for finding in judged["findings"]} <= {"serve.accept-length"}
    assert code == (FOUND if judged["findings"] else OK)
