"""What differs between two checkpoints beside their tensors: config.json by key, the other files by their bytes."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..files.checkpoint import Checkpoint
from ..files.source import PIECE, Source

# Files that decide, beside the weights and config.json, what a model says.
_TELLING = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab.*", "merges.txt", "*.model", "*preprocessor_config.json", "processor_config.json", "*.py",
)  # fmt: skip


class ConfigDiff(NamedTuple):
    """``added`` and ``removed`` keys of config.json by dotted path, ``changed`` ones with both values.

    ``files`` maps the name of each other file that differs to ``only in A``, ``only in B`` or ``differs``.
    """

    added: Mapping[str, Any]
    removed: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]
    files: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        return not any(self)


def compare_configs(a: Checkpoint, b: Checkpoint) -> ConfigDiff | None:
    """What differs; None where one of the two is a single file, which has nothing beside it."""
    if a.source.is_single_file or b.source.is_single_file:
        return None
    one, other = dict(flat(a.config or {})), dict(flat(b.config or {}))
    return ConfigDiff(
        added={key: other[key] for key in other if key not in one},
        removed={key: one[key] for key in one if key not in other},
        changed={key: (one[key], other[key]) for key in one if key in other and not same(one[key], other[key])},
        files=dict(_differing_files(a.source, b.source)),
    )


def flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted path; a list is one leaf, and so is an empty table."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def shown(value: Any) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def same(a: Any, b: Any) -> bool:
    """Equality in which true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _differing_files(a: Source, b: Source) -> Iterator[tuple[str, str]]:
    for name in sorted({*a.files, *b.files}):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _TELLING):
            continue
        if name not in b.files or name not in a.files:
            yield name, "only in A" if name in a.files else "only in B"
        elif not _same_file(a, b, name):
            yield name, "differs"


def _same_file(a: Source, b: Source, name: str) -> bool:
    size = a.files[name].size
    if size != b.files[name].size:
        return False
    pieces = ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))
    return all(a.read(name, *piece) == b.read(name, *piece) for piece in pieces)
