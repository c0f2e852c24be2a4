"""Bytes [start, stop) of a file over HTTP: half-open ranges, what came checked, what was cut carried on.

A range that a server answers with others than the bytes asked for is refused: they would pass for tensors.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, parse_ratelimit_headers

from ..errors import UserError, fail

TRIES = 5  # that bring nothing, one after another
WAIT = 1.0  # seconds before the second try; each wait is twice the one before
MOMENT = 0.2  # seconds between two looks whether to stop
LONGEST = 60.0  # seconds, whatever a server asks for
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # HTTP statuses that may be others the next time
_AGAIN = "the same command again; one that makes files carries on with --resume"
T = TypeVar("T")

_WHERE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass
class Traffic:
    """What was received: bytes of content, and the answers that brought them. Thread-safe.

    ``check`` is called while bytes come and while they are waited for; what it raises ends it.
    """

    bytes: int = 0
    requests: int = 0
    check: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, nbytes: int, requests: int = 0) -> None:
        with self._lock:
            self.bytes += nbytes
            self.requests += requests


class Address(NamedTuple):
    """Where a file's bytes are got, with the headers to send. ``signed``: an address that expires."""

    url: str
    headers: dict[str, str]
    signed: bool


class Asked(NamedTuple):
    """A file as it was listed, and how to learn its address; ``locate(True)`` gives a fresh one."""

    file: str
    size: int
    locate: Callable[[bool], Address]


class _Again(Exception):
    """An answer that may be a better one next time: ``got`` bytes came, ``wait`` seconds were asked for.

    ``error`` is what to say if it does not get better.
    """

    def __init__(self, error: UserError, got: int = 0, wait: float = 0.0, anew: bool = False):
        super().__init__()
        self.error, self.got, self.wait, self.anew = error, got, wait, anew


def fetch(asked: Asked, start: int, view: memoryview, traffic: Traffic) -> None:
    """Fill ``view`` with the bytes of a file from ``start`` on.

    A connection that is cut is carried on where it stopped, a signed address that has expired is asked for anew. Raises
    UserError: ``source.read``, ``source.range``, ``source.changed``, ``access.denied``, ``access.unreachable``.
    """
    done, tries, anew = 0, 0, False
    while done < len(view):
        try:
            _receive(asked, asked.locate(anew), start + done, view[done:], traffic)
            return
        except _Again as again:
            done, tries = done + again.got, 0 if again.got else tries + 1
            if tries > TRIES or (anew and again.anew):
                raise again.error from None
            anew = again.anew
            if tries and not anew:
                _wait(_pause(tries, again.wait), traffic)


def patiently(ask: Callable[[], T], traffic: Traffic | None = None) -> T:
    """What the Hub's library is asked, and asked again where the answer may be a better one: not where nobody listens."""
    tries = 0
    while True:
        tries += 1
        try:
            return ask()
        except HfHubHTTPError as error:
            if tries > TRIES or error.response.status_code not in PASSING:
                raise
            wanted = _wanted(error.response)
        except httpx.TransportError as error:
            if tries > TRIES or isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol):
                raise
            wanted = 0.0
        _wait(_pause(tries, wanted), traffic or Traffic())


def _pause(tries: int, wanted: float) -> float:
    """Seconds to wait after that many tries in vain, of which the server wants ``wanted``."""
    return min(LONGEST, max(wanted, WAIT * (1 << (tries - 1))))


def _wanted(answer: httpx.Response) -> float:
    """Seconds for which a server wants to be left alone."""
    told, limit = answer.headers.get("Retry-After", ""), parse_ratelimit_headers(answer.headers)
    if told.isdecimal():
        return float(told)
    return float(limit.reset_in_seconds) if limit and not limit.remaining else 0.0


def _wait(seconds: float, traffic: Traffic) -> None:
    """Sleep, a moment at a time."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        traffic.check()
        time.sleep(min(MOMENT, left))


def _receive(asked: Asked, address: Address, start: int, view: memoryview, traffic: Traffic) -> None:
    """Fill ``view`` with one answer. Raises _Again where it is cut, or none."""
    file, done = asked.file, 0
    headers = {**address.headers, "Range": f"bytes={start}-{start + len(view) - 1}", "Accept-Encoding": "identity"}
    options: Any = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    try:
        with get_session().stream("GET", address.url, **options) as answer:
            _check(asked, address, answer, start, start + len(view))
            traffic.add(0, 1)
            for piece in answer.iter_raw():
                traffic.check()
                taken = piece[: len(view) - done]
                view[done : done + len(taken)] = taken
                done += len(taken)
                traffic.add(len(taken))
                if done == len(view):
                    return
    except (httpx.TransportError, OfflineModeIsEnabled) as error:
        where, what = start + done, type(error).__name__
        said = fail("access.unreachable", f"{file}: no bytes from {where:,} on ({what})", file=file, hint=_AGAIN)
        raise _Again(said, done) from None
    said = fail("source.read", f"{file}: the server's answer ended before byte {start + len(view):,}", file=file)
    raise _Again(said, done)


def _check(asked: Asked, address: Address, answer: httpx.Response, start: int, stop: int) -> None:
    """Raises UserError, or _Again, unless the answer brings bytes from ``start`` on of the file that was listed."""
    file, status = asked.file, answer.status_code
    if status in {401, 403}:
        denied = fail("access.denied", f"{file} may not be read (HTTP {status})", file=file, hint="hf auth login")
        raise _Again(denied, anew=True) if address.signed else denied
    if status in PASSING:
        busy = fail("access.unreachable", f"{file}: the server answered HTTP {status}", file=file, hint=_AGAIN)
        raise _Again(busy, wait=_wanted(answer))
    if status in {404, 410, 416}:
        what = "ends before the bytes that were listed" if status == 416 else "is gone"
        raise fail("source.changed", f"{file} {what} (HTTP {status})", file=file, hint="give the commit: org/name@sha")
    if status not in {200, 206}:
        raise fail("source.read", f"{file} cannot be read: HTTP {status}", file=file, hint=_AGAIN)
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise _wrong(file, start, stop, f"bytes in {answer.headers['Content-Encoding']}")
    if status == 200:
        length = answer.headers.get("Content-Length")
        if start or (length and int(length) != asked.size):
            raise _wrong(file, start, stop, f"all of a file of {length or 'unknown'} bytes")
        return
    found = _WHERE.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start or int(found[2]) >= stop:
        raise _wrong(file, start, stop, answer.headers.get("Content-Range", "a range that it does not name"))
    if found[3] != "*" and int(found[3]) != asked.size:
        message = f"{file} has {int(found[3]):,} bytes now, it was listed with {asked.size:,}"
        raise fail("source.changed", message, file=file, hint="the same command again")


def _wrong(file: str, start: int, stop: int, answered: str) -> UserError:
    message = f"{file}: the server was asked for bytes [{start:,}, {stop:,}) and answered with {answered}"
    return fail("source.range", message, file=file, hint="a proxy between may not know ranges: hf download fetches all")
