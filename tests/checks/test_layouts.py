"""What ``ckptkit unpack`` makes, against its source: every weight is found in its place, and every damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.test_unpack import (
    EXPERTS,
    HIDDEN,
    INTER,
    dsv4,
    gpt_oss,
    mxfp4_ct,
    nvfp4,
    stacked,
    stacked_fp8,
    tensors_of,
    without,
)
from safetensors.torch import save_file

from ckptkit.checks import Subject
from ckptkit.checks.matching import Matched
from ckptkit.cli import main
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source

from .subjects import edit, findings, outcome, results, stored

WEIGHTS = 3 * EXPERTS * HIDDEN * INTER  # numbers in all experts
BIASES = EXPERTS * (2 * INTER + HIDDEN)
PATH = "model.layers.0.mlp.experts"
DS_PATH = "layers.0.ffn.experts"


def unpack(source: Path, layout: str, name: str = "out") -> Path:
    out = source.parent / name
    assert main(["unpack", str(source), str(out), "--layout", layout, "-q", "--no-progress"]) == 0
    return out


def matched(out: Path, source: Path) -> Matched:
    with open_source(str(out)) as made, open_source(str(source)) as against:
        return Subject(open_checkpoint(made), against=open_checkpoint(against)).matched


def assert_same_values(out: Path, source: Path) -> None:
    found = outcome(out, source)
    assert found.findings == []
    assert {results(found)[id] for id in ("numeric.exact", "numeric.error", "numeric.missing")} == {"ok"}


# --- sound results -----------------------------------------------------------------------------------------

CONTAINERS = {"dsv4": dsv4, "mxfp4-ct": mxfp4_ct, "gpt-oss": gpt_oss}


@pytest.mark.parametrize("there", ["dsv4", "mxfp4-ct", "gpt-oss", "codes"])
@pytest.mark.parametrize("here", CONTAINERS)
def test_containers_of_fp4(here: str, there: str, tmp_path: Path) -> None:
    if here == there:
        return
    source = CONTAINERS[here](tmp_path)
    out = unpack(source, there)
    assert_same_values(out, source)
    compared = sum(pair.made.rows * pair.made.cols for pair in matched(out, source).pairs)
    biases = 0 if here != "gpt-oss" or there == "codes" else BIASES
    assert compared == WEIGHTS + biases
    back = unpack(out, "packed" if there == "codes" else here, "back")
    assert_same_values(back, out)
    assert_same_values(back, source)


@pytest.mark.parametrize("there", CONTAINERS)
@pytest.mark.parametrize("here", CONTAINERS)
def test_codes_against_any_container(here: str, there: str, tmp_path: Path) -> None:
    source = CONTAINERS[here](tmp_path)
    codes = unpack(source, "codes", "codes")
    out = unpack(codes, there)
    assert_same_values(out, codes)
    assert_same_values(out, source)


def test_codes_of_nvfp4(tmp_path: Path) -> None:
    source = nvfp4(tmp_path)
    out = unpack(source, "codes")
    assert_same_values(out, source)
    assert_same_values(unpack(out, "packed", "back"), out)
    assert len(matched(out, source).pairs) == 3


@pytest.mark.parametrize(
    ("model_type", "suffix"), [("qwen3_5_moe", ""), ("qwen3_5_moe", ".weight"), ("llama4", ""), ("gpt_oss", "")]
)
def test_experts_of_floats(model_type: str, suffix: str, tmp_path: Path) -> None:
    source = stacked(tmp_path, model_type, suffix)
    out = unpack(source, "per-expert")
    assert_same_values(out, source)
    compared = sum(pair.made.rows * pair.made.cols for pair in matched(out, source).pairs)
    assert compared == WEIGHTS + (BIASES if model_type == "gpt_oss" else 0)
    assert_same_values(unpack(out, "fused", "back"), out)


def test_experts_of_fp8(tmp_path: Path) -> None:
    source = stacked_fp8(tmp_path)
    out = unpack(source, "per-expert")
    assert_same_values(out, source)
    assert_same_values(unpack(out, "fused", "back"), out)


@pytest.mark.parametrize("layout", ["gpt-oss", "codes", "mxfp4-ct"])
def test_the_config_of_a_result_for_exchange_is_no_fault(layout: str, tmp_path: Path) -> None:
    from ckptkit.checks import Level, run

    with open_source(str(unpack(dsv4(tmp_path), layout))) as out:
        found = run(Subject(open_checkpoint(out)), Level.STATIC, lambda id: id.startswith(("config.quant", "index.")))
    assert found.findings == []


# --- damages -----------------------------------------------------------------------------------------------

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Damage = Callable[[Bytes], None]


def damage(folder: Path, tensor: str, change: Damage, *shape: int) -> None:
    """Change a tensor's bytes, [*shape, bytes of an element]."""
    content = np.frombuffer(stored(folder, tensor), np.uint8).copy().reshape(*shape, -1)
    before = content.copy()
    change(content)
    assert not np.array_equal(before, content)
    edit(folder, tensor, 0, content.tobytes())


def swapped(one: Any, other: Any) -> Damage:
    """Exchange two parts."""

    def change(content: Bytes) -> None:
        content[one], content[other] = content[other].copy(), content[one].copy()

    return change


def swap_halves(content: Bytes) -> None:
    """Of the 21st byte, or the first after it that has two different halves."""
    flat = content.reshape(-1)
    at = next(at for at in range(20, len(flat)) if flat[at] % 16 != flat[at] // 16)
    flat[at] = flat[at] >> 4 | (flat[at] & 15) << 4


def one_more(content: Bytes) -> None:
    content.reshape(-1)[3] += 1


def negate_a_zero(content: Bytes) -> None:
    flat = content.reshape(-1)
    flat[np.flatnonzero(flat == 0)[0]] = 8


def no_code(content: Bytes) -> None:
    content.reshape(-1)[7] = 16


GATE_UP = (EXPERTS, INTER, 2, HIDDEN // 2)  # of gpt-oss' blocks
DAMAGES = [
    (dsv4, "mxfp4-ct", f"{DS_PATH}.1.w3.weight_packed", swap_halves, (1,)),
    (dsv4, "mxfp4-ct", f"{DS_PATH}.2.w2.weight_scale", one_more, (1,)),
    (dsv4, "codes", f"{DS_PATH}.1.w1.weight_codes", negate_a_zero, (1,)),
    (dsv4, "codes", f"{DS_PATH}.1.w1.weight_codes", no_code, (1,)),
    (dsv4, "codes", f"{DS_PATH}.1.w1.scale", one_more, (1,)),
    (dsv4, "gpt-oss", f"{DS_PATH}.gate_up_proj_blocks", swap_halves, (1,)),
    (dsv4, "gpt-oss", f"{DS_PATH}.gate_up_proj_blocks", swapped(0, 1), GATE_UP),
    (dsv4, "gpt-oss", f"{DS_PATH}.gate_up_proj_blocks", swapped((2, slice(None), 0), (2, slice(None), 1)), GATE_UP),
    (dsv4, "gpt-oss", f"{DS_PATH}.down_proj_scales", one_more, (1,)),
    (mxfp4_ct, "dsv4", f"{PATH}.1.up_proj.weight", swap_halves, (1,)),
    (mxfp4_ct, "gpt-oss", f"{PATH}.down_proj_blocks", swapped(0, 2), (EXPERTS, HIDDEN)),
    (gpt_oss, "codes", f"{PATH}.gate_up_proj_codes", swapped((0, 5), (1, 5)), (EXPERTS, 2 * INTER)),
    (gpt_oss, "mxfp4-ct", f"{PATH}.1.gate_proj.bias", one_more, (1,)),
    (gpt_oss, "dsv4", f"{PATH}.0.down_proj.scale", one_more, (1,)),
    (nvfp4, "codes", "model.layers.0.mlp.up_proj.weight_codes", negate_a_zero, (1,)),
    (nvfp4, "codes", "model.layers.0.mlp.up_proj.weight_global_scale", one_more, (1,)),
]


@pytest.mark.parametrize(("make", "layout", "tensor", "change", "shape"), DAMAGES)
def test_a_damage_to_fp4_is_found_and_named(
    make: Callable[[Path], Path], layout: str, tensor: str, change: Damage, shape: tuple[int, ...], tmp_path: Path
) -> None:
    source = make(tmp_path)
    out = unpack(source, layout)
    damage(out, tensor, change, *shape)
    assert named(findings(out, source)) == {("numeric.exact", module_of(tensor))}


def module_of(tensor: str) -> str:
    """The name without what says which part of the weight the tensor is."""
    for part in ("_codes", "_blocks", "_scales", ".weight_packed", ".weight_scale", ".weight_global_scale", ".scale"):
        tensor = tensor.removesuffix(".weight" + part).removesuffix(part)
    return tensor.removesuffix(".weight")


def named(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.id, module_of(finding.tensor or "")) for finding in found}


FLOATS = [
    ("qwen3_5_moe", "", swapped(0, 1), (EXPERTS, 2, INTER, HIDDEN)),
    ("qwen3_5_moe", ".weight", swapped((1, 0), (1, 1)), (EXPERTS, 2, INTER, HIDDEN)),
    ("llama4", "", swapped(1, 2), (EXPERTS, HIDDEN, 2, INTER)),
    ("llama4", "", swapped((0, slice(None), 0), (0, slice(None), 1)), (EXPERTS, HIDDEN, 2, INTER)),
    ("gpt_oss", "", swapped((0, slice(None), slice(None), 0), (0, slice(None), slice(None), 1)), (EXPERTS, HIDDEN, INTER, 2)),
    ("gpt_oss", "", one_more, (1,)),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "suffix", "change", "shape"), FLOATS)
def test_a_damage_to_stacked_floats_is_found_and_named(
    model_type: str, suffix: str, change: Damage, shape: tuple[int, ...], tmp_path: Path
) -> None:
    alone = unpack(stacked(tmp_path, model_type, suffix), "per-expert", "alone")
    out = unpack(alone, "fused")
    damage(out, f"{PATH}.gate_up_proj{suffix}", change, *shape)
    assert {(f.id, f.tensor) for f in findings(out, alone)} == {("numeric.exact", f"{PATH}.gate_up_proj{suffix}")}


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llama4", "gpt_oss"])
def test_gate_and_up_exchanged_are_found_and_named(model_type: str, tmp_path: Path) -> None:
    source = stacked(tmp_path, model_type)
    out = unpack(source, "per-expert")
    gate, up = (f"{PATH}.1.{name}_proj.weight" for name in ("gate", "up"))
    one, other = stored(out, gate), stored(out, up)
    edit(out, gate, 0, other)
    edit(out, up, 0, one)
    assert {(f.id, f.tensor) for f in findings(out, source)} == {("numeric.exact", gate), ("numeric.exact", up)}


@pytest.mark.parametrize("tensor", ["down_proj.weight", "up_proj.weight_scale_inv"])
def test_a_damage_to_stacked_fp8_is_found_and_named(tensor: str, tmp_path: Path) -> None:
    source = stacked_fp8(tmp_path)
    out = unpack(source, "per-expert")
    damage(out, f"{PATH}.2.{tensor}", one_more, 1)
    assert named(findings(out, source)) == {("numeric.exact", module_of(f"{PATH}.2.{tensor}".replace("_inv", "")))}


def test_the_place_of_a_damage_is_that_in_the_stack(tmp_path: Path) -> None:
    """Row 2 x 30 + 1 of expert 2 is its up's row 30; a byte is two columns."""
    source = dsv4(tmp_path)
    out = unpack(source, "gpt-oss")
    tensor, row = f"{DS_PATH}.gate_up_proj_blocks", 2 * 2 * INTER + 61
    at = row * HIDDEN // 2 + 20
    edit(out, tensor, at, bytes([stored(out, tensor)[at] ^ 0x70]))
    (found,) = findings(out, source)
    worst = found.data["worst"]
    assert (worst["row"], worst["column"], found.data["beyond"]) == (row, 41, 1)
    assert found.data["source"] == f"{DS_PATH}.2.w3.weight"


# --- what is not there -------------------------------------------------------------------------------------


def test_an_expert_that_is_gone_is_missed(tmp_path: Path) -> None:
    source = mxfp4_ct(tmp_path)
    out = unpack(source, "gpt-oss")
    back = unpack(out, "mxfp4-ct", "back")
    (back / "ckptkit.json").unlink()
    for part in ("weight_packed", "weight_scale"):
        without(back, f"{PATH}.2.up_proj.{part}")
    assert [(f.id, f.tensor) for f in findings(back, out)] == [
        ("numeric.missing", f"{PATH}.gate_up_proj_blocks ({PATH}.2.up_proj)")
    ]
    assert [(f.id, f.tensor) for f in findings(out, back)] == [
        ("numeric.missing", f"{PATH}.gate_up_proj_blocks ({PATH}.2.up_proj)")
    ]


def test_another_number_of_outputs_is_told(tmp_path: Path) -> None:
    source = stacked(tmp_path, "llama4")
    out = unpack(source, "per-expert")
    tensors, name = tensors_of(out), f"{PATH}.1.up_proj.weight"
    tensors[name] = tensors[name][:50].contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert [(f.id, f.tensor) for f in findings(out, source)] == [("numeric.shape", name)]


@pytest.mark.parametrize("note", [{"names": 5, "columns": "yes", "was": {"model_type": "x"}}, {"was": {}}, [], None])
def test_a_broken_note_of_the_layout_is_no_hindrance(note: Any, tmp_path: Path) -> None:
    source = stacked(tmp_path, "llama4")
    out = unpack(source, "per-expert")
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"ckptkit_layout": note}), "utf-8")
    assert_same_values(out, source)
