"""Dense DSpark drafts: stand-alone ones (Qwen3, Gemma, Ling, LFM2), and MiniMax-M3.1's within its target. No I/O.

Their tensors have one set of names; what differs is where a config keeps the draft's fields. Three homes are known: the top
level, as DeepSpec writes and SGLang and vLLM load (``serving``); ``dflash_config``, as SpecForge writes (``specforge``); and
speculators', which nests the layers' config and counts taps from 1 (``hf``). The families are data:
``data/dense_dspark.yaml``. Definitions: DeepSpec, SpecForge 0.2.0, speculators, SGLang 0.5.23 (``models/dspark.py``,
``dspark_minimax.py``), vLLM 0.33 (``transformers_utils/configs/speculators``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from ..errors import Finding
from ..families.config import config_value
from ..plan import Ref
from .completeness import CONFIDENCE
from .dense_config import Fields
from .tables import Config

_FLOATS = frozenset({"BF16", "F16", "F32"})
_TERM = re.compile(r"(\d*)([A-Z])")


class Family(NamedTuple):
    """An entry of the table; each field is explained there."""

    id: str
    name: str
    prefixes: Sequence[str]
    layer: str
    inside: bool
    telling: Sequence[str]
    renames: Sequence[Sequence[str]] = ()
    shaped: Sequence[str] = ()
    block: Mapping[str, Sequence[str]] = MappingProxyType({})


class Dense(NamedTuple):
    """A draft: its tensors by their name without prefix, how many layers, the target's copies, vocabulary maps, the rest."""

    family: Family
    prefix: str
    layers: int
    tensors: Mapping[str, Ref]
    shared: Mapping[str, Ref]
    maps: Mapping[str, Ref]


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(
        files(__package__).joinpath("data", "dense_dspark.yaml").read_text(encoding="utf-8")
    )
    return found


def find(tensors: Mapping[str, Ref]) -> Dense | None:
    """The dense DSpark draft among ``tensors``; None if there is none. A DFlash draft has no Markov head."""
    for entry in _table()["families"]:
        family = Family(**entry)
        for prefix in family.prefixes:
            mine = dict(_named(tensors, family, prefix))
            has_markov = any(name.startswith("markov_head.") for name in mine)
            if has_markov and any(name in mine for name in family.telling):
                return _dense(family, prefix, mine)
    return None


def served_as(model_type: Any) -> str | None:
    """The architecture that engines load a stand-alone draft of this model type by, if one is known."""
    return next((str(found) for name, found in _table()["served"].items() if name == model_type), None)


def _named(tensors: Mapping[str, Ref], family: Family, prefix: str) -> Iterator[tuple[str, Ref]]:
    for name, ref in tensors.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            for pattern, replacement in family.renames:
                rest = re.sub(pattern, replacement, rest)
            yield rest, ref


def _dense(family: Family, prefix: str, mine: Mapping[str, Ref]) -> Dense:
    shared = {name: ref for name, ref in mine.items() if name in _table()["shared"]}
    maps = {name: ref for name, ref in mine.items() if name in _table()["maps"]}
    left = {name: ref for name, ref in mine.items() if name not in shared and name not in maps}
    return Dense(family, prefix, 1 + max(map(_layer, left), default=-1), left, shared, maps)


def _layer(name: str) -> int:
    found = re.match(r"layers\.(\d{1,4})\.", name)
    return int(found[1]) if found else -1


# --- whether it is whole -----------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...] | None]


def check(draft: Dense, fields: Fields, config: Config) -> Iterator[Finding]:
    """Findings as of :func:`ckptkit.drafts.completeness.check`; ``config`` is that of the draft's layers."""
    sizes = _sizes(draft, fields, config)
    expected = _ends(fields, sizes) | _layers(draft, sizes, config)
    for name in expected.keys() - draft.tensors.keys():
        id = CONFIDENCE if name == "confidence_head.proj.weight" else "draft.missing"
        hint = f"--allow {CONFIDENCE} makes a draft without one" if id == CONFIDENCE else "take it from the original"
        yield Finding(id, f"{draft.prefix}{name} is missing", tensor=f"{draft.prefix}{name}", hint=hint)
    for name, ref in draft.tensors.items():
        if name not in expected:
            hint = f"ckptkit reshard SRC OUT --drop {ref.name} leaves it out"
            yield _of("draft.unknown", ref, "is no tensor of this draft", hint)
            continue
        shape = expected[name]
        if ref.dtype not in _FLOATS and not draft.family.inside:
            yield _of("draft.dtype", ref, f"is {ref.dtype}, no float", "ckptkit dequantize SRC OUT first")
        elif shape is not None and ref.shape != shape:
            message = f"is {list(ref.shape)}; the config asks for {list(shape)}"
            yield _of("draft.shape", ref, message, "take it from the original of the draft")
    yield from _counted(draft, config)


def _of(id: str, ref: Ref, message: str, hint: str) -> Finding:
    return Finding(id, f"{ref.name} {message}", file=ref.file, tensor=ref.name, hint=hint)


def _counted(draft: Dense, config: Config) -> Iterator[Finding]:
    stated = None if draft.family.inside else config_value(config, "num_hidden_layers")
    if stated is not None and stated != draft.layers:
        message = f"config.json: num_hidden_layers is {stated!r}; the draft has {draft.layers} layers"
        hint = f"set num_hidden_layers to {draft.layers}, if no layer is missing"
        yield Finding("draft.config", message, file="config.json", hint=hint, data={"what": "stages"})


def _sizes(draft: Dense, fields: Fields, config: Config) -> dict[str, int | None]:
    heads, kv, hidden, inter, dim, vocab = (
        value if type(value := config_value(config, key)) is int else None
        for key in (
            "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "head_dim", "vocab_size",
        )
    )  # fmt: skip
    dim = dim or (hidden // heads if hidden and heads else None)
    taps = len(fields.target_layer_ids) if fields.target_layer_ids else None
    stated = config_value(config, "target_hidden_size")
    wide = stated if type(stated) is int else hidden
    with_markov = fields.confidence_head_with_markov is not False
    return {
        "H": hidden, "I": inter, "D": dim, "V": vocab, "R": fields.markov_rank,
        "Q": heads * dim if heads and dim else None,
        "K": kv * dim if kv and dim else None,
        "T": taps * wide if taps and wide else None,
        "M": (fields.markov_rank or 0) if with_markov else 0,
    }  # fmt: skip


def _ends(fields: Fields, sizes: Mapping[str, int | None]) -> Shapes:
    table, heads = dict(_table()["ends"]), _table()["heads"]
    table |= heads.get(fields.markov_head_type, {})
    table |= heads["confidence"] if fields.enable_confidence_head is not False else {}
    return {name: _shape(shape, sizes) for name, shape in table.items()}


def _layers(draft: Dense, sizes: Mapping[str, int | None], config: Config) -> Shapes:
    """Of each layer: by the family's table where the layers are such, else what most layers have."""
    family = draft.family
    if config_value(config, "model_type") in family.shaped and not config_value(config, "attention_bias"):
        block: Shapes = {name: _shape(shape, sizes) for name, shape in family.block.items()}
    else:
        in_layers = [(name.split(".", 2)[2], ref.shape) for name, ref in draft.tensors.items() if _layer(name) >= 0]
        block = dict(in_layers)
    paths = [family.layer.format(n=n) for n in range(draft.layers)]
    return {path + name: shape for path in paths for name, shape in block.items()}


def _shape(sides: Sequence[str | int], sizes: Mapping[str, int | None]) -> tuple[int, ...] | None:
    """``[R, H+2R]`` in numbers; None where the config does not give one of them."""
    found = []
    for side in map(str, sides):
        parts = [(int(many or 1), sizes[size]) for many, size in _TERM.findall(side)]
        if any(size is None for _, size in parts):
            return None
        found.append(sum(many * (size or 0) for many, size in parts) if parts else int(side))
    return tuple(found)
