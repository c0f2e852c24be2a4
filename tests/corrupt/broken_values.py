"""Defects of the tensors' bytes: numbers that cannot be meant, and bytes that are not those that were recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from ckptkit.checks import Level
from ckptkit.cli import main
from corrupt import edit
from corrupt.broken_config import UP, Q
from corrupt.broken_files import EMBEDDING, HEAD, NORM, both, template
from corrupt.broken_quantization import PACKED, SCALE, SHAPE
from corrupt.defects import Defect, defect
from corrupt.edit import Damage, file, flip, put

EXPERTS = "model.layers.1.mlp.experts"
Change = Callable[[torch.Tensor], torch.Tensor]
_data = partial(defect, level=Level.DATA)


def value(name: str, good: str, damage: Damage, ids: str) -> Defect:
    """A defect of a checkpoint that some other tool made: no digest is recorded of it."""
    return _data(name, good, both(lambda folder: (folder / "ckptkit.json").unlink(missing_ok=True), damage), ids)


def at(index: int, value: float) -> Change:
    """One number changed."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.float().flatten()
        flat[index] = value
        return flat.reshape(tensor.shape).to(tensor.dtype)

    return change


def byte(index: int, value: int) -> Change:
    """One byte changed, whatever the dtype."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        flat[index] = value
        return flat.view(tensor.dtype).reshape(tensor.shape)

    return change


def filled(value: float) -> Change:
    return lambda tensor: torch.full_like(tensor.float(), value).to(tensor.dtype)


def rows(first: int, stop: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor[first:stop] = change(tensor[first:stop])
        return tensor

    return damage


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """int4 codes of which every other is -8 or 7 (stored with an offset of 8: 0 or 15)."""
    return (tensor & 0x0F0F0F0F) | torch.tensor(0x70F0F0F0, dtype=torch.int32)


def same_head(folder: Path) -> None:
    """Make the head the embedding's numbers."""
    embedding = load_file(edit.holder(folder, EMBEDDING))[EMBEDDING]
    put(HEAD, lambda head: embedding)(folder)


def spread(folder: Path) -> None:
    """Unpack the codes, one a byte."""
    held = folder.with_name("spread")
    main(["unpack", str(folder), str(held), "-q", "--no-progress"])
    shutil.rmtree(folder)
    held.rename(folder)
    (folder / "ckptkit.json").unlink()


def recorded(damage: Damage, per_tensor: bool = True) -> Damage:
    """Digests taken, then the damage."""
    options = ["--per-tensor"] if per_tensor else []
    return both(lambda folder: main(["hash", str(folder), *options, "-q", "--no-progress"]), damage)


VALUES = [
    value("NaN in a weight", "dense", put(f"{Q}.weight", at(77, float("nan"))), "data.nan"),
    value("NaN in a norm", "moe", put(NORM, at(3, float("nan"))), "data.nan"),
    value("Inf of a cast to float16", "half", put(EMBEDDING, at(1000, float("inf"))), "data.inf"),
    value("NaN among FP8 codes", "fp8", put(f"{Q}.weight", byte(9, 0x7F)), "data.nan"),
    value("weight never filled", "dense", put(f"{UP}.weight", filled(0)), "data.all-zero"),
    value("norm never filled", "dense", put(NORM, filled(0)), "data.all-zero"),
    value("codes never filled", "nvfp4", put(f"{Q}.{PACKED}", filled(0)), "data.all-zero"),
    value("scale of zero", "w4w8", put(f"{Q}.{SCALE}", at(5, 0)), "data.scale-zero"),
    value("head scale of zero", "w8head", put("lm_head.weight_scale", at(511, 0)), "data.scale-zero"),
    value("scale of NaN (S10)", "w8a8", put(f"{Q}.{SCALE}", at(5, float("nan"))), "data.scale-nonfinite"),
    value("scale of Inf, FP8 blocks", "fp8", put(f"{Q}.weight_scale_inv", at(0, float("inf"))), "data.scale-nonfinite"),
    value("scale of NaN, GPTQ", "gptq", put(f"{Q}.scales", at(5, float("nan"))), "data.scale-nonfinite"),
    value("exponent of NaN, MXFP4", "mxfp4", put(f"{Q}.{SCALE}", byte(0, 255)), "data.scale-nonfinite"),
    value("block scale of NaN, NVFP4 (S10)", "nvfp4", put(f"{Q}.{SCALE}", byte(0, 0x7F)), "data.scale-nonfinite"),
    value("scale with its sign flipped", "fp8-dynamic", put(f"{Q}.{SCALE}", lambda t: -t), "data.scale-negative"),
    value("global scale that overflowed (S22)", "nvfp4", both(put(f"{Q}.weight_global_scale", filled(1)),
          put(f"{Q}.{SCALE}", filled(2.0**-8))), "data.scale-range"),
    value("codes at both ends", "w4w8", put(f"{UP}.{PACKED}", extremes), "data.saturated"),
    value("one byte and no other", "mxfp8", put(f"{UP}.weight", filled(0.5625)), "data.saturated"),
    value("weight_shape of another weight", "w4w8", put(f"{Q}.{SHAPE}", lambda t: torch.tensor([128, 256])),
          "data.weight-shape"),
    value("weight_shape transposed", "w4w8", put(f"{UP}.{SHAPE}", lambda t: t.flip(0)), "data.weight-shape"),
    value("byte that is no code", "gpt_oss", both(spread, put(f"{EXPERTS}.down_proj_codes", byte(9, 16))), "data.codes"),
    value("tied, with other numbers in the head", "dense", edit.config(tie_word_embeddings=True), "config.tie data.tie"),
    value("tied, with the embedding stored twice", "dense", both(same_head, edit.config(tie_word_embeddings=True)),
          "config.tie"),
    value("new rows filled with one vector", "dense", put(HEAD, rows(400, 512, lambda t: t[:1].expand_as(t))),
          "data.repeated-rows"),
    value("rows that nobody trained", "dense", put(EMBEDDING, rows(400, 512, lambda t: t * 1e-4)), "data.near-zero-rows"),
]  # fmt: skip

RECORDED = [
    _data("bit of a weight flipped, whole files recorded", "dense", recorded(flip(f"{Q}.weight", at=100, bit=3), False),
          "data.digest"),
    _data("NaN after hashing", "half", recorded(put(HEAD, at(7, float("nan")))), "data.digest"),
    _data("file gone after hashing", "dense", recorded(file("generation_config.json", None)), "data.digest"),
    _data("tokenizer edited after hashing", "dense", recorded(template("{{ messages }}")), "data.digest"),
    _data("record of digests that is a page of an error", "dense", recorded(file("SHA256SUMS", b"<html></html>"), False),
          "data.digest"),
    _data("record of tensors' digests cut short", "dense", recorded(file("ckptkit.digests.json", b'{"schema": 1,')),
          "data.digest"),
    _data("tensor dropped after hashing", "w4w8", recorded(edit.drop(f"{Q}.{SHAPE}")), "data.digest shapes.weight-shape"),
]  # fmt: skip

FLIPPED = [
    _data(f"bit flipped in {tensor} of {good}", good, recorded(flip(tensor, at=at, bit=bit)), "data.digest")
    for good, tensor, at, bit in (
        ("dense", f"{Q}.weight", 100, 3), ("single", NORM, 1, 7),
        ("moe", "model.layers.1.mlp.experts.2.up_proj.weight", 5000, 6), ("w4w8", f"{Q}.{PACKED}", 31, 7),
        ("w4w8", f"{Q}.{SCALE}", 3, 7), ("w4w8", f"{Q}.{SHAPE}", 9, 0), ("fp8", f"{Q}.weight_scale_inv", 3, 6),
        ("fp8", f"{Q}.weight", 40, 0), ("gptq", f"{Q}.g_idx", 7, 4), ("awq", f"{Q}.qzeros", 7, 4),
        ("nvfp4", f"{Q}.weight_global_scale", 3, 6), ("nvfp4", f"{Q}.{SCALE}", 70, 7), ("mxfp4", f"{Q}.{PACKED}", 1, 1),
        ("w8a8", f"{Q}.weight", 17, 2), ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_scales", 5, 7),
        ("modelopt", f"{Q}.weight_scale_2", 3, 7), ("multimodal", "model.visual.patch_embed.proj.weight", 9, 5),
    )
]  # fmt: skip
