"""What ``ckptkit verify --serve`` is asked for: its options read together, before anything is opened or started."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UserError, fail
from ..files.source import open_source
from ..manifest import read_manifest
from ..serving import client
from ..serving.engine import NONE, Engine, Method, Server, engine
from ..serving.implied import Implied, implied
from ..serving.llama_server import gguf_file
from ..serving.speculative import method_name, parse
from .serving import How

if TYPE_CHECKING:
    from .verify import Asked

_LABEL = re.compile(r"([\w.+-]+)=(.+)")


class Job(NamedTuple):
    """What is asked for: the options, checkpoints by label (their paths), the engine and the ways to speculate."""

    asked: Asked
    how: How
    paths: Mapping[str, str]
    engine: Engine
    methods: Sequence[Method]


def job_of(ckpts: Sequence[str], asked: Asked, how: How) -> Job:
    """Raises UserError (``usage.*``) for options that exclude each other, lack another, or name what is not known."""
    _check_options(asked, how)
    if how.url:
        _check_url(how.url, ckpts, asked, how)
    paths = labelled(ckpts or [how.url or "."])
    for path in paths.values():
        if not is_local(path) and path != how.url:
            raise elsewhere(path)
    methods = [method for method in map(parse, asked.speculative) if method.name != NONE]
    chosen = _engine(asked.engine, how, next(iter(paths.values())))
    [path, *others] = paths.values()
    if is_folder(path) and not others and (meant := _implied(path, chosen)).method:
        paths, methods = labelled([meant.checkpoint]), methods or [meant.method]
    if chosen.name == "llama-server" and not how.url:
        paths = {label: str(gguf_file(Path(path))) for label, path in paths.items()}
    _check_paths(paths.values())
    _check_drafts(how, methods)
    if how.min_accept_length and not methods and not how.url:
        raise fail("usage.arguments", "--min-accept-length is about speculation", hint="--speculative ngram")
    return Job(asked, how, paths, chosen, [Method(), *methods])


def _check_options(asked: Asked, how: How) -> None:
    """Raises UserError (``usage.arguments``) for options that exclude each other, or lack another."""
    references = [f"--{name}" for name in ("golden", "record") if getattr(how, name)]
    references += ["--against"] if asked.against else []
    if len(references) > 1:
        raise fail("usage.arguments", f"{' and '.join(references)} exclude each other: there is one reference")
    alone = [name for name in ("min_score", "eval_runner", "journal") if getattr(how, name) is not None]
    if alone and not how.eval:
        option = alone[0].replace("_", "-")
        raise fail("usage.arguments", f"--{option} is about an evaluation", hint="--eval gsm8k:FILE")


def _check_paths(paths: Iterable[str]) -> None:
    """Raises UserError (``source.missing``, ``usage.arguments``) for a file that no engine is started on."""
    for path in paths:
        if _is_gguf(path) and not Path(path).is_file():
            raise fail("source.missing", f"{path} does not exist", file=path)
        if is_folder(path) and Path(path).is_file():
            message = f"engines are started on folders, and {path} is a file"
            raise fail("usage.arguments", message, file=path, hint=f"ckptkit verify {Path(path).parent} --serve")


def elsewhere(path: str) -> UserError:
    """``usage.arguments``: a checkpoint that lies on a server."""
    name = path.rpartition("://")[2].partition("@")[0]
    hint = f"hf download {name} --local-dir ./{Path(name).name}"
    return fail("usage.arguments", f"engines are started on folders, and {path} is on a server", hint=hint)


def _check_url(url: str, ckpts: Sequence[str], asked: Asked, how: How) -> None:
    """Raises UserError (``usage.arguments``) for what cannot be asked of a server that runs already."""
    if not re.match(r"https?://[^/]", url):
        raise fail("usage.arguments", f"--url {url}: no URL", hint="--url http://127.0.0.1:30000")
    if len(ckpts) > 1:
        raise fail("usage.arguments", "--url serves one checkpoint")
    if not ckpts and not how.golden and not asked.against:
        hint = "CKPT, --golden FILE or --against SRC"
        raise fail("usage.arguments", "--url needs something to judge by", hint=hint)
    starting = {"speculative": asked.speculative} | {
        name: getattr(how, name) for name in ("engine_cmd", "engine_arg", "draft", "keep_serving")
    }
    for name in (name for name, given in starting.items() if given):
        message = f"--{name.replace('_', '-')} is about servers that are started here, not --url"
        raise fail("usage.arguments", message)


def _check_drafts(how: How, methods: Sequence[Method]) -> None:
    """Raises UserError (``usage.*``) for a ``--draft`` that nothing speculates with, or that is not there."""
    for name in drafts_of(how.draft).keys() - {method.name for method in methods}:
        raise fail("usage.arguments", f"--draft {name}=…: no --speculative of that name", hint=f"--speculative {name}")


def _implied(path: str, engine: Engine) -> Implied:
    with open_source(path) as source:
        return implied(Path(path), read_manifest(source), engine)


def labelled(ckpts: Sequence[str]) -> dict[str, str]:
    """Checkpoints by label: ``LABEL=CKPT``, or the folder's name; primed where it comes again.

    Raises UserError (``usage.arguments``) for a label that is given twice.
    """
    found: dict[str, str] = {}
    for text in ckpts:
        given = None if Path(text).exists() else _LABEL.fullmatch(text)
        label, path = (given[1], given[2]) if given else (Path(text).resolve().name if is_local(text) else text, text)
        if label in found and given:
            raise fail("usage.arguments", f"two checkpoints are called {label}", hint="LABEL=CKPT")
        while label in found:
            label += "'"
        found[label] = path
    return found


def is_local(path: str) -> bool:
    return "://" not in path


def is_folder(path: str) -> bool:
    """Whether ckptkit itself can read it: a GGUF file and a URL only their engines can."""
    return is_local(path) and not _is_gguf(path)


def _is_gguf(path: str) -> bool:
    return is_local(path) and path.endswith(".gguf")


def _engine(name: str | None, how: How, path: str) -> Engine:
    """The engine that is named; ``auto`` is llama-server for GGUF, what a URL says it is, else transformers."""
    if name not in {None, "auto"}:
        return engine(str(name).partition("==")[0])
    if how.url:
        try:
            return engine(client.engine_of(Server(how.url.rstrip("/"), "")))
        except client.Failed as error:
            raise fail("engine.unreachable", f"{how.url}{error}", hint="the server's URL, without /v1") from None
    return engine("transformers" if is_folder(path) else "llama-server")


def drafts_of(given: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in given:
        name, _, path = text.partition("=")
        if not path or not Path(path).exists():
            hint = "--draft eagle3=./draft"
            raise fail("usage.arguments", f"--draft {text}: no NAME=PATH of a draft that is there", hint=hint)
        found[method_name(name)] = Path(path)
    return found
