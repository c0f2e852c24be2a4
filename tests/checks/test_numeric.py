"""Values against the source: errors against compressed-tensors' own decompressors, bounds against brute force, damages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file, save_file

from ckptkit.checks import Level, Sample, Subject, run
from ckptkit.checks.bounds import bound
from ckptkit.checks.matching import Pair
from ckptkit.cli import main
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source

from .subjects import edit, findings, flip, ids, outcome, quantize, results, stored

Q, UP, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "lm_head"
HEADS, LINEAR = "re:.*lm_head$", "Linear"


def body(scheme: str, more: str = "") -> str:
    """A recipe that quantizes everything by one scheme."""
    return f"{more}groups: {{body: {{targets: [{LINEAR}, '{HEADS}'], scheme: {scheme}}}}}\n"


def integers(bits: int, symmetric: bool, sharing: str) -> str:
    weights = f"{{type: int, num_bits: {bits}, symmetric: {str(symmetric).lower()}, {sharing}}}"
    return f"{{format: pack-quantized, weights: {weights}}}"


RECIPES = {
    "w4a16-lm_head-w8a16": "w4a16-lm_head-w8a16",
    "float32": body("W4A16", "arithmetic: float32\n"),
    "asymmetric": body(integers(8, False, "strategy: channel")),
    "3 bits": body(integers(3, True, "strategy: group, group_size: 32")),
    "tensor": body(integers(8, True, "strategy: tensor")),
    "w8a8": body("W8A8"),
    "fp8-dynamic": "fp8-dynamic",
    "fp8-block": "fp8-block",
    "nvfp4a16": "nvfp4a16",
    "mxfp4": "mxfp4",
    "mxfp8": body("MXFP8A16"),
}


def model(folder: Path, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> Path:
    tensors = {name: tensor.to(dtype) for name, tensor in llama().items()}
    return checkpoint(folder, tensors, llama_config(torch_dtype=str(dtype).removeprefix("torch."), **extra))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors, whose names have ``__`` for dots."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor.contiguous()
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def decompressed(folder: Path, module: str) -> torch.Tensor:
    """What compressed-tensors reads back, in float32."""
    tensors = load_file(folder / "model.safetensors")
    parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{module}.")}
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    is_head = module == HEAD
    group = next(g for g in groups if len(groups) == 1 or is_head == any("lm_head" in t for t in g["targets"]))
    scheme = QuantizationScheme(targets=[], weights=QuantizationArgs(**group["weights"]), format=group["format"])
    wide = {n: t.float() if t.dtype in {torch.bfloat16, torch.float16} else t for n, t in parts.items()}
    found: torch.Tensor = BaseCompressor.get_value_from_registry(group["format"]).decompress(wide, scheme)["weight"]
    return found.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sound_results_and_their_figures(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    source = model(tmp_path / "source", dtype)
    out = quantize(source, tmp_path / "out", RECIPES[recipe], "--allow", "plan.head-block-fp8")
    found = outcome(out, source)
    assert found.findings == []
    assert results(found)["numeric.error"] == results(found)["numeric.exact"] == "ok"
    figures = {line["tensor"].rpartition(".")[0]: line for line in found.figures["numeric"]["tensors"]}
    for module in (Q, UP):
        w = load_file(source / "model.safetensors")[f"{module}.weight"].float()
        d = w - decompressed(out, module)
        tolerance = 2e-2 if recipe == "nvfp4a16" else 1e-4  # the library multiplies NVFP4 out in bfloat16
        assert figures[module]["rel_rms"] == pytest.approx(float(d.norm() / w.norm()), rel=tolerance)
        assert figures[module]["max_abs"] == pytest.approx(float(d.abs().max()), rel=tolerance, abs=2e-5)
        assert figures[module]["rel_rms"] < figures[module]["bound"] < 3 * figures[module]["rel_rms"]
        assert figures[module]["cos"] == pytest.approx(
            float(torch.cosine_similarity(w.flatten(), (w - d).flatten(), 0)), abs=1e-5
        )


# --- the bounds ----------------------------------------------------------------------------------------------


def adversarial(dtype: torch.dtype) -> torch.Tensor:
    """Rows of many kinds: each value near a tie of some format, tails, tiny and huge, one-sided, few."""
    generator = torch.Generator().manual_seed(0)
    n, u = torch.randn(512, 128, generator=generator), torch.rand(512, 128, generator=generator)
    kinds = [n * 0.02, torch.tan((u - 0.5) * 3.1) * 0.01, u * 0.05, -u * 0.05, n.sign() * 10 ** (u * 8 - 9), n * 1e-5]
    kinds += [n * (u < 0.05), torch.full_like(n, 0.0371), n * 100, (n * 4).round() / 40, n * 0.02 + 0.5, u - 0.5]
    rows = torch.stack([kinds[row % len(kinds)][row] for row in range(512)])
    rows[:, 0] = rows.abs().amax(1)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rounding_is_beyond_its_bound(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in llama().items()} | {f"{HEAD}.weight": adversarial(dtype)}
    tensors |= {
        f"{UP}.weight": adversarial(dtype)[:256],
        f"{UP.replace('up', 'gate')}.weight": adversarial(dtype)[256:],
    }
    source = checkpoint(tmp_path / "source", tensors, llama_config())
    out = quantize(source, tmp_path / "out", RECIPES[recipe], "--allow", "plan.head-block-fp8")
    assert ids(out, source) == []


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float16, True), (torch.bfloat16, False)])
def test_a_weight_of_which_little_is_left_is_told_though_its_format_explains_it(
    tmp_path: Path, dtype: torch.dtype, lost: bool
) -> None:
    """A float16 scale is never below 2**-24: FP8's codes of such a weight are few, and most of it becomes zero."""
    weight = (llama()[f"{UP}.weight"].float() * 2.0**-14).to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in llama().items()} | {f"{UP}.weight": weight}
    dtypes = {"torch_dtype": str(dtype).removeprefix("torch.")}
    source = checkpoint(tmp_path / "source", tensors, llama_config(**dtypes))
    out = quantize(source, tmp_path / "out", "fp8-dynamic")
    error = decompressed(out, UP) - weight.float()
    assert bool(error.norm() >= 0.25 * weight.float().norm()) is lost
    assert [(f.id, f.severity, f.tensor) for f in findings(out, source)] == (
        [("numeric.loss", "warning", f"{UP}.weight")] if lost else []
    )


STEPS = {  # (bits, symmetric, arithmetic): the bound in steps for bfloat16, away from the ends of the range and there
    (8, True, "compat"): (0.75, 0.998), (8, True, "float32"): (0.5, 0.998), (4, True, "compat"): (0.5156, 0.5294),
    (4, True, "float32"): (0.5, 0.5294), (8, False, "compat"): (0.75, 2.746), (4, False, "compat"): (0.5313, 0.6487),
    (8, False, "float32"): (0.5, 2.746),
}  # fmt: skip


@pytest.mark.parametrize(("bits", "symmetric", "arithmetic"), STEPS)
def test_bounds_of_integers_are_those_stated_and_are_reached(
    tmp_path: Path, bits: int, symmetric: bool, arithmetic: str
) -> None:
    recipe = body(integers(bits, symmetric, "strategy: channel"), f"arithmetic: {arithmetic}\n")
    tensors = llama() | {f"{HEAD}.weight": adversarial(torch.bfloat16)}
    source = checkpoint(tmp_path / "source", tensors, llama_config())
    out = quantize(source, tmp_path / "out", recipe)
    (pair,) = [pair for pair in pairs(out, source) if pair.made.name.startswith(HEAD)]
    limits = bound(pair.made.stored, pair.source.stored, arithmetic)
    assert (limits.step, limits.end) == pytest.approx(STEPS[bits, symmetric, arithmetic], rel=1e-3)
    step = load_file(out / "model.safetensors")[f"{HEAD}.weight_scale"].float()
    steps = (tensors[f"{HEAD}.weight"].float() - decompressed(out, HEAD)).abs() / step
    assert 0.99 * limits.step < steps.max() <= limits.end


def pairs(out: Path, source: Path) -> list[Pair]:
    with open_source(str(out)) as made, open_source(str(source)) as against:
        return Subject(open_checkpoint(made), against=open_checkpoint(against)).matched.pairs


# --- damages -------------------------------------------------------------------------------------------------

DAMAGES = [
    ("w4a16", f"{UP}.weight_packed", lambda b: b.__setitem__(99, b[99] ^ 0x80)),
    ("w4a16", f"{UP}.weight_packed", lambda b: b.__setitem__(slice(0, None), bytes(x >> 4 | (x & 15) << 4 for x in b))),
    ("w4a16", f"{UP}.weight_scale", lambda b: b.__setitem__(8, b[8] ^ 0x40)),
    ("asymmetric", f"{UP}.weight_zero_point", lambda b: b.__setitem__(3, b[3] ^ 0x04)),
    ("asymmetric", f"{HEAD}.weight_packed", lambda b: b.__setitem__(70, b[70] ^ 0x02)),
    ("fp8-dynamic", f"{UP}.weight", lambda b: b.__setitem__(5, b[5] ^ 0x10)),
    ("fp8-dynamic", f"{UP}.weight", lambda b: b.__setitem__(5, 0x7F)),
    ("fp8-block", f"{UP}.weight_scale", lambda b: b.__setitem__(1, b[1] ^ 0x01)),
    ("nvfp4a16", f"{UP}.weight_packed", lambda b: b.__setitem__(slice(0, None), bytes(x >> 4 | (x & 15) << 4 for x in b))),
    ("nvfp4a16", f"{UP}.weight_scale", lambda b: b.__setitem__(1, b[1] ^ 0x10)),
    ("nvfp4a16", f"{UP}.weight_global_scale", lambda b: b.__setitem__(2, b[2] ^ 0x80)),
    ("mxfp4", f"{UP}.weight_scale", lambda b: b.__setitem__(0, b[0] + 1)),
    ("mxfp8", f"{UP}.weight_scale", lambda b: b.__setitem__(0, b[0] - 1)),
    ("w8a8", f"{UP}.weight", lambda b: b.__setitem__(0, b[0] ^ 0x04)),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "tensor", "damage"), DAMAGES)
def test_a_damaged_weight_is_found_and_named(tmp_path: Path, recipe: str, tensor: str, damage: Any) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", RECIPES.get(recipe, recipe))
    content = bytearray(stored(out, tensor))
    damage(content)
    edit(out, tensor, 0, bytes(content))
    found = findings(out, source)
    module = tensor.rpartition(".")[0]
    assert [(f.id, f.severity, (f.tensor or "").rpartition(".")[0]) for f in found] == [
        ("numeric.error", "error", module)
    ]
    assert found[0].data["source"] == f"{module}.weight"


def test_the_worst_element_is_where_it_was_damaged(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    edit(out, f"{UP}.weight_packed", 77 * 64 + 10, bytes([stored(out, f"{UP}.weight_packed")[77 * 64 + 10] ^ 0x80]))
    (found,) = findings(out, source)
    assert (found.data["worst"]["row"], found.data["worst"]["column"], found.data["beyond"]) == (77, 21, 1)


def test_codes_that_a_calibration_chose_are_a_warning(tmp_path: Path) -> None:
    """A fifth of the codes moved by one; few, or far, or in a result of our own, are an error."""
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    for module in (Q, UP):
        codes = torch.frombuffer(bytearray(stored(out, f"{module}.weight_packed")), dtype=torch.uint8).clone()
        nudged = codes + (codes & 7 == 3).to(torch.uint8)
        edit(out, f"{module}.weight_packed", 0, nudged.numpy().tobytes())
    assert {f.severity for f in findings(out, source)} == {"error"}
    (out / "ckptkit.json").unlink()
    assert {(f.id, f.severity) for f in findings(out, source)} == {("numeric.error", "warning")}


# --- copies, ties, experts -----------------------------------------------------------------------------------


def test_a_changed_copy(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    flip(out, "model.norm.weight", 100, 0)
    flip(out, "model.embed_tokens.weight", 4000, 5)
    assert {(f.id, f.tensor, f.data["byte"]) for f in findings(out, source)} == {
        ("numeric.exact", "model.norm.weight", 100),
        ("numeric.exact", "model.embed_tokens.weight", 4000),
    }


@pytest.mark.parametrize("link", ["copy", "hard"])
def test_a_linked_shard_is_equal(tmp_path: Path, link: str) -> None:
    tensors = llama()
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[:9]}, {name: tensors[name] for name in names[9:]}]
    source = checkpoint(tmp_path / "source", parts, llama_config())
    recipe = "groups: {head: {targets: ['re:.*lm_head$'], scheme: W8A16}}\n"
    assert ids(quantize(source, tmp_path / "out", recipe, "--link", link), source) == []


@pytest.mark.parametrize("recipe", ["w4a16", "lm_head-w8a16"])
def test_an_untied_head_is_compared_with_the_embedding(tmp_path: Path, recipe: str) -> None:
    tensors = llama(lm_head__weight=None)
    source = checkpoint(tmp_path / "source", tensors, llama_config(tie_word_embeddings=True))
    out = quantize(source, tmp_path / "out", recipe, "--set", "tie=untie")
    assert ids(out, source) == []
    head = f"{HEAD}.weight" if recipe == "w4a16" else f"{HEAD}.weight_packed"
    if recipe == "w4a16":
        rewrite(out, lm_head__weight=tensors["model.embed_tokens.weight"].clone())
        assert ids(out, source) == []
    flip(out, head, 1001, 6)
    assert [(f.id, f.tensor) for f in findings(out, source)] == [
        ("numeric.exact" if recipe == "w4a16" else "numeric.error", head)
    ]


def experts(layout: str, model_type: str, alternate: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tensors = llama(layers=1)
    for name in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"model.layers.0.mlp.{name}.weight"]
    for name, out, columns in (("gate_up_proj", 128, 128), ("down_proj", 128, 64)):
        shape = (4, out, columns) if layout == "rows" else (4, columns, out)
        weight = (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)
        tensors[f"model.layers.0.mlp.experts.{name}"] = weight
        if alternate:
            tensors[f"model.layers.0.mlp.experts.{name}_bias"] = torch.randn(4, out, generator=generator).to(
                torch.bfloat16
            )
    return tensors, llama_config(layers=1, model_type=model_type)


@pytest.mark.parametrize(
    ("layout", "model_type", "alternate"),
    [("rows", "qwen3_5_moe", False), ("columns", "llama4", False), ("columns", "gpt_oss", True)],
)
def test_stacked_experts_are_compared_slice_by_slice(
    tmp_path: Path, layout: str, model_type: str, alternate: bool
) -> None:
    tensors, config = experts(layout, model_type, alternate)
    source = checkpoint(tmp_path / "source", tensors, config)
    recipe = f"groups: {{moe: {{targets: ['re:.*experts'], scheme: W4A16, group_size: 32, experts: {layout}}}}}\n"
    out = quantize(source, tmp_path / "out", recipe)
    assert ids(out, source) == []
    stem = "model.layers.0.mlp.experts.2."
    gate, up = stored(out, f"{stem}gate_proj.weight_packed"), stored(out, f"{stem}up_proj.weight_packed")
    edit(out, f"{stem}gate_proj.weight_packed", 0, up)
    edit(out, f"{stem}up_proj.weight_packed", 0, gate)
    assert {(f.id, f.tensor) for f in findings(out, source)} == {
        ("numeric.error", f"{stem}gate_proj.weight_packed"),
        ("numeric.error", f"{stem}up_proj.weight_packed"),
    }
    if alternate:
        flip(out, f"{stem}down_proj.bias", 3, 3)
        assert "numeric.exact" in ids(out, source)


def test_a_head_merged_onto_a_finished_body(tmp_path: Path) -> None:
    """The body's packed tensors are copies; the head is converted."""
    body = quantize(model(tmp_path / "source"), tmp_path / "body", "w4a16")
    recipe = "existing: merge\ngroups: {head: {targets: ['re:.*lm_head$'], scheme: W8A16}}\n"
    out = quantize(body, tmp_path / "out", recipe)
    assert ids(out, body) == []
    flip(out, f"{UP}.weight_packed", 9, 1)
    assert [(f.id, f.tensor) for f in findings(out, body)] == [("numeric.exact", f"{UP}.weight_packed")]
    assert ids(out, tmp_path / "source") == ["numeric.error"]


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_casts_are_within_half_a_last_place(tmp_path: Path, dtype: str) -> None:
    source = model(tmp_path / "source", torch.float32)
    command = ["reshard", str(source), str(tmp_path / "out"), "--cast", f"*={dtype}", "-q", "--no-progress"]
    assert main(command) == 0
    assert ids(tmp_path / "out", source) == []
    flip(tmp_path / "out", f"{UP}.weight", 200, 1)
    assert [(f.id, f.tensor) for f in findings(tmp_path / "out", source)] == [("numeric.error", f"{UP}.weight")]


def test_names_that_reshard_changed_and_dropped(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    rewrite(source, model__layers__0__mlp__extra__weight=torch.ones(8, 8))
    options = ["--rename", "model.=transformer.", "--drop", "*.extra.weight", "-q", "--no-progress"]
    assert main(["reshard", str(source), str(tmp_path / "out"), *options]) == 0
    assert ids(tmp_path / "out", source) == []
    (tmp_path / "out/ckptkit.json").unlink()
    assert set(ids(tmp_path / "out", source)) == {"numeric.missing"}


def test_a_dequantized_checkpoint(tmp_path: Path) -> None:
    """The source is the quantized one: what is made of it is compared with what it stands for."""
    quantized = quantize(model(tmp_path / "dense"), tmp_path / "fp8", "fp8-block")
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale")]:
        module = name.removesuffix(".weight_scale")
        tensors[f"{module}.weight"] = decompressed(quantized, module).to(torch.bfloat16)
        del tensors[name]
    made = checkpoint(tmp_path / "made", tensors, llama_config())
    assert ids(made, quantized) == []
    flip(made, f"{UP}.weight", 201, 0)
    assert [(f.id, f.tensor) for f in findings(made, quantized)] == [("numeric.error", f"{UP}.weight")]


# --- what does not belong together ---------------------------------------------------------------------------


def test_tensors_without_a_counterpart(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    rewrite(source, model__layers__0__eh_proj__weight=torch.ones(8, 8))
    rewrite(out, model__extra__weight=torch.ones(8, 8), model__layers__0__self_attn__k_scale=torch.ones(1))
    assert {(f.id, f.tensor) for f in findings(out, source)} == {
        ("numeric.missing", "model.layers.0.eh_proj.weight"),
        ("numeric.missing", "model.extra.weight"),
    }


def test_another_shape(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    rewrite(source, model__norm__weight=torch.ones(64), **{f"{UP}.weight".replace(".", "__"): torch.ones(256, 64)})
    assert {(f.id, f.tensor) for f in findings(out, source)} == {
        ("numeric.shape", "model.norm.weight"),
        ("numeric.shape", f"{UP}.weight_packed"),
    }


def test_what_cannot_be_decoded_is_not_run(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    found = outcome(out, source)
    assert found.findings == []
    assert results(found)["numeric.error"] == "skip"


def test_without_a_source_nothing_is_compared(tmp_path: Path) -> None:
    with open_source(str(model(tmp_path / "source"))) as source:
        found = run(Subject(open_checkpoint(source)), Level.NUMERIC, lambda id: id.startswith("numeric."))
    assert {result.result for result in found.results} == {"skip"}


def test_the_parts_of_a_sample_are_everything_once(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", "w4a16")
    flip(out, f"{UP}.weight_packed", 99, 7)
    flip(out, "model.norm.weight", 1, 1)
    hit = [(f.id, f.tensor) for n in range(1, 8) for f in findings(out, source, sample=Sample(n, 7))]
    assert sorted(hit) == [("numeric.error", f"{UP}.weight_packed"), ("numeric.exact", "model.norm.weight")]


# --- the peer library ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["w4a16-lm_head-w8a16", "nvfp4a16", "asymmetric"])
def test_bits_of_the_peer_library(tmp_path: Path, recipe: str) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", RECIPES[recipe])
    found = outcome(out, source, oracle="llmcompressor")
    assert found.findings == []
    assert results(found)["numeric.oracle"] == "ok"
    name = next(part for part in (f"{Q}.weight_zero_point", f"{Q}.weight_scale") if _has(out, part))
    edit(out, name, 0, bytes([stored(out, name)[0] ^ 1]))
    assert ("numeric.oracle", name) in {(f.id, f.tensor) for f in findings(out, source, oracle="llmcompressor")}


def _has(folder: Path, tensor: str) -> bool:
    return tensor in load_file(folder / "model.safetensors")


def test_arithmetic_that_the_peer_library_does_not_have(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    out = quantize(source, tmp_path / "out", RECIPES["float32"])
    assert results(outcome(out, source, oracle="llmcompressor"))["numeric.oracle"] == "skip"
