"""``ckptkit dequantize`` as a user runs it: values against the slow decoders and plain torch, configs against readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from decode.memory import Stored
from decode.samples import FORMATS, sample_of, values_of
from make import checkpoint
from safetensors.torch import load_file
from told import Told, teller

from ckptkit.cli import main
from ckptkit.errors import OK, SOURCE, USAGE
from ckptkit.files.header import Spec, lay_out

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "dequantize")


def ids(document: Mapping[str, Any]) -> list[str]:
    return [finding["id"] for finding in document["findings"]]


def about(document: Mapping[str, Any], id: str) -> set[str]:
    """The tensors that findings of this id name."""
    return {finding["tensor"] for finding in document["findings"] if finding["id"] == id}


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config_of(folder: Path, file: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


# --- values: every format, side by side --------------------------------------------------------------------

WORDS = [name for name in FORMATS if sample_of(name).last == "qweight"]
OTHERS = [name for name in FORMATS if name not in WORDS]


def module_of(number: int, name: str) -> str:
    return f"layers.{number}.experts.w" if name == "gpt-oss" else f"layers.{number}.w"


def write(folder: Path, names: Iterable[str], config: Mapping[str, Any]) -> Path:
    """A checkpoint of samples of formats; safetensors' own writer does not know all of their dtypes."""
    stored = {}
    for number, name in enumerate(names):
        module, sample = module_of(number, name), sample_of(name)
        sizes = (*sample.tensors[sample.last].shape[:-1], sample.cols)
        shape = {"weight_shape": Stored("I64", (len(sizes),), struct.pack(f"<{len(sizes)}q", *sizes))}
        for part, tensor in {**sample.tensors, **(shape if sample.last == "weight_packed" else {})}.items():
            stored[f"{module}_{part}" if "experts" in module else f"{module}.{part}"] = tensor
    header, layout = lay_out([Spec(name, tensor.dtype, tensor.shape) for name, tensor in stored.items()], None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    data = b"".join(stored[entry.name].data for entry in sorted(layout.entries, key=lambda entry: entry.start))
    (folder / "model.safetensors").write_bytes(header + data)
    return folder


def assert_values(folder: Path, names: Iterable[str]) -> None:
    found = tensors_of(folder)
    for number, name in enumerate(names):
        module, expected = module_of(number, name), torch.tensor(values_of(name))
        weight = found.pop(module if "experts" in module else f"{module}.weight")
        if name == "gpt-oss":
            weight = weight.transpose(1, 2)
        elif name in WORDS:
            weight = weight.T
        assert torch.equal(weight.reshape(expected.shape), expected), name
    assert not found


def side_by_side(folder: Path) -> Path:
    """A checkpoint of all formats but GPTQ's and AWQ's, each declared as a group of its own."""
    groups = {}
    for number, name in enumerate(OTHERS):
        known = sample_of(name).known
        block = list(known["block"]) if "block" in known else None
        weights = {"num_bits": known.get("bits", 8), "block_structure": block, "symmetric": "asym" not in name}
        groups[name] = {"targets": [module_of(number, name)], "weights": weights}
    declared = {"quant_method": "compressed-tensors", "config_groups": groups}
    return write(folder, OTHERS, {"quantization_config": declared})


def test_formats_side_by_side(tmp_path: Path, told: Told) -> None:
    told(side_by_side(tmp_path / "src"), tmp_path / "out", "--dtype", "fp32", "--no-verify")
    assert_values(tmp_path / "out", OTHERS)
    assert config_of(tmp_path / "out") == {}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_gptq_as_the_config_says(version: str, tmp_path: Path, told: Told) -> None:
    names = [name for name in WORDS if name != "AWQ" and ("v2" in name) == (version == "v2")]
    rules = {rf"+:layers\.{number}\.": {"bits": sample_of(name).known["bits"]} for number, name in enumerate(names)}
    declared = {"quant_method": "gptq", "bits": 4, "dynamic": rules}
    declared |= {"checkpoint_format": "gptq_v2"} if version == "v2" else {}
    src = write(tmp_path / "src", names, {"quantization_config": declared})
    told(src, tmp_path / "out", "--dtype", "fp32", "--no-verify")
    assert_values(tmp_path / "out", names)


@pytest.mark.parametrize(("packing", "version"), [("auto_round:auto_gptq", "v1"), ("auto_round", "v2")])
def test_auto_round_stores_zero_points_both_ways(packing: str, version: str, tmp_path: Path, told: Told) -> None:
    names = [name for name in WORDS if name != "AWQ" and ("v2" in name) == (version == "v2")]
    own = {module_of(number, name): {"bits": sample_of(name).known["bits"]} for number, name in enumerate(names)}
    declared = {"quant_method": "auto-round", "bits": 4, "packing_format": packing, "extra_config": own}
    src = write(tmp_path / "src", names, {"quantization_config": declared})
    told(src, tmp_path / "out", "--dtype", "fp32", "--no-verify")
    assert_values(tmp_path / "out", names)


def test_zero_points_that_nothing_explains_are_refused(tmp_path: Path, told: Told) -> None:
    declared = {"quant_method": "auto-round", "bits": 4, "packing_format": "another"}
    name = next(name for name in WORDS if name != "AWQ")
    src = write(tmp_path / "src", [name], {"quantization_config": declared})
    document = told(src, tmp_path / "out", code=USAGE)
    assert {finding["id"] for finding in document["findings"]} == {"decode.format"}


def test_a_group_that_there_is_not_is_named(tmp_path: Path, told: Told) -> None:
    declared = {"quant_method": "gptq", "bits": 4}
    src = write(tmp_path / "src", ["GPTQ, g_idx"], {"quantization_config": declared})
    order, file = sample_of("GPTQ, g_idx").tensors["g_idx"].data, src / "model.safetensors"
    data = file.read_bytes()
    assert data.count(order) == 1
    file.write_bytes(data.replace(order, order[:-4] + struct.pack("<i", 3)))
    [finding] = told(src, tmp_path / "out", code=SOURCE)["findings"]
    assert (finding["id"], finding["file"], finding["tensor"]) == (
        "data.group-order", "model.safetensors", "layers.0.w.g_idx",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_awq(tmp_path: Path, told: Told) -> None:
    src = write(tmp_path / "src", ["AWQ"], {"quantization_config": {"quant_method": "awq", "w_bit": 4}})
    told(src, tmp_path / "out", "--dtype", "fp32", "--no-verify")
    assert_values(tmp_path / "out", ["AWQ"])


# --- DeepSeek-V4: FP4 experts, FP8 projections -------------------------------------------------------------

FP8_TABLE = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
EXPERTS = [f"{at}.ffn.experts.{expert}.w1" for at in ("layers.0", "mtp.0") for expert in (0, 1)]
PROJECTION = "layers.0.attn.wq_a"


def fp4(seed: int, rows: int, cols: int, low: int = 110, high: int = 124) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of one E2M1 each, and exponents from ``low`` to ``high``."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=generator)
    return codes, torch.randint(low, high + 1, (rows, cols // 32), generator=generator)


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """By the formats' definitions, in float64: nothing is lost."""
    numbers = torch.where(codes < 8, E2M1[codes % 8], -E2M1[codes % 8]).double()
    return numbers * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


def stored(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed.view(torch.int8), exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def deepseek(folder: Path, **spread: int) -> Path:
    """Two shards; the scales lie in the other one than their weights."""
    first: Tensors = {"embed.weight": torch.ones(8, 4, dtype=torch.bfloat16), "layers.0.hc_attn_scale": torch.ones(3)}
    second: Tensors = {"layers.0.hc.scale": torch.ones(3)}
    for seed, module in enumerate(EXPERTS):
        first[f"{module}.weight"], second[f"{module}.scale"] = stored(*fp4(seed, 200, 256, **spread))
    first[f"{PROJECTION}.weight"] = torch.full((130, 200), 1.75).to(torch.float8_e4m3fn)
    scale = torch.tensor([[126, 128], [127, 125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    second[f"{PROJECTION}.scale"] = scale
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": FP8_TABLE}
    return checkpoint(folder, [first, second], config)


def test_mixed_formats_by_their_own_headers(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out)
    found = tensors_of(out)
    assert config_of(out) == {"model_type": "deepseek_v4"}
    for seed, module in enumerate(EXPERTS):
        assert_bits(found.pop(f"{module}.weight"), values(*fp4(seed, 200, 256)).bfloat16())
    corner = found.pop(f"{PROJECTION}.weight")
    assert [float(corner[at]) for at in ((0, 0), (0, 128), (128, 0), (129, 199))] == [0.875, 3.5, 1.75, 0.4375]
    assert found.keys() == {"embed.weight", "layers.0.hc_attn_scale", "layers.0.hc.scale"}


def test_a_dense_weight_goes_where_the_weight_was(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out)
    index = config_of(out, "model.safetensors.index.json")["weight_map"]
    assert {index[f"{module}.weight"] for module in EXPERTS} == {"model-00001-of-00002.safetensors"}
    assert [name for name, file in index.items() if file.startswith("model-00002")] == ["layers.0.hc.scale"]


def test_a_file_that_nothing_is_left_in_is_gone(tmp_path: Path, told: Told) -> None:
    codes, scale = stored(*fp4(0, 32, 64))
    src = checkpoint(tmp_path / "src", [{"a.weight": codes}, {"a.scale": scale}], {"model_type": "x"})
    told(src, tmp_path / "out", "--no-verify")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ckptkit.json", "config.json", "model.safetensors",
    ]  # fmt: skip


def test_experts_alone(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out, "--experts")
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(out).items()}
    assert {dtypes[f"{module}.weight"] for module in EXPERTS} == {torch.bfloat16}
    assert dtypes[f"{PROJECTION}.weight"] == torch.float8_e4m3fn
    paths = ["layers.0.ffn.experts", "mtp.0.ffn.experts"]
    assert config_of(out) == {
        "model_type": "deepseek_v4", "quantization_config": {**FP8_TABLE, "modules_to_not_convert": paths},
    }  # fmt: skip


def test_some_experts_leave_the_word_for_the_others(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out, "--only", "mtp.*", "--no-verify")
    config = config_of(out)
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["modules_to_not_convert"] == ["mtp.0.ffn.experts"]


def test_fp4_as_block_fp8_is_exact(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out, "--dtype", "fp8")
    found, before = tensors_of(out), tensors_of(src)
    for seed, module in enumerate(EXPERTS):
        weight, scale = found[f"{module}.weight"], found[f"{module}.scale"]
        assert (weight.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float8_e8m0fnu, (2, 2))
        spread = scale.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
        assert torch.equal(weight.double() * spread, values(*fp4(seed, 200, 256)))
    assert_bits(found[f"{PROJECTION}.weight"], before[f"{PROJECTION}.weight"])
    assert config_of(out) == {"model_type": "deepseek_v4", "expert_dtype": "fp8", "quantization_config": FP8_TABLE}


def test_what_fp8_would_round_is_listed(tmp_path: Path, told: Told) -> None:
    src, out = deepseek(tmp_path / "src", low=109), tmp_path / "out"
    document = told(src, out, "--dtype", "fp8", code=USAGE)
    assert about(document, "dequantize.inexact") == {f"{module}.weight" for module in EXPERTS}
    assert len(document["findings"]) == len(EXPERTS)
    assert not out.exists()
    document = told(src, out, "--dtype", "fp8", "--inexact", "round")
    assert ids(document).count("dequantize.inexact") == len(EXPERTS)
    found = tensors_of(out)
    spread = found[f"{EXPERTS[0]}.scale"].double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    near = values(*fp4(0, 200, 256, low=109)) / spread
    assert_bits(found[f"{EXPERTS[0]}.weight"], near.float().to(torch.float8_e4m3fn))


def test_groups_of_zeros_are_no_reason_to_round(tmp_path: Path, told: Told) -> None:
    codes, exponents = fp4(0, 128, 128)
    codes[5, 32:64], exponents[5, 1] = 0, 0
    weight, scale = stored(codes, exponents)
    config = {"model_type": "deepseek_v4", "quantization_config": FP8_TABLE}
    src = checkpoint(tmp_path / "src", {"a.weight": weight, "a.scale": scale}, config)
    assert not ids(told(src, tmp_path / "out", "--dtype", "fp8", "--no-verify"))


def test_a_nan_scale_is_told_before_the_run(tmp_path: Path, told: Told) -> None:
    src = deepseek(tmp_path / "src", high=255)
    document = told(src, tmp_path / "out", "--dtype", "fp8", "--dry-run", code=SOURCE)
    assert about(document, "data.nan") == {f"{module}.scale" for module in EXPERTS}
    document = told(src, tmp_path / "out", "--dtype", "fp8", "--allow", "data.nan", code=SOURCE)
    assert about(document, "data.nan") == {f"{module}.scale" for module in EXPERTS}
    document = told(src, tmp_path / "out", code=SOURCE)
    assert about(document, "data.nan") <= {f"{module}.scale" for module in EXPERTS}
    assert "--allow data.nan" in document["findings"][0]["hint"]
    assert not (tmp_path / "out").exists()
    told(src, tmp_path / "out", "--allow", "data.nan", "--no-verify", "--overwrite")
    assert tensors_of(tmp_path / "out")[f"{EXPERTS[0]}.weight"].isnan().any()


def test_one_word_for_all_experts(tmp_path: Path, told: Told) -> None:
    src = deepseek(tmp_path / "src")
    document = told(src, tmp_path / "out", "--dtype", "fp8", "--only", "mtp.*", code=USAGE)
    assert ids(document) == ["plan.config"]
    told(src, tmp_path / "out", "--dtype", "fp8", "--only", "mtp.*", "--allow", "plan.config", "--no-verify")


# --- what does not fit, and what is missing ----------------------------------------------------------------


def test_what_does_not_fit_is_told_and_nothing_is_published(tmp_path: Path, told: Told) -> None:
    tensors = {
        "a.weight": torch.full((2, 4), 448.0).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.tensor([1.0, 200.0]),
    }
    src = checkpoint(tmp_path / "src", tensors, {"model_type": "x"})
    document = told(src, tmp_path / "out", "--dtype", "fp16", "--no-verify", code=SOURCE)
    assert (ids(document), about(document, "data.overflow")) == (["data.overflow"], {"a.weight"})
    assert "--dtype bf16" in document["findings"][0]["hint"]
    assert not (tmp_path / "out").exists()
    told(src, tmp_path / "inf", "--dtype", "fp16", "--no-verify", "--allow", "data.overflow")
    assert_bits(tensors_of(tmp_path / "inf")["a.weight"], torch.tensor([[448.0], [torch.inf]]).half().repeat(1, 4))
    told(src, tmp_path / "wide", "--no-verify")
    assert_bits(tensors_of(tmp_path / "wide")["a.weight"], torch.tensor([[448.0], [89600.0]]).bfloat16().repeat(1, 4))


def test_a_missing_scale_taken_for_one(tmp_path: Path, told: Told) -> None:
    weight = torch.arange(254).to(torch.uint8)
    weight = torch.where(weight > 126, weight + 1, weight).view(2, 127).view(torch.float8_e4m3fn)
    src = checkpoint(tmp_path / "src", {"a.weight": weight, "b.weight": weight[None].clone()}, {"model_type": "x"})
    document = told(src, tmp_path / "out", "--no-verify", code=SOURCE)
    assert about(document, "names.weight-without-scale") == {"a.weight", "b.weight"}
    told(src, tmp_path / "out", "--no-verify", "--missing-scale", "one")
    found = tensors_of(tmp_path / "out")
    assert_bits(found["a.weight"], weight.float().bfloat16())
    assert_bits(found["b.weight"], weight[None].float().bfloat16())


# --- how it is run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--experts"], ["--dtype", "fp8"]])
def test_a_plan_file_makes_the_same(options: list[str], tmp_path: Path, told: Told) -> None:
    src, file = deepseek(tmp_path / "src"), tmp_path / "plan.jsonl"
    told(src, tmp_path / "out", *options, "--plan", file)
    assert main(["apply", str(file), str(tmp_path / "again"), "-q", "--no-progress"]) == OK
    first, second = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "again")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert_bits(second[name], tensor)
    assert config_of(tmp_path / "out") == config_of(tmp_path / "again")


def test_untouched_files_are_linked(tmp_path: Path, told: Told) -> None:
    out = tmp_path / "out"
    codes, scale = stored(*fp4(0, 32, 64))
    parts: list[Any] = [{"a.experts.0.w1.weight": codes, "a.experts.0.w1.scale": scale}, {"b.weight": torch.ones(4, 4)}]
    src = checkpoint(tmp_path / "other", parts, {"model_type": "x"})
    told(src, out, "--link", "hard", "--no-verify")
    assert (out / "model-00002-of-00002.safetensors").samefile(src / "model-00002-of-00002.safetensors")


def test_a_single_file_without_a_config(tmp_path: Path, told: Told) -> None:
    codes, scale = stored(*fp4(0, 32, 64))
    src = checkpoint(tmp_path / "src", {"a.weight": codes, "a.scale": scale})
    told(src / "model.safetensors", tmp_path / "out", "--no-verify")
    assert_bits(tensors_of(tmp_path / "out")["a.weight"], values(*fp4(0, 32, 64)).bfloat16())


# --- verified against the source ---------------------------------------------------------------------------


def verified(out: Path, src: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The report of ``verify --against``, of what is numeric."""
    code = main(
        [
            "verify",
            str(out),
            "--against",
            str(src),
            "--level",
            "numeric",
            "--select",
            "numeric.*",
            "--json",
            "--no-progress",
        ]
    )
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return report


@pytest.mark.parametrize("options", [[], ["--experts"], ["--dtype", "fp8"]])
def test_verify_against_the_source(options: list[str], tmp_path: Path, told: Told, capsys: Any) -> None:
    src, out = deepseek(tmp_path / "src"), tmp_path / "out"
    told(src, out, *options)
    report = verified(out, src, capsys)
    assert (report["ok"], ids(report)) == (True, [])


TURNED = [name for name in FORMATS if name == "AWQ" or name == "gpt-oss" or "GPTQ v1" in name or "act-order" in name]


@pytest.mark.parametrize("name", TURNED)
def test_verify_what_is_stored_as_a_transpose(name: str, tmp_path: Path, told: Told, capsys: Any) -> None:
    method = {"AWQ": "awq", "gpt-oss": "mxfp4"}.get(name, "gptq")
    table = {"quant_method": method, "bits": sample_of(name).known.get("bits")}
    src, out = write(tmp_path / "src", [name], {"quantization_config": table}), tmp_path / "out"
    told(src, out, "--no-verify")
    report = verified(out, src, capsys)
    assert (report["ok"], ids(report)) == (True, [])
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40  # an exponent bit of the last number
    path.write_bytes(data)
    assert ids(verified(out, src, capsys)) == ["numeric.exact"]
