"""The engines' loader rules: complete drafts fill every slot, others are told; and the engines' own source agrees."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from dsv4 import make
from headers import config, specs

from ckptkit.drafts.loaders import TABLES, Draft, Loaded, draft_of, load, loader, renamed
from ckptkit.drafts.tables import dspark

VARIANTS: dict[str, dict[str, Any]] = {
    "official": {}, "bf16": {"form": "bf16"}, "fp8": {"form": "fp8"}, "v41": {"v41": True},
}  # fmt: skip
# Names that are no tensor of the published checkpoints, but of others that users meet.
ODD = (
    "mtp.0.embed.weight", "mtp.2.head.weight", "mtp.0.ffn.gate.bias_vl", "mtp.2.markov_head.embed.weight",
    "mtp.2.markov_head.head.weight", "mtp.0.ffn.gate.tid2eid", "mtp.0.attn.rotary_emb.inv_freq", "lm_head.weight",
    "embed_tokens.weight", "model.embed_tokens.weight", "mtp.0", "mtp.x.norm.weight", "mtp.0.e_proj.weight",
    "mtp.0.markov_head.markov_w1.weight", "mtp.0.confidence_head.proj.bias", "mtp.10.ffn.experts.11.w2.scale",
    "mtp.0.ffn.experts.0.w1.weight_scale_inv", "mtp.0.attn.attn.attn_norm.ffn.w1.weight", "", "mtp.", "mtp..",
)  # fmt: skip


def drafted(folder: Path, variant: str) -> tuple[list[str], Draft]:
    made = make(folder, **VARIANTS[variant])
    return list(made.shapes), draft_of(made.config, 3)


def complete(loaded: Loaded) -> bool:
    return not (loaded.unexpected or loaded.missing or loaded.twice)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("fixture", ["deepseek-v4-flash-dspark", "deepseek-v4-pro-dspark"])
def test_published_drafts_are_complete(table: str, fixture: str) -> None:
    loaded = load(loader(table), [spec.name for spec in specs(fixture)], draft_of(config(fixture), 3))
    assert complete(loaded)
    assert len(loaded.dropped) == len([spec for spec in specs(fixture) if not spec.name.startswith("mtp.")])
    assert sorted(loaded.slots.values()) == sorted(s.name for s in specs(fixture) if s.name.startswith("mtp."))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_tensor_left_out_is_missed(table: str, variant: str, tmp_path: Path) -> None:
    names, draft = drafted(tmp_path / "made", variant)
    rules, mine = loader(table), [name for name in names if name.startswith("mtp.")]
    whole = load(rules, mine, draft)
    assert complete(whole)
    slot_of = {name: slot for slot, name in whole.slots.items()}
    optional = {name for name in mine if name.endswith(("confidence_head.proj.weight", ".gate.bias_vl"))}
    for name in mine:
        loaded = load(rules, [other for other in mine if other != name], draft)
        assert loaded.missing == ([] if name in optional else [slot_of[name]])
        assert not loaded.unexpected


@pytest.mark.parametrize("table", TABLES)
def test_each_tensor_renamed_is_missed_and_not_taken(table: str, tmp_path: Path) -> None:
    names, draft = drafted(tmp_path / "made", "official")
    rules = loader(table)
    mine = [name for name in names if name.startswith("mtp.")]
    for name in (n for n in mine if "confidence_head" not in n):
        loaded = load(rules, [f"{other}_" if other == name else other for other in mine], draft)
        assert len(loaded.missing) == 1
        assert loaded.unexpected.keys() == {f"{name}_"}


@pytest.mark.parametrize(
    ("table", "name", "unexpected", "twice"),
    [
        ("sglang_v4", "mtp.0.embed.weight", True, False),
        ("vllm_v4", "mtp.0.embed.weight", True, False),
        ("sglang_v4", "mtp.3.attn_norm.weight", True, False),
        ("vllm_v4", "mtp.3.attn_norm.weight", True, False),
        ("sglang_v4", "mtp.0.norm.weight", True, False),  # only the last stage has a norm
        ("vllm_v4", "mtp.0.norm.weight", False, True),  # the model has one, whatever the stage
        ("sglang_v4", "mtp.0.markov_head.markov_w1.weight", False, True),
        ("vllm_v4", "mtp.0.markov_head.markov_w1.weight", False, True),
        ("sglang_v4", "mtp.2.markov_head.embed.weight", False, True),
        ("vllm_v4", "mtp.2.markov_head.embed.weight", True, False),
        ("sglang_v4", "mtp.0.ffn.gate.bias_vl", False, False),
        ("vllm_v4", "mtp.0.ffn.gate.bias_vl", True, False),
        ("sglang_v4", "mtp.0.ffn.experts.4.w1.weight", True, False),
        ("vllm_v4", "mtp.0.ffn.experts.4.w1.weight", True, False),
        ("sglang_v4", "mtp.0.e_proj.weight", True, False),
        ("vllm_v4", "mtp.0.e_proj.weight", True, False),
        ("sglang_v4", "mtp.2.confidence_head.proj.bias", True, False),
        ("vllm_v4", "mtp.2.confidence_head.proj.bias", True, False),
    ],
)
def test_a_tensor_too_many(table: str, name: str, unexpected: bool, twice: bool, tmp_path: Path) -> None:
    names, draft = drafted(tmp_path / "made", "official")
    loaded = load(loader(table), [*names, name], draft)
    assert (name in loaded.unexpected) is unexpected
    assert [name] == [second for _, second in loaded.twice.values()] if twice else not loaded.twice
    assert not loaded.missing


@pytest.mark.parametrize("table", TABLES)
def test_a_nextn_block_is_no_dspark_draft(table: str, tmp_path: Path) -> None:
    made = make(tmp_path / "made", draft="nextn")
    keys = make(tmp_path / "dspark").config
    loaded = load(loader(table), made.shapes, draft_of(keys, 3))
    assert {"mtp.0.e_proj.weight", "mtp.0.hnorm.weight"} <= loaded.unexpected.keys()
    assert any("main_proj" in slot for slot in loaded.missing)


@pytest.mark.parametrize("table", TABLES)
def test_a_bf16_draft_under_an_fp8_config_lacks_its_scales(table: str, tmp_path: Path) -> None:
    made = make(tmp_path / "made", form="bf16")
    quantized = make(tmp_path / "official")
    loaded = load(loader(table), made.shapes, draft_of(quantized.config, 3))
    scales = [name for name in quantized.shapes if name.startswith("mtp.") and name.endswith(".scale")]
    assert len(loaded.missing) == len(scales) > 0


def test_rules_of_one_expert() -> None:
    draft = draft_of(published(), 3)
    names = ["mtp.1.ffn.experts.3.w3.weight", "mtp.1.ffn.experts.3.w3.scale", "mtp.1.attn.wo_a.scale"]
    assert set(load(loader("sglang_v4"), names, draft).slots) == {
        "stages.1.mlp.experts.w13_weight[3.w3]",
        "stages.1.mlp.experts.w13_weight_scale_inv[3.w3]",
        "stages.1.self_attn.wo_a.weight[scale]",
    }
    assert set(load(loader("vllm_v4"), names, draft).slots) == {
        "model.layers.1.ffn.experts.w13_weight[3.w3]",
        "model.layers.1.ffn.experts.w13_weight_scale[3.w3]",
        "model.layers.1.attn.wo_a.weight_scale_inv",
    }


def published() -> dict[str, Any]:
    return config("deepseek-v4-flash-dspark")


# --- the engines' own source -------------------------------------------------------------------------------

SOURCES = [
    ("sglang_v4", "sglang", "srt/models/deepseek_v4_dspark.py", "_remap_dspark_weight_name", "v4"),
    ("sglang_v4", "sglang", "srt/models/deepseek_v4_dspark.py", "_remap_dspark_weight_name", "v41"),
    ("vllm_v4", "vllm", "models/deepseek_v4/nvidia/dspark.py", "_remap_dspark_name", "v4"),
    ("vllm_v4", "vllm", "models/deepseek_v41/nvidia/dspark.py", "_remap_dspark_name", "v41"),
]


def package(engine: str) -> Path | None:
    """The folder of an engine's package: ``CKPTKIT_TEST_SGLANG`` or ``CKPTKIT_TEST_VLLM``, or where it is installed."""
    stated = os.environ.get(f"CKPTKIT_TEST_{engine.upper()}")
    spec = None if stated else find_spec(engine)
    places = [stated] if stated else list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def method(file: Path, name: str) -> Callable[[Any, str], str | None]:
    """A method out of a source file, compiled alone: neither the engine nor what it imports is needed."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"Optional": Optional, "re": re}
    exec(compile(ast.Module([found], []), str(file), "exec"), scope)
    function: Callable[[Any, str], str | None] = scope[name]
    return function


@pytest.mark.engine
@pytest.mark.parametrize(("table", "engine", "file", "name", "trait"), SOURCES)
def test_names_become_what_the_engine_makes_of_them(table: str, engine: str, file: str, name: str, trait: str) -> None:
    folder = package(engine)
    if folder is None or not (folder / file).exists():
        pytest.skip(f"{engine} with {file} is not installed")
    remap = method(folder / file, name)
    head = object()
    model = SimpleNamespace(confidence_head=head, model=SimpleNamespace(confidence_head=head))
    rules, traits = loader(table), frozenset({trait})
    v41 = dspark(published() | {"model_type": "deepseek_v41"}, 3)
    names = [*(spec.name for spec in specs("deepseek-v4-flash-dspark")), *v41, *ODD]
    assert {name: renamed(rules, name, traits) for name in names} == {name: remap(model, name) for name in names}
