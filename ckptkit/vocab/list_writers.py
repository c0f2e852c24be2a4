"""A draft vocabulary written in the convention that a program reads.

Lists keep the order that they have; maps and masks are of the tokens in ascending order, as their readers expect.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..files import gguf
from ..files.header import Spec, lay_out
from .conventions import mask_of, offsets_of
from .list_files import FINGERPRINT
from .lists import MOST, DraftVocab, list_sha256, sorted_unique

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_I64 = 27  # ggml's number for tensors of int64
Files = dict[str, bytes]  # by name within a folder; a single file's name is ""


class Form(NamedTuple):
    """A convention: what it is, and how a vocabulary becomes files of it. ``by_rank``: its readers take the first N."""

    about: str
    encode: Callable[[DraftVocab], Files]
    by_rank: bool = False


def encoded(vocab: DraftVocab, form: str) -> Files:
    """The files of ``vocab`` in ``form``, one of :data:`FORMS`. Raises UserError: ``vocab.size``, ``vocab.duplicate``, …"""
    sorted_unique(vocab, vocab.n_vocab or MOST)
    return FORMS[form].encode(vocab)


def facts_of(vocab: DraftVocab) -> dict[str, str]:
    """What is known of a list, as text."""
    known = {
        "tokens": len(vocab.ids),
        "order": "rank" if vocab.is_ranked else "id",
        "n_vocab": vocab.n_vocab,
        "list_sha256": list_sha256(vocab.ids),
        FINGERPRINT: vocab.tokenizer_sha256,
    }
    return {key: str(value) for key, value in known.items() if value is not None}


def _text(vocab: DraftVocab, per_line: int) -> Files:
    said = " ".join(f"{key}={value}" for key, value in facts_of(vocab).items())
    rows = (vocab.ids[start : start + per_line] for start in range(0, len(vocab.ids), per_line))
    lines = [f"# draft vocabulary: {said}", *(" ".join(map(str, row)) for row in rows)]
    return {"": "".join(f"{line}\n" for line in lines).encode()}


def _json(vocab: DraftVocab) -> Files:
    return {"": f"{json.dumps(vocab.ids.tolist())}\n".encode()}


def _npy(array: Array) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _pt(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _pt_tensor(vocab: DraftVocab) -> Files:
    import torch

    return {"": _pt(torch.from_numpy(vocab.ids.astype("<i8")))}


def _pt_maps(vocab: DraftVocab) -> Files:
    import torch

    d2t, t2d = maps_of(vocab)
    return {"": _pt({"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)})}


def _npy_maps(vocab: DraftVocab) -> Files:
    d2t, t2d = maps_of(vocab)
    return {f"d2t-{len(d2t)}.npy": _npy(d2t), f"t2d-{len(d2t)}.npy": _npy(t2d)}


def maps_of(vocab: DraftVocab) -> tuple[Array, Array]:
    """``d2t``, offsets int64 [n], and ``t2d``, bool [n_vocab]. Raises UserError (``vocab.size``) where that isn't known."""
    if vocab.n_vocab is None:
        message = (
            f"{vocab.origin}: a mask t2d has an entry for every token of the target, and their number is not known"
        )
        raise fail("vocab.size", message, file=vocab.origin, hint="add --n-vocab N, or --tokenizer DIR")
    ids = sorted_unique(vocab, vocab.n_vocab)
    return offsets_of(ids), mask_of(ids, vocab.n_vocab)


def tensors_file(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None) -> bytes:
    """A safetensors file of vectors of int64, int32 or bool."""
    dtypes = {"int64": "I64", "int32": "I32", "bool": "BOOL"}
    specs = [Spec(name, dtypes[str(array.dtype)], array.shape) for name, array in tensors.items()]
    head, layout = lay_out(specs, metadata)
    return head + b"".join(tensors[entry.name].tobytes() for entry in layout.entries)


def _safetensors(tensors: Mapping[str, Array], vocab: DraftVocab) -> Files:
    return {"": tensors_file(tensors, {"format": "pt", **facts_of(vocab)})}


def _eagle3(vocab: DraftVocab) -> Files:
    d2t, t2d = maps_of(vocab)
    return _safetensors({"d2t": d2t, "t2d": t2d}, vocab)


def _trtllm(vocab: DraftVocab) -> Files:
    return _safetensors({"model.d2t": maps_of(vocab)[0].astype("<i4")}, vocab)


def _medusa(vocab: DraftVocab) -> Files:
    return _safetensors({"token_map": vocab.ids.astype("<i8")}, vocab)


def _gguf(vocab: DraftVocab) -> Files:
    ids = sorted_unique(vocab, vocab.n_vocab or MOST)
    said = [gguf.text_field(f"ckptkit.{key}", text) for key, text in facts_of(vocab).items() if key != "n_vocab"]
    if vocab.n_vocab is not None:
        said.append(gguf.integer_field("ckptkit.n_vocab", gguf.U32, vocab.n_vocab))
    fields = [gguf.text_field("general.architecture", "ckptkit-draft-vocab"), *said]
    return {"": _gguf_of(fields, [gguf.Tensor("d2t", (len(ids),), _I64, 0)], ids.astype("<i8").tobytes())}


def _gguf_of(fields: Iterable[gguf.Field], tensors: Iterable[gguf.Tensor], data: bytes) -> bytes:
    """A whole GGUF file of these fields and tensors, whose data is ``data``."""
    made = gguf.Gguf(3, {field.key: field for field in fields}, {tensor.name: tensor for tensor in tensors}, 0, 0)
    return gguf.encode(made) + data + bytes(-len(data) % made.alignment)


FORMS: Mapping[str, Form] = {
    "text": Form("token ids as text, one a line", lambda vocab: _text(vocab, 1)),
    "json": Form("a JSON list of token ids", _json),
    "pt": Form("a torch tensor of token ids, int64", _pt_tensor),
    "npy": Form("a numpy vector of token ids, int64", lambda vocab: {"": _npy(vocab.ids.astype("<i8"))}),
    "npy-mask": Form("a numpy vector of truth values, one for each token", lambda vocab: {"": _npy(maps_of(vocab)[1])}),
    "safetensors-d2t": Form("d2t (offsets) and t2d as an EAGLE-3 checkpoint has them", _eagle3),
    "trtllm-d2t": Form("model.d2t (offsets, int32) as TensorRT-LLM has it", _trtllm),
    "specforge-cache": Form("d2t (offsets) and t2d in a .pt file, as SpecForge caches them", _pt_maps),
    "speculators-npy": Form("a folder with d2t-N.npy (offsets) and t2d-N.npy, as speculators has them", _npy_maps),
    "gguf-d2t": Form("d2t (token ids, I64) in a GGUF file, as llama.cpp has it", _gguf),
    "sglang-token-map": Form(
        "a .pt list of token ids, for --speculative-token-map and FR-Spec", lambda vocab: {"": _pt(vocab.ids.tolist())}
    ),
    "vllm-token-map": Form("token_map (token ids, int64), as vLLM's Medusa loads it", _medusa),
    "llamacpp-list": Form(
        "text, 16 ids a line, the most frequent first, for --spec-draft-vocab", lambda v: _text(v, 16), True
    ),
}
