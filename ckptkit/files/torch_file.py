"""A trainer's ``training_state.pt`` read as a checkpoint: where each tensor of the draft lies in the file.

torch's own format is a zip of uncompressed records, so a tensor is a range of the file as in safetensors. The pickle is
read with ``weights_only``: no code in it is run. Definition: ``torch.save`` (2.x), SpecForge 0.2.0 (``training/``).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, fail
from ..plan import Ref
from .checkpoint import Checkpoint, open_checkpoint, read_config
from .source import Source

if TYPE_CHECKING:
    import torch

STATE = "training_state.pt"
_DRAFT = "draft_state_dict"
_EXPORT = "save a dict of plain tensors as draft_state_dict, or export the draft with SpecForge"


def is_training_state(source: Source) -> bool:
    """Whether this is a trainer's checkpoint folder, and holds no safetensors."""
    return STATE in source.files and not any(name.endswith(".safetensors") for name in source.files)


def open_draft(source: Source) -> Checkpoint:
    """A draft as it is found: a trainer's checkpoint, or safetensors. Raises UserError with all that is wrong with it."""
    return open_training_state(source) if is_training_state(source) else open_checkpoint(source)


def open_training_state(source: Source) -> Checkpoint:
    """The draft in :data:`STATE`. Raises UserError: ``source.training-state``, ``draft.strategy``."""
    state = _load(source)
    tensors = state.get(_DRAFT) if isinstance(state, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise _unfit(f"{STATE} has no {_DRAFT}", "give the folder of a checkpoint that SpecForge wrote")
    strategy = state.get("strategy")
    if strategy is not None and "dspark" not in str(strategy):
        message = f"{STATE} is of a draft trained as {strategy!r}, not as dspark"
        raise fail("draft.strategy", message, file=STATE, hint="give a checkpoint of a DSpark run")
    refs = {str(name): _ref(str(name), tensor) for name, tensor in tensors.items()}
    return Checkpoint(source, {}, refs, None, read_config(source))


def _load(source: Source) -> Any:
    import torch

    _check_zip(source)
    path = source.local(STATE)
    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # pickle, zip and torch raise what they like
        asked = _asked(path)
    if asked:
        message = f"{STATE} needs code to be run that it names: {', '.join(asked)}; it was not"
        raise fail("source.training-state", message, file=STATE, hint=_EXPORT, data={"globals": asked})
    raise _unfit(f"{STATE} is a zip, and what is in it is not what torch.save writes", "write it again")


def _check_zip(source: Source) -> None:
    """Raises UserError (``source.training-state``) unless the file is a whole zip."""
    info = source.files[STATE]
    if not info.size:
        raise _unfit(f"{STATE} is empty", "copy it again")
    if source.read(STATE, 0, min(4, info.size)) != b"PK\3\4"[: info.size]:
        raise _unfit(f"{STATE} is no file that torch.save has written since torch 1.6", "save it anew with torch.save")
    if not zipfile.is_zipfile(source.local(STATE)):
        raise _unfit(f"{STATE} is cut off: the list of its records, at its end, is missing", "copy it again")


def _asked(path: Path) -> list[str]:
    """The functions and classes that a pickle wants called, and that are not torch's for tensors."""
    import torch

    try:
        found: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # of whatever kind: the bytes are anybody's
        return []
    return found


def _ref(name: str, tensor: torch.Tensor) -> Ref:
    if not hasattr(tensor, "is_contiguous") or not tensor.is_contiguous() or tensor.dtype not in _dtypes():
        raise _unfit(f"{STATE}: {name} is no plain tensor that lies in one piece", "export it with SpecForge first")
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise _unfit(f"{STATE} is of a format that torch 1.5 and older wrote", "save it anew with torch.save")
    start = offset + tensor.storage_offset() * tensor.itemsize
    return Ref(STATE, name, _dtypes()[tensor.dtype], tuple(tensor.shape), start, start + tensor.nbytes)


def _dtypes() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8",
        torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
    }  # fmt: skip


def _unfit(message: str, hint: str) -> UserError:
    return fail("source.training-state", message, file=STATE, hint=hint)
