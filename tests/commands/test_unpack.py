"""``ckptkit unpack``: every layout holds the same values, told by a decoder of the test's own, and every way leads back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from make import checkpoint, llama_config
from safetensors.torch import load_file
from told import Told, teller

from ckptkit.errors import FOUND, SOURCE, USAGE

Tensors = dict[str, torch.Tensor]

HIDDEN, INTER, EXPERTS = 64, 96, 3
W3 = "layers.0.ffn.experts.1.w3"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys)


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(a: Path, b: Path) -> None:
    """Tensors equal in name, dtype, shape and bytes; config.json equal."""
    first, second = tensors_of(a), tensors_of(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())


# --- checkpoints -------------------------------------------------------------------------------------------


def codes(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8).view(dtype)


def exponents(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(110, 130, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8).view(dtype)


def floats(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def common() -> Tensors:
    embedding = floats(1, 8, HIDDEN)
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": floats(2, HIDDEN),
        "lm_head.weight": embedding.clone(),
    }


def config(model_type: str, **extra: Any) -> dict[str, Any]:
    return llama_config(1, HIDDEN, INTER, 8) | {"model_type": model_type, "num_local_experts": EXPERTS} | extra


def sides(names: tuple[str, str, str]) -> list[tuple[str, int, int]]:
    gate, up, down = names
    return [(gate, INTER, HIDDEN), (up, INTER, HIDDEN), (down, HIDDEN, INTER)]


def dsv4(tmp_path: Path) -> Path:
    """Experts in FP4 as DeepSeek-V4 has them, over three shards, scales not beside their codes; FP8 attention."""
    shards: list[Tensors] = [common(), {}, {}]
    for expert in range(EXPERTS):
        for at, (name, rows, cols) in enumerate(sides(("w1", "w3", "w2"))):
            path, seed = f"layers.0.ffn.experts.{expert}.{name}", 10 * expert + at
            shards[at][f"{path}.weight"] = codes(seed, rows, cols // 2, dtype=torch.int8)
            shards[2][f"{path}.scale"] = exponents(seed, rows, cols // 32, dtype=torch.float8_e8m0fnu)
    shards[0]["layers.0.attn.wkv.weight"] = codes(99, 8, HIDDEN, dtype=torch.float8_e4m3fn)
    shards[0]["layers.0.attn.wkv.scale"] = exponents(98, 1, 1, dtype=torch.float8_e8m0fnu)
    table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return checkpoint(
        tmp_path / "dsv4", [*shards], config("deepseek_v4", quantization_config=table, expert_dtype="fp4")
    )


def mxfp4_ct(tmp_path: Path) -> Path:
    tensors = common()
    for expert in range(EXPERTS):
        for at, (name, rows, cols) in enumerate(sides(("gate_proj", "up_proj", "down_proj"))):
            path, seed = f"model.layers.0.mlp.experts.{expert}.{name}", 10 * expert + at
            tensors[f"{path}.weight_packed"] = codes(seed, rows, cols // 2)
            tensors[f"{path}.weight_scale"] = exponents(seed, rows, cols // 32)
    group = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    table = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    return checkpoint(tmp_path / "ct", tensors, config("qwen3_moe", quantization_config=table))


def gpt_oss(tmp_path: Path) -> Path:
    tensors, path = common(), "model.layers.0.mlp.experts"
    for at, (name, rows, cols) in enumerate((("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER))):
        tensors[f"{path}.{name}_blocks"] = codes(at, EXPERTS, rows, cols // 32, 16)
        tensors[f"{path}.{name}_scales"] = exponents(at, EXPERTS, rows, cols // 32)
        tensors[f"{path}.{name}_bias"] = floats(at, EXPERTS, rows)
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return checkpoint(tmp_path / "gpt", tensors, config("gpt_oss", quantization_config=table))


def nvfp4(tmp_path: Path) -> Path:
    tensors = common()
    for at, (name, rows, cols) in enumerate(sides(("gate_proj", "up_proj", "down_proj"))):
        path = f"model.layers.0.mlp.{name}"
        tensors[f"{path}.weight_packed"] = codes(at, rows, cols // 2)
        tensors[f"{path}.weight_scale"] = codes(at, rows, cols // 16).bitwise_and(0x77).view(torch.float8_e4m3fn)
        tensors[f"{path}.weight_global_scale"] = torch.tensor([3584.0])
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["re:.*mlp.*"], "weights": weights}}
    table = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    return checkpoint(tmp_path / "nv", tensors, config("llama", quantization_config=table))


def stacked(tmp_path: Path, model_type: str, suffix: str = "") -> Path:
    """Stacked experts of floats: transposed for gpt-oss and Llama 4, as Linears have it for others."""
    tensors, path, columns = common(), "model.layers.0.mlp.experts", model_type in {"gpt_oss", "llama4", "qwen3_vl_moe"}
    for at, (name, rows, cols) in enumerate((("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER))):
        shape = (EXPERTS, cols, rows) if columns else (EXPERTS, rows, cols)
        tensors[f"{path}.{name}{suffix}"] = floats(at, *shape)
        if model_type == "gpt_oss":
            tensors[f"{path}.{name}_bias"] = floats(at + 5, EXPERTS, rows)
    return checkpoint(tmp_path / model_type, tensors, config(model_type))


def stacked_fp8(tmp_path: Path) -> Path:
    tensors, path, block = common(), "model.layers.0.mlp.experts", 32
    for at, (name, rows, cols) in enumerate((("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER))):
        tensors[f"{path}.{name}"] = codes(at, EXPERTS, rows, cols, dtype=torch.float8_e4m3fn)
        tensors[f"{path}.{name}_scale_inv"] = floats(at, EXPERTS, rows // block, cols // block).float()
    table = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return checkpoint(tmp_path / "fp8", tensors, config("qwen3_5_moe", quantization_config=table))


# --- the oracle --------------------------------------------------------------------------------------------


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K] from two codes a byte (or one, if as many as the scales have columns of 32) and exponents."""
    numbers = packed.view(torch.uint8)
    if numbers.shape[1] == scale.shape[1] * 16:
        numbers = torch.stack([numbers % 16, numbers // 16], dim=-1).flatten(1)
    powers = torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, dim=1)
    return torch.tensor(E2M1, dtype=torch.float64)[numbers.long()] * powers


def values(folder: Path) -> Tensors:
    """Every projection of every expert by number and role, whatever the layout."""
    found: Tensors = {}
    tensors = tensors_of(folder)
    role = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in {"weight", "weight_packed", "weight_codes"} and ".experts." in name:
            scale = tensors.get(f"{module}.scale", tensors.get(f"{module}.weight_scale"))
            assert scale is not None
            _, expert, projection = module.rsplit(".", 2)
            found[f"{expert}.{role[projection]}"] = decoded(tensor, scale)
        if (
            last.startswith(("gate_up_proj", "down_proj"))
            and last.endswith(("_blocks", "_codes"))
            and ".experts." in name
        ):
            stem, _, _ = last.rpartition("_")
            scales = tensors[f"{module}.{stem}_scales"]
            for number in range(tensor.shape[0]):
                both = decoded(tensor[number].flatten(1), scales[number])
                if last.startswith("gate_up"):
                    found[f"{number}.gate"], found[f"{number}.up"] = both[0::2], both[1::2]
                else:
                    found[f"{number}.down"] = both
    return found


# --- FP4 ---------------------------------------------------------------------------------------------------

FP4 = {"dsv4": dsv4, "mxfp4-ct": mxfp4_ct, "gpt-oss": gpt_oss}


@pytest.mark.parametrize("there", ["dsv4", "mxfp4-ct", "gpt-oss", "codes"])
@pytest.mark.parametrize("here", FP4)
def test_mxfp4_goes_round(here: str, there: str, tmp_path: Path, told: Told) -> None:
    if here == there:
        return
    src, out, back = FP4[here](tmp_path), tmp_path / "out", tmp_path / "back"
    before = values(src)
    assert len(before) == 3 * EXPERTS
    told("unpack", src, out, "--layout", there)
    after = values(out)
    assert before.keys() == after.keys()
    for name, matrix in before.items():
        assert torch.equal(matrix, after[name]), name
        assert torch.equal(matrix.signbit(), after[name].signbit()), name
    told("unpack", out, back, "--layout", "packed" if there == "codes" else here)
    same(src, back)


@pytest.mark.parametrize("there", ["dsv4", "mxfp4-ct", "gpt-oss"])
@pytest.mark.parametrize("here", FP4)
def test_codes_go_into_any_container_and_back(here: str, there: str, tmp_path: Path, told: Told) -> None:
    src = FP4[here](tmp_path)
    told("unpack", src, tmp_path / "codes")
    told("unpack", tmp_path / "codes", tmp_path / "there", "--layout", there)
    assert values(src).keys() == values(tmp_path / "there").keys()
    for name, matrix in values(src).items():
        assert torch.equal(matrix, values(tmp_path / "there")[name]), name
    told("unpack", tmp_path / "there", tmp_path / "again", "--layout", "codes")
    told("unpack", tmp_path / "again", tmp_path / "packed", "--layout", "packed")
    same(tmp_path / "there", tmp_path / "packed")


def test_codes_of_nvfp4(tmp_path: Path, told: Told) -> None:
    src = nvfp4(tmp_path)
    told("unpack", src, tmp_path / "out")
    first, made = tensors_of(src), tensors_of(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj"
    spread = made[f"{name}.weight_codes"]
    assert spread.shape == (INTER, HIDDEN)
    byte = int(first[f"{name}.weight_packed"][3, 4])
    assert spread[3, 8:10].tolist() == [byte % 16, byte // 16]
    assert torch.equal(made[f"{name}.weight_global_scale"], first[f"{name}.weight_global_scale"])
    told("unpack", tmp_path / "out", tmp_path / "back", "--layout", "packed")
    same(src, tmp_path / "back")


def test_gpt_oss_biases_go_with_their_experts(tmp_path: Path, told: Told) -> None:
    src = gpt_oss(tmp_path)
    told("unpack", src, tmp_path / "out", "--layout", "mxfp4-ct")
    both = tensors_of(src)["model.layers.0.mlp.experts.gate_up_proj_bias"]
    made = tensors_of(tmp_path / "out")
    assert torch.equal(made["model.layers.0.mlp.experts.2.up_proj.bias"], both[2, 1::2])
    assert torch.equal(made["model.layers.0.mlp.experts.1.gate_proj.bias"], both[1, 0::2])


def test_what_no_engine_reads_is_no_model(tmp_path: Path, told: Told) -> None:
    src = dsv4(tmp_path)
    document = told("unpack", src, tmp_path / "out", "--layout", "mxfp4-ct")
    assert "unpack.exchange" in {finding["id"] for finding in document["findings"]}
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    from transformers import AutoConfig

    with pytest.raises((ValueError, KeyError)):
        AutoConfig.from_pretrained(tmp_path / "out")
    assert made["model_type"] != "deepseek_v4"


def test_compressed_tensors_config_says_what_lies_there(tmp_path: Path, told: Told) -> None:
    """An MXFP4 checkpoint of DeepSeek's container without other quantized weights becomes a loadable one."""
    src = mxfp4_ct(tmp_path)
    told("unpack", src, tmp_path / "dsv4", "--layout", "dsv4")
    plain = json.loads((tmp_path / "dsv4" / "config.json").read_text())
    plain = {key: value for key, value in plain.items() if key not in {"ckptkit_layout", "quantization_config"}}
    (tmp_path / "dsv4" / "config.json").write_text(json.dumps(plain | {"model_type": "qwen3_moe"}))
    document = told("unpack", tmp_path / "dsv4", tmp_path / "out", "--layout", "mxfp4-ct")
    assert not document["findings"]
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert table["quant_method"] == "compressed-tensors"
    assert table["format"] == "mxfp4-pack-quantized"


# --- experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "suffix"), [("qwen3_5_moe", ""), ("qwen3_5_moe", ".weight"), ("llama4", ""), ("gpt_oss", "")]
)
def test_stacked_floats_go_round(model_type: str, suffix: str, tmp_path: Path, told: Told) -> None:
    src = stacked(tmp_path, model_type, suffix)
    told("unpack", src, tmp_path / "out", "--layout", "per-expert")
    first, made = tensors_of(src), tensors_of(tmp_path / "out")
    path = "model.layers.0.mlp.experts"
    for expert in range(EXPERTS):
        both, down = first[f"{path}.gate_up_proj{suffix}"][expert], first[f"{path}.down_proj{suffix}"][expert]
        if model_type != "qwen3_5_moe":
            both, down = both.T, down.T
        gate, up = (both[0::2], both[1::2]) if model_type == "gpt_oss" else both.chunk(2)
        for name, wanted in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            assert torch.equal(made[f"{path}.{expert}.{name}.weight"], wanted), name
    told("unpack", tmp_path / "out", tmp_path / "back", "--layout", "fused")
    same(src, tmp_path / "back")


def test_stacked_fp8_goes_round(tmp_path: Path, told: Told) -> None:
    src = stacked_fp8(tmp_path)
    told("unpack", src, tmp_path / "out", "--layout", "per-expert")
    scale = tensors_of(src)["model.layers.0.mlp.experts.gate_up_proj_scale_inv"]
    made = tensors_of(tmp_path / "out")
    assert torch.equal(made["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"], scale[1, INTER // 32 :])
    told("unpack", tmp_path / "out", tmp_path / "back", "--layout", "fused")
    same(src, tmp_path / "back")


def test_a_small_chunk_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every operation, cut into pieces of a few bytes, fills its outputs in order and with the same bytes."""
    from ckptkit.execute import Options, execute
    from ckptkit.files.checkpoint import open_checkpoint
    from ckptkit.files.source import open_source
    from ckptkit.planners.unpack import plan_unpack

    cases = [
        (stacked(tmp_path, "gpt_oss"), "per-expert"), (stacked(tmp_path, "llama4"), "per-expert"),
        (dsv4(tmp_path), "gpt-oss"), (gpt_oss(tmp_path), "codes"), (mxfp4_ct(tmp_path), "gpt-oss"),
    ]  # fmt: skip
    for src, layout in cases:
        outs = []
        for size in (1, 300, 1 << 24):
            out = tmp_path / f"{src.name}-{layout}-{size}"
            with open_source(str(src)) as source:
                plan = plan_unpack(open_checkpoint(source), layout).plan
                execute(plan, source, out, Options(chunk_bytes=size), Mock(), {})
            outs.append(out)
        same(outs[0], outs[2])
        same(outs[1], outs[2])


# --- refusals ----------------------------------------------------------------------------------------------


def refused_as_broken(told: Told, folder: Path, layout: str) -> list[dict[str, Any]]:
    return refused(told, folder, layout, SOURCE)


def refused(told: Told, folder: Path, layout: str, code: int = USAGE) -> list[dict[str, Any]]:
    document = told("unpack", folder, folder.parent / "never", "--layout", layout, code=code)
    assert not (folder.parent / "never").exists()
    findings: list[dict[str, Any]] = document["findings"]
    assert all(finding["hint"] for finding in findings)
    return findings


@pytest.mark.parametrize(
    ("make", "layout"),
    [(dsv4, "dsv4"), (dsv4, "packed"), (dsv4, "per-expert"), (stacked_fp8, "codes"), (nvfp4, "mxfp4-ct")],
)
def test_nothing_to_do(make: Callable[[Path], Path], layout: str, tmp_path: Path, told: Told) -> None:
    assert [finding["id"] for finding in refused(told, make(tmp_path), layout)] == ["unpack.nothing"]


def without(folder: Path, name: str) -> Path:
    from safetensors.torch import save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table = json.loads(index.read_text())
        table["weight_map"].pop(name, None)
        index.write_text(json.dumps(table))
    return folder


def test_an_expert_short_of_a_projection_is_not_stacked(tmp_path: Path, told: Told) -> None:
    folder = without(without(dsv4(tmp_path), f"{W3}.weight"), f"{W3}.scale")
    found = refused(told, folder, "gpt-oss")
    assert [finding["id"] for finding in found] == ["unpack.layout"]
    assert found[0]["tensor"] == W3


def test_floats_short_of_a_projection_are_not_stacked(tmp_path: Path, told: Told) -> None:
    told("unpack", stacked(tmp_path, "qwen3_5_moe"), tmp_path / "out", "--layout", "per-expert")
    folder = without(tmp_path / "out", "model.layers.0.mlp.experts.2.down_proj.weight")
    assert [finding["id"] for finding in refused(told, folder, "fused")] == ["unpack.layout"]


def test_blocks_are_not_per_expert(tmp_path: Path, told: Told) -> None:
    assert [finding["id"] for finding in refused(told, stacked_odd(tmp_path), "per-expert")] == ["unpack.layout"]


def stacked_odd(tmp_path: Path) -> Path:
    """A hidden size that fits neither side."""
    folder = stacked(tmp_path, "qwen3_5_moe")
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"hidden_size": 17}))
    return folder


@pytest.mark.parametrize(
    ("gone", "id"),
    [
        (f"{W3}.weight", "names.scale-without-weight"),
        (f"{W3}.scale", "names.weight-without-scale"),
        ("layers.0.attn.wkv.weight", "names.scale-without-weight"),
    ],
)
@pytest.mark.parametrize("layout", ["codes", "mxfp4-ct", "gpt-oss"])
def test_halves_are_named(gone: str, id: str, layout: str, tmp_path: Path, told: Told) -> None:
    (finding,) = refused_as_broken(told, without(dsv4(tmp_path), gone), layout)
    assert finding["id"] == id
    assert finding["tensor"].rpartition(".")[0] == gone.rpartition(".")[0]


def test_a_scale_of_another_shape_is_named(tmp_path: Path, told: Told) -> None:
    from safetensors.torch import save_file

    folder = mxfp4_ct(tmp_path)
    tensors, name = tensors_of(folder), "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    tensors[name] = exponents(0, HIDDEN, INTER // 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (finding,) = refused_as_broken(told, folder, "dsv4")
    assert (finding["id"], finding["tensor"]) == ("shapes.scale", name)


# --- what was edited in between --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "gpt-oss", "mxfp4-ct"])
def test_a_byte_that_is_no_code_is_refused(layout: str, tmp_path: Path, told: Told) -> None:
    told("unpack", dsv4(tmp_path), tmp_path / "codes")
    name = f"{W3}.weight_codes"
    file = edited(tmp_path / "codes", name, lambda tensor: tensor.index_fill_(0, torch.tensor([5]), 16))
    (finding,) = refused_as_broken(told, tmp_path / "codes", layout)
    assert (finding["id"], finding["tensor"], finding["file"]) == ("data.codes", name, file)


def edited(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Change a tensor; gives the file that holds it."""
    from safetensors.torch import save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: change(tensors[name])}, file, metadata={"format": "pt"})
            return file.name
    raise KeyError(name)


NOTES = [
    5, [], {"names": 5}, {"names": ["a", "a", "b"]}, {"names": None}, {"from": 3}, {"to": None}, {"was": 3},
    {"was": {"model_type": 3}}, {"was": {"ckptkit_layout": [5]}}, {"was": {"ckptkit_layout": [{"from": "fused"}]}},
    {"columns": "x"}, {"alternate": None}, {"suffix": 4}, {"fp4": [1]},
]  # fmt: skip


@pytest.mark.parametrize("note", NOTES, ids=str)
def test_an_edited_note_is_a_finding(note: Any, tmp_path: Path, told: Told) -> None:
    told("unpack", stacked(tmp_path, "qwen3_5_moe"), tmp_path / "out", "--layout", "per-expert")
    path = tmp_path / "out" / "config.json"
    table = json.loads(path.read_text())
    table["ckptkit_layout"] = table["ckptkit_layout"] | note if isinstance(note, dict) else note
    path.write_text(json.dumps(table))
    (finding,) = refused_as_broken(told, tmp_path / "out", "fused")
    assert (finding["id"], finding["file"]) == ("config.layout", "config.json")
    found = told("verify", tmp_path / "out", "--select", "config.layout", code=FOUND)["findings"]
    assert [finding["id"] for finding in found] == ["config.layout"]
    told("verify", tmp_path / "out", "--against", tmp_path / "qwen3_5_moe", code=FOUND)


def test_any_way_round_ends_with_the_first_config(tmp_path: Path, told: Told) -> None:
    """DeepSeek's layout is come back to over two others, and is the model again."""
    here = dsv4(tmp_path)
    for layout in ("mxfp4-ct", "gpt-oss", "codes", "mxfp4-ct", "dsv4"):
        before, here = here, tmp_path / f"{here.name}-{layout}"
        findings = told("unpack", before, here, "--layout", layout)["findings"]
        ids = [finding["id"] for finding in findings]
        assert ("unpack.exchange" in ids) == (layout != "dsv4"), layout
    same(tmp_path / "dsv4", here)


# --- which results pass for the model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "layout", "loads"),
    [
        ("qwen3_5_moe", "per-expert", True), ("gpt_oss", "per-expert", False), ("llama4", "per-expert", False),
        ("qwen3_vl_moe", "per-expert", False), ("gemma4", "per-expert", False), ("mistral4", "per-expert", False),
        ("a_model_that_nobody_knows", "per-expert", False),
        ("qwen3_moe", "fused", True), ("gpt_oss", "fused", True), ("a_model_that_nobody_knows", "fused", False),
    ],
)  # fmt: skip
def test_only_what_loads_passes_for_the_model(
    model_type: str, layout: str, loads: bool, tmp_path: Path, told: Told
) -> None:
    src = stacked(tmp_path, model_type)
    if layout == "fused":
        told("unpack", src, tmp_path / "apart", "--layout", "per-expert")
        (tmp_path / "apart" / "config.json").write_text(json.dumps(config(model_type)))
        src = tmp_path / "apart"
    findings = told("unpack", src, tmp_path / "out", "--layout", layout)["findings"]
    assert [finding["id"] for finding in findings] == ([] if loads else ["unpack.exchange"])
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["model_type"] == (model_type if loads else "ckptkit_layout")
    back = "fused" if layout == "per-expert" else "per-expert"
    findings = told("unpack", tmp_path / "out", tmp_path / "back", "--layout", back)["findings"]
    assert "unpack.exchange" not in {finding["id"] for finding in findings}
    same(src, tmp_path / "back")


def test_experts_of_floats_do_not_hide_codes(tmp_path: Path, told: Told) -> None:
    """No engine reads the codes, whatever becomes of the stacked floats beside them."""
    from safetensors.torch import save_file

    src = nvfp4(tmp_path)
    experts = tensors_of(stacked(tmp_path, "qwen3_5_moe"))
    tensors = tensors_of(src) | {name: tensor for name, tensor in experts.items() if ".experts." in name}
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((src / "config.json").read_text()) | {"model_type": "qwen3_5_moe"}
    (src / "config.json").write_text(json.dumps(table))
    told("unpack", src, tmp_path / "codes")
    told("unpack", tmp_path / "codes", tmp_path / "both", "--layout", "per-expert")
    assert json.loads((tmp_path / "both" / "config.json").read_text())["model_type"] == "ckptkit_layout"


# --- experts that are not all there --------------------------------------------------------------------------


def test_fp4_experts_are_named_where_floats_are_wanted(tmp_path: Path, told: Told) -> None:
    found = refused(told, gpt_oss(tmp_path), "per-expert")
    assert {finding["id"] for finding in found} == {"unpack.layout"}
    assert all(finding["tensor"].endswith("_blocks") for finding in found)


@pytest.mark.parametrize(
    ("make", "layout"), [(dsv4, "gpt-oss"), (gpt_oss, "gpt-oss"), (stacked, "per-expert"), (stacked, "fused")]
)
def test_the_last_expert_is_missed(make: Any, layout: str, tmp_path: Path, told: Told) -> None:
    folder = make(tmp_path, "qwen3_5_moe") if make is stacked else make(tmp_path)
    if layout == "fused":
        told("unpack", folder, tmp_path / "apart", "--layout", "per-expert")
        folder = tmp_path / "apart"
    if make is gpt_oss:
        told("unpack", folder, tmp_path / "codes")
        folder = tmp_path / "codes"
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": EXPERTS + 1}))
    found = refused_as_broken(told, folder, layout)
    assert {finding["id"] for finding in found} == {"names.incomplete-experts"}
