"""A server that replies what a test says, on a free port of the loopback, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from ckptkit.serving.engine import Server

# Given the request's JSON, None of a GET: the status, and what is sent as JSON; text is sent as it is.
Reply = Callable[[Any], tuple[int, Any]]


class Asked(NamedTuple):
    path: str
    body: Any


@contextmanager
def replying(replies: Mapping[str, Reply], model: str = "ck/q3") -> Iterator[tuple[Server, list[Asked]]]:
    """A server that answers the paths of ``replies``, others with 404."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            asked.append(Asked(self.path, body))
            status, said = replies.get(self.path, lambda _: (404, {"error": "no such path"}))(body)
            content = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", model, 10.0), asked
    finally:
        server.shutdown()
        server.server_close()


def always(said: Any, status: int = 200) -> Reply:
    return lambda body: (status, said)
