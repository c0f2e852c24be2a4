"""What ``extract-dspark`` and ``attach-dspark`` refuse, declare and mend: each defect is put into a whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4 import Dims, Made, make
from safetensors.torch import load_file, save_file
from told import Told, teller

from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE

SMALL = Dims(hidden=128, experts=2, layers=3, vocab=96, rank=32)
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
NAN = float("nan")


@pytest.fixture
def extract(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "extract-dspark")


@pytest.fixture
def attach(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "attach-dspark")


@pytest.fixture
def target(tmp_path: Path) -> Made:
    return make(tmp_path / "target", SMALL)


def ids(document: dict[str, Any]) -> list[str]:
    return sorted(finding["id"] for finding in document["findings"])


def one(document: dict[str, Any], id: str) -> dict[str, Any]:
    (found,) = [finding for finding in document["findings"] if finding["id"] == id]
    return dict(found)


def configure(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: edit(tensors[name])}, file, metadata={"format": "pt"})


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.flatten()
        flat[3] = value
        return flat.reshape(tensor.shape)

    return edit


def last_byte(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.view(torch.uint8).clone()
    changed[0, 0] = 255
    return changed.view(tensor.dtype)


def rename(folder: Path, to: Callable[[str], str]) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({to(name): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = {to(name): file for name, file in document["weight_map"].items()}
    index.write_text(json.dumps(document))


# --- NaN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("mtp.0.attn_norm.weight", filled(NAN)),
        ("mtp.2.markov_head.markov_w1.weight", filled(NAN)),
        ("mtp.1.hc_attn_fn", filled(NAN)),
        ("mtp.1.ffn.experts.1.w3.scale", last_byte),
        ("mtp.1.attn.wkv.scale", last_byte),
    ],
)
def test_nan_is_told_where_values_are_read(
    name: str, edit: Callable[[torch.Tensor], torch.Tensor], target: Made, tmp_path: Path, extract: Told, attach: Told
) -> None:
    extract(target.folder, tmp_path / "draft")
    change(tmp_path / "draft", name, edit)
    asked = (tmp_path / "draft", tmp_path / "back", "--base", target.folder)
    found = extract(*asked, code=SOURCE)
    assert (ids(found), found["findings"][0]["tensor"]) == (["data.nan"], name)
    found = attach(target.folder, tmp_path / "draft", tmp_path / "with", code=SOURCE)
    assert (ids(found), found["findings"][0]["tensor"]) == (["data.nan"], name)
    assert not (tmp_path / "with").exists()


def test_nan_among_dequantized_floats(target: Made, tmp_path: Path, extract: Told) -> None:
    change(target.folder, "mtp.2.markov_head.markov_w2.weight", filled(NAN))
    found = extract(target.folder, tmp_path / "draft", "--dequantize", "bf16", code=SOURCE)
    assert ids(found) == ["data.nan"]


# --- what is declared --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        None,
        {"quant_method": "fp8"},
        FP8 | {"modules_to_not_convert": ["mtp"]},
        FP8 | {"ignored_layers": ["re:.*mtp.*experts.*", "lm_head"]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:mtp.*"], "config_groups": {}},
    ],
    ids=str,
)
def test_the_config_written_declares_what_is_stored(
    table: dict[str, Any] | None, target: Made, tmp_path: Path, extract: Told, attach: Told
) -> None:
    extract(target.folder, tmp_path / "draft")
    configure(target.folder, lambda config: config.update(quantization_config=table))
    found = extract(target.folder, tmp_path / "out")
    assert ids(found) == ["draft.form"]
    written = config_of(tmp_path / "out")
    told = {key: value for key, value in written["quantization_config"].items() if key in FP8}
    assert written["expert_dtype"] == "fp4"
    assert told == (
        FP8
        if table != {"quant_method": "fp8"}
        else {**table, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
        assert not [entry for entry in written["quantization_config"].get(key, []) if "mtp" in entry]
    if table is not None:
        found = attach(target.folder, tmp_path / "draft", tmp_path / "with", "--allow", "target-mismatch", code=USAGE)
        assert ids(found) == ["attach.form"]


# --- the figures of a config -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "written"),
    [
        ({"compress_ratios": [0, 4, 128]}, [0, 4, 128, 0, 0, 0]),
        ({"compress_ratios": [0, 4, 128, 4, 4, 4]}, [0, 4, 128, 0, 0, 0]),
        ({"compress_ratios": None}, None),
        ({"dspark_target_layer_ids": [1, 1, 2]}, None),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None),
    ],
    ids=str,
)
def test_figures_that_engines_need(
    edit: dict[str, Any], written: list[int] | None, target: Made, tmp_path: Path, extract: Told
) -> None:
    configure(target.folder, lambda config: config.update(edit))
    assert set(ids(extract(target.folder, tmp_path / "out", code=SOURCE))) == {"draft.config"}
    code = OK if written else SOURCE
    found = extract(target.folder, tmp_path / "out", "--allow", "draft.config", code=code)
    if written:
        assert config_of(tmp_path / "out")["compress_ratios"] == written
        assert one(found, "draft.config")["hint"] is None


def test_another_markov_head_is_settled(target: Made, tmp_path: Path, extract: Told) -> None:
    configure(target.folder, lambda config: config.update(dspark_markov_head_type="rnn"))
    assert ids(extract(target.folder, tmp_path / "out", code=SOURCE)) == ["draft.config"]
    extract(target.folder, tmp_path / "out", "--allow", "draft.config")
    assert config_of(tmp_path / "out")["dspark_markov_head_type"] == "vanilla"


@pytest.mark.parametrize(
    ("key", "right"),
    [("hidden_size", 128), ("n_routed_experts", 2), ("vocab_size", 96), ("dspark_markov_rank", 32), ("head_dim", 128)],
)
def test_one_wrong_size_is_one_finding(key: str, right: int, target: Made, tmp_path: Path, extract: Told) -> None:
    configure(target.folder, lambda config: config.update({key: right * 2}))
    assert ids(extract(target.folder, tmp_path / "out", code=SOURCE)) == ["draft.config"]
    extract(target.folder, tmp_path / "out", "--allow", "draft.config")
    assert config_of(tmp_path / "out")[key] == right


def test_all_missing_figures_are_told_at_once(target: Made, tmp_path: Path, extract: Told) -> None:
    gone = ("hidden_size", "hc_mult", "q_lora_rank")
    configure(target.folder, lambda config: [config.pop(key) for key in gone])
    found = extract(target.folder, tmp_path / "out", code=SOURCE)
    assert {item["data"]["field"] for item in found["findings"] if item["id"] == "config.draft-field"} == set(gone)
    assert all(item["hint"] for item in found["findings"])


def test_mixers_beside_quantized_matrices_are_f32(target: Made, tmp_path: Path, extract: Told) -> None:
    change(target.folder, "mtp.0.hc_attn_fn", torch.Tensor.bfloat16)
    found = extract(target.folder, tmp_path / "out", code=SOURCE)
    assert (ids(found), found["findings"][0]["tensor"]) == (["draft.dtype"], "mtp.0.hc_attn_fn")


# --- the cause, not what follows from it -------------------------------------------------------------------


def test_scales_of_another_ending_are_one_rename(target: Made, tmp_path: Path, extract: Told) -> None:
    def other(name: str) -> str:
        return name.replace(".scale", ".weight_scale") if name.startswith("mtp.") else name

    rename(target.folder, other)
    found = extract(target.folder, tmp_path / "out", code=SOURCE)
    assert ids(found) == ["draft.unknown"]
    assert found["findings"][0]["hint"].startswith(f"ckptkit reshard {target.folder} {target.folder}-mended --rename ")


def test_a_missing_last_stage_is_that(target: Made, tmp_path: Path, extract: Told) -> None:
    for file in target.folder.glob("*.safetensors"):
        if any(name.startswith("mtp.2.") for name in load_file(file)):
            file.unlink()
    index = target.folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = {name: file for name, file in document["weight_map"].items() if name[:6] != "mtp.2."}
    index.write_text(json.dumps(document))
    found = extract(target.folder, tmp_path / "out", code=SOURCE)
    assert [item["tensor"] for item in found["findings"] if item["id"] == "draft.stage-missing"] == ["mtp.2"]
    assert not [item for item in found["findings"] if item["id"] == "draft.missing"]


def test_heads_at_both_ends_are_one_finding(target: Made, tmp_path: Path, extract: Told) -> None:
    heads, index = {}, json.loads((target.folder / "model.safetensors.index.json").read_text())
    for file in target.folder.glob("*.safetensors"):
        heads |= {name: tensor for name, tensor in load_file(file).items() if name.startswith("mtp.2.markov_head.")}
    for file in target.folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "mtp.0.main_norm.weight" in tensors:
            more = {name.replace("mtp.2", "mtp.0"): tensor for name, tensor in heads.items()}
            save_file(tensors | more, file, metadata={"format": "pt"})
            index["weight_map"] |= dict.fromkeys(more, file.name)
    (target.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = one(extract(target.folder, tmp_path / "out", code=SOURCE), "draft.misplaced")
    assert f"reshard {target.folder} {target.folder}-mended --drop 'mtp.0.markov_head.*'" in found["hint"]


def test_tensors_under_another_prefix_are_named(target: Made, tmp_path: Path, extract: Told) -> None:
    rename(target.folder, lambda name: f"model.{name}")
    found = extract(target.folder, tmp_path / "out", code=SOURCE)
    assert ids(found) == ["draft.declared-only"]
    assert found["findings"][0]["hint"].endswith("--rename model.mtp.=mtp.")
    assert found["findings"][0]["tensor"].startswith("model.mtp.")


# --- cut drafts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["specforge", "hf"])
def test_a_cut_draft_is_read_again(layout: str, target: Made, tmp_path: Path, extract: Told) -> None:
    extract(target.folder, tmp_path / "cut", "--stages", "0-1", "--layout", layout)
    assert config_of(tmp_path / "cut")["compress_ratios"] == [0, 4, 128, 0, 0]
    extract(tmp_path / "cut", tmp_path / "again", "--layout", "specforge")
    assert config_of(tmp_path / "again")["dflash_config"]["num_layers"] == 2
    assert "extract.stages" in ids(extract(tmp_path / "cut", tmp_path / "served", code=USAGE))


# --- attaching ---------------------------------------------------------------------------------------------


def test_a_draft_is_no_target(target: Made, tmp_path: Path, extract: Told, attach: Told) -> None:
    extract(target.folder, tmp_path / "draft")
    for first in ("draft", "again"):
        extract(target.folder, tmp_path / "again", "--layout", "specforge", "--overwrite")
        found = attach(tmp_path / first, tmp_path / "draft", tmp_path / "out", code=USAGE)
        assert ids(found) == ["attach.target"]


def test_a_draft_without_a_record_of_its_target_is_told(
    target: Made, tmp_path: Path, extract: Told, attach: Told
) -> None:
    extract(target.folder, tmp_path / "draft")
    assert ids(attach(target.folder, tmp_path / "draft", tmp_path / "one")) == []
    configure(tmp_path / "draft", lambda config: config.pop("ckptkit_target"))
    assert ids(attach(target.folder, tmp_path / "draft", tmp_path / "two")) == ["attach.target-unknown"]


def test_out_is_looked_at_before_values_are_read(
    target: Made, tmp_path: Path, extract: Told, attach: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(target.folder, tmp_path / "draft", "--layout", "hf")
    read: list[object] = []
    for command in ("extract_dspark", "attach_dspark"):
        monkeypatch.setattr(f"ckptkit.commands.{command}.same_values", lambda *given: read.append(given) or set())
    inside = target.folder / "out"
    assert ids(attach(target.folder, tmp_path / "draft", inside, code=OUTPUT)) == ["output.same"]
    assert ids(extract(tmp_path / "draft", inside, "--base", target.folder, code=OUTPUT)) == ["output.same"]
    assert ids(attach(target.folder, tmp_path / "draft", code=USAGE)) == ["usage.arguments"]
    assert read == []


def test_an_unknown_id_to_allow_is_refused(target: Made, tmp_path: Path, extract: Told, attach: Told) -> None:
    assert ids(extract(target.folder, tmp_path / "out", "--allow", "foo", code=USAGE)) == ["usage.pattern-unmatched"]
    found = attach(target.folder, target.folder, tmp_path / "out", "--allow", "foo", code=USAGE)
    assert ids(found) == ["usage.pattern-unmatched"]


# --- a trainer's state -------------------------------------------------------------------------------------


def test_each_unreadable_state_has_its_own_sentence(tmp_path: Path, extract: Told) -> None:
    state, run = tmp_path / "run" / "training_state.pt", tmp_path / "run"
    run.mkdir()
    messages = set()
    torch.save({"draft_state_dict": {"a": torch.ones(64)}}, state)
    whole = state.read_bytes()
    for data in (b"", b"junk" * 9, whole[: len(whole) // 2]):
        state.write_bytes(data)
        found = extract(run, tmp_path / "out", code=SOURCE)
        assert ids(found) == ["source.training-state"]
        messages.add(found["findings"][0]["message"])
    torch.save({"draft_state_dict": {"a": torch.ones(1)}, "args": Path("x")}, state)
    found = one(extract(run, tmp_path / "out", code=SOURCE), "source.training-state")
    assert found["data"]["globals"] == ["pathlib.PosixPath"]
    messages.add(found["message"])
    assert len(messages) == 4
    assert not any("\x1b" in message or "Weights only" in message for message in messages)
