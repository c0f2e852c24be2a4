"""The section of a model card (README.md) that says how a published result was made. Pure text, no I/O.

It stands between two markers; whatever else a card says is its author's and stays as it is. The same result gives the
same section.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

CARD = "README.md"
BEGIN = "<!-- ckptkit: what follows is written by `ckptkit push` -->"
END = "<!-- ckptkit: end -->"

# From the last of several beginnings: what stands behind one that lost its end is an author's.
_SECTION = re.compile(f"{re.escape(BEGIN)}(?:(?!{re.escape(BEGIN)}).)*?{re.escape(END)}\n?", re.DOTALL)
# Where a recorded line that starts an engine names the result.
_DRAFT = re.compile(r'(--speculative-draft-model-path |"model": )("[^"]*"|\S+)')


class Facts(NamedTuple):
    """What a section tells of: the manifest, size in bytes and sha256 (hex) by file, and where it is published.

    ``served`` is what engines are given to load it from there; None where they cannot.
    """

    manifest: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    uri: str
    served: str | None


def card(text: str | None, facts: Facts) -> str:
    """The card ``text`` with the section in the place of an earlier one, or at its end; None: a new card."""
    section = "\n".join([BEGIN, "", *_section(facts), "", END, ""])
    if text is None:
        return "\n".join([*_front_matter(facts.manifest), f"# {_title(facts.uri)}", "", section])
    if _SECTION.search(text):
        return _SECTION.sub(lambda found: section, text, count=1)
    return f"{text.rstrip()}\n\n{section}" if text.strip() else section


def _title(uri: str) -> str:
    return uri.partition("@")[0].rstrip("/").rpartition("/")[2]


def _front_matter(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The metadata from which the Hub draws a model's family tree."""
    origin = _repository(manifest["source"])
    yield "---"
    if origin:
        yield f"base_model: {origin}"
    if origin and manifest["command"] == "quantize":
        yield "base_model_relation: quantized"
    yield from ("tags:", "- ckptkit", "---", "")


def _repository(source: Mapping[str, Any]) -> str | None:
    """The Hub repository that a source is."""
    return source["uri"].removeprefix("hf://").partition("@")[0] if source.get("revision") else None


def _section(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    yield "## How this was made"
    yield ""
    yield f"By `ckptkit {manifest['command']}` (ckptkit {manifest['tool']['version']}) of {_origin(manifest['source'])}."
    yield f"Plan sha256 `{manifest['plan']}`."
    if manifest.get("allowed"):
        yield f"Passed over on request: {', '.join(f'`{id}`' for id in manifest['allowed'])}."
    settings = {key: value for key, value in manifest["settings"].items() if key != "launch"}
    if settings:
        what = "Recipe" if "recipe" in settings else "Settings"
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        yield from ("", f"### {what}", "", "<details><summary>as JSON</summary>", "")
        yield from ("```json", text, "```", "", "</details>")
    lines = dict(_launch(facts))
    if lines:
        yield from ("", "### Serving", "", *(f"- {engine}: {line}" for engine, line in lines.items()))
    yield from ("", "### Digests", "", *_digests(facts))


def _origin(source: Mapping[str, Any]) -> str:
    """The source by name: on the Hub with its commit, elsewhere without the folders that it lay in."""
    origin, uri = _repository(source), source["uri"]
    if origin:
        commit = source["revision"]
        return f"[{origin}](/{origin}/tree/{commit}) at commit `{commit}`"
    return f"`{uri if '://' in uri else PurePath(uri).name or uri}`"


def _launch(facts: Facts) -> Iterator[tuple[str, str]]:
    """By engine, how it is started with the result where that lies now."""
    if facts.served is None:
        return
    name, _, revision = facts.served.partition("@")
    recorded = facts.manifest["settings"].get("launch")
    if recorded is None:
        at = f" --revision {revision}" if revision else ""
        yield "vLLM", f"`vllm serve {name}{at}`"
        yield "SGLang", f"`python -m sglang.launch_server --model-path {name}{at}`"
        return
    option = f" --speculative-draft-model-revision {revision}" if revision else ""
    key = f', "revision": "{revision}"' if revision else ""
    for engine, line in recorded.items():
        moved = _DRAFT.sub(lambda found: found[1] + (f'"{name}"{key}' if found[2][0] == '"' else name + option), line)
        yield engine, f"`{moved}`" if "--" in moved else moved


def _digests(facts: Facts) -> Iterator[str]:
    yield f"`ckptkit verify {facts.uri} --level data` reads every byte and compares it."
    yield ""
    yield f"<details><summary>sha256 of {len(facts.files):,} files</summary>"
    yield ""
    yield from ("| file | bytes | sha256 |", "|---|---:|---|")
    yield from (f"| `{name}` | {size:,} | `{digest}` |" for name, (size, digest) in sorted(facts.files.items()))
    yield from ("", "</details>")
