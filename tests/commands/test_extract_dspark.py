"""``ckptkit extract-dspark`` as a user runs it: bytes against the source, values against the fixture's float32 truth."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4 import Dims, Made, make
from headers import materialize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from told import Told, teller

from ckptkit.cli import main
from ckptkit.drafts.loaders import TABLES, Loaded, draft_of, load, loader
from ckptkit.drafts.tables import BF16
from ckptkit.errors import OK, SOURCE, USAGE
from ckptkit.files.source import Source

Tensors = dict[str, torch.Tensor]
SMALL = Dims(hidden=128, experts=3, draft_experts=2, layers=3, vocab=96, rank=32)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "extract-dspark")


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = make(tmp_path_factory.mktemp("official") / "target", SMALL, truth=True)
    (made.folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return made


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def drafted(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}


def config_of(folder: Path, file: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return found.keys() == expected.keys() and all(
        (tensor.dtype, tensor.shape, raw(tensor)) == (expected[name].dtype, expected[name].shape, raw(expected[name]))
        for name, tensor in found.items()
    )


def same_files(one: Path, other: Path) -> bool:
    """All files but the manifests, which say when and from what they were made."""
    names = sorted(path.name for path in one.iterdir() if path.name != "ckptkit.json")
    there = sorted(path.name for path in other.iterdir() if path.name != "ckptkit.json")
    return names == there and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint in place, each shard as a file of its own."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        with contextlib.suppress(KeyError):
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})


def complete(loaded: Loaded) -> bool:
    return not (loaded.unexpected or loaded.missing or loaded.twice)


def ids(document: Mapping[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


# --- serving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [{}, {"form": "fp8"}, {"form": "bf16"}, {"v41": True}, {"scatter": True}], ids=str)
def test_serving_is_the_draft_verbatim(variant: dict[str, Any], tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, **variant)
    told(made.folder, tmp_path / "draft")
    assert same_bits(tensors_of(tmp_path / "draft"), drafted(tensors_of(made.folder)))
    index = config_of(tmp_path / "draft", "model.safetensors.index.json")
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "draft" / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118
    config = config_of(tmp_path / "draft")
    text = config["text_config"] if variant.get("v41") else config
    assert (text.pop("n_mtp_layers"), text.pop("sample_from_anchor")) == (3, True)
    del config["ckptkit_target"]
    assert config == made.config


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("variant", [{}, {"form": "fp8"}, {"v41": True}], ids=str)
def test_serving_fills_what_engines_build(table: str, variant: dict[str, Any], tmp_path: Path, told: Told) -> None:
    told(make(tmp_path / "target", SMALL, **variant).folder, tmp_path / "draft")
    names = tensors_of(tmp_path / "draft")
    loaded = load(loader(table), names, draft_of(config_of(tmp_path / "draft"), 3))
    assert complete(loaded)
    passed_over = {name for name in names if name.endswith("bias_vl")} if table == "sglang_v4" else set()
    assert set(loaded.dropped) == passed_over


def test_one_stage_has_an_index_too(tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", Dims(hidden=128, experts=1, stages=1, vocab=64))
    told(made.folder, tmp_path / "draft")
    index = config_of(tmp_path / "draft", "model.safetensors.index.json")
    assert index["weight_map"].keys() == drafted(made.shapes).keys()  # type: ignore[arg-type]
    assert config_of(tmp_path / "draft")["n_mtp_layers"] == 1


def test_only_the_draft_and_samples_of_the_target_are_read(
    official: Made, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, int, int]] = []
    read_into = Source.read_into

    def counted(self: Source, file: str, start: int, view: memoryview) -> None:
        spans.append((file, start, start + len(view)))
        read_into(self, file, start, view)

    monkeypatch.setattr(Source, "read_into", counted)
    told(official.folder, tmp_path / "draft", "--no-verify")
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in official.folder.glob("*.safetensors"))
    size = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "draft").values())
    sampled = 2 * 16 * 2 * SMALL.hidden + 2 * SMALL.hidden
    small = sum(path.stat().st_size for path in official.folder.glob("*.json"))
    assert (
        size
        <= sum(stop - start for file, start, stop in spans if file.endswith(".safetensors"))
        <= size + headers + 8 * 20 + sampled
    )
    assert sum(stop - start for _, start, stop in spans) <= size + headers + 8 * 20 + sampled + 3 * small


def test_the_result_says_how_it_is_launched(official: Made, tmp_path: Path, told: Told) -> None:
    for how, options in {"serving": [], "dense": ["--dequantize", "bf16"]}.items():
        out = tmp_path / how
        launch = told(official.folder, out, *options)["plan"]["settings"]["launch"]
        assert launch == config_of(out, "ckptkit.json")["settings"]["launch"]
        assert f"--speculative-algorithm DSPARK --speculative-draft-model-path {out}" in launch["SGLang"]
        assert ("--speculative-draft-model-quantization unquant" in launch["SGLang"]) == (how == "dense")
        assert '"num_speculative_tokens": 5' in launch["vLLM"]
        assert ("not loadable beside a quantized target" in launch["vLLM"]) == (how == "dense")


def test_embeddings_are_taken_along_on_demand(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "draft", "--embeddings", "copy")
    expected = tensors_of(official.folder)
    wanted = drafted(expected) | {name: expected[name] for name in ("embed.weight", "head.weight")}
    assert same_bits(tensors_of(tmp_path / "draft"), wanted)
    told(tmp_path / "draft", tmp_path / "without")
    assert same_bits(tensors_of(tmp_path / "without"), drafted(expected))
    told(tmp_path / "without", tmp_path / "none", "--embeddings", "copy", code=USAGE)


def test_the_target_is_known_again_after_conversions(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "one")
    told(tmp_path / "one", tmp_path / "two", "--layout", "hf")
    told(tmp_path / "two", tmp_path / "three", "--layout", "specforge")
    found = [config_of(tmp_path / name)["ckptkit_target"] for name in ("one", "two", "three")]
    assert found[0] == found[1] == found[2]
    assert found[0].keys() == {"embedding", "head", "norm", "tokenizer"}


@pytest.mark.parametrize(
    ("options", "size"),
    [([], 10_862_838_300), (["--dequantize", "bf16"], 39_696_553_884), (["--layout", "hf"], 39_696_553_884)],
)
def test_the_official_draft_has_as_many_bytes_as_published(
    options: list[str], size: int, tmp_path: Path, told: Told
) -> None:
    target = materialize("deepseek-v4-flash-dspark", tmp_path / "flash")
    document = told(target, "--dry-run", *options)
    assert sum(rule["bytes_written"] for rule in document["plan"]["rules"]) == size
    assert not document["findings"]


# --- numbers -----------------------------------------------------------------------------------------------


def expected_dense(made: Made) -> Tensors:
    plain = {name: t for name, t in drafted(tensors_of(made.folder)).items() if not name.endswith(".scale")}
    return {name: made.truth[name].to(torch.bfloat16) if name in made.truth else t for name, t in plain.items()}


@pytest.mark.parametrize("variant", [{}, {"form": "fp8"}, {"v41": True}, {"scatter": True}], ids=str)
def test_dequantized_is_the_truth(variant: dict[str, Any], tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, truth=True, **variant)
    told(made.folder, tmp_path / "draft", "--dequantize", "bf16")
    assert same_bits(tensors_of(tmp_path / "draft"), expected_dense(made))
    config = config_of(tmp_path / "draft")
    assert not {"quantization_config", "expert_dtype"} & (config.keys() | config.get("text_config", {}).keys())
    names = tensors_of(tmp_path / "draft")
    for table in TABLES:
        loaded = load(loader(table), names, draft_of(config, 3, BF16))
        assert complete(loaded)


def test_fp8_holds_the_same_values(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "draft", "--dequantize", "fp8")
    found = tensors_of(tmp_path / "draft")
    for name, truth in official.truth.items():
        if name.startswith("mtp."):
            scale = found[name.replace(".weight", ".scale")].float()
            each = scale.repeat_interleave(128, 0)[: len(truth)].repeat_interleave(128, 1)[:, : truth.shape[1]]
            assert found[name].dtype == torch.float8_e4m3fn
            assert torch.equal(found[name].float() * each, truth), name
    assert config_of(tmp_path / "draft")["expert_dtype"] == "fp8"
    for table in TABLES:
        loaded = load(loader(table), found, draft_of(config_of(tmp_path / "draft"), 3))
        assert complete(loaded)


def test_hf_is_named_and_stacked_as_transformers_has_it(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "hf", "--layout", "hf")
    found, expected = tensors_of(tmp_path / "hf"), expected_dense(official)
    for stage in range(3):
        at, experts = f"mtp.{stage}.ffn.experts", range(SMALL.experts)
        up = [torch.cat([expected.pop(f"{at}.{e}.{w}.weight") for w in ("w1", "w3")]) for e in experts]
        assert torch.equal(found.pop(f"layers.{stage}.mlp.experts.gate_up_proj"), torch.stack(up))
        down = torch.stack([expected.pop(f"{at}.{e}.w2.weight") for e in experts])
        assert torch.equal(found.pop(f"layers.{stage}.mlp.experts.down_proj"), down)
    for ours, theirs in {
        "mtp.0.main_proj.weight": "fc.weight", "mtp.2.norm.weight": "norm.weight", "mtp.2.hc_head_fn": "fold_module.hc_fn",
        "mtp.1.attn.attn_sink": "layers.1.self_attn.sinks", "mtp.1.attn.wo_a.weight": "layers.1.self_attn.o_a_proj.weight",
        "mtp.1.ffn.gate.bias": "layers.1.mlp.gate.e_score_correction_bias", "mtp.0.hc_ffn_base": "layers.0.ffn_hc.base",
        "mtp.0.ffn.shared_experts.w3.weight": "layers.0.mlp.shared_experts.up_proj.weight",
    }.items():  # fmt: skip
        assert same_bits({"": found.pop(theirs)}, {"": expected.pop(ours)})
    assert len(found) == len(expected)
    config = config_of(tmp_path / "hf")
    assert config["architectures"] == ["DSparkDeepseekV4DraftModel"]
    assert config["layer_types"] == ["sliding_attention"] * 3
    assert config["compress_ratios"] == official.config["compress_ratios"]


def test_hf_layers_are_those_of_transformers_own_model(official: Made, tmp_path: Path, told: Told) -> None:
    """Every tensor of a layer by name and shape; what stands at the top is the draft's own."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4Model

    told(official.folder, tmp_path / "hf", "--layout", "hf")
    with torch.device("meta"):
        model = DeepseekV4Model(DeepseekV4Config(**config_of(tmp_path / "hf")))
    found, built = (
        {name: tensor.shape for name, tensor in each.items() if name.startswith("layers.")}
        for each in (tensors_of(tmp_path / "hf"), model.state_dict())
    )
    assert found == built
    assert len({name.split(".")[1] for name in built}) == 3


def test_specforge_keeps_bytes_and_says_what_a_trainer_reads(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "serving")
    told(official.folder, tmp_path / "trainer", "--layout", "specforge")
    assert same_bits(tensors_of(tmp_path / "trainer"), tensors_of(tmp_path / "serving"))
    config = config_of(tmp_path / "trainer")
    assert config["architectures"] == ["DeepseekV4DSparkDraftModel"]
    assert (config["model_type"], config["block_size"], config["n_mtp_layers"]) == ("deepseek_v4_dspark", 5, 3)
    assert config["dflash_config"] == {
        "target_layer_ids": [0, 1, 2], "mask_token_id": 95, "markov_rank": 32, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "num_layers": 3,
    }  # fmt: skip
    assert config_of(tmp_path / "trainer", "config.serving.json") == config_of(tmp_path / "serving")


# --- there and back ----------------------------------------------------------------------------------------

WAYS = {
    "serving": ["--dequantize", "bf16"],
    "specforge": ["--layout", "specforge", "--dequantize", "bf16"],
    "specforge-stored": ["--layout", "specforge"],
    "specforge-fp8": ["--layout", "specforge", "--dequantize", "fp8"],
    "hf": ["--layout", "hf"],
}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "specforge-fp8"])
@pytest.mark.parametrize("variant", [{}, {"form": "fp8"}, {"scatter": True}], ids=str)
def test_an_untrained_draft_comes_back_as_it_was(way: str, variant: dict[str, Any], tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, **variant)
    (made.folder / "tokenizer.json").write_text("{}")
    told(made.folder, tmp_path / "first")
    told(made.folder, tmp_path / "there", *WAYS[way])
    told(tmp_path / "there", tmp_path / "back", "--base", made.folder)
    assert same_files(tmp_path / "back", tmp_path / "first")


def test_back_from_v41(tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, v41=True)
    told(made.folder, tmp_path / "first")
    told(made.folder, tmp_path / "there", "--dequantize", "bf16")
    told(tmp_path / "there", tmp_path / "back", "--base", tmp_path / "first")
    assert same_files(tmp_path / "back", tmp_path / "first")


def test_a_trained_tensor_alone_is_quantized_anew(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "first")
    told(official.folder, tmp_path / "trained", *WAYS["specforge"])
    trained = ("mtp.1.ffn.experts.2.w2", "mtp.0.attn.wo_b", "mtp.2.norm")
    values = {}
    for file in (tmp_path / "trained").glob("*.safetensors"):
        tensors = load_file(file)
        for name in (f"{module}.weight" for module in trained if f"{module}.weight" in tensors):
            tensors[name] = values[name] = (tensors[name].float() * 1.3).to(torch.bfloat16)
        save_file(tensors, file, {"format": "pt"})
    told(tmp_path / "trained", tmp_path / "back", "--base", official.folder)
    found, first = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "first")
    differing = {name for name, tensor in found.items() if not same_bits({"": tensor}, {"": first[name]})}
    assert {name.rpartition(".")[0] for name in differing} == set(trained)
    assert torch.equal(found["mtp.2.norm.weight"], values["mtp.2.norm.weight"])
    told(tmp_path / "back", tmp_path / "dense", "--dequantize", "bf16")
    again = tensors_of(tmp_path / "dense")
    for name, value in values.items():
        # Half of the widest step of FP4, whose scale is less than a third of the greatest value.
        assert (again[name].float() - value.float()).abs().max() < value.float().abs().max() / 3


def test_floats_that_a_trainer_widened_go_back(official: Made, tmp_path: Path, told: Told) -> None:
    """Norms in F32 with the values of BF16 are what they were; a trained one is rounded to the dtype it had."""
    told(official.folder, tmp_path / "first")
    told(official.folder, tmp_path / "trained", *WAYS["specforge"])
    for file in (tmp_path / "trained").glob("*.safetensors"):
        tensors = load_file(file)
        wide = {name: t.float() for name, t in tensors.items() if name.endswith(("norm.weight", "wkv.weight"))}
        if "mtp.1.attn_norm.weight" in wide:
            wide["mtp.1.attn_norm.weight"] += 1e-4
        save_file(tensors | wide, file, {"format": "pt"})
    told(tmp_path / "trained", tmp_path / "back", "--base", official.folder)
    found, first = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "first")
    changed = found.pop("mtp.1.attn_norm.weight")
    assert torch.equal(changed, (first.pop("mtp.1.attn_norm.weight").float() + 1e-4).to(torch.bfloat16))
    assert same_bits(found, first)


def test_without_a_base_the_declared_formats_are_made_anew(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "hf", "--layout", "hf")
    told(tmp_path / "hf", tmp_path / "back")
    found, source = tensors_of(tmp_path / "back"), drafted(tensors_of(official.folder))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {n: (t.dtype, t.shape) for n, t in source.items()}
    told(tmp_path / "back", tmp_path / "dense", "--dequantize", "bf16")
    assert same_bits(tensors_of(tmp_path / "dense"), expected_dense(official))
    told(tmp_path / "hf", tmp_path / "floats", "--dequantize", "bf16")
    assert same_bits(tensors_of(tmp_path / "floats"), expected_dense(official))


@pytest.mark.parametrize(
    "dims", [Dims(hidden=256, experts=3, layers=3, vocab=96), Dims(hidden=128, experts=3, layers=2, stages=2)]
)
def test_another_original_is_refused(dims: Dims, official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "there", *WAYS["hf"])
    other = make(tmp_path / "other", dims)
    assert "extract.base" in ids(told(tmp_path / "there", tmp_path / "no", "--base", other.folder, code=USAGE))


def test_an_original_of_the_same_shape_is_told_by_its_target(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "there", *WAYS["hf"])
    other = make(tmp_path / "other", SMALL, seed=1)
    assert ids(told(tmp_path / "there", tmp_path / "no", "--base", other.folder, code=USAGE)) == {"target-mismatch"}
    told(tmp_path / "there", tmp_path / "out", "--base", other.folder, "--allow", "target-mismatch")


def test_fp8_goes_back_to_fp4_where_it_was_not_trained(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "first")
    told(official.folder, tmp_path / "there", *WAYS["specforge-fp8"])
    told(tmp_path / "there", tmp_path / "back", "--base", official.folder)
    assert same_files(tmp_path / "first", tmp_path / "back")
    edit(tmp_path / "there", lambda tensors: tensors["mtp.1.ffn.experts.0.w2.weight"].view(torch.uint8)[5, 7:9].add_(1))
    found = told(tmp_path / "there", tmp_path / "no", "--base", official.folder, code=USAGE)
    assert (ids(found), found["findings"][0]["tensor"]) == ({"extract.form"}, "mtp.1.ffn.experts.0.w2.weight")


def test_a_trainers_state_is_read_where_it_lies(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "first")
    run = tmp_path / "run-step10"
    run.mkdir()
    state = {"draft_state_dict": expected_dense(official), "strategy": "dspark", "global_step": 10}
    torch.save(state, run / "training_state.pt")
    assert ids(told(run, tmp_path / "none", code=SOURCE)) == {"config.missing"}
    told(run / "training_state.pt", tmp_path / "back", "--base", official.folder)
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "first"))
    torch.save(state | {"strategy": "eagle3"}, run / "training_state.pt")
    assert ids(told(run, tmp_path / "none", "--base", official.folder, code=SOURCE)) == {"draft.strategy"}
    torch.save({"model": {}}, run / "training_state.pt")
    assert ids(told(run, tmp_path / "none", "--base", official.folder, code=SOURCE)) == {"source.training-state"}


def test_a_trainers_config_that_is_no_object_is_refused(official: Made, tmp_path: Path, told: Told) -> None:
    state = {"draft_state_dict": expected_dense(official), "strategy": "dspark", "global_step": 10}
    torch.save(state, tmp_path / "training_state.pt")
    (tmp_path / "config.json").write_text("[]", "utf-8")
    found = told(tmp_path / "training_state.pt", tmp_path.parent / "none", "--base", official.folder, code=SOURCE)
    assert ids(found) == {"config.parse"}


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_no_code_in_a_trainers_state_is_run(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"draft_state_dict": {"a": torch.ones(1)}, "other": Evil()}, tmp_path / "training_state.pt")
    assert ids(told(tmp_path / "training_state.pt", tmp_path.parent / "out", code=SOURCE)) == {"source.training-state"}
    assert not (tmp_path / "evil").exists()


# --- stages ------------------------------------------------------------------------------------------------


def test_stages_are_counted_anew_and_the_ends_stay(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "two", "--layout", "specforge", "--stages", "1-2")
    source = tensors_of(official.folder)
    expected = {name.replace("mtp.1.", "mtp.0."): t for name, t in source.items() if name.startswith("mtp.1.")}
    expected |= {name.replace("mtp.2.", "mtp.1."): t for name, t in source.items() if name.startswith("mtp.2.")}
    expected |= {name: t for name, t in source.items() if name.startswith("mtp.0.main_")}
    assert same_bits(tensors_of(tmp_path / "two"), expected)
    assert config_of(tmp_path / "two")["dflash_config"]["num_layers"] == 2
    assert ids(told(official.folder, tmp_path / "no", "--stages", "1-2", code=USAGE)) == {"extract.stages"}
    assert ids(told(official.folder, tmp_path / "no", "--stages", "1-3", code=USAGE)) == {"extract.stages"}
    assert ids(told(official.folder, tmp_path / "no", "--stages", "x", code=USAGE)) == {"usage.arguments"}


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "id"), [("nextn", "draft.nextn"), ("declared", "draft.declared-only"), ("none", "draft.none")]
)
def test_what_is_no_draft_is_said(draft: str, id: str, tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, draft=draft)
    assert ids(told(made.folder, tmp_path / "draft", code=SOURCE)) == {id}
    assert not (tmp_path / "draft").exists()


def edited(made: Made, out: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The draft of ``made`` in one file, with its tensors changed."""
    out.mkdir()
    save_file(change(drafted(tensors_of(made.folder))), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(made.config))
    return out


def test_all_that_is_wrong_is_told_at_once(official: Made, tmp_path: Path, told: Told) -> None:
    def broken(tensors: Tensors) -> Tensors:
        del tensors["mtp.0.ffn.experts.2.w1.scale"], tensors["mtp.1.attn.attn_sink"]
        tensors["mtp.1.norm.weight"] = tensors["mtp.2.norm.weight"].clone()
        tensors["mtp.0.ffn.gate.tid2eid"] = torch.zeros(4, 4, dtype=torch.int64)
        return tensors

    src = edited(official, tmp_path / "src", broken)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "there").touch()
    document = told(src, tmp_path / "out", code=SOURCE)
    assert {(f["id"], f["tensor"]) for f in document["findings"]} == {
        ("draft.missing", "mtp.0.ffn.experts.2.w1.scale"),
        ("draft.missing", "mtp.1.attn.attn_sink"),
        ("draft.misplaced", "mtp.1.norm.weight"),
        ("draft.target-tensor", "mtp.0.ffn.gate.tid2eid"),
        ("output.exists", None),
    }


def test_tapped_layers_beside_a_draft_are_told_and_left_out(official: Made, tmp_path: Path, told: Told) -> None:
    tapped = {name: t for name, t in tensors_of(official.folder).items() if name.startswith("layers.2.")}
    src = edited(official, tmp_path / "src", lambda tensors: tensors | tapped)
    assert ids(told(src, tmp_path / "draft")) == {"draft.target-tensor"}
    assert same_bits(tensors_of(tmp_path / "draft"), drafted(tensors_of(official.folder)))


def test_a_draft_without_confidence_head_needs_leave(official: Made, tmp_path: Path, told: Told) -> None:
    name = "mtp.2.confidence_head.proj.weight"
    src = edited(official, tmp_path / "src", lambda t: {n: value for n, value in t.items() if n != name})
    assert ids(told(src, tmp_path / "no", code=USAGE)) == {"confidence-head-missing"}
    told(src, tmp_path / "draft", "--allow", "confidence-head-missing", "--layout", "specforge")
    assert name not in tensors_of(tmp_path / "draft")
    assert config_of(tmp_path / "draft")["dflash_config"]["enable_confidence_head"] is False
    assert config_of(tmp_path / "draft", "ckptkit.json")["allowed"] == ["confidence-head-missing"]


@pytest.mark.parametrize(("value", "code"), [(0.0, OK), (-0.0, OK), (0.5, SOURCE), (1e-38, SOURCE)])
def test_a_confidence_bias_must_be_zero(value: float, code: int, official: Made, tmp_path: Path, told: Told) -> None:
    bias = {"mtp.2.confidence_head.proj.bias": torch.tensor([value], dtype=torch.bfloat16)}
    src = edited(official, tmp_path / "src", lambda tensors: tensors | bias)
    document = told(src, tmp_path / "draft", code=code)
    if code == OK:
        assert not bias.keys() & tensors_of(tmp_path / "draft").keys()
        assert bias.keys() <= {item["name"] for item in document["plan"]["dropped"]}
    else:
        assert ids(document) == {"draft.confidence-bias"}


def test_a_head_that_is_switched_off_and_there_is_said(tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, enable_confidence_head=False)
    assert "draft.confidence-off" in ids(told(made.folder, tmp_path / "draft"))


def test_vendors_copies_are_explained_and_kept_on_demand(official: Made, tmp_path: Path, told: Told) -> None:
    extras = {"mtp.0.embed.weight": torch.ones(4, 4), "mtp.2.head.weight": torch.ones(4, 4)}
    src = edited(official, tmp_path / "src", lambda tensors: tensors | extras)
    assert ids(told(src, tmp_path / "draft")) == {"draft.vendor-extra"}
    assert not extras.keys() & tensors_of(tmp_path / "draft").keys()
    told(src, tmp_path / "all", "--embeddings", "copy")
    assert same_bits(tensors_of(tmp_path / "all"), drafted(tensors_of(official.folder)) | extras)


def test_heads_of_the_first_stage_are_written_at_the_last(official: Made, tmp_path: Path, told: Told) -> None:
    heads = ("mtp.2.markov_head.", "mtp.2.confidence_head.")

    def moved(tensors: Tensors) -> Tensors:
        return {n.replace("mtp.2.", "mtp.0.") if n.startswith(heads) else n: t for n, t in tensors.items()}

    told(edited(official, tmp_path / "src", moved), tmp_path / "draft")
    assert same_bits(tensors_of(tmp_path / "draft"), drafted(tensors_of(official.folder)))


def test_the_written_config_says_how_the_draft_is_stored(official: Made, tmp_path: Path, told: Told) -> None:
    """A BF16 draft under the config of a quantized target: engines would read it as FP4."""
    src = edited(official, tmp_path / "src", lambda _: expected_dense(official))
    assert ids(told(src, tmp_path / "draft")) == {"draft.form"}
    assert not {"quantization_config", "expert_dtype"} & config_of(tmp_path / "draft").keys()


def test_v41_has_the_serving_layout_alone(tmp_path: Path, told: Told) -> None:
    made = make(tmp_path / "target", SMALL, v41=True)
    for options in (["--layout", "hf"], ["--layout", "specforge"]):
        assert ids(told(made.folder, tmp_path / "no", *options, code=USAGE)) == {"extract.layout"}
    assert ids(told(made.folder, tmp_path / "no", "--dequantize", "fp8", code=USAGE)) == {"extract.form"}


@pytest.mark.parametrize("value", ["x", [], {}, -1, 10**12, 2.5, True])
@pytest.mark.parametrize("key", ["num_hidden_layers", "compress_ratios", "dspark_target_layer_ids", "dflash_config"])
def test_odd_configs_are_no_bugs(key: str, value: Any, official: Made, tmp_path: Path, told: Told) -> None:
    """What no field of the draft depends on may be anything; else the config is refused."""
    src = edited(official, tmp_path / "src", lambda tensors: tensors)
    (src / "config.json").write_text(json.dumps(official.config | {key: value}))
    for layout in ("serving", "hf"):
        got = main(["extract-dspark", str(src), str(tmp_path / "out"), "--layout", layout, "--dry-run", "-q"])
        assert got in {OK, SOURCE}
        assert got == SOURCE or key != "dspark_target_layer_ids"


# --- the command line --------------------------------------------------------------------------------------


def test_src_and_out_have_defaults(official: Made, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ids(told(code=USAGE)) == {"usage.arguments"}
    told(official.folder)
    assert (tmp_path / "target-dspark" / "ckptkit.json").exists()
    monkeypatch.chdir(official.folder)
    assert told("--dry-run")["output"] is None
    told()
    assert (official.folder.parent / "target-dspark" / "ckptkit.json").exists()


def test_a_plan_of_two_sources_can_be_kept_and_run(official: Made, tmp_path: Path, told: Told) -> None:
    told(official.folder, tmp_path / "first")
    told(official.folder, tmp_path / "there", *WAYS["hf"])
    told(tmp_path / "there", tmp_path / "back", "--base", official.folder, "--plan", tmp_path / "plan", "--dry-run")
    assert not (tmp_path / "back").exists()
    assert main(["apply", str(tmp_path / "plan"), str(tmp_path / "back"), "--no-progress", "-q"]) == OK
    assert same_files(tmp_path / "back", tmp_path / "first")
