"""``--speculative NAME[:key=value,…]``: how speculation is asked for, whatever the engine; its defaults and its limits.

One vocabulary for three: ``steps`` tokens are drafted in a row, ``draft-tokens`` are verified at a time (the engine's own
one among them, as SGLang counts), ``block`` is ``block_size`` of a draft that drafts blocks.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..drafts.dense_config import fields_of
from ..errors import UserError, fail
from ..naming.patterns import nearest
from .engine import METHODS, NONE, Method

STEPS, TOPK, DRAFT_TOKENS = 3, 1, 4

# What engines call our methods; names that end in _mtp are vLLM's, one for each family.
_SPELLINGS = {
    "nextn": "mtp", "draft-mtp": "mtp", "draft-eagle3": "eagle3", "draft-dflash": "dflash", "draft-dspark": "dspark",
    "ngram-simple": "ngram", "standalone": "draft", "draft_model": "draft", "draft-simple": "draft",
}  # fmt: skip
_CHAINS = {"mtp", "eagle", "eagle3", "draft"}
_BLOCKS = {"dflash", "dspark", "domino"}
# Those whose weights never lie within the target.
_APART = {"eagle", "eagle3", "draft", "dflash", "domino"}
_KEYS = {
    name: {"arg"}
    | ({"steps", "topk", "draft-tokens"} if name in _CHAINS else set())
    | ({"block"} if name in _BLOCKS else set())
    | ({"draft-tokens"} if name == "ngram" else {"draft"} if name != NONE else set())
    for name in METHODS
}
_PAIR = re.compile(r"""\s*(?P<key>[\w-]+)\s*=\s*(?P<quote>['"]?)(?P<value>.*?)(?P=quote)\s*(?:,|$)""")


def method_name(spelling: str) -> str:
    """Our name of a method, of whatever engine the spelling is. Raises UserError (``usage.speculative``)."""
    given = spelling.strip().lower()
    found = "mtp" if given.endswith("_mtp") else _SPELLINGS.get(given, given)
    if found not in METHODS:
        guess = nearest(given, [*METHODS, *_SPELLINGS])
        message = f"speculative method {spelling!r} is not known: {', '.join(METHODS)}"
        raise fail("usage.speculative", message, hint=f"--speculative {guess}" if guess else None)
    return found


def parse(text: str) -> Method:
    """One ``--speculative``; what it leaves open has the defaults, but for ``block`` and ``draft`` (:func:`resolved`).

    ``arg='…'``, which may be given more than once, is split as a shell splits words. Raises UserError
    (``usage.speculative``).
    """
    spelling, _, rest = text.partition(":")
    name = method_name(spelling)
    counts: dict[str, int] = {}
    draft, arguments = None, []
    for key, value in _pairs(text, rest):
        if key not in _KEYS[name]:
            keys = ", ".join(sorted(_KEYS[name]))
            raise _wrong(text, f"{name} has no key {key!r}, only {keys}")
        if key == "arg":
            arguments += _words(text, value)
        elif key == "draft":
            draft = Path(value)
        else:
            counts[key] = _count(text, key, value)
    method = Method(name, block=counts.get("block"), draft=draft, arguments=tuple(arguments))
    if name == "ngram":
        return method._replace(draft_tokens=counts.get("draft-tokens", DRAFT_TOKENS))
    return _chain(text, method, counts) if name in _CHAINS else method


def _pairs(text: str, rest: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(rest):
        found = _PAIR.match(rest, at)
        if found is None:
            raise _wrong(text, f"{rest[at:]!r} is not key=value")
        yield found["key"], found["value"]
        at = found.end()


def _words(text: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise _wrong(text, f"arg: {error}") from error


def _count(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise _wrong(text, f"{key} is a number of at least 1, not {value!r}")
    return int(value)


def _chain(text: str, method: Method, counts: Mapping[str, int]) -> Method:
    """Steps, width and tokens verified of a chain or tree; a chain verifies one token more than it drafts."""
    topk, tokens = counts.get("topk", TOPK), counts.get("draft-tokens")
    steps = counts.get("steps", tokens - 1 if tokens and topk == 1 else STEPS)
    if topk > 1 and tokens is None:
        raise _wrong(text, "with topk, draft-tokens says how much of the tree is verified")
    if topk == 1 and (steps < 1 or tokens not in (None, steps + 1)):
        raise _wrong(text, f"{steps} steps of one token each verify {steps + 1} draft-tokens, not {tokens}")
    return method._replace(steps=steps, topk=topk, draft_tokens=tokens or steps + 1)


def _wrong(text: str, message: str) -> UserError:
    return fail("usage.speculative", f"--speculative {text}: {message}", hint="--speculative mtp:steps=3,topk=1")


def resolved(method: Method, drafts: Mapping[str, Path], checkpoint: Path) -> Method:
    """The method with its draft, ``drafts`` by our names, and the block size that the draft's config states.

    A draft within the target is stated in ``checkpoint``'s config. Raises UserError (``usage.speculative``) where a draft
    is needed and none is given.
    """
    draft = method.draft or drafts.get(method.name)
    if draft is None and method.name in _APART:
        hint = f"--draft {method.name}=PATH"
        raise fail("usage.speculative", f"{method.name} needs a draft, and none is given", hint=hint)
    block = method.block
    if block is None and method.name in _BLOCKS:
        block = _stated_block(draft or checkpoint)
    return method._replace(draft=draft, block=block)


def _stated_block(folder: Path) -> int | None:
    """``block_size`` of a draft's config; None where nothing readable states it, for the engine to say so."""
    try:
        config: Any = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    block = fields_of(config).block_size if isinstance(config, Mapping) else None
    return block if isinstance(block, int) and block > 0 else None


def drafted(method: Method) -> int | None:
    """The most tokens that are drafted in a row; None where only the engine knows.

    A block of DFLASH begins with the token that is there already, one of DSpark with the first that is drafted.
    """
    if method.name in _BLOCKS:
        return None if method.block is None else method.block - (method.name != "dspark")
    if method.name == "ngram":
        return None if method.draft_tokens is None else method.draft_tokens - 1
    return method.steps


def longest(method: Method) -> int | None:
    """The largest accept length that there can be: all that is drafted, and the engine's own token."""
    most = drafted(method)
    return None if most is None else most + 1
