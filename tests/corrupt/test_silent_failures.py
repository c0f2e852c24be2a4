"""Broken checkpoints that llmcompressor's model_free_ptq makes without a word, made with it: each is found.

Static checks find what headers and config show. NaN and a scale that overflowed show in the scales, so that it takes
the data to find them; MXFP4 alone hides a NaN, since every byte of its codes is a number and the largest of a block
passes over it: that takes the source.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckptkit.checks import Level, Subject, run
from ckptkit.files.checkpoint import scan
from ckptkit.files.source import open_source
from corrupt.broken_config import UP
from corrupt.broken_files import HEAD, NORM, stray
from corrupt.edit import Damage, config, drop, file, index, put
from corrupt.goods import GOOD

pytestmark = pytest.mark.slow

STATIC, DATA, NUMERIC = Level.STATIC, Level.DATA, Level.NUMERIC
Groups = dict[str, dict[str, Any]]
W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
HEAD_W8: Groups = {"head": {"targets": ["re:.*lm_head$"], "weights": W8}}
BODY = r"re:.*layers.*_proj$"


def nothing(folder: Path) -> None:
    """No damage."""


class Case(NamedTuple):
    """``good`` after ``before``, quantized by ``how`` (a scheme's name or groups), and what is found at ``level``."""

    name: str
    good: str
    how: str | Groups
    ids: str
    ignore: tuple[str, ...] = ()
    before: Damage = nothing
    level: Level = STATIC


def typo(*targets: str) -> Groups:
    return {"head": {"targets": list(targets), "weights": W8}}


def nan(tensor: str) -> Damage:
    def change(found: torch.Tensor) -> torch.Tensor:
        found[3, 5] = float("nan")
        return found

    return put(tensor, change)


def small(folder: Path) -> None:
    """Projections whose largest magnitude is below 0.04."""
    for layer, name in product(range(2), PROJECTIONS):
        put(f"model.layers.{layer}.{name}_proj.weight", lambda found: found * 0.04 / found.abs().max())(folder)


PROJECTIONS = (*(f"self_attn.{x}" for x in "qkvo"), *(f"mlp.{x}" for x in ("gate", "up", "down")))
ALL_BUT_ENDS = ("re:.*embed_tokens", "lm_head")
CASES = [
    Case("S1 embedding and head in passing", "dense", "W4A16", "config.quant-embedding config.quant-class-head"),
    Case("S2 general group before the head's", "dense", {
        "body": {"targets": ["Linear"], "weights": W4}, "head": {"targets": ["re:.*lm_head"], "weights": W8}},
        "config.quant-bits", ("re:.*embed_tokens",)),
    Case("S3 regexes that overlap", "dense", {
        "a": {"targets": ["re:.*layers.0.*q_proj"], "weights": W8}, "b": {"targets": ["re:.*_proj"], "weights": W4}},
        "config.quant-consumers config.quant-fused"),
    Case("S3 in the other order of names", "dense", {
        "z": {"targets": ["re:.*layers.0.*q_proj"], "weights": W8}, "b": {"targets": ["re:.*_proj"], "weights": W4}},
        "config.quant-bits config.quant-fused"),
    Case("S4 head of a tied model", "tied", HEAD_W8, "config.quant-status config.quant-target-unmatched"),
    Case("S6 stored head of a tied model", "dense", HEAD_W8, "config.tie", before=config(tie_word_embeddings=True)),
    Case("S7 target misspelt", "dense", typo("lm_haed"), "config.quant-target-unmatched config.quant-status"),
    Case("S7 head in the vision model's spelling", "multimodal", typo("model.language_model.lm_head"),
         "config.quant-target-unmatched config.quant-status"),
    Case("S7 everything ignored", "dense", HEAD_W8, "config.quant-both config.quant-status", ("re:.*",)),
    Case("S8 ignores that match nothing", "dense", "W4A16",
         "config.quant-ignore-unmatched config.quant-embedding config.quant-class-head",
         ("lm_haed", "embed_tokens", "lm_head.weight")),
    Case("S9 tensors that the index left out", "dense", "W4A16", "config.tie names.incomplete-model", ("re:.*embed_tokens",),
         index(lambda table: [table["weight_map"].pop(name) for name in (HEAD, NORM)])),
    Case("S10 NaN, W8", "dense", HEAD_W8, "data.scale-nonfinite", before=nan(HEAD), level=DATA),
    Case("S10 NaN, W4", "dense", "W4A16", "data.scale-nonfinite", ALL_BUT_ENDS, nan(f"{UP}.weight"), DATA),
    Case("S10 NaN, FP8", "dense", "FP8_DYNAMIC", "data.scale-nonfinite data.nan", ALL_BUT_ENDS, nan(f"{UP}.weight"), DATA),
    Case("S10 NaN, NVFP4", "single", "NVFP4A16", "data.scale-nonfinite data.scale-range", ALL_BUT_ENDS, nan(f"{UP}.weight"), DATA),
    Case("S10 NaN, MXFP4", "single", "MXFP4", "numeric.error", ALL_BUT_ENDS, nan(f"{UP}.weight"), NUMERIC),
    Case("S11 head of an FP8 model", "fp8", HEAD_W8, "config.quant-undeclared"),
    Case("S12 GPTQ model, overwritten", "gptq", "W4A16", "config.quant-format config.quant-status", ALL_BUT_ENDS),
    Case("S13 second run", "asymmetric", "W8A16", "config.quant-undeclared", ("re:.*embed_tokens",)),
    Case("S15 router in passing", "moe", {"all": {"targets": ["Linear"], "weights": W8}}, "config.quant-router", ALL_BUT_ENDS),
    Case("S16 draft layer in passing", "mtp", "W4A16", "config.quant-draft", ALL_BUT_ENDS),
    Case("S17 one of three siblings", "dense", {
        "q": {"targets": [r"re:.*\.q_proj$"], "weights": W8}, "rest": {"targets": [r"re:.*(?<!\.q)_proj$"], "weights": W4}},
        "config.quant-fused"),
    Case("S18 head by its class", "dense", "W8A16", "config.quant-class-head", ("re:.*embed_tokens",)),
    Case("S21 no config", "dense", "W4A16", "config.missing config.quant-undeclared", ALL_BUT_ENDS, file("config.json", None)),
    Case("S22 global scale that overflows", "half", "NVFP4A16", "data.scale-range", ALL_BUT_ENDS, small, DATA),
    Case("L5 a layer without up_proj", "dense", "W4A16", "names.incomplete-layer", ALL_BUT_ENDS, drop(f"{UP}.weight")),
]  # fmt: skip


def quantize(source: Path, out: Path, case: Case) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free import model_free_ptq

    how = {"scheme": case.how} if isinstance(case.how, str) else {"config": QuantizationConfig(config_groups=case.how)}
    model_free_ptq(str(source), str(out), ignore=list(case.ignore), device="cpu", **how)


def found(folder: Path, level: Level, against: Path) -> set[str]:
    with open_source(str(folder)) as source, open_source(str(against)) as other:
        checkpoint, findings = scan(source)
        beside = scan(other)[0] if level >= NUMERIC else None
        return {f.id for f in run(Subject(checkpoint, tuple(findings), against=beside), level).findings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_found(case: Case, tmp_path: Path) -> None:
    source, out = GOOD[case.good](tmp_path / case.good), tmp_path / "out"
    case.before(source)
    quantize(source, out, case)
    assert found(out, case.level, source) == set(case.ids.split())


def test_a_folder_that_was_not_empty(tmp_path: Path) -> None:
    """S19: what lies in the output folder stays there, and transformers loads the single file instead."""
    source, out = GOOD["dense"](tmp_path / "dense"), tmp_path / "out"
    out.mkdir()
    stray("model.safetensors")(out)
    quantize(source, out, Case("S19", "dense", HEAD_W8, ""))
    assert found(out, STATIC, source) == {"index.stray-shard"}


def test_mxfp4_hides_what_was_nan(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "S10 NaN, MXFP4")
    source, out = GOOD[case.good](tmp_path / case.good), tmp_path / "out"
    case.before(source)
    assert found(source, DATA, source) == {"data.nan"}
    quantize(source, out, case)
    assert found(out, DATA, source) == set()
