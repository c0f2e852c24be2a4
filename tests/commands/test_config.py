"""``ckptkit config``: keys of JSON files change, every shard stays the very file it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dsv4
import pytest
from drafts.mtp_fixtures import config_of, model
from make import checkpoint, llama, llama_config
from told import Told, teller

from ckptkit.errors import OUTPUT, SOURCE, USAGE


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "config")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = checkpoint(tmp_path / "model", llama(), llama_config(text={"a": 1}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "do_sample": true}')
    return folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Set keys of config.json by hand; None removes one."""
    config = config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_keys_are_set_and_removed_and_no_tensor_is_written(tmp_path: Path, told: Told, source: Path) -> None:
    told(source, tmp_path / "out", "--set", "text.b=[1,2]", "--set", "note=x y", "--unset", "rope_theta")
    before = config_of(source)
    del before["rope_theta"]
    assert config_of(tmp_path / "out") == before | {"text": {"a": 1, "b": [1, 2]}, "note": "x y"}
    here, there = source / "model.safetensors", tmp_path / "out" / "model.safetensors"
    assert here.samefile(there)


def test_order_and_values_of_all_other_keys_stay(tmp_path: Path, told: Told, source: Path) -> None:
    told(source, tmp_path / "set", "--set", "rms_norm_eps=1e-5")
    assert list(config_of(tmp_path / "set")) == list(config_of(source))
    assert config_of(tmp_path / "set")["rms_norm_eps"] == 1e-5


def test_a_table_is_made_where_there_was_null_and_none_where_nothing_is_set(
    tmp_path: Path, told: Told, source: Path
) -> None:
    (source / "config.json").write_text(json.dumps(config_of(source) | {"rope_scaling": None}))
    allowed = ["--unset", "none.x", "--allow", "plan.config-key"]
    told(source, tmp_path / "out", "--set", "rope_scaling.type=yarn", *allowed)
    assert config_of(tmp_path / "out") == config_of(source) | {"rope_scaling": {"type": "yarn"}}


def test_another_file_is_changed_and_config_json_is_not(tmp_path: Path, told: Told, source: Path) -> None:
    told(source, tmp_path / "out", "--set", "generation_config.json:eos_token_id=[1, 2]", "--allow", "plan.config-type")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [1, 2], "do_sample": True}
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "id"),
    [
        ([], USAGE, "usage.arguments"),
        (["--set", "no_equals"], USAGE, "usage.set"),
        (["--set", "a..b=1"], USAGE, "usage.set"),
        (["--set", "vocab_size=null"], USAGE, "usage.set"),
        (["--set", "vocab_size.x=1"], USAGE, "usage.set"),
        (["--set", "a=1", "--set", "a.b=1"], USAGE, "usage.set"),
        (["--set", "a=NaN"], USAGE, "usage.set"),
        (["--set", "a=[1e999]"], USAGE, "usage.set"),
        (["--set", 'a="\\ud800"'], USAGE, "usage.set"),
        (["--set", "a=\udcff"], USAGE, "usage.set"),
        (["--set", "a\udcff=1"], USAGE, "usage.set"),
        (["--set", "a=" + "[" * 5000], USAGE, "usage.set"),
        (["--set", "model.bin:x=1"], USAGE, "usage.set"),
        (["--set", "absent.json:x=1"], SOURCE, "source.missing"),
        (["--set", "vocab_sizes=512"], USAGE, "plan.config-key"),
        (["--unset", "nothing_like_it"], USAGE, "plan.config-key"),
        (["--set", "vocab_size=many"], USAGE, "plan.config-type"),
        (["--set", "tie_word_embeddings=0"], USAGE, "plan.config-type"),
        (["--set", "vocab_size=512"], USAGE, "plan.unchanged"),
        (["--preset", "mtp-serving"], SOURCE, "draft.none"),
        (["--preset", "dspark-serving"], SOURCE, "draft.none"),
        (["--set", "vocab_size=100"], OUTPUT, "output.verify"),
    ],
)
def test_refused(tmp_path: Path, told: Told, source: Path, arguments: list[str], code: int, id: str) -> None:
    document = told(source, tmp_path / "out", *arguments, code=code)
    assert id in [finding["id"] for finding in document["findings"]]
    assert not (tmp_path / "out").exists()


def test_a_misspelled_key_can_be_meant(tmp_path: Path, told: Told, source: Path) -> None:
    told(source, tmp_path / "out", "--set", "vocab_sizes=512", "--allow", "plan.config-key")
    assert config_of(tmp_path / "out")["vocab_sizes"] == 512


@pytest.mark.parametrize("stored", [True, False])
def test_the_tie_is_what_the_tensors_show(tmp_path: Path, told: Told, stored: bool) -> None:
    tensors = llama() if stored else llama(lm_head__weight=None)
    folder = checkpoint(tmp_path / "model", tensors, llama_config(tie_word_embeddings=stored))
    told(folder, tmp_path / "out", "--preset", "tie")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is not stored


def test_layers_that_predict_further_tokens_are_counted(tmp_path: Path, told: Told) -> None:
    folder = model(tmp_path / "model", "deepseek-v3")
    before = config_of(folder)
    rewrite(folder, num_nextn_predict_layers=3)
    told(folder, tmp_path / "out", "--preset", "mtp-serving")
    assert config_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_mtp_layers": 7},
        {"compress_ratios": dsv4.Dims().ratios},
        {"dspark_markov_rank": 3},
        {"quantization_config": None, "expert_dtype": None},
    ],
)
def test_a_drafts_config_becomes_what_extraction_writes(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    dsv4.make(tmp_path / "target")
    teller(capsys, "extract-dspark")(tmp_path / "target", tmp_path / "draft")
    right = config_of(tmp_path / "draft")
    rewrite(tmp_path / "draft", **wrong)
    assert config_of(tmp_path / "draft") != right
    told(tmp_path / "draft", tmp_path / "out", "--preset", "dspark-serving")
    assert config_of(tmp_path / "out") == right


def test_a_targets_config_keeps_what_is_the_targets(tmp_path: Path, told: Told) -> None:
    made = dsv4.make(tmp_path / "target", dspark_markov_rank=3)
    told(tmp_path / "target", tmp_path / "out", "--preset", "dspark-serving")
    rank = dsv4.Dims().rank
    assert config_of(tmp_path / "out") == made.config | {"dspark_markov_rank": rank}
