"""A program that passes for any of the engines, and misbehaves:   pretender.py MODE [LOG] … --port PORT

Every answer counts on from the last token of the prompt: after 6 come 7, 8, 9.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODE = sys.argv[1]
STARTED = time.monotonic()


def sglang(body: dict[str, Any]) -> Any:
    tokens = counting(body["input_ids"], body["sampling_params"]["max_new_tokens"])
    logprobs = [[-0.5, token, None] for token in tokens]
    return {"text": "text", "output_ids": tokens, "meta_info": {"output_token_logprobs": logprobs}}


def vllm(body: dict[str, Any]) -> Any:
    tokens = counting(body["prompt"], body["max_tokens"])
    logprobs = {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": [{"a": -0.5, "b": -1.5}] * len(tokens)}
    return {"choices": [{"text": "text", "token_ids": tokens, "logprobs": logprobs}]}


def worker(body: dict[str, Any]) -> Any:
    tokens = counting(body["prompt"], body["max_tokens"])
    return {"choices": [{"text": "text", "token_ids": tokens, "logprobs": [-0.5] * len(tokens)}]}


def completions(body: dict[str, Any]) -> Any:
    return vllm(body) if "return_token_ids" in body else worker(body)


def llama(body: dict[str, Any]) -> Any:
    tokens = counting(body["prompt"], body["n_predict"])
    places = [{"id": token, "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]} for token in tokens]
    return {"content": "text", "tokens": tokens, "completion_probabilities": places}


def counting(prompt: list[int], count: int) -> list[int]:
    return list(range(prompt[-1] + 1, prompt[-1] + 1 + count))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_ready = MODE != "slow" or time.monotonic() > STARTED + 1
        listed = b'{"status": "ok", "data": [{"id": "model"}]}'
        self.reply(listed, 200 if is_ready else 503)

    def do_POST(self) -> None:
        if MODE == "dies when asked":
            os._exit(3)
        if MODE == "stalls":
            time.sleep(60)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            self.chat(body)
            return
        said = {"/generate": sglang, "/v1/completions": completions, "/completion": llama}[self.path](body)
        garbage = {"answers no JSON": b"<html>", "answers no UTF-8": b'{"text": "\xff"}', "answers little": b"{}"}
        self.reply(garbage.get(MODE, json.dumps(said).encode()), 200)

    def chat(self, body: dict[str, Any]) -> None:
        if not body.get("stream"):
            self.reply(b'{"choices": [{"message": {"content": "ok"}}]}', 200)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "ok"}}]}\n\n')
        self.wfile.flush()
        if MODE == "streams and stalls":
            time.sleep(60)
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    if MODE == "dies":
        os.write(1, Path(sys.argv[2]).read_bytes())
        sys.exit(1)
    if MODE == "never":
        time.sleep(60)
    if MODE == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


main()
