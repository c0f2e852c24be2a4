"""Small GGUF files, written by the ``gguf`` package: a model of two blocks with a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROWS, WIDTH = 96, 256  # tokens, and elements of a row: whole blocks of every type
TYPES = tuple(
    kind for kind, (per_block, _) in gguf.GGML_QUANT_SIZES.items() if WIDTH % per_block == 0 and kind.name not in
    {"I8", "I16", "I32", "I64", "F64"}
)  # fmt: skip
TOKENS = [f"tok{id}" for id in range(ROWS)]


def rows_of(kind: gguf.GGMLQuantizationType, rows: int, seed: int = 0, width: int = WIDTH) -> np.ndarray[Any, Any]:
    """Random bytes of so many rows, uint8 [rows, bytes of a row]."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, width // per_block * block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def model(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    tied: bool = False,
    fields: dict[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    tokenizer: str = "llama",
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    tokens: list[str] | None = None,
) -> Path:
    """A file of architecture llama with further ``fields`` (value and type by key) and ``tensors``."""
    tokens = TOKENS if tokens is None else tokens
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_block_count(2)
    writer.add_embedding_length(WIDTH)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(id) for id in range(len(tokens))])
    writer.add_token_types([1 + id % 4 for id in range(len(tokens))])
    writer.add_token_merges(["t o", "to k"])
    writer.add_eos_token_id(7)
    for key, (value, type) in (fields or {}).items():
        writer.add_key_value(key, value, type, gguf.GGUFValueType.INT32 if type == gguf.GGUFValueType.ARRAY else None)
    writer.add_tensor("token_embd.weight", rows_of(kind, ROWS, 1), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.weight", rows_of(kind, 5, 2), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    if not tied:
        writer.add_tensor("output.weight", rows_of(kind, ROWS, 3), raw_dtype=kind)
    writer.add_tensor("blk.1.attn_q.weight", rows_of(kind, 3, 4), raw_dtype=kind)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bytes_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """By tensor its bytes, uint8, a row each, as the ``gguf`` package reads them."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        rows = int(np.prod(tensor.shape[1:])) if len(tensor.shape) > 1 else 1
        found[tensor.name] = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1)
    return found


def value(path: Path, key: str) -> Any:
    """A field's value, None where there is no such field."""
    field = gguf.GGUFReader(path).get_field(key)
    return None if field is None else field.contents()
