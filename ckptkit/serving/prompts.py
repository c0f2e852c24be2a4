"""What servers are asked: a few texts and chats, short and long, that models complete with little doubt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import fail, unreadable


class Prompt(NamedTuple):
    """A prompt by name: ``body`` is ``{"prompt": text}`` or ``{"messages": […]}``, as requests have it."""

    name: str
    body: Mapping[str, Any]


def prompts(path: str | None = None) -> list[Prompt]:
    """Those of a file of JSON lines, ``{"name": …, "text": …}`` or ``{"name": …, "messages": […]}``; else our own.

    Raises UserError (``usage.prompts``, ``access.denied``).
    """
    text = _read(path) if path else (files(__package__) / "data" / "prompts.jsonl").read_text("utf-8")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = [_prompt(line, f"{path or 'prompts.jsonl'}:{number}") for number, line in lines]
    if not found or len({prompt.name for prompt in found}) < len(found):
        raise fail("usage.prompts", f"{path} holds no prompt, or two of one name", file=path)
    return found


def counted(tokens: int) -> Prompt:
    """A long one, of at least as many tokens: numbers counted up, which any model that sees them all goes on counting."""
    return Prompt(f"count-{tokens}", {"prompt": " ".join(f"{number}," for number in range(1, tokens // 2 + 2))})


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError:
        raise fail("usage.prompts", f"{path} is not UTF-8", file=path) from None
    except OSError as error:
        raise unreadable(error, "usage.prompts", path) from None


def _is_message(found: Any) -> bool:
    match found:
        case {"role": str(), "content": str() | list()}:
            return True
    return False


def _prompt(line: str, where: str) -> Prompt:
    try:
        match json.loads(line):
            case {"name": str(name), "text": str(text)} if text:
                return Prompt(name, {"prompt": text})
            case {"name": str(name), "messages": [_, *_] as messages} if all(map(_is_message, messages)):
                return Prompt(name, {"messages": messages})
    except ValueError:
        pass
    hint = '{"name": "capital", "text": "The capital of France is"}'
    raise fail("usage.prompts", f"{where}: no prompt", file=where, hint=f"a line is {hint}")
