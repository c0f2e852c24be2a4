"""``draft-vocab subset-head``: the rows of a head that a draft vocabulary names, as a head of its own with its map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from ..declarations import Declaration, declarations
from ..errors import fail
from ..files.checkpoint import CONFIG, VOCAB_ORDER, Checkpoint
from ..plan import Plan, Shard, copy_step
from ..vocab.conventions import mask_of, offsets_of
from .documents import json_text
from .head_rows import Rows, row_steps
from .narrowed_lists import restated
from .reorder_vocab import Head
from .sidecars import sidecars

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

COMMAND = "draft-vocab subset-head"
BESIDE = "list"  # the key of the file that holds the list and its maps, among the checkpoints that a plan reads
TABLES = "draft_vocab.safetensors"
SHARD = "model.safetensors"
# No engine knows these: the folder is a part to be put into a draft, and must not be served with a body of random numbers.
MODEL_TYPE, ARCHITECTURE = "ckptkit_draft_head", "CkptkitDraftHead"


class Layout(NamedTuple):
    """How a loader calls the head's module and its map, of what dtype that is, and whether it has a mask beside it."""

    head: str
    d2t: str
    dtype: str
    has_mask: bool


LAYOUTS: Mapping[str, Layout] = {
    "eagle3": Layout("lm_head", "d2t", "I64", True),
    "specforge": Layout("lm_head", "d2t", "I64", True),
    "sglang-eagle3": Layout("lm_head", "d2t", "I64", False),
    "vllm": Layout("lm_head", "d2t", "I64", False),
    "trtllm": Layout("lm_head", "model.d2t", "I32", False),
}


def tables_of(ids: Array, n_rows: int, layout: Layout) -> dict[str, Array]:
    """The tables that a plan reads: ``rows``, int32 [n], the tokens in ascending order; their map; their mask."""
    d2t = offsets_of(ids).astype("<i4" if layout.dtype == "I32" else "<i8")
    mask = {"t2d": mask_of(ids, n_rows)} if layout.has_mask else {}
    return {"rows": ids.astype("<i4"), layout.d2t: d2t, **mask}


def check_source(checkpoint: Checkpoint) -> None:
    """Raises UserError (``vocab.ordered``) for a head whose rows are not those of tokens in their order."""
    if VOCAB_ORDER in checkpoint.source.files:
        message = f"the head of {checkpoint.source.uri} has an order of its own"
        raise fail("vocab.ordered", message, file=VOCAB_ORDER, hint="ckptkit reorder-vocab SRC PLAIN --inverse first")


def plan_subset_head(
    checkpoint: Checkpoint,
    tables: Checkpoint,
    head: Head,
    rows: Rows,
    layout: Layout,
    metadata: Mapping[str, str],
    include: Iterable[str] = (),
) -> Plan:
    """The plan that takes ``rows`` of ``head`` out of ``checkpoint``; ``tables`` are what :func:`tables_of` gives, beside it.

    ``metadata`` is written into the file of tensors. Raises UserError: ``vocab.format``, ``vocab.block-fp8``.
    """
    stored = head.parts.module
    steps = row_steps(checkpoint, stored, rows, lambda name: layout.head + name.removeprefix(stored))
    maps = [copy_step(ref, "the map of draft ids") for name, ref in tables.tensors.items() if name != "rows"]
    made = tuple(step for listed in steps.values() for step in listed)
    shard = Shard(SHARD, None, {"format": "pt", **metadata}, (*made, *maps))
    declared = declarations(checkpoint)
    texts = {CONFIG: json_text(_config(checkpoint, declared, head, rows.number, layout))}
    stale = {found.file: "declares the quantization of all modules" for found in declared if found.file != CONFIG}
    if checkpoint.index:
        stale[checkpoint.index.file] = "the result is one file"
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    settings = {"list_sha256": rows.sha256, "tokens": rows.number, "head": stored}
    return Plan(COMMAND, (shard,), kept, left_out, settings=settings)


def _config(
    checkpoint: Checkpoint, declared: Iterable[Declaration], head: Head, number: int, layout: Layout
) -> dict[str, Any]:
    """What config.json says of the head: its sizes, and how it is quantized if it is."""
    source = dict(checkpoint.config or {})
    width: dict[str, Any] = {key: source[key] for key in ("hidden_size", "dtype", "torch_dtype") if key in source}
    made: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        **width,
        "vocab_size": head.parts.n_rows,
        "draft_vocab_size": number,
        "tie_word_embeddings": False,
    }
    is_quantized = head.parts.refs.keys() - {"weight", "bias"}
    table = next((found.table for found in declared), None) if is_quantized else None
    if table is not None:
        made["quantization_config"] = restated(deepcopy(dict(table)), {head.parts.module: layout.head})
    return made
