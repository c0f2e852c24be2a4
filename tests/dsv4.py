"""Small DeepSeek-V4-Flash-DSpark checkpoints: real names, dtypes, layout and config, any size, and what users meet.

    made = make(tmp_path / "target", truth=True)      FP4 experts, FP8 linears, a shard for each layer and stage
    make(…, draft="nextn")                            a base: one NextN layer under mtp.0
    make(…, draft="declared")                         config keys of a draft, none of its tensors
    make(…, form="bf16")                              the same values dequantized; form="fp8": FP8 experts
    make(…, v41=True)                                 V4.1: text_config, other Markov names, FP8 blocks of 32 x 32
    make(…, scatter=True)                             each scale in the shard after its weight's

Made with torch alone, so that it can judge what the package makes of it. A tensor's values depend on its name and the
seed, not on the variant: the target of a base is the target of its DSpark sibling, bit for bit. In V4.1 only the draft
and the config are as published; the target's layers are V4's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

# Value of an E2M1 code: a sign bit, two of exponent, one of mantissa.
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Dims:
    """Sizes; the defaults make a target of 4 MB with a draft of 2 MB. Widths of FP8 linears are multiples of 128."""

    hidden: int = 256
    inter: int = 128
    experts: int = 4
    per_token: int = 2
    draft_experts: int = 2  # in V4.1
    heads: int = 2
    head_dim: int = 128
    q_rank: int = 128
    groups: int = 2
    out_rank: int = 64
    layers: int = 4
    hashed: int = 1
    stages: int = 3
    index_heads: int = 2
    index_dim: int = 64
    streams: int = 4
    rank: int = 32
    vocab: int = 512

    @property
    def ratios(self) -> list[int]:
        return [0, *([4, 128] * self.layers)][: self.layers]

    @property
    def taps(self) -> list[int]:
        return list(range(self.layers - self.stages, self.layers))


class Made(NamedTuple):
    """``truth``: of each quantized weight (and, with ``form="bf16"``, of its dequantized self) the float32 values."""

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    truth: Tensors


class _Maker:
    """Collects the tensors of one shard below a prefix, with their truth where it is wanted."""

    def __init__(self, form: str, fp8_block: int, seed: int, truth: bool) -> None:
        self.form, self.fp8_block, self.seed, self.wants_truth = form, fp8_block, seed, truth
        self.tensors: Tensors = {}
        self.truth: Tensors = {}

    def random(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(crc32(name.encode()) + self.seed)

    def plain(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, near: float = 0.0) -> None:
        values = torch.randn(shape, generator=self.random(name)) * 0.02 + near
        self.tensors[name] = values.to(dtype)

    def norm(self, name: str, size: int) -> None:
        self.plain(f"{name}.weight", size, near=1.0)

    def fp8(self, module: str, rows: int, columns: int) -> None:
        """E4M3 codes; each block's scale is the power of two that brings its greatest value to 448 at most."""
        values, size = torch.randn(rows, columns, generator=self.random(module)) * 0.02, self.fp8_block
        spread = values.new_zeros(-(-rows // size), -(-columns // size))
        for i, j in torch.cartesian_prod(*map(torch.arange, spread.shape)).tolist():
            there = values[i * size : (i + 1) * size, j * size : (j + 1) * size]
            spread[i, j] = torch.exp2(torch.ceil(torch.log2(there.abs().max() / 448)))
        each = spread.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        codes = (values / each).to(torch.float8_e4m3fn)
        self._quantized(module, codes, spread.to(torch.float8_e8m0fnu), lambda: codes.float() * each)

    def fp4(self, module: str, rows: int, columns: int) -> None:
        """Two codes a byte, the low nibble the even column; exponents of 2**-11 to 2**-4, one for 32 columns."""
        random = self.random(module)
        packed = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        exponents = torch.randint(116, 124, (rows, columns // 32), generator=random, dtype=torch.uint8)

        def values() -> torch.Tensor:
            codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(rows, columns)
            return E2M1[codes.int()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)

        self._quantized(module, packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu), values)

    def expert(self, module: str, rows: int, columns: int) -> None:
        (self.fp8 if self.form == "fp8" else self.fp4)(module, rows, columns)

    def _quantized(
        self, module: str, codes: torch.Tensor, scale: torch.Tensor, values: Callable[[], torch.Tensor]
    ) -> None:
        if self.wants_truth:
            self.truth[f"{module}.weight"] = values()
        if self.form == "bf16":
            self.tensors[f"{module}.weight"] = values().to(torch.bfloat16)
        else:
            self.tensors |= {f"{module}.weight": codes, f"{module}.scale": scale}

    # --- parts of the model ----------------------------------------------------------------------------------

    def mixer(self, at: str, d: Dims, rows: int, scales: int = 3) -> None:
        for name, shape in (("fn", (rows, d.streams * d.hidden)), ("base", (rows,)), ("scale", (scales,))):
            self.plain(f"{at}_{name}", *shape, dtype=torch.float32)

    def gated(self, at: str, d: Dims, matrix: Callable[[str, int, int], None]) -> None:
        for name, shape in (("w1", (d.inter, d.hidden)), ("w2", (d.hidden, d.inter)), ("w3", (d.inter, d.hidden))):
            matrix(f"{at}.{name}", *shape)

    def block(self, at: str, d: Dims, experts: int, hashed: bool = False) -> None:
        width = d.heads * d.head_dim
        self.plain(f"{at}attn.attn_sink", d.heads, dtype=torch.float32)
        self.fp8(f"{at}attn.wq_a", d.q_rank, d.hidden)
        self.fp8(f"{at}attn.wq_b", width, d.q_rank)
        self.fp8(f"{at}attn.wkv", d.head_dim, d.hidden)
        self.fp8(f"{at}attn.wo_a", d.groups * d.out_rank, width // d.groups)
        self.fp8(f"{at}attn.wo_b", d.hidden, d.groups * d.out_rank)
        norms = {"attn.q_norm": d.q_rank, "attn.kv_norm": d.head_dim, "attn_norm": d.hidden, "ffn_norm": d.hidden}
        for name, size in norms.items():
            self.norm(at + name, size)
        for name in ("hc_attn", "hc_ffn"):
            self.mixer(at + name, d, (2 + d.streams) * d.streams)
        self.plain(f"{at}ffn.gate.weight", experts, d.hidden)
        if hashed:
            table = torch.randint(0, experts, (d.vocab, d.per_token), generator=self.random(at))
            self.tensors[f"{at}ffn.gate.tid2eid"] = table
        else:
            self.plain(f"{at}ffn.gate.bias", experts, dtype=torch.float32)
        for expert in range(experts):
            self.gated(f"{at}ffn.experts.{expert}", d, self.expert)
        self.gated(f"{at}ffn.shared_experts", d, self.fp8)

    def compressor(self, at: str, d: Dims, ratio: int, dim: int) -> None:
        width = dim * (2 if ratio == 4 else 1)
        self.plain(f"{at}.ape", ratio, width, dtype=torch.float32)
        self.norm(f"{at}.norm", dim)
        self.plain(f"{at}.wgate.weight", width, d.hidden)
        self.plain(f"{at}.wkv.weight", width, d.hidden)

    def layer(self, index: int, d: Dims) -> None:
        at, ratio = f"layers.{index}.", d.ratios[index]
        self.block(at, d, d.experts, hashed=index < d.hashed)
        if ratio:
            self.compressor(f"{at}attn.compressor", d, ratio, d.head_dim)
        if ratio == 4:
            self.compressor(f"{at}attn.indexer.compressor", d, ratio, d.index_dim)
            self.plain(f"{at}attn.indexer.weights_proj.weight", d.index_heads, d.hidden)
            self.fp8(f"{at}attn.indexer.wq_b", d.index_heads * d.index_dim, d.q_rank)

    def nextn(self, d: Dims) -> None:
        self.block("mtp.0.", d, d.experts)
        self.fp8("mtp.0.e_proj", d.hidden, d.hidden)
        self.fp8("mtp.0.h_proj", d.hidden, d.hidden)
        for name in ("enorm", "hnorm", "norm"):
            self.norm(f"mtp.0.{name}", d.hidden)
        self.mixer("mtp.0.hc_head", d, d.streams, scales=1)

    def stage(self, index: int, d: Dims, v41: bool) -> None:
        at, experts = f"mtp.{index}.", d.draft_experts if v41 else d.experts
        self.block(at, d, experts)
        if v41:
            self.plain(f"{at}ffn.gate.bias_vl", experts, dtype=torch.float32)
        if index == 0:
            self.fp8(f"{at}main_proj", d.hidden, len(d.taps) * d.hidden)
            self.norm(f"{at}main_norm", d.hidden)
        if index < d.stages - 1:
            return
        self.norm(f"{at}norm", d.hidden)
        if not v41:
            self.mixer(f"{at}hc_head", d, d.streams, scales=1)
        for name in ("embed", "head") if v41 else ("markov_w1", "markov_w2"):
            self.plain(f"{at}markov_head.{name}.weight", d.vocab, d.rank)
        self.plain(f"{at}confidence_head.proj.weight", 1, d.hidden + d.rank)

    def ends(self, d: Dims) -> None:
        self.plain("head.weight", d.vocab, d.hidden)
        self.norm("norm", d.hidden)
        self.mixer("hc_head", d, d.streams, scales=1)


def make(
    folder: Path,
    dims: Dims | None = None,
    *,
    draft: str = "dspark",
    form: str = "official",
    v41: bool = False,
    scatter: bool = False,
    truth: bool = False,
    seed: int = 0,
    **config: Any,
) -> Made:
    """Write the checkpoint, a shard at a time; ``config`` sets keys of config.json, or removes those that are None.

    ``draft``: ``dspark``, ``nextn``, ``declared`` or ``none``. ``form``: ``official``, ``fp8`` or ``bf16``.
    """
    d = dims or Dims()
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in (configured(d, draft, form, v41) | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys, indent=2))
    parts = list(_parts(d, draft, v41))
    names = [f"model-{i + 1:05}-of-{len(parts) + scatter:05}.safetensors" for i in range(len(parts) + scatter)]
    made, weight_map, late = Made(folder, keys, {}, {}), {}, Tensors()
    for name, part in zip(names, [*parts, *[lambda _: None] * scatter], strict=True):
        maker = _Maker(form, 32 if v41 else 128, seed, truth)
        part(maker)
        shard, late = maker.tensors | late, Tensors()
        if scatter:
            late = {scale: value for scale, value in maker.tensors.items() if scale.endswith(".scale")}
            shard = {tensor: value for tensor, value in shard.items() if tensor not in late}
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        made.shapes.update({tensor: (_DTYPES[value.dtype], tuple(value.shape)) for tensor, value in shard.items()})
        made.truth.update(maker.truth)
    total = sum((folder / name).stat().st_size - _header_size(folder / name) for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return made


def configured(d: Dims, draft: str = "dspark", form: str = "official", v41: bool = False) -> dict[str, Any]:
    """config.json with the keys of the published ones."""
    drafting = draft in ("dspark", "declared")
    text: dict[str, Any] = {
        "vocab_size": d.vocab, "hidden_size": d.hidden, "num_hidden_layers": d.layers, "num_attention_heads": d.heads,
        "num_key_value_heads": 1, "head_dim": d.head_dim, "qk_rope_head_dim": d.index_dim, "q_lora_rank": d.q_rank,
        "o_lora_rank": d.out_rank, "o_groups": d.groups, "n_routed_experts": d.experts, "n_shared_experts": 1,
        "num_experts_per_tok": d.per_token, "moe_intermediate_size": d.inter, "index_n_heads": d.index_heads,
        "index_head_dim": d.index_dim, "index_topk": 16, "num_hash_layers": d.hashed, "hc_mult": d.streams,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "swiglu_limit": 10.0,
        "hidden_act": "silu", "sliding_window": 128, "rope_theta": 10000, "compress_rope_theta": 160000,
        "max_position_embeddings": 4096, "num_nextn_predict_layers": d.stages if v41 else 1,
        "compress_ratios": d.ratios + [0] * (d.stages if drafting else 1), "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if drafting:
        text |= {
            "dspark_block_size": 5, "dspark_noise_token_id": d.vocab - 1, "dspark_markov_rank": d.rank,
            "dspark_target_layer_ids": d.taps,
        }  # fmt: skip
    if v41:
        text |= {"dspark_n_routed_experts": d.draft_experts, "dspark_num_experts_per_tok": 1}
        text = {"text_config": {"model_type": "deepseek_v41_text", **text}}
    name = "DeepseekV41ForCausalLM" if v41 else "DeepseekV4ForCausalLM"
    found = {"architectures": [name], "model_type": "deepseek_v41" if v41 else "deepseek_v4", "dtype": "bfloat16"}
    if form != "bf16":
        size = 32 if v41 else 128
        found["expert_dtype"] = "fp8" if form == "fp8" else "fp4"
        found["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
            "weight_block_size": [size, size],
        }  # fmt: skip
    return found | text


_DTYPES = {
    torch.int8: "I8", torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def _parts(d: Dims, draft: str, v41: bool) -> Iterator[Callable[[_Maker], None]]:
    """What each shard holds, as published: the embedding, a layer each, head and norm, a stage each."""
    yield lambda maker: maker.plain("embed.weight", d.vocab, d.hidden)
    for layer in range(d.layers):
        yield lambda maker, layer=layer: maker.layer(layer, d)
    yield lambda maker: maker.ends(d)
    if draft == "nextn":
        yield lambda maker: maker.nextn(d)
    for stage in range(d.stages if draft == "dspark" else 0):
        yield lambda maker, stage=stage: maker.stage(stage, d, v41)


def _header_size(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
