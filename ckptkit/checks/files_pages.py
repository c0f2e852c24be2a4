"""The pages of the checks of the files beside the shards."""

from __future__ import annotations

from . import Level, Page

PAGES = (
    Page(
        "files.empty",
        Level.STATIC,
        "error",
        "A file is empty, or a Git LFS pointer",
        "The name is there and the content is not: a copy that ran out of space, or a clone without git lfs, which "
        "leaves three lines of text in place of each large file.",
        "tokenizer.json of 134 bytes that begins with 'version https://git-lfs.github.com/spec/v1'",
        "Fetch it again: hf download ORG/NAME FILE --local-dir DIR --force-download, or git lfs pull.",
    ),
    Page(
        "files.tokenizer",
        Level.STATIC,
        "error",
        "The tokenizer is missing or cannot be read",
        "tokenizer_config.json names a file that is not there, or is there without any tokenizer, or tokenizer.json is "
        "no JSON: the server stops at start, or falls back to another class of tokenizer and splits text otherwise. A "
        "warning where nothing of a tokenizer is there at all: some engines take one from elsewhere (--tokenizer).",
        "tokenizer_config.json alone",
        "Copy tokenizer.json and tokenizer_config.json from the model that this one was made from.",
    ),
    Page(
        "files.generation",
        Level.STATIC,
        "error",
        "generation_config.json cannot be read",
        "Engines take stop tokens and sampling defaults from it, and go on without it when it cannot be read: a model "
        "whose end-of-turn token stands only there never stops.",
        '{"eos_token_id": [1, 106],',
        "Fetch it again, or correct the JSON.",
    ),
    Page(
        "files.remote-code",
        Level.STATIC,
        "error",
        "A Python file that auto_map names is missing",
        "With trust_remote_code the classes are loaded from files beside the config: those in auto_map and those that "
        "they import from each other. One that is missing stops the load, or makes an engine fetch other code from the "
        "Hub than what was tested. References to another repository (ORG/NAME--module.Class) are not followed.",
        '"auto_map": {"AutoConfig": "configuration_x.XConfig"}, and no configuration_x.py',
        "Copy the .py files from the model that this one was made from.",
    ),
    Page(
        "files.chat-template",
        Level.STATIC,
        "error",
        "The chat template is missing or cannot be read",
        "A template (chat_template.jinja, additional_chat_templates/, tokenizer_config.json, chat_template.json) has a "
        "syntax error, or one is named by file and not there. The server starts, and every chat request fails.",
        "{% for message in messages %}{{ message['content'] }}   (no endfor)",
        "Correct the template; the finding gives the line.",
    ),
)
