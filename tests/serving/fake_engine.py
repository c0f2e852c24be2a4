"""A server that speaks as engines do and misbehaves on request: python fake_engine.py MODE PORT

It counts: the token after ``n`` is ``n + 1``, of a vocabulary of 64, with a logprob of -0.1 for it and a lead of 3 nat.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 64
LOGPROB, LEAD = -0.1, 3.0
ACCEPTED, STEPS = 30, 10  # of every completion that is speculated


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def completion(mode: str, body: dict[str, Any]) -> dict[str, Any]:
    count = body.get("max_tokens", 4)
    last = body["prompt"][-1] if isinstance(body.get("prompt"), list) else 0
    tokens = [(last + at) % VOCABULARY for at in range(1, count + 1)]
    logprobs: list[float | None] = [LOGPROB] * count
    if mode == "one-token":
        tokens = [0] * count
    if mode == "uniform":
        tokens, logprobs = [0] * count, [-4.1588830833596715] * count  # -ln 64
    if mode == "nan":
        logprobs = [None] * count
    if mode == "flipped" and count > 1:
        tokens[1] = 63
    if mode == "empty":
        tokens, logprobs = [], []
    choice = {
        "text": " ".join(map(str, tokens)),
        "token_ids": tokens,
        "logprobs": logprobs,
        "gaps": [LEAD] * len(tokens),
    }
    if mode == "no-text":  # bytes that are no UTF-8, as tokenizers give them back
        choice["text"] = "\ufffd" * count
    if mode == "speculates":
        choice["counted"] = [STEPS, ACCEPTED]
    if mode == "useless-draft":
        choice["counted"] = [STEPS, 0]
    return choice


class Handler(BaseHTTPRequestHandler):
    mode = "good"
    lines: tuple[str, ...] = ()
    began = time.monotonic()

    def do_GET(self) -> None:
        if self.path == "/health":
            waiting = self.mode == "never" or (self.mode == "slow" and time.monotonic() - self.began < 1.0)
            self.send(503 if waiting else 200, b'{"status": "ok"}')
        elif self.path == "/v1/models":
            self.send(200, b'{"data": [{"id": "fake"}]}')
        else:
            self.send(404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.mode == "dies-on-request":
            say("Traceback (most recent call last):")
            say("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x512 and 768x256)")
            os._exit(1)
        if self.mode == "never-decodes":
            for compiler in self.lines:
                subprocess.Popen([compiler, "20"], start_new_session=True)
            time.sleep(20)
        if self.mode == "dies-after-500":
            say("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x512 and 768x256)")
            self.send(500, b'{"error": "the engine is dead"}')
            threading.Timer(1.0, os._exit, [1]).start()
            return
        if self.mode == "garbage":
            self.send(200, b"\xff\xfe<html>")
        elif self.mode == "refuses":
            self.send(500, b'{"error": "no"}')
        elif self.path == "/score":
            off = 0.2 if self.mode == "off" else 0.0
            self.send(200, json.dumps({"logprobs": [LOGPROB - off] * (len(body["ids"]) - 1)}).encode())
        elif body.get("stream"):
            self.stream()
        else:
            choice = completion(self.mode, body)
            choice["message"] = {"content": "ok"}
            self.send(200, json.dumps({"choices": [choice]}).encode())

    def stream(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "ok"}}]}\n\n')
        if self.mode == "stalls":
            self.wfile.flush()
            time.sleep(30)
        self.wfile.write(b"" if self.mode == "cut-stream" else b"data: [DONE]\n\n")

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(mode: str, port: str, *lines: str) -> None:
    for line in lines:
        say(line)
    if mode == "dies":
        sys.exit(3)
    if mode == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode in {"never", "leaves-a-child"}:
        # In a session of its own, as engines start their workers: a signal to the group does not reach it.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        say(f"child {child.pid}")
    Handler.mode, Handler.lines = mode, lines
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
