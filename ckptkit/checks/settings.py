"""What config.json says of the model, against the source's: numbers that no tensor shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ..comparing.config_diff import flat, same, shown
from ..errors import Finding
from ..files.checkpoint import CONFIG, Checkpoint
from ..layout_config import KEY, original
from ..vocab.marks import KEPT, is_declared, unmarked
from . import Level, Page, Probe, Seen, Subject
from .sidecars import Sidecars

ID = "config.differs"
# What a conversion changes by right, and what says who wrote the file. Other checks look at the former.
_FREE = frozenset({
    "quantization_config", "compression_config", "expert_dtype", "tie_word_embeddings", "dtype", "torch_dtype", "auto_map",
    "transformers_version", "_name_or_path", "_commit_hash", "_attn_implementation_autoset", "use_cache", KEY,
})  # fmt: skip


def _settings(subject: Subject) -> Seen:
    assert subject.against is not None
    before, after = _leaves(subject.against), _leaves(subject.checkpoint)
    return Seen([*_differences(before, after)], len(before))


def _leaves(checkpoint: Checkpoint) -> dict[str, Any]:
    """Keys by dotted path with their values, as they were before ckptkit changed the layout or the order of the head."""
    config = checkpoint.config or {}
    if is_declared(config):
        config = unmarked(config, Sidecars(checkpoint.source).table(KEPT))
    return {key: value for key, value in flat(original(config)) if _FREE.isdisjoint(key.split("."))}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Finding]:
    """A key that stands elsewhere with the same value has moved, as rope_theta does between versions of transformers."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for key, value in after.items():
        by_name[_name(key)].append(value)
    for key, value in before.items():
        if key in after and not same(value, after[key]):
            yield _difference(key, value, f"is {shown(after[key])}", "error")
        elif key not in after and value and not any(same(value, other) for other in by_name[_name(key)]):
            yield _difference(key, value, "is not there", "warning")


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _difference(key: str, value: Any, how: str, severity: str) -> Finding:
    message = f"{key} in {CONFIG} {how}; the source has {shown(value)}"
    hint = f'"{_name(key)}": {shown(value)} in {CONFIG}, or --allow {ID} if the change is meant'
    return Finding(ID, message, file=CONFIG, hint=hint, severity=severity, data={"key": key})


def _unfit(subject: Subject) -> str | None:
    if subject.against is None:
        return "no source to compare with (--against)"
    return None if subject.checkpoint.config and subject.against.config else f"not both have a {CONFIG}"


PROBES = (Probe((ID,), Level.STATIC, _settings, _unfit),)

PAGES = (
    Page(
        ID,
        Level.STATIC,
        "error",
        "config.json says something else of the model than its source's",
        "A conversion changes how numbers are stored, not the model: rope_theta, rms_norm_eps, the number of experts "
        "for each token and the like must be the source's. No tensor shows them, so an engine loads such a checkpoint "
        "and computes something else. Every key is compared but those that a conversion changes by right "
        "(quantization_config, dtype, tie_word_embeddings) and those that say who wrote the file. A key that is gone "
        "is a warning, unless its value stands elsewhere under the same name: engines then take a default. What ckptkit "
        "reorder-vocab wrote so that nothing loads its result is compared as it was before.",
        '"rope_theta": 10000.0, where the source has 1000000.0',
        "Copy the value from the source's config.json: ckptkit diff SRC CKPT shows all that differ.",
    ),
)
