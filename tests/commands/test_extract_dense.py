"""``ckptkit extract-dspark`` on dense drafts: the bytes stay, fields change homes, broken ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from told import Told, teller

from ckptkit.errors import OK, SOURCE, USAGE

Tensors = dict[str, torch.Tensor]

H, INTER, HEADS, KV, DIM, TAPS, V, R = 64, 96, 4, 2, 16, [1, 3, 5], 80, 8
QWEN3 = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": INTER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": DIM, "num_hidden_layers": 2, "vocab_size": V, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
HEAD = {
    "markov_rank": R,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DEEPSPEC = QWEN3 | HEAD | {
    "architectures": ["Qwen3DSparkModel"], "target_layer_ids": TAPS, "mask_token_id": 79, "block_size": 7,
    "num_target_layers": 8,
}  # fmt: skip
SPECFORGE = QWEN3 | {
    "architectures": ["DSparkDraftModel"], "block_size": 7, "num_target_layers": 8, "auto_map": {"AutoModel": "dspark.X"},
    "dflash_config": HEAD | {"target_layer_ids": TAPS, "mask_token_id": 79, "projector_type": "dspark"},
}  # fmt: skip
SPECULATORS = HEAD | {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "transformer_layer_config": QWEN3,
    "draft_vocab_size": V, "aux_hidden_state_layer_ids": [2, 4, 6], "mask_token_id": 79, "block_size": 7,
    "sample_from_anchor": True,
}  # fmt: skip
HOMES = {"serving": DEEPSPEC, "specforge": SPECFORGE, "hf": SPECULATORS}


def draft(layers: int = 2, at: str = "layers.{}.", mlp: str = "mlp") -> Tensors:
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    found = {"fc.weight": some(H, len(TAPS) * H), "hidden_norm.weight": some(H), "norm.weight": some(H)}
    found |= {f"markov_head.markov_w{n}.weight": some(V, R) for n in (1, 2)}
    found |= {"confidence_head.proj.weight": some(1, H + R), "confidence_head.proj.bias": some(1)}
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (HEADS * DIM, H), "self_attn.k_proj": (KV * DIM, H), "self_attn.v_proj": (KV * DIM, H),
            "self_attn.o_proj": (H, HEADS * DIM), "self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,),
            f"{mlp}.gate_proj": (INTER, H), f"{mlp}.up_proj": (INTER, H), f"{mlp}.down_proj": (H, INTER),
            "input_layernorm": (H,), "post_attention_layernorm": (H,),
        }  # fmt: skip
        found |= {f"{at.format(layer)}{name}.weight": some(*shape) for name, shape in shapes.items()}
    return found


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "extract-dspark")


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


# --- homes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", HOMES)
@pytest.mark.parametrize("here", HOMES)
def test_fields_move_between_homes(here: str, there: str, tmp_path: Path, told: Told) -> None:
    src = write(tmp_path / "src", draft(), HOMES[here])
    told(src, tmp_path / "out", "--layout", there)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), draft())
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    found, wanted = config_of(tmp_path / "out"), HOMES[there] | {"sample_from_anchor": True}
    for config in (found, wanted):
        config.pop("auto_map", None)
        config.pop("num_target_layers", None)  # speculators does not keep it
    assert found == wanted


def test_what_transformers_keeps_stays(tmp_path: Path, told: Told) -> None:
    extra = {"rope_theta": 1000000, "rms_norm_eps": 1e-5, "my_field": [1]}
    told(write(tmp_path / "src", draft(), DEEPSPEC | extra), tmp_path / "out", "--layout", "specforge")
    assert extra.items() <= config_of(tmp_path / "out").items()


@pytest.mark.parametrize(("layout", "block", "taps"), [("serving", 6, TAPS), ("hf", 7, [2, 4, 6])])
def test_an_anchor_that_is_not_sampled_counts_in_speculators_alone(
    layout: str, block: int, taps: list[int], tmp_path: Path, told: Told
) -> None:
    src = write(tmp_path / "src", draft(), SPECULATORS | {"sample_from_anchor": False})
    told(src, tmp_path / "serving")
    told(tmp_path / "serving", tmp_path / "out", "--layout", layout)
    found = config_of(tmp_path / "out")
    assert (found["block_size"], found["sample_from_anchor"]) == (block, False)
    assert found.get("target_layer_ids", found.get("aux_hidden_state_layer_ids")) == taps


def test_an_anchor_is_not_guessed(tmp_path: Path, told: Told) -> None:
    config = {key: value for key, value in SPECULATORS.items() if key != "sample_from_anchor"}
    document = told(write(tmp_path / "src", draft(), config), tmp_path / "out", code=SOURCE)
    assert {finding["data"]["what"] for finding in document["findings"]} == {"sample_from_anchor"}


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type"])
def test_a_field_that_is_missing_is_named(key: str, tmp_path: Path, told: Told) -> None:
    config = {name: value for name, value in DEEPSPEC.items() if name != key}
    document = told(write(tmp_path / "src", draft(), config), tmp_path / "out", code=SOURCE)
    assert key in {finding["data"].get("what") for finding in document["findings"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_layer_ids", 3), ("target_layer_ids", [1, "x"]), ("markov_rank", "8"), ("enable_confidence_head", 1)],
)
def test_a_field_of_another_type_is_named(key: str, value: Any, tmp_path: Path, told: Told) -> None:
    document = told(write(tmp_path / "src", draft(), DEEPSPEC | {key: value}), tmp_path / "out", code=SOURCE)
    assert key in {finding["data"].get("what") for finding in document["findings"]}


# --- tensors -----------------------------------------------------------------------------------------------


def test_the_published_shapes_fit(tmp_path: Path, told: Told) -> None:
    settings = told(write(tmp_path / "src", draft(), DEEPSPEC), tmp_path / "out")["plan"]["settings"]
    assert '"num_speculative_tokens": 7' in settings["launch"]["vLLM"]
    assert settings["draft"]["says"]["markov_rank"] == {"config.json": R}


@pytest.mark.parametrize("name", draft())
def test_each_tensor_left_out_renamed_or_of_another_shape_is_named(name: str, tmp_path: Path, told: Told) -> None:
    whole = draft()
    without = {other: tensor for other, tensor in whole.items() if other != name}
    missing = "confidence-head-missing" if name == "confidence_head.proj.weight" else "draft.missing"
    code = USAGE if missing == "confidence-head-missing" else SOURCE

    def findings(tensors: Tensors, code: int) -> set[tuple[str, str]]:
        document = told(write(tmp_path / "src", tensors, DEEPSPEC), tmp_path / "out", code=code)
        return {(finding["id"], finding["tensor"]) for finding in document["findings"]}

    assert findings(without, code) == {(missing, name)}
    renamed = name.replace("weight", "wieght").replace("bias", "bais")
    assert findings(without | {renamed: whole[name]}, SOURCE) == {(missing, name), ("draft.unknown", renamed)}
    wider = torch.ones((*whole[name].shape[:-1], whole[name].shape[-1] + 1), dtype=torch.bfloat16)
    assert findings(whole | {name: wider}, SOURCE) == {("draft.shape", name)}


def test_copies_of_the_targets_are_left_out_unless_wanted(tmp_path: Path, told: Told) -> None:
    copies = {name: torch.ones(V, H, dtype=torch.bfloat16) for name in ("embed_tokens.weight", "lm_head.weight")}
    src = write(tmp_path / "src", draft() | copies, DEEPSPEC)
    told(src, tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), draft())
    told(src, tmp_path / "all", "--embeddings", "copy")
    assert same(load_file(tmp_path / "all" / "model.safetensors"), draft() | copies)


def test_older_names_are_brought_up_to_date(tmp_path: Path, told: Told) -> None:
    old = {f"logit_head.{n}" if n.startswith("markov_head.") else n: tensor for n, tensor in draft().items()}
    told(write(tmp_path / "src", old, SPECFORGE), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), draft())


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("gated", {"gate_proj.weight": (R, H + R), "gate_proj.bias": (R,)}),
        ("rnn", {"joint_proj.weight": (3 * R, 2 * R + H), "joint_proj.bias": (3 * R,)}),
    ],
)
def test_other_markov_heads(kind: str, extra: dict[str, tuple[int, ...]], tmp_path: Path, told: Told) -> None:
    heads = {f"markov_head.{name}": torch.ones(shape, dtype=torch.bfloat16) for name, shape in extra.items()}
    config = DEEPSPEC | {"markov_head_type": kind}
    told(write(tmp_path / "src", draft() | heads, config), tmp_path / "out")
    assert ids(told(write(tmp_path / "src", draft(), config), tmp_path / "no", code=SOURCE)) == {"draft.missing"}


@pytest.mark.parametrize(("shift", "code"), [(0, OK), (3, USAGE)])
def test_a_vocabulary_of_its_own_is_refused(shift: int, code: int, tmp_path: Path, told: Told) -> None:
    maps = {"d2t": torch.full((V,), shift), "t2d": torch.ones(V, dtype=torch.bool)}
    document = told(write(tmp_path / "src", draft() | maps, SPECULATORS), tmp_path / "out", code=code)
    assert ids(document) == (set() if code == OK else {"extract.draft-vocab"})


def test_other_layers_need_only_be_alike(tmp_path: Path, told: Told) -> None:
    tensors = draft() | {
        f"layers.{n}.pre_feedforward_layernorm.weight": torch.ones(H, dtype=torch.bfloat16) for n in (0, 1)
    }
    config = DEEPSPEC | {"model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"]}
    told(write(tmp_path / "src", tensors, config), tmp_path / "out")
    assert config_of(tmp_path / "out")["architectures"] == ["Gemma4DSparkModel"]
    del tensors["layers.1.pre_feedforward_layernorm.weight"]
    assert ids(told(write(tmp_path / "src", tensors, config), tmp_path / "no", code=SOURCE)) == {"draft.missing"}


@pytest.mark.parametrize("options", [["--dequantize", "bf16"], ["--stages", "0"]])
def test_options_of_v4_are_refused(options: list[str], tmp_path: Path, told: Told) -> None:
    told(write(tmp_path / "src", draft(), DEEPSPEC), tmp_path / "out", *options, code=USAGE)


# --- within a target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["language_model.model.dspark.", "model.dspark.", "dspark."])
def test_minimax_is_cut_out_under_its_own_names(prefix: str, tmp_path: Path, told: Told) -> None:
    inner = draft(at="layers.{}.decoder_layer.", mlp="block_sparse_moe")
    inner["final_norm.weight"] = inner.pop("norm.weight")
    mine = {f"{prefix}{name}": tensor for name, tensor in inner.items()}
    theirs = {
        "language_model.model.embed_tokens.weight": torch.ones(V, H),
        "language_model.lm_head.weight": torch.ones(V, H),
    }
    text = {key: value for key, value in QWEN3.items() if key != "model_type"} | {
        "model_type": "minimax_m3", "dspark_block_size": 7, "dspark_noise_token_id": 79, "dspark_markov_rank": R,
        "dspark_config": {"use_dense_ffn": True, "ffn_hidden_size": INTER}, "dspark_markov_head_type": "vanilla",
        "dflash_config": {"target_layer_ids": TAPS, "num_target_layers": 8, "num_hidden_layers": 2},
    }  # fmt: skip
    config = {"architectures": ["MiniMaxM3VL"], "model_type": "minimax_m3_vl", "text_config": text}
    told(write(tmp_path / "src", mine | theirs, config), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), mine)
    assert config_of(tmp_path / "out")["text_config"] == text
    assert ids(told(tmp_path / "src", tmp_path / "no", "--layout", "hf", code=USAGE)) == {"extract.layout"}
    del mine[f"{prefix}layers.1.decoder_layer.self_attn.k_norm.weight"]
    document = told(write(tmp_path / "src", mine | theirs, config), tmp_path / "no", code=SOURCE)
    assert [f["tensor"] for f in document["findings"]] == [f"{prefix}layers.1.decoder_layer.self_attn.k_norm.weight"]


def test_the_draft_in_a_targets_dspark_folder_is_taken(tmp_path: Path, told: Told) -> None:
    write(tmp_path / "target", {"model.embed_tokens.weight": torch.ones(V, H)}, QWEN3)
    write(tmp_path / "target" / "dspark", draft(), DEEPSPEC)
    told(tmp_path / "target", tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), draft())
