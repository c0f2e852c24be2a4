"""What a checkpoint declares about its quantization: in config.json, and in the files that other tools write.

Readers take config.json's table where there is one. ModelOpt's ``hf_quant_config.json`` (TensorRT-LLM reads it; vLLM
and SGLang where config.json says nothing), AutoGPTQ's ``quantize_config.json`` and AutoAWQ's ``quant_config.json`` may
stand beside it, or alone.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..declarations import DECLARATIONS, LISTS, MODELOPT, method_of
from ..errors import Finding, UserError
from ..files.checkpoint import CONFIG, parse_json
from ..naming.names import unwrapped
from ..naming.regexes import compiled
from . import Subject


class Declaration(NamedTuple):
    """A table that declares quantization: the file it stands in, its method."""

    file: str
    method: str
    table: Mapping[str, Any]


def declarations(subject: Subject) -> tuple[list[Declaration], list[Finding]]:
    """Every declaration, that of config.json first, and findings about files that cannot be read."""
    found: list[Declaration] = []
    findings: list[Finding] = []
    if subject.quantization is not None:
        found.append(_declaration(CONFIG, subject.quantization.table))
    for file in DECLARATIONS:
        if file in subject.checkpoint.source.files:
            try:
                table = parse_json(subject.checkpoint.source.text(file), file, "config.quant-version")
            except UserError as error:
                findings += [Finding("config.quant-version", item.message, file=file) for item in error.findings]
                continue
            if isinstance(table, dict) and table:
                found.append(_declaration(file, table))
    return found, findings


def _declaration(file: str, table: Mapping[str, Any]) -> Declaration:
    inner = table.get("quantization")
    if isinstance(inner, Mapping):  # ModelOpt's own file
        table = {**inner, "quant_method": table.get("quant_method") or MODELOPT}
    return Declaration(file, method_of(file, table), table)


def excluded_entries(declaration: Declaration) -> tuple[str, ...]:
    """The entries of the lists of modules that are left dense, under the names that the methods have for them."""
    lists = (declaration.table.get(key) for key in LISTS)
    entries = (entry for listed in lists if isinstance(listed, list) for entry in listed)
    return tuple(dict.fromkeys(entry for entry in entries if isinstance(entry, str) and entry))


# --- lists of modules, read in the engines' ways ------------------------------------------------------------


class Excluded(NamedTuple):
    """A list of modules that are left dense. Engines read such lists in different ways: as names, as globs of names or
    of the parts of their paths (ModelOpt, SGLang), as regexes of their beginnings (transformers), as substrings (vLLM).

    ``globs`` are read by all alike, ``texts`` and ``patterns`` are the widest readings of all entries.
    """

    entries: tuple[str, ...]
    globs: tuple[re.Pattern[str], ...]
    texts: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]

    def strictly(self, name: str) -> bool:
        """Whether every engine takes ``name`` to be listed: by itself, or by a glob of it, of a parent, or of a part."""
        if name in self.entries:
            return True
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)] if self.globs else []
        return any(glob.fullmatch(text) for glob in self.globs for text in (*paths, *parts))

    def loosely(self, name: str) -> bool:
        """Whether any engine could take ``name`` to be listed."""
        return any(text in name for text in self.texts) or any(pattern.match(name) for pattern in self.patterns)


def excluded(entries: tuple[str, ...]) -> Excluded:
    globs = [entry for entry in entries if not entry.startswith("re:") and ("*" in entry or "." not in entry)]
    plain = [entry.removeprefix("re:") for entry in entries]
    wide = [text for entry, text in zip(entries, plain, strict=True) if entry != text or re.search(r"[*?\[]", text)]
    patterns = [re.compile(fnmatch.translate(f"*{unwrapped(text)}*")) for text in wide]
    return Excluded(
        entries,
        tuple(re.compile(fnmatch.translate(entry)) for entry in globs),
        tuple(unwrapped(text).rstrip("*.") for text in plain),
        (*patterns, *filter(None, map(_regex, wide))),
    )


def _regex(text: str) -> re.Pattern[str] | None:
    try:
        return compiled(text)
    except re.error:
        return None
