"""Captured features for tests: what a sound capture of a small target writes, and the target."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from make import checkpoint, llama, llama_config

HIDDEN, VOCAB, TAPS, TOKENS, NOISE = 128, 512, 3, 80, 511
LAYERS = [1, 2, 3]
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB, "markov_rank": 8,
    "target_layer_ids": LAYERS, "mask_token_id": NOISE,
}  # fmt: skip
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "vocab_size": VOCAB}
UPSTREAM = ("hidden_states", "target_last_hidden_states")
AUX = ("aux_hidden_state", "hidden_state")

Sample = dict[str, Any]


def norm_weight() -> torch.Tensor:
    return (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(5)) * 2 + 0.25).bfloat16()


def head_weight() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16()


def target(folder: Path, config: Mapping[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """A checkpoint whose head reads the next token off the last states of :func:`sample`."""
    given = {"model__norm__weight": norm_weight(), "lm_head__weight": head_weight(), **tensors}
    return checkpoint(
        folder, llama(1, HIDDEN, vocab=VOCAB, **given), {**llama_config(1, HIDDEN, vocab=VOCAB), **(config or {})}
    )


def sample(seed: int = 0, keys: Sequence[str] = UPSTREAM, tokens: int = TOKENS, **changes: Any) -> Sample:
    """A sound sample; ``changes`` replace its values, or (None) remove them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, NOISE, (tokens,), generator=generator)
    mask = torch.ones(tokens, dtype=torch.int64)
    mask[: tokens // 4] = 0
    taps = torch.randn(tokens, TAPS * HIDDEN, generator=generator) * 3
    made = {"input_ids": ids, "loss_mask": mask, keys[0]: taps.bfloat16(), keys[1]: last_states(ids)[None]}
    made |= changes
    return {key: value for key, value in made.items() if value is not None}


def last_states(ids: torch.Tensor) -> torch.Tensor:
    """States after the final norm, in which the head sees the next token: along its row, as long as the norm leaves them."""
    following = torch.cat([ids[1:], ids[:1]])
    along = head_weight().float()[following]
    scaled = along / norm_weight().float()
    return (along / scaled.square().mean(1, keepdim=True).sqrt()).bfloat16()


def store(folder: Path, *samples: Any, suffix: str = ".ckpt", start: int = 0) -> Path:
    """Files as SpecForge names them; a sample that is bytes is written as it is."""
    for number, made in enumerate(samples, start):
        path = folder / "rows_0-2000" / f"data_{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(made, bytes):
            path.write_bytes(made)
        elif suffix.endswith(".gz"):
            with gzip.open(path, "wb", 1) as file:
                torch.save(made, file)
        else:
            torch.save(made, path)
    return folder


def config(folder: Path, **fields: Any) -> Path:
    """A draft's config.json."""
    path = folder / "draft.json"
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return path


def cache(folder: Path, samples: Sequence[Sample], count: int = 2, **changes: Any) -> Path:
    """A DeepSpec target cache of samples in the keys of upstream; ``changes`` are of its manifest."""
    folder.mkdir(parents=True)
    blobs, records = [b""] * count, []
    for number, made in enumerate(samples):
        shard = number * count // len(samples)
        tokens = len(made["input_ids"])
        offsets = []
        for part in (
            made["input_ids"].int().numpy().tobytes(),
            b"\1" * tokens,
            made["loss_mask"].to(torch.uint8).numpy().tobytes(),
            made[UPSTREAM[0]].view(torch.int16).numpy().tobytes(),
            made[UPSTREAM[1]][0].view(torch.int16).numpy().tobytes(),
        ):
            offsets.append(len(blobs[shard]))
            blobs[shard] += part
        records.append(struct.pack("<QIIQQQQQ", number, shard, tokens, *offsets))
    names = [f"shard-{shard:05}.bin" for shard in range(count)]
    for name, blob in zip(names, blobs, strict=True):
        (folder / name).write_bytes(blob)
    (folder / "samples.idx").write_bytes(b"".join(records))
    manifest = {
        "version": 2, "num_samples": len(samples), "num_shards": count, "target_layer_ids": LAYERS,
        "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
        "hidden_size": HIDDEN, "shards": [{"shard_id": i, "file_name": name} for i, name in enumerate(names)],
        "target_model_name_or_path": "org/target",
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder
