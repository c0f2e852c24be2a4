"""The config of a checkpoint that holds layers which predict further tokens alone, and how engines are started with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from ..families import is_tied
from ..families.config import text_configs
from .mtp_families import Config, Layers, declared_layers, layers_of_a_step

NONE_KNOWN = "none known"
_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
_DEPTH = "num_hidden_layers"
_EMBEDDING = re.compile(r"(?:embed_tokens|tok_emb|embed)\.weight")
_HEAD = re.compile(r"(?:^|[._])head(?:\.(?:head|output))?\.weight")


def with_layers(config: Config, found: Layers, renumber: bool) -> dict[str, Any]:
    """``config`` with as many layers declared as there are; all else stays.

    Engines build the draft from the target's fields, and know it by the target's architecture. Where layers are numbered
    from 0 they are the model's only ones, and its architecture says that it has no others.
    """
    made = deepcopy(dict(config))
    count = len(found.numbers) // layers_of_a_step(found.family, config)
    if count:
        _declare(made, found, count)
    if renumber:
        for holder in _stating(made, _DEPTH, int):
            depth, holder[_DEPTH] = holder[_DEPTH], len(found.numbers)
            holder.update(_per_layer(holder, depth, len(found.numbers)))
        made["architectures"] = [_architecture(found, config)]
    return made


def _architecture(found: Layers, config: Config) -> str:
    """The class that loads the layers, or would be called so."""
    stated = config.get("architectures")
    target = stated[0] if isinstance(stated, list) and stated else ""
    return found.family.sglang or found.family.vllm or f"{target}NextN"


def _declare(config: dict[str, Any], found: Layers, count: int) -> None:
    """Set the key that counts the layers: where it stands, or beside the number of the model's own if that is known."""
    keys = found.family.counted_by
    for key in keys:
        table, _, last = key.rpartition(".")
        holders = [holder[table] for holder in _stating(config, table, dict)] if table else _stating(config, last, int)
        for holder in holders:
            holder[last] = count
            return
    if keys and found.family.models and "." not in keys[0]:
        for holder in [*_stating(config, _DEPTH, int)][:1]:
            holder[keys[0]] = count


def _stating(config: dict[str, Any], key: str, kind: type) -> Iterator[dict[str, Any]]:
    """The config and the nested configs of the text model in which ``key`` is a value of that ``kind``."""
    for _, holder in text_configs(config):
        if isinstance(holder, dict) and isinstance(holder.get(key), kind):
            yield holder


def _per_layer(holder: Mapping[str, Any], depth: int, count: int) -> Iterator[tuple[str, list[Any]]]:
    """Lists with an entry for each layer, cut to those of the layers that are left: the last ones."""
    for key, value in holder.items():
        if isinstance(value, list) and len(value) in (depth, depth + count) and "layer" in key:
            yield key, value[-count:]


# --- engines -----------------------------------------------------------------------------------------------


def launch(
    found: Layers, config: Config, quantized: bool, was_quantized: bool, renumber: bool, vocabulary: bool
) -> dict[str, str]:
    """By engine, the options that load the result, or why none do; ``{out}`` stands for the result's folder.

    ``quantized``: whether any of the layers are, ``was_quantized`` any of the target; ``vocabulary``: whether the
    target's embedding and head come along.
    """
    steps = max(len(found.numbers) // layers_of_a_step(found.family, config), 1)
    told = json.dumps({"method": "mtp", "model": "{out}", "num_speculative_tokens": steps})
    sglang = "--speculative-algorithm EAGLE --speculative-draft-model-path {out}"
    if was_quantized and not quantized:
        sglang += " --speculative-draft-model-quantization unquant"
    options = {"sglang": sglang, "vllm": f"--speculative-config '{told}'"}
    has_vocabulary = vocabulary or _has_vocabulary(found, config)
    reasons = {engine: _obstacle(engine, found, steps, quantized, renumber, has_vocabulary) for engine in options}
    return {_NAMES[engine]: reasons[engine] or line for engine, line in options.items()}


def _obstacle(
    engine: str, found: Layers, steps: int, quantized: bool, renumber: bool, has_vocabulary: bool
) -> str | None:
    """Why an engine does not load the layers; None where it does."""
    family, name = found.family, _NAMES[engine]
    if getattr(family, engine) is None or (renumber and engine not in family.renumber):
        return NONE_KNOWN
    if found.at not in family.at:
        return f"{NONE_KNOWN}: {name} looks for names that begin with {family.at[0]}"
    if steps > 1 and engine in family.one_layer:
        return f"{NONE_KNOWN}: {name} takes one layer, and these are for {steps} steps"
    is_strict = engine == "vllm" and not quantized and engine not in family.shares
    if (is_strict or engine in family.needs_vocabulary) and not has_vocabulary:
        return f"{NONE_KNOWN} as it is: {name} wants an embedding and a head in it (--embeddings copy)"
    return None


def _has_vocabulary(found: Layers, config: Config) -> bool:
    """Whether the layers bring an embedding and a head of their own."""
    has = {part: any(part.search(name) for name in found.names) for part in (_EMBEDDING, _HEAD)}
    return has[_EMBEDDING] and (has[_HEAD] or is_tied(config))


def declared_otherwise(found: Layers, config: Config) -> tuple[str, int] | None:
    """The key that declares another number of layers than there are, and the number; None where they agree."""
    declared = declared_layers(found.family, config)
    return declared if declared and declared[1] != len(found.numbers) else None
