"""The header fixtures against what is published of their checkpoints, and against what transformers writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from headers import FOLDER, config, expand, materialize, specs
from safetensors import safe_open

from ckptkit.families import draft_part

# Elements by dtype as the Hub's safetensors metadata gives them (a total, where only that is published).
PUBLISHED: dict[str, dict[str, int] | int] = {
    "deepseek-v3": {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600},
    "deepseek-v4-flash-dspark": 165_265_454_782,
    "gemma-3-4b": 4_300_079_472,
    "glm-4.5-air": 110_468_824_832,
    "gpt-oss-20b-bf16": 20_914_757_184,
    "gpt2": {"F32": 137_022_720},
    "llama-3.1-8b": {"BF16": 8_030_261_248},
    "llama-3.2-1b": {"BF16": 1_235_814_400},
    "llama-4-scout": 108_641_793_536,
    "mimo-7b": 7_833_409_536,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-next-80b-a3b": 81_324_862_720,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3.5-35b-a3b": 35_951_822_704,
    "qwen3.6-27b": 27_781_427_952,
    "smollm2-135m": {"BF16": 134_515_008},
}


@pytest.mark.parametrize("fixture", PUBLISHED)
def test_fixture_has_the_published_number_of_parameters(fixture: str) -> None:
    elements: Counter[str] = Counter()
    for spec in specs(fixture):
        elements[spec.dtype] += prod(spec.shape)
    published = PUBLISHED[fixture]
    assert (dict(elements) if isinstance(published, dict) else elements.total()) == published


@pytest.mark.parametrize(
    ("fixture", "tensors"),
    [("deepseek-v3", 91_991), ("deepseek-v4-flash-dspark", 67_612 + 1568 + 1565 + 1572), ("gpt2", 160)],
)
def test_fixture_has_the_published_number_of_tensors(fixture: str, tensors: int) -> None:
    names = [spec.name for spec in specs(fixture)]
    assert len(names) == len(set(names)) == tensors


def test_fixture_files_are_as_the_script_writes_them() -> None:
    script = FOLDER.parent / "make_headers.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_templates_expand_to_every_combination() -> None:
    assert list(expand("a.{0..2,7}.b.{1,2}.c")) == [f"a.{i}.b.{j}.c" for i in (0, 1, 2, 7) for j in (1, 2)]


def test_materialized_fixture_is_a_checkpoint_without_data(tmp_path: Path) -> None:
    folder = materialize("llama-3.2-1b", tmp_path / "checkpoint")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(folder / "model.safetensors", framework="numpy") as reader:
        stored = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    assert stored == {spec.name: spec.shape for spec in specs("llama-3.2-1b")}
    assert os.stat(folder / "model.safetensors").st_blocks * 512 < 1_000_000


# Fixtures that are, MTP layers apart, what transformers loads and writes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture",
    [
        "glm-4.5-air", "gpt-oss-20b-bf16", "llama-3.1-8b", "llama-3.2-1b", "llama-4-scout", "mixtral-8x7b",
        "qwen2.5-vl-7b", "qwen3-30b-a3b", "qwen3-4b", "qwen3-next-80b-a3b", "qwen3.6-27b", "smollm2-135m",
    ],
)  # fmt: skip
def test_fixture_is_what_transformers_writes(fixture: str) -> None:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    keys = config(fixture)
    with torch.device("meta"):
        model = getattr(transformers, keys["architectures"][0])(transformers.AutoConfig.for_model(**keys))
    tensors = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    written = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, tensors).items()}
    part_of = draft_part(keys)
    assert {spec.name: spec.shape for spec in specs(fixture) if part_of(spec.name) is None} == written
