"""``attach-dspark`` against the bytes of targets as they were made, and float32 truth of what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4 import E2M1, Made, make
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file, save_file

from ckptkit.cli import main
from ckptkit.drafts.loaders import TABLES, draft_of, load, loader
from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE

Change = Callable[[torch.Tensor], torch.Tensor]
Tensors = dict[str, torch.Tensor]

EXPERT, LINEAR, NORM = "mtp.1.ffn.experts.2.w1", "mtp.0.attn.wq_b", "mtp.2.norm"
LAYOUTS = {
    "serving": [],
    "bf16": ["--dequantize", "bf16"],
    "specforge": ["--layout", "specforge"],
    "trained": ["--layout", "specforge", "--dequantize", "bf16"],
    "hf": ["--layout", "hf"],
}


def run(*arguments: str | Path, code: int = OK) -> None:
    assert main([*map(str, arguments), "--no-progress"]) == code


def extract(source: Path, out: Path, *options: str) -> Path:
    run("extract-dspark", source, out, *options)
    return out


def attach(target: Path, draft: Path, *options: str) -> Path:
    out = target.with_name(f"{target.name}-{draft.name}")
    run("attach-dspark", target, draft, out, *options)
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = USAGE) -> list[str]:
    """The ids of what is wrong; nothing is written."""
    capsys.readouterr()
    out = Path(arguments[2])
    assert main(["attach-dspark", *map(str, arguments), "--json"]) == code
    assert not out.exists()
    return [finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]]


def tensors(folder: Path) -> Tensors:
    """All tensors that the index names, FP4 and scales as bytes."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in sorted(set(index["weight_map"].values()))}
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in files.values() for t in held.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def edit(folder: Path, **changes: Any) -> None:
    found = {key: value for key, value in (config(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(found))


def same(mine: Tensors, theirs: Tensors) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name].view(torch.uint8), value.view(torch.uint8)), name


def train(folder: Path, **changes: Change) -> None:
    """Change tensors of a draft in place."""
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        for name in held.keys() & changes.keys():
            held[name] = changes[name](held[name]).contiguous()
        save_file(held, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("official") / "target"
    made = make(folder, truth=True)
    (folder / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def serving(official: Made) -> Path:
    return extract(official.folder, official.folder.with_name("serving"))


@pytest.fixture(scope="module")
def in_bf16(official: Made) -> Path:
    return extract(official.folder, official.folder.with_name("bf16"), "--dequantize", "bf16")


# --- what did not change -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [{}, {"form": "fp8"}, {"form": "bf16"}, {"scatter": True}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_untrained_draft_gives_the_target_back(layout: str, variant: dict[str, Any], tmp_path: Path) -> None:
    target = make(tmp_path / "target", **variant).folder
    out = attach(target, extract(target, tmp_path / "draft", *LAYOUTS[layout]), "--link", "hard")
    for file in target.glob("*.safetensors"):
        assert (out / file.name).stat().st_ino == file.stat().st_ino
    same(tensors(out), tensors(target))
    assert config(out) == config(target) | {"n_mtp_layers": 3, "sample_from_anchor": True}


def test_v41(tmp_path: Path) -> None:
    target = make(tmp_path / "target", v41=True).folder
    out = attach(target, extract(target, tmp_path / "draft", "--dequantize", "bf16"))
    same(tensors(out), tensors(target))
    written, was = config(out), config(target)
    assert written == was | {"text_config": was["text_config"] | {"n_mtp_layers": 3, "sample_from_anchor": True}}


@pytest.mark.parametrize("lost", ["declared", "none", "nextn"])
def test_a_checkpoint_that_has_no_draft_gets_one(lost: str, official: Made, serving: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", draft=lost).folder
    out = attach(target, serving, "--link", "hard")
    same(tensors(out), tensors(official.folder))
    assert sorted(path.name for path in out.glob("*.safetensors")) == sorted(
        path.name for path in official.folder.glob("*.safetensors")
    )
    assert all(path.stat().st_nlink > 1 for path in out.glob("*.safetensors"))
    written = config(out)
    assert {key: written[key] for key in official.config} == official.config
    for table in TABLES:
        found = load(loader(table), tensors(out), draft_of(written, 3))
        assert (found.missing, found.unexpected, found.twice) == ([], {}, {})
    run("verify", out)


def test_a_whole_checkpoint_as_the_draft(official: Made, tmp_path: Path) -> None:
    target = make(tmp_path / "target", draft="declared").folder
    same(tensors(attach(target, official.folder)), tensors(official.folder))


def test_stages_lie_behind_a_single_file(official: Made, serving: Path, tmp_path: Path) -> None:
    tensors_of_target = {name: value for name, value in tensors(official.folder).items() if not name.startswith("mtp.")}
    target = tmp_path / "target"
    target.mkdir()
    save_file(tensors_of_target, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(official.config))
    out = attach(target, serving)
    same(tensors(out), tensors(official.folder))
    assert len(list(out.glob("model-*-of-00004.safetensors"))) == 4


# --- what was trained --------------------------------------------------------------------------------------


def fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and exponents (uint8) by the rule: 2**ceil(log2(amax / 6)), nearest, of two the even code."""
    groups = values.double().view(len(values), -1, 32)
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
    ratio = (groups / torch.exp2(exponent)[..., None]).view(len(values), -1)
    away = (ratio.abs()[..., None] - E2M1[:8].double()).abs()
    nearest = away == away.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    code = torch.where((nearest & even).any(-1), (nearest & even).int().argmax(-1), nearest.int().argmax(-1))
    code += 8 * torch.signbit(values)
    return (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)


def fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of 128 x 128 blocks (uint8) by the rule: 2**ceil(log2(amax / 448)), torch's own cast."""
    rows, columns = values.shape
    blocks = values.double().view(rows // 128, 128, columns // 128, 128)
    exponent = torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448))
    ratio = (blocks / torch.exp2(exponent)[:, None, :, None]).view(rows, columns)
    return ratio.float().to(torch.float8_e4m3fn).view(torch.uint8), (exponent + 127).to(torch.uint8)


@pytest.mark.parametrize("layout", ["bf16", "trained", "hf"])
def test_what_was_trained_is_quantized_as_the_target_is(layout: str, official: Made, tmp_path: Path) -> None:
    draft = extract(official.folder, tmp_path / "draft", *LAYOUTS[layout])
    noise = torch.Generator().manual_seed(7)

    def nudged(weight: torch.Tensor) -> torch.Tensor:
        return (weight.float() * (1 + 0.1 * torch.randn(weight.shape, generator=noise))).to(weight.dtype)

    trained: Tensors = {}
    for file in sorted(draft.glob("*.safetensors")):
        held = load_file(file)
        if f"{EXPERT}.weight" in held:
            held[f"{EXPERT}.weight"] = trained["expert"] = nudged(held[f"{EXPERT}.weight"])
        if "layers.1.mlp.experts.gate_up_proj" in held:
            stack = held["layers.1.mlp.experts.gate_up_proj"]
            rows = stack.shape[1] // 2
            stack[2, :rows] = trained["expert"] = nudged(stack[2, :rows])
        for name in (f"{LINEAR}.weight", "layers.0.self_attn.q_b_proj.weight"):
            if name in held:
                held[name] = trained["linear"] = nudged(held[name])
        for name in (f"{NORM}.weight", "norm.weight"):
            if name in held:
                held[name] = trained["norm"] = nudged(held[name])
        save_file(held, file, metadata={"format": "pt"})
    target = official.folder
    out = tmp_path / "out"
    run("attach-dspark", target, draft, out, "--link", "hard")
    wanted = tensors(target) | {f"{NORM}.weight": trained["norm"]}
    for module, (codes, scale) in {EXPERT: fp4(trained["expert"]), LINEAR: fp8(trained["linear"])}.items():
        wanted[f"{module}.weight"] = codes.view(wanted[f"{module}.weight"].dtype)
        wanted[f"{module}.scale"] = scale.view(torch.float8_e8m0fnu)
    same(tensors(out), wanted)
    changed = [
        file.name for file in target.glob("*.safetensors") if (out / file.name).stat().st_ino != file.stat().st_ino
    ]
    assert sorted(changed) == [f"model-0000{number}-of-00009.safetensors" for number in (7, 8, 9)]


def test_floats_that_a_trainer_widened_go_back(official: Made, in_bf16: Path, tmp_path: Path) -> None:
    draft = extract(official.folder, tmp_path / "draft", "--dequantize", "bf16")
    train(
        draft, **{f"{NORM}.weight": lambda norm: norm.float(), "mtp.0.ffn.gate.weight": lambda gate: gate.float() * 2}
    )
    out = tmp_path / "out"
    run("attach-dspark", official.folder, draft, out)
    gate = tensors(official.folder)["mtp.0.ffn.gate.weight"]
    same(tensors(out), tensors(official.folder) | {"mtp.0.ffn.gate.weight": gate * 2})


def test_without_a_draft_to_compare_with_values_are_kept(official: Made, in_bf16: Path, tmp_path: Path) -> None:
    """FP4 that was dequantized is held exactly by the rule's scales, if not by the first ones."""
    target = make(tmp_path / "target", draft="declared").folder
    out = attach(target, in_bf16)
    again = extract(out, tmp_path / "again", "--dequantize", "bf16")
    mine, theirs = tensors(again), tensors(in_bf16)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_quantized_draft_in_a_target_in_bf16(official: Made, serving: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", form="bf16", draft="declared").folder
    same(tensors(attach(target, serving)), tensors(make(tmp_path / "whole", form="bf16").folder))


def test_a_trainers_checkpoint(official: Made, in_bf16: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    torch.save({"strategy": "dspark", "draft_state_dict": tensors(in_bf16)}, draft / "training_state.pt")
    plan, out = tmp_path / "plan.jsonl", tmp_path / "out"
    run("attach-dspark", official.folder, draft, out, "--plan", plan)
    same(tensors(out), tensors(official.folder))
    run("apply", plan, tmp_path / "again")
    same(tensors(tmp_path / "again"), tensors(official.folder))


# --- a folder of its own -----------------------------------------------------------------------------------


def test_into_a_subfolder(official: Made, serving: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target", draft="none").folder
    out = attach(target, serving, "--into", "subfolder", "--link", "hard")
    same(tensors(out), tensors(target))
    assert config(out) == config(target)
    drafted = {name: value for name, value in tensors(official.folder).items() if name.startswith("mtp.")}
    same(tensors(out / "dspark"), drafted)
    assert all(path.stat().st_nlink > 1 for path in out.rglob("*.safetensors"))
    same(tensors(extract(out / "dspark", tmp_path / "again")), drafted)


def test_into_a_subfolder_as_it_is(official: Made, in_bf16: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("attach-dspark", official.folder, in_bf16, out, "--into", "subfolder", "--requantize", "none")
    same(tensors(out / "dspark"), tensors(in_bf16))
    assert not config(out / "dspark").keys() & {"quantization_config", "expert_dtype"}
    run("attach-dspark", out, in_bf16, tmp_path / "again", "--into", "subfolder")
    drafted = {name: value for name, value in tensors(official.folder).items() if name.startswith("mtp.")}
    same(tensors(tmp_path / "again" / "dspark"), drafted)
    assert config(tmp_path / "again" / "dspark")["expert_dtype"] == "fp4"


# --- two sources -------------------------------------------------------------------------------------------


def test_a_plan_of_two_sources(
    official: Made, in_bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(tmp_path / "target", draft="declared").folder
    plan = tmp_path / "plan.jsonl"
    run("attach-dspark", target, in_bf16, "--dry-run", "--plan", plan)
    run("apply", plan, tmp_path / "first")
    run("attach-dspark", target, in_bf16, tmp_path / "second")
    same(tensors(tmp_path / "first"), tensors(tmp_path / "second"))
    manifest = json.loads((tmp_path / "first" / "ckptkit.json").read_text())
    assert manifest["source"]["others"] == {"draft": str(in_bf16)}
    header = (in_bf16 / "model-00001-of-00003.safetensors").read_bytes()
    try:
        train(in_bf16, **{"mtp.0.attn_norm.weight": lambda norm: norm.float()})
        run("apply", plan, tmp_path / "third", code=SOURCE)
    finally:
        (in_bf16 / "model-00001-of-00003.safetensors").write_bytes(header)


def test_the_output_lies_in_neither(
    official: Made, serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (official.folder, serving):
        found = refused(capsys, official.folder, serving, folder / "out", code=OUTPUT)
        assert found == ["output.same"]


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"moe_intermediate_size": 64}, "attach.widths"),
        ({"hidden_size": 512, "head_dim": 64}, "attach.widths"),
        ({"vocab_size": 1024}, "attach.vocabulary"),
        ({"dspark_target_layer_ids": [0, 1, 2]}, "attach.taps"),
        ({"num_hidden_layers": 5}, "attach.taps"),
        ({"n_mtp_layers": 2}, "attach.stages"),
        ({"model_type": "deepseek_v3"}, "attach.family"),
        ({"model_type": "deepseek_v41"}, "attach.family"),
    ],
    ids=str,
)
def test_a_draft_that_does_not_fit(
    changes: dict[str, Any], id: str, serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(tmp_path / "target", draft="declared").folder
    edit(target, **changes)
    assert refused(capsys, target, serving, tmp_path / "out") == [id]


def test_a_draft_of_another_target(serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make(tmp_path / "target", seed=1).folder
    assert refused(capsys, target, serving, tmp_path / "out") == ["target-mismatch"]
    run("attach-dspark", target, serving, tmp_path / "out", "--allow", "target-mismatch")


def test_a_draft_that_does_not_say_where_it_was_cut(official: Made, tmp_path: Path) -> None:
    """Its own final norm, which the hf layout calls as targets call theirs, is none of a target's."""
    draft = extract(official.folder, tmp_path / "draft", "--layout", "hf")
    edit(draft, ckptkit_target=None)
    same(tensors(attach(make(tmp_path / "target").folder, draft)), tensors(official.folder))


def test_a_draft_for_another_tokenizer(
    official: Made, serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make(tmp_path / "target").folder
    (target / "tokenizer.json").write_text('{"other": true}')
    assert refused(capsys, target, serving, tmp_path / "out") == ["target-mismatch"]


def test_two_formats_of_experts(
    official: Made, in_bf16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(capsys, official.folder, in_bf16, tmp_path / "out", "--requantize", "none")
    assert found == ["attach.form"]
    eight = extract(make(tmp_path / "eight", form="fp8").folder, tmp_path / "eight-draft")
    assert refused(capsys, official.folder, eight, tmp_path / "out") == ["attach.form"]


def test_a_vendors_copies_stay(official: Made, serving: Path, tmp_path: Path) -> None:
    target = make(tmp_path / "target").folder
    file = target / "model-00007-of-00009.safetensors"
    save_file(load_file(file) | {"mtp.0.embed.weight": torch.zeros(512, 256)}, file)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.0.embed.weight"] = file.name
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    out = attach(target, serving, "--link", "hard", "--allow", "target-mismatch")
    assert (out / file.name).stat().st_ino == file.stat().st_ino


def test_an_incomplete_draft(official: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = extract(official.folder, tmp_path / "draft")
    file = draft / "model-00002-of-00003.safetensors"
    held = load_file(file)
    del held[f"{EXPERT}.scale"]
    save_file(held, file)
    (draft / "model.safetensors.index.json").unlink()
    names = {name: path.name for path in draft.glob("*.safetensors") for name in load_file(path)}
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert refused(capsys, official.folder, draft, tmp_path / "out", code=SOURCE) == ["draft.missing"]


@pytest.mark.parametrize(("draft", "id"), [("nextn", "draft.nextn"), ("declared", "draft.declared-only")])
def test_what_is_no_draft(
    draft: str, id: str, official: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make(tmp_path / "other", draft=draft).folder
    assert refused(capsys, official.folder, other, tmp_path / "out", code=SOURCE) == [id]


# --- dense drafts ------------------------------------------------------------------------------------------

DENSE = {
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 512,
    "block_size": 7, "num_target_layers": 2,
    "dflash_config": {
        "target_layer_ids": [0, 1], "mask_token_id": 511, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "projector_type": "dspark",
    },
}  # fmt: skip


def dense(folder: Path, **changes: Any) -> Path:
    """A one-layer Qwen3 draft for the small Llama of :func:`make.llama`, as SpecForge writes it."""
    sizes: dict[str, tuple[int, ...]] = {
        "fc": (128, 256), "hidden_norm": (128,), "norm": (128,), "markov_head.markov_w1": (512, 8),
        "markov_head.markov_w2": (512, 8), "confidence_head.proj": (1, 136),
        "layers.0.input_layernorm": (128,), "layers.0.post_attention_layernorm": (128,),
        "layers.0.self_attn.q_norm": (32,), "layers.0.self_attn.k_norm": (32,),
        "layers.0.mlp.gate_proj": (64, 128), "layers.0.mlp.up_proj": (64, 128), "layers.0.mlp.down_proj": (128, 64),
        **{f"layers.0.self_attn.{name}_proj": (128, 128) for name in "qkvo"},
    }  # fmt: skip
    held = {f"{name}.weight": torch.randn(size).to(torch.bfloat16) for name, size in sizes.items()}
    return checkpoint(folder, held | {"confidence_head.proj.bias": torch.zeros(1)}, DENSE | changes)


def test_a_dense_draft_goes_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = list(llama().items())
    target = checkpoint(tmp_path / "target", [dict(held[:9]), dict(held[9:])], llama_config())
    draft = dense(tmp_path / "draft")
    assert refused(capsys, target, draft, tmp_path / "out") == ["attach.family"]
    plan, out = tmp_path / "plan.jsonl", tmp_path / "out"
    run("attach-dspark", target, draft, out, "--into", "subfolder", "--link", "hard", "--plan", plan)
    same(tensors(out), tensors(target))
    same(tensors(out / "dspark"), load_file(draft / "model.safetensors"))
    assert config(out / "dspark")["target_layer_ids"] == [0, 1]
    run("apply", plan, tmp_path / "again")
    same(tensors(tmp_path / "again" / "dspark"), load_file(draft / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"hidden_size": 64}, "attach.widths"),
        ({"vocab_size": 1024}, "attach.vocabulary"),
        ({"num_hidden_layers": 1}, "attach.taps"),
    ],
    ids=str,
)
def test_a_dense_draft_that_does_not_fit(
    changes: dict[str, int], id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = checkpoint(tmp_path / "target", llama(), llama_config() | changes)
    draft = dense(tmp_path / "draft")
    assert set(refused(capsys, target, draft, tmp_path / "out", "--into", "subfolder")) == {id}
