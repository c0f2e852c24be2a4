"""HTTP as engines speak it: JSON there and back, and streams of server-sent events. Nothing is retried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .engine import Server

_SHOWN = 300  # characters of an answer in a message
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server"}
_LARGEST = 64 << 20  # bytes of an answer


class Failed(Exception):
    """A request without a usable answer. ``status`` is the HTTP status; None where there was no answer at all."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def get(server: Server, path: str, timeout: float | None = None) -> str:
    """The text of an answer of status 200. Raises Failed, also for bytes that are no UTF-8."""
    return _text(path, _read(server, path, None, timeout))


def get_json(server: Server, path: str, timeout: float | None = None) -> Any:
    """An answer of status 200 as JSON. Raises Failed."""
    return _json(path, get(server, path, timeout))


def post(server: Server, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
    """What a request in JSON is answered, as JSON. Raises Failed."""
    return _json(path, _text(path, _read(server, path, body, timeout)))


def stream(server: Server, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
    """The events of an answer that is streamed, each as JSON; ``server.timeout`` seconds for each. Raises Failed.

    A stream that ends without ``[DONE]`` was cut.
    """
    try:
        with urlopen(_request(server, path, {**body, "stream": True}), timeout=server.timeout) as answer:
            for line in answer:
                text = _text(path, line).strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    yield _json(path, text.removeprefix("data:"))
    except (OSError, HTTPException) as error:
        raise _failed(path, error) from None
    raise Failed(f"{path}: the stream ended before it was done")


def model_of(server: Server) -> str:
    """What a server calls the first of its models. Raises Failed."""
    try:
        return str(get_json(server, "/v1/models")["data"][0]["id"])
    except (LookupError, TypeError):
        raise Failed("/v1/models: no list of models", 200) from None


def engine_of(server: Server) -> str:
    """The name of the engine that runs a server, by what it says of its models; transformers where it does not say.

    Raises Failed.
    """
    try:
        owner = get_json(server, "/v1/models")["data"][0]["owned_by"]
    except (LookupError, TypeError):
        owner = None
    return _OWNERS.get(owner, "transformers")


def _request(server: Server, path: str, body: Mapping[str, Any] | None) -> Request:
    data = None if body is None else json.dumps(body).encode()
    return Request(server.url + path, data, {"Content-Type": "application/json"})


def _read(server: Server, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> bytes:
    try:
        with urlopen(_request(server, path, body), timeout=timeout or server.timeout) as answer:
            content: bytes = answer.read(_LARGEST)
            return content
    except (OSError, HTTPException) as error:
        raise _failed(path, error) from None


def _failed(path: str, error: Exception) -> Failed:
    if isinstance(error, HTTPError):
        said = error.read(_SHOWN).decode("utf-8", "replace").strip()
        return Failed(f"{path}: status {error.code}: {said}", error.code)
    return Failed(f"{path}: no answer: {error}")


def _text(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Failed(f"{path}: the answer is not UTF-8: {content[:40]!r}", 200) from None


def _json(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed(f"{path}: the answer is not JSON: {text[:_SHOWN]!r}", 200) from None
