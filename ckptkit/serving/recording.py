"""What a model makes of the prompts, recorded: the reference that servers are judged by, in memory or as a golden file.

A golden file (``--record FILE``, ``--golden FILE``) is JSON, schema 1; fields are only ever added. It holds what it was
made from and with, and for every position the token and the best few with their logprobs, so that a server can be
judged where the model it was made from is not at hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import fail, unreadable
from ..files.checkpoint import CONFIG, Checkpoint

SCHEMA = 1
GGUF_START = 32 << 20  # bytes
DIGITS = 6  # of a logprob: a millionth of a nat
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


# What values are run of: a checkpoint, or a GGUF file.
Weights = Checkpoint | Path


class Item(NamedTuple):
    """A prompt of ids and its greedy continuation ``tokens``.

    ``logprobs`` has a value, in nats, for each id but the first of both; ``top`` the best ids there with theirs, best
    first. ``text`` is the prompt as the tokenizer gives it back, ``completion`` that of the continuation.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    text: str = ""
    completion: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.tokens

    def gap(self, at: int) -> float:
        """By how much the best token leads the second, in nats, where ``tokens[at]`` was chosen."""
        (_, best), (_, second), *_ = self.top[len(self.prompt) - 1 + at]
        return best - second


class Recording(NamedTuple):
    """All prompts of one model. ``rounding`` is how far bfloat16 puts its logprobs off, mean and largest, in nats."""

    about: Mapping[str, Any]
    items: tuple[Item, ...]
    rounding: tuple[float, float] = (0.0, 0.0)


def digest(weights: Weights, names: Iterable[str] | None = None) -> str:
    """sha256 of the files of that name; without names of the config and the headers: what the checkpoint is made of.

    Of a GGUF file, which has no other files, that of its size and its beginning, in which such a header lies.
    """
    return _of_gguf(weights) if isinstance(weights, Path) else _of_checkpoint(weights, names)


def _of_gguf(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.sha256(f"{file.stat().st_size}\0".encode() + content.read(GGUF_START)).hexdigest()


def _of_checkpoint(checkpoint: Checkpoint, names: Iterable[str] | None) -> str:
    source, sums = checkpoint.source, hashlib.sha256()
    for name in sorted(name for name in names or (CONFIG, *checkpoint.shards) if name in source.files):
        header = checkpoint.shards.get(name)
        stop = header.data_start if header else source.files[name].size
        sums.update(f"{name}\0{source.files[name].size}\0".encode() + source.read(name, 0, stop))
    return sums.hexdigest()


def about(weights: Weights, told: Mapping[str, Any], dtype: str, engine: str, version: str) -> dict[str, Any]:
    """What a recording says of itself; ``told`` is what the server says: its vocabulary, whether it takes chats."""
    return {
        "source": digest(weights),
        "tokenizer": digest(weights, TOKENIZER),
        "dtype": dtype,
        "engine": engine,
        "version": version,
        "vocabulary": told["vocabulary"],
        "chat": told["chat"],
    }


def vocabulary(checkpoint: Checkpoint) -> int | None:
    """The number of tokens, as the config has it."""
    config = checkpoint.config or {}
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def write(recording: Recording, path: Path) -> None:
    """Write a golden file. Raises UserError (``output.write``)."""
    items = [
        {
            **item._asdict(),
            "logprobs": _rounded(item.logprobs),
            "top": [[[i, *_rounded([v])] for i, v in t] for t in item.top],
        }
        for item in recording.items
    ]
    text = json.dumps({"schema": SCHEMA, **recording.about, "rounding": recording.rounding, "items": items})
    try:
        path.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=str(path)) from None


def read(path: str) -> Recording:
    """A golden file. Raises UserError (``usage.golden``, ``access.denied``)."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, and this version reads {SCHEMA}")
        items = tuple(_item(fields) for fields in content.pop("items"))
        if not items:
            raise ValueError("it holds no prompt")
        mean, largest = content.pop("rounding")
        return Recording(content, items, (float(mean), float(largest)))
    except OSError as error:
        raise unreadable(error, "usage.golden", path) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is no golden file: {error}"
        raise fail("usage.golden", message, file=path, hint=f"ckptkit verify SRC --serve --record {path}") from None


def _item(fields: Mapping[str, Any]) -> Item:
    item = Item(
        str(fields["name"]),
        tuple(map(int, fields["prompt"])),
        tuple(map(int, fields["tokens"])),
        tuple(math.nan if value is None else float(value) for value in fields["logprobs"]),
        tuple(tuple((int(id), float(value)) for id, value in best) for best in fields["top"]),
        str(fields["text"]),
        str(fields["completion"]),
    )
    if (
        not item.prompt
        or not len(item.logprobs) == len(item.top) == len(item.ids) - 1
        or any(len(t) < 2 for t in item.top)
    ):
        raise ValueError(f"{item.name}: tokens and logprobs do not belong together")
    return item


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values]
