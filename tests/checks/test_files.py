"""The files beside the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama_config
from quantized_parts import found

from ckptkit.checks import files

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
TOKENIZER = {"tokenizer.json": {"model": {"vocab": {"a": 0}}}}
Content = str | dict[str, Any] | list[Any]


def folder(tmp_path: Path, config: dict[str, Any] | None = None, **contents: Content) -> Path:
    """A checkpoint with files beside it; ``__`` in a name is its dot."""
    checkpoint(tmp_path, {"a": torch.zeros(1)}, llama_config() if config is None else config)
    write(tmp_path, {name.replace("__", "."): content for name, content in contents.items()})
    return tmp_path


def write(into: Path, contents: dict[str, Content]) -> None:
    for name, content in contents.items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def told(path: Path) -> list[tuple[str, str | None, str]]:
    return [(finding.id, finding.file, finding.severity) for finding in found(path, files)]


GOOD_TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
GOOD: dict[str, dict[str, Content]] = {
    "tokenizer.json": {},
    "stale absolute paths": {"tokenizer_config.json": {"tokenizer_file": "/root/.cache/tokenizer.json",
                             "special_tokens_map_file": "special_tokens_map.json", "vocab_file": None}},
    "a template with transformers' own tags": {"chat_template.jinja": GOOD_TEMPLATE},
    "templates by name": {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": GOOD_TEMPLATE}]}},
    "a template in a file that is named": {"tokenizer_config.json": {"chat_template": "chat_template.jinja"},
                                           "chat_template.jinja": "{{ messages }}"},
    "a template of a processor": {"chat_template.json": {"chat_template": GOOD_TEMPLATE}},
    "code of another repository": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["org/x--tok.Tok", None]}}},
    "code that imports code": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}},
                               "tok.py": "from .base import B\nimport os\n", "base.py": "from .tok import T\n"},
    "an empty package": {"code/__init__.py": ""},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_ones(name: str, tmp_path: Path) -> None:
    folder(tmp_path)
    write(tmp_path, TOKENIZER | GOOD[name])
    assert told(tmp_path) == []


BAD: dict[str, tuple[dict[str, Content], str, str]] = {
    "empty": ({"merges.txt": ""}, "files.empty", "merges.txt"),
    "a pointer": ({"tokenizer.model": LFS}, "files.empty", "tokenizer.model"),
    "no JSON": ({"tokenizer.json": "{"}, "files.tokenizer", "tokenizer.json"),
    "settings that are no object": ({"tokenizer_config.json": []}, "files.tokenizer", "tokenizer_config.json"),
    "a named file": ({"tokenizer_config.json": {"vocab_file": "spiece.model"}}, "files.tokenizer", "spiece.model"),
    "a version": ({"tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}}, "files.tokenizer",
                  "tokenizer.4.0.0.json"),
    "generation": ({"generation_config.json": "{'eos_token_id': 1}"}, "files.generation", "generation_config.json"),
    "code": ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}}}, "files.remote-code", "tok.py"),
    "imported code": ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}},
                       "tok.py": "from .base import B\n"}, "files.remote-code", "base.py"),
    "a template": ({"chat_template.jinja": "{% if x %}"}, "files.chat-template", "chat_template.jinja"),
    "one of several": ({"additional_chat_templates/tool.jinja": "{{ x"}, "files.chat-template",
                       "additional_chat_templates/tool.jinja"),
    "a template by name": ({"tokenizer_config.json": {"chat_template": "other.jinja"}}, "files.chat-template",
                           "other.jinja"),
    "a template's file": ({"chat_template.json": "[]"}, "files.chat-template", "chat_template.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_ones(name: str, tmp_path: Path) -> None:
    contents, id, file = BAD[name]
    folder(tmp_path)
    write(tmp_path, TOKENIZER | contents)
    assert told(tmp_path) == [(id, file, "error")]


def test_no_tokenizer_at_all_is_a_warning_and_a_config_without_one_an_error(tmp_path: Path) -> None:
    folder(tmp_path)
    assert told(tmp_path) == [("files.tokenizer", "tokenizer.json", "warning")]
    write(tmp_path, {"tokenizer_config.json": {}})
    assert told(tmp_path) == [("files.tokenizer", "tokenizer.json", "warning")]
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "</s>"}})
    assert told(tmp_path) == [("files.tokenizer", "tokenizer.json", "error")]


def test_a_draft_needs_no_tokenizer(tmp_path: Path) -> None:
    assert told(folder(tmp_path, llama_config(architectures=["DFlashDraftModel"]))) == []


def test_a_single_file_has_nothing_beside_it(tmp_path: Path) -> None:
    folder(tmp_path)
    assert told(tmp_path / "model.safetensors") == []
