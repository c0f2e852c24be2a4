"""Checks of the files beside the shards: tokenizer, generation config, remote code, chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..errors import Finding, UserError
from ..files.checkpoint import CONFIG, INDEX_SUFFIX
from ..files.source import Source, is_plain
from . import Level, Probe, Seen, Subject
from .config import generates
from .files_pages import PAGES
from .sidecars import Sidecars, is_hollow

__all__ = ["PAGES", "PROBES"]

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
_READ = (".json", ".jinja", ".model", ".tiktoken", "merges.txt", "vocab.txt", ".py")


def _refetch(file: str) -> str:
    return f"hf download ORG/NAME {file} --local-dir DIR --force-download"


def _fault(id: str, file: str, message: str, **details: Any) -> Finding:
    return Finding(id, message, file=file, **{"hint": _refetch(file), **details})


def _is_unreadable(sidecars: Sidecars, file: str) -> bool:
    """Whether a file that is there, and not hollow, is no JSON object."""
    source = sidecars.source
    return file in source.files and not isinstance(sidecars[file], dict) and not is_hollow(source, file)


# --- hollow files ------------------------------------------------------------------------------------------


def _empty(subject: Subject) -> Seen:
    """Files that other checks read (config, index) are left to them."""
    source = subject.checkpoint.source
    names = [
        name for name in source.files if name.endswith(_READ) and name != CONFIG and not name.endswith(INDEX_SUFFIX)
    ]
    findings = [
        _fault(
            "files.empty", name, f"{name} is empty" if not source.files[name].size else f"{name} is a Git LFS pointer"
        )
        for name in names
        if not name.endswith("__init__.py") and is_hollow(source, name)
    ]
    return Seen(findings, len(names))


# --- tokenizer ---------------------------------------------------------------------------------------------

_TOKENIZERS = re.compile(
    r"tokenizer\.json|.*\.model(?:\.v\d+)?|.*\.tiktoken|tekken\.json|vocab\.(?:json|txt|bpe)|merges\.txt|.*spm.*"
)
_NAMED = re.compile(r"(?!special_tokens_map).*_file")


def _tokenizer(subject: Subject) -> Seen:
    source = subject.checkpoint.source
    found = [name for name in source.files if "/" not in name and _TOKENIZERS.fullmatch(name)]
    findings = [*_missing_tokenizer(subject.sidecars, found), *_unreadable_tokenizer(subject.sidecars)]
    if not found and not findings and generates(subject.config):
        message = "there is no tokenizer: engines can be given token ids only, or a tokenizer from elsewhere"
        hint = "copy tokenizer.json and tokenizer_config.json from the model that this one was made from"
        findings.append(_fault("files.tokenizer", "tokenizer.json", message, severity="warning", hint=hint))
    return Seen(findings, len(found))


def _missing_tokenizer(sidecars: Sidecars, found: list[str]) -> Iterator[Finding]:
    """Files that tokenizer_config.json names; absolute paths there are traces of where it was written."""
    settings, files = sidecars.table(SETTINGS), sidecars.source.files
    versions = settings.get("fast_tokenizer_files")
    named = [value for key, value in settings.items() if _NAMED.fullmatch(key)]
    named += versions if isinstance(versions, list) else []
    for name in named:
        if isinstance(name, str) and name and is_plain(name) and name not in files:
            yield _fault("files.tokenizer", name, f"{SETTINGS} names {name}, which is not there")
    if settings and not found and not any(isinstance(name, str) and name in files for name in named):
        message = f"there is {SETTINGS} and no tokenizer that it could be of"
        yield _fault("files.tokenizer", "tokenizer.json", message)


def _unreadable_tokenizer(sidecars: Sidecars) -> Iterator[Finding]:
    for name in ("tokenizer.json", SETTINGS):
        if _is_unreadable(sidecars, name):
            yield _fault("files.tokenizer", name, f"{name} is no JSON object")


# --- generation --------------------------------------------------------------------------------------------


def _generation(subject: Subject) -> Seen:
    if not _is_unreadable(subject.sidecars, GENERATION):
        return Seen((), int(GENERATION in subject.checkpoint.source.files))
    message = f"{GENERATION} is no JSON object: its stop tokens and sampling defaults are lost without a word"
    return Seen([_fault("files.generation", GENERATION, message)], 1)


# --- remote code -------------------------------------------------------------------------------------------

_IMPORT = re.compile(r"^\s*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+))", re.MULTILINE)
_CODED = (CONFIG, SETTINGS, "processor_config.json", "preprocessor_config.json", GENERATION)


def _remote_code(subject: Subject) -> Seen:
    source = subject.checkpoint.source
    wanted = {
        f"{reference.rpartition('.')[0].replace('.', '/')}.py": f"auto_map of {file}"
        for file in _CODED
        for reference in _references(subject.sidecars.table(file))
        if "--" not in reference
    }
    missing: dict[str, str] = {}
    seen: set[str] = set()
    while wanted:
        name, who = wanted.popitem()
        seen.add(name)
        if name not in source.files:
            missing[name] = who
        else:
            wanted |= {module: name for module in _imports(source, name) if module not in seen}
    findings = [
        _fault("files.remote-code", name, f"{who} names {name}, which is not there") for name, who in missing.items()
    ]
    return Seen(sorted(findings, key=lambda finding: finding.message), len(seen))


def _references(table: Mapping[str, Any]) -> Iterator[str]:
    """What ``auto_map`` names: ``module.Class``, or for a tokenizer a list of slow and fast; ``repository--…``."""
    auto_map = table.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))


def _imports(source: Source, name: str) -> Iterator[str]:
    """The modules beside it that a Python file imports."""
    try:
        text = source.text(name)
    except UserError:
        return
    folder = name.rpartition("/")[0]
    for first, second in _IMPORT.findall(text):
        module = f"{first or second}.py"
        yield f"{folder}/{module}" if folder else module


# --- chat templates ----------------------------------------------------------------------------------------

_TEMPLATE = "chat_template.jinja"
_TEMPLATES_FOLDER = "additional_chat_templates/"
# A tag of transformers' own, which marks what an assistant says.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def _chat_template(subject: Subject) -> Seen:
    source = subject.checkpoint.source
    templates = list(_templates(subject.sidecars))
    findings = [finding for file, text in templates if (finding := _template_fault(source, file, text))]
    if _is_unreadable(subject.sidecars, "chat_template.json"):
        findings.append(_fault("files.chat-template", "chat_template.json", "chat_template.json is no JSON object"))
    return Seen(findings, len(templates))


def _templates(sidecars: Sidecars) -> Iterator[tuple[str, str]]:
    """Every template, with the file that it stands in."""
    source = sidecars.source
    for file in source.files:
        if file == _TEMPLATE or (file.startswith(_TEMPLATES_FOLDER) and file.endswith(".jinja")):
            yield file, source.read(file, 0, source.files[file].size).decode("utf-8", "replace")
    for file in (SETTINGS, "chat_template.json", "processor_config.json"):
        stated = sidecars.table(file).get("chat_template")
        for item in stated if isinstance(stated, list) else [stated]:
            text = item.get("template") if isinstance(item, dict) else item
            if isinstance(text, str):
                yield file, text


def _template_fault(source: Source, file: str, text: str) -> Finding | None:
    name = text.strip()
    if name.endswith(".jinja") and is_plain(name) and "{" not in name:
        if name in source.files:
            return None
        return _fault("files.chat-template", name, f"{file} names {name}, which is not there")
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    except TemplateSyntaxError as error:
        message = f"the chat template in {file} cannot be read: {error.message} (line {error.lineno})"
        return _fault("files.chat-template", file, message, data={"line": error.lineno})
    return None


# --- probes ------------------------------------------------------------------------------------------------


def _without_folder(subject: Subject) -> str | None:
    return "a single file has nothing beside it" if subject.checkpoint.source.is_single_file else None


_probe = partial(Probe, level=Level.STATIC, unfit=_without_folder)

PROBES = (
    _probe(("files.empty",), run=_empty),
    _probe(("files.tokenizer",), run=_tokenizer),
    _probe(("files.generation",), run=_generation),
    _probe(("files.remote-code",), run=_remote_code),
    _probe(("files.chat-template",), run=_chat_template),
)
