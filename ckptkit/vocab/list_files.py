"""The files that draft vocabularies are kept in: what numbers they hold, whatever those mean.

Definitions: SGLang (``--speculative-token-map``), FR-Spec, SpecForge's and speculators' mappings, the Medusa and
EAGLE-3 loaders of vLLM, llama.cpp's EAGLE-3 conversion.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError, fail, unreadable
from ..files import gguf
from ..files.checkpoint import Checkpoint, open_checkpoint, parse_json
from ..files.source import open_source
from ..plan import Ref

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FINGERPRINT = "tokenizer_sha256"  # how a list says which tokenizer it was made for
_LARGEST = 1 << 28  # bytes: a list of every token of the largest vocabulary is far smaller in any form
_FORMS = "a list is text, JSON, .pt, .npy, .safetensors, .gguf, prefix:N or prefix:N+tail:M"
_RECORDED = re.compile(rf"^#.*\b{FINGERPRINT}=([0-9a-f]{{64}})\b", re.MULTILINE)
_RECORDED_SIZE = re.compile(r"^#.*\bn_vocab=([0-9]{1,9})\b", re.MULTILINE)
# The last part of a tensor's name, and whether it holds offsets; None where both are in use.
_MAPS = {"d2t": None, "draft_id_to_target_id": True, "token_map": False, "vocab_map": False}


class Kept(NamedTuple):
    """What a file holds: ``values``, int64 [n], a mask ``t2d``, bool [n_vocab], or both.

    ``is_offset``: True if the values are offsets, False if they are token ids, None if the file doesn't say; so anything
    but False is of a map.
    """

    values: Array | None
    t2d: Array | None = None
    is_offset: bool | None = False
    n_vocab: int | None = None
    tokenizer_sha256: str | None = None


def read_kept(path: Path) -> Kept:
    """What the file or the checkpoint's folder holds. Raises UserError (``vocab.list``, ``access.denied``)."""
    try:
        if path.is_dir():
            return _of_checkpoint(path)
        size = path.stat().st_size
        reader = _READERS.get(path.suffix.lower(), _of_text)
        if size > _LARGEST and reader not in (_of_checkpoint, _of_gguf):
            raise _unfit(path, f"has {size:,} bytes: too many for a list of tokens")
        return reader(path)
    except OSError as error:
        raise unreadable(error, "vocab.list", str(path), _FORMS) from None


# --- plain lists -------------------------------------------------------------------------------------------


def _of_text(path: Path) -> Kept:
    """Decimal integers between whitespace or commas; ``#`` begins a comment."""
    import numpy as np

    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unfit(path, f"is not text (byte {error.start})") from None
    words = [word for line in text.splitlines() for word in line.partition("#")[0].replace(",", " ").split()]
    wrong = next((word for word in words if not re.fullmatch(r"[+-]?[0-9]{1,18}", word)), None)
    if wrong is not None:
        raise _unfit(path, f"holds {wrong[:40]!r}, which is no token id")
    recorded, size = _RECORDED.search(text), _RECORDED_SIZE.search(text)
    values = np.array(words, np.int64)
    return Kept(values, n_vocab=size and int(size[1]), tokenizer_sha256=recorded and recorded[1])


def _of_json(path: Path) -> Kept:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unfit(path, f"is not text (byte {error.start})") from None
    return _of_object(parse_json(text, str(path), "vocab.list"), path)


def _of_pt(path: Path) -> Kept:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of forms that old files have
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # pickle, zip and torch raise what they like
        reason = "is nothing that torch.load reads with weights_only: no list, tensor or dict of them"
        raise _unfit(path, reason) from None
    return _of_object(found, path)


def _of_npy(path: Path) -> Kept:
    """An array; one of the name ``d2t…`` is a map, whose ``t2d…`` lies beside it as speculators writes them."""
    found = _array(_load_npy(path), path)
    if found.dtype == bool:
        beside = path.with_name(path.name.replace("t2d", "d2t", 1))
        is_pair = beside != path and beside.is_file()
        return Kept(_array(_load_npy(beside), beside) if is_pair else None, found, None)
    if not path.name.startswith("d2t"):
        return Kept(found)
    beside = path.with_name(path.name.replace("d2t", "t2d", 1))
    return Kept(found, _mask(_load_npy(beside), beside) if beside.is_file() else None, None)


def _load_npy(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise _unfit(path, f"is no .npy file of plain numbers: {str(error).splitlines()[0]}") from None


def _of_object(found: Any, path: Path) -> Kept:
    """A list or tensor; a dict of ``d2t`` and ``t2d``; or a dict of counts by token id, which give the rank."""
    if not isinstance(found, Mapping):
        listed = _array(found, path)
        return Kept(None, listed) if listed.dtype == bool else Kept(listed)
    if found.keys() & {"d2t", "t2d"}:
        d2t, t2d = found.get("d2t"), found.get("t2d")
        values: Array | None = None if d2t is None else _array(d2t, path)
        if values is not None and values.dtype == bool:
            raise _unfit(path, "has a d2t of truth values")
        return Kept(values, None if t2d is None else _mask(t2d, path), None)
    return Kept(_ranked(found, path))


def _ranked(counts: Mapping[Any, Any], path: Path) -> Array:
    """Token ids by falling count, equal counts by rising id; tokens that never occur left out."""
    try:
        pairs = [(int(token), int(count)) for token, count in counts.items()]
    except (ValueError, TypeError):
        raise _unfit(path, "is an object of neither d2t and t2d nor counts by token id") from None
    return _array([token for token, count in sorted(pairs, key=lambda pair: (-pair[1], pair[0])) if count > 0], path)


def _mask(values: Any, path: Path) -> Array:
    """``t2d`` as bool; zeros and ones are taken too."""
    import numpy as np

    found = _array(values, path)
    if found.dtype != bool and not np.isin(found, (0, 1)).all():
        raise _unfit(path, "has a t2d of other values than true and false")
    return found.astype(bool)


def _of_tensor(tensor: Any, path: Path) -> Any:
    """A tensor as an array; one that lies in no memory, or holds other than whole numbers, is none."""
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError):
        raise _unfit(path, f"holds a tensor of {tensor.dtype} that is no plain list of whole numbers") from None


def _array(values: Any, path: Path) -> Array:
    """A vector of int64, or of bool, of a list, tensor or array of whole numbers or of truth values."""
    import numpy as np

    if hasattr(values, "detach"):
        values = _of_tensor(values, path)
    is_numbers = isinstance(values, Sequence) and {type(value) for value in values} in ({int}, {bool}, set())
    if not (is_numbers or isinstance(values, np.ndarray)):
        raise _unfit(path, "holds no list of whole numbers")
    try:
        found = np.asarray(values)
        plain = found.astype(np.int64) if len(found) else np.zeros(0, np.int64)
    except (OverflowError, ValueError, TypeError):
        raise _unfit(path, "holds numbers that are no token ids") from None
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iub"):
        raise _unfit(path, f"holds an array of {found.dtype}, shape {list(found.shape)}: no list of token ids")
    if found.dtype.kind == "u" and (plain < 0).any():
        raise _unfit(path, "holds numbers that are no token ids")
    return found if found.dtype == bool else plain


# --- files of tensors --------------------------------------------------------------------------------------


def _of_checkpoint(path: Path) -> Kept:
    """The map of a draft: a .safetensors file, or a folder of them with its config."""

    with open_source(str(path)) as source:
        checkpoint = open_checkpoint(source)
        name, is_offset = _map_of(checkpoint.tensors, path)
        mask = next((found for found in checkpoint.tensors if found.rpartition(".")[2] == "t2d"), None)
        t2d = None if mask is None else _mask(_vector(checkpoint, mask, path), path)
        values = None if name is None else _array(_vector(checkpoint, name, path), path)
        metadata = [header.metadata or {} for header in checkpoint.shards.values()]
        recorded = next((found[FINGERPRINT] for found in metadata if FINGERPRINT in found), None)
    if values is None and t2d is None:
        raise _unfit(path, f"has no {' or '.join(_MAPS)} in it")
    return Kept(values, t2d, is_offset, tokenizer_sha256=recorded)


def _map_of(names: Iterable[str], path: Path) -> tuple[str | None, bool | None]:
    """The tensor that maps draft ids to tokens, and whether it holds offsets. Raises UserError where there are several."""
    found = [name for name in names if name.removesuffix(".weight").rpartition(".")[2] in _MAPS]
    if len(found) > 1:
        raise _unfit(path, f"has several maps of draft ids: {', '.join(found)}")
    if not found:
        return None, None
    return found[0], _MAPS[found[0].removesuffix(".weight").rpartition(".")[2]]


def _vector(checkpoint: Checkpoint, name: str, path: Path) -> Array:
    import numpy as np

    ref: Ref = checkpoint.tensors[name]
    dtypes = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U32": "<u4"}
    if len(ref.shape) != 1 or ref.dtype not in dtypes:
        raise _unfit(path, f"has {name} as {ref.dtype} {list(ref.shape)}: no list of token ids")
    return np.frombuffer(checkpoint.source.read(ref.file, ref.start, ref.stop), dtypes[ref.dtype])


def _of_gguf(path: Path) -> Kept:
    """The map ``d2t`` of a GGUF file: token ids in llama.cpp, offsets in some forks."""
    from ..execute.one_file import mapped

    buffer = mapped(path)
    found = gguf.parse(buffer, str(path))
    tensors = {name.removesuffix(".weight"): tensor for name, tensor in found.tensors.items()}
    if "d2t" not in tensors:
        raise _unfit(path, "has no tensor d2t in it")
    tokens, recorded = found.fields.get("tokenizer.ggml.tokens"), found.fields.get(f"ckptkit.{FINGERPRINT}")
    said = found.fields.get("ckptkit.n_vocab")
    size = (
        int(gguf.scalar(said))
        if said
        else len(gguf.strings(tokens))
        if tokens and tokens.item_type == gguf.STRING
        else None
    )
    values = _array(_gguf_vector(buffer, found, tensors["d2t"], path), path)
    return Kept(values, None, None, size, str(gguf.scalar(recorded)) if recorded else None)


def _gguf_vector(buffer: memoryview, found: gguf.Gguf, tensor: gguf.Tensor, path: Path) -> Array:
    import numpy as np

    dtype = {"I32": "<i4", "I64": "<i8"}.get(gguf.type_name(tensor.type))
    if dtype is None or len(tensor.shape) != 1:
        raise _unfit(
            path, f"has {tensor.name} as {gguf.type_name(tensor.type)} {list(tensor.shape)}: no list of token ids"
        )
    return np.frombuffer(buffer, dtype, tensor.shape[0], found.data_start + tensor.offset)


_READERS: Mapping[str, Callable[[Path], Kept]] = {
    ".json": _of_json,
    ".pt": _of_pt,
    ".pth": _of_pt,
    ".npy": _of_npy,
    ".safetensors": _of_checkpoint,
    ".gguf": _of_gguf,
}


def _unfit(path: Path, reason: str) -> UserError:
    return fail("vocab.list", f"{path} {reason}", file=str(path), hint=_FORMS)
