"""``vocab_order.safetensors``: the order of a head's rows, beside the checkpoint whose head has it.

Tensors, all I32: ``row_to_token`` and ``token_to_row`` [n_rows], ``list`` and ``list_requested``; they are what
:class:`~.order.Order` says. ``vocab_order`` in ``__metadata__`` is a JSON object of everything else, which stands in
config.json under that key too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError, fail
from ..files.checkpoint import VOCAB_ORDER as NAME
from ..files.header import Header, read_header
from ..files.source import Source
from .lists import list_sha256
from .marks import KEY
from .order import Order, inverse, is_permutation

if TYPE_CHECKING:
    import numpy as np

    Tables = Mapping[str, np.ndarray[Any, np.dtype[np.int32]]]

VERSION = 1
_TABLES = ("row_to_token", "token_to_row", "list", "list_requested")
_HEADER = "header:"
_PADDED = frozenset({"sglang", "vllm"})


def facts_of(order: Order) -> dict[str, Any]:
    """What is to be recorded of an order beside its tables."""
    rotation = order.n_layer % order.slices if order.engine == "llama.cpp" else 0
    return {
        "version": VERSION,
        "n_rows": order.n_rows,
        "n_tokenizer": order.n_tokenizer,
        "slices": order.slices,
        "slice_rows": list(order.slice_rows),
        "slice_list_rows": list(order.slice_list_rows),
        "rule": {
            "engine": order.engine,
            "pad": 64 if order.engine in _PADDED else 0,
            "n_layer": order.n_layer,
            "rotation": rotation,
            "tensor_split": None,
            "align": order.align,
        },
        "row_to_token_sha256": list_sha256(order.row_to_token),
        "token_to_row_sha256": list_sha256(order.token_to_row),
        "list_sha256": list_sha256(order.list),
        "list_requested_sha256": list_sha256(order.list_requested),
    }


def tables_of(order: Order) -> Tables:
    return {name: getattr(order, name) for name in _TABLES}


def read_facts(source: Source) -> dict[str, Any] | None:
    """What the file records beside its tables; None where there is no such file. Raises UserError as :func:`read_order`."""
    return None if NAME not in source.files else _facts(_header(source))


def metadata_of(facts: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, str]:
    """The file's ``__metadata__``: the facts, and by shard the text of a header that the way back is to restore."""
    return {KEY: json.dumps(facts, sort_keys=True), **{_HEADER + shard: text for shard, text in headers.items()}}


def read_headers(source: Source) -> dict[str, str]:
    """The headers' texts by shard, as :func:`metadata_of` was given them."""
    metadata = _header(source).metadata or {}
    return {key.removeprefix(_HEADER): text for key, text in metadata.items() if key.startswith(_HEADER)}


def read_order(source: Source) -> Order | None:
    """The order of ``source``'s head, None where it has none of its own.

    Raises UserError ``source.vocab-order`` where the tables contradict each other or what is recorded of them.
    """
    if NAME not in source.files:
        return None
    header = _header(source)
    facts = _facts(header)
    try:
        tables = _tables(source, header)
        rule = facts["rule"]
        order = Order(
            tables["row_to_token"], tables["token_to_row"], tuple(facts["slice_rows"]), tuple(facts["slice_list_rows"]),
            tables["list"], tables["list_requested"], rule["engine"], rule["align"], rule["n_layer"], facts["n_tokenizer"],
        )  # fmt: skip
        wrong = _fault(order, facts)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise _broken("is not as this version writes it") from None
    if wrong:
        raise _broken(wrong)
    return order


def _header(source: Source) -> Header:
    return read_header(lambda start, stop: source.read(NAME, start, stop), source.files[NAME].size, NAME)


def _facts(header: Header) -> dict[str, Any]:
    try:
        facts = json.loads((header.metadata or {}).get(KEY, ""))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise _broken(f"does not say what it is in the way of version {VERSION}")
    return facts


def _tables(source: Source, header: Header) -> dict[str, Any]:
    import numpy as np

    entries = {entry.name: entry for entry in header.entries}
    if any(entries[name].dtype != "I32" or len(entries[name].shape) != 1 for name in _TABLES):
        raise _broken("holds a table that is no vector of I32")
    ranges = {name: (entries[name].start, entries[name].stop) for name in _TABLES}
    return {name: np.frombuffer(source.read(NAME, *where), "<i4") for name, where in ranges.items()}


def _fault(order: Order, facts: Mapping[str, Any]) -> str | None:
    """What is wrong with an order as it was read, if anything is."""
    import numpy as np

    if not is_permutation(order.row_to_token) or not np.array_equal(inverse(order.row_to_token), order.token_to_row):
        return "holds no order of rows and its inverse"
    if sum(order.slice_rows) != order.n_rows or len(order.slice_rows) != len(order.slice_list_rows):
        return f"has slices that are not its {order.n_rows:,} rows"
    starts = np.cumsum([0, *order.slice_rows])
    parts = [order.row_to_token[a : a + k] for a, k in zip(starts, order.slice_list_rows, strict=False)]
    if not np.array_equal(np.concatenate(parts), order.list):
        return "holds a list that is not the first rows of its slices"
    digests = {key: value for key, value in facts_of(order).items() if key.endswith("_sha256")}
    if digests != {key: facts.get(key) for key in digests}:
        return "holds tables that have not the digests recorded of them"
    return None


def _broken(what: str) -> UserError:
    hint = f"take {NAME} from where the checkpoint came from, or make the checkpoint again from its source"
    return fail("source.vocab-order", f"{NAME} {what}", file=NAME, hint=hint)
