"""A model behind HTTP, as plain as can be: what is asked is computed, greedily and with logprobs, and nothing else.

    python -P worker.py FOLDER|FILE.gguf --port N [--dtype float32] [--device cpu] [--own-head] [--complete] [--assistant FOLDER]
                        [--lookup N]

Transformers loads the folder as it does for everybody. ``--own-head`` unties a head that is stored, ``--complete`` ends
the program where a tensor is missing, ``--assistant`` and ``--lookup`` speculate with a draft model or with n-grams of
the prompt. It runs under the interpreter that has the engine, which need not have ckptkit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch
import transformers

Json = dict[str, Any]
HF: Any = transformers
TOP = 5


class Loaded(NamedTuple):
    """What answers requests; ``lock``: one at a time."""

    name: str
    model: Any
    tokenizer: Any
    drafting: Mapping[str, Any]
    lock: threading.Lock


def main() -> int:
    given = _arguments()
    missing, loaded = _load(given)
    if missing and given.complete:
        return 1
    server = ThreadingHTTPServer(("127.0.0.1", given.port), _handler(loaded))
    _log(f"serving {given.folder} with transformers {transformers.__version__}")
    server.serve_forever()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--own-head", action="store_true")
    parser.add_argument("--complete", action="store_true")
    parser.add_argument("--assistant")
    parser.add_argument("--lookup", type=int)
    parser.add_argument("--draft-tokens", type=int, default=4)
    return parser.parse_args()


def _log(line: str) -> None:
    os.write(2, f"{line}\n".encode("utf-8", "replace"))


def _load(given: argparse.Namespace) -> tuple[bool, Loaded]:
    """The model, and whether tensors of it are missing; what is missing, left over or misshapen is told in the log."""
    folder, file = os.path.split(given.folder) if given.folder.endswith(".gguf") else (given.folder, None)
    place = {"gguf_file": file} if file else {}
    config = HF.AutoConfig.from_pretrained(folder, **place)
    if given.own_head:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    model, found = HF.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=given.dtype, output_loading_info=True, **place
    )
    for what in ("missing", "unexpected", "mismatched"):
        for key in sorted(str(key) for key in found[f"{what}_keys"]):
            _log(f"worker: {what} {key}")
    model = model.eval().to(given.device)
    model.generation_config = HF.GenerationConfig(pad_token_id=0)
    tokenizer = HF.AutoTokenizer.from_pretrained(folder, **place)
    return bool(found["missing_keys"]), Loaded(given.folder, model, tokenizer, _drafting(given), threading.Lock())


def _drafting(given: argparse.Namespace) -> Json:
    """What ``generate`` is told of speculation."""
    if given.lookup:
        return {"prompt_lookup_num_tokens": given.draft_tokens, "max_matching_ngram_size": given.lookup}
    if given.assistant:
        draft = HF.AutoModelForCausalLM.from_pretrained(given.assistant, dtype=given.dtype).eval().to(given.device)
        draft.generation_config = HF.GenerationConfig(
            pad_token_id=0,
            num_assistant_tokens=given.draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return {"assistant_model": draft}
    return {}


# --- what is computed --------------------------------------------------------------------------------------


def _ids(loaded: Loaded, body: Json) -> list[int]:
    """The prompt as ids: given so, as text, or as messages that the chat template makes text of."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        [prompt] = prompt  # a batch of one, as some clients send it
    if isinstance(prompt, list):
        return prompt
    if prompt is None:
        prompt = loaded.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return list(loaded.tokenizer(prompt, add_special_tokens=False).input_ids)
    return list(loaded.tokenizer(prompt).input_ids)


def _tensor(loaded: Loaded, ids: list[int]) -> Any:
    return torch.tensor([ids], device=loaded.model.device)


@torch.inference_mode()
def _greedy(loaded: Loaded, ids: list[int], count: int, stop: int | None) -> Iterator[tuple[int, float, float]]:
    """Up to ``count`` tokens, each with its logprob and its lead over the second; ``stop`` ends it."""
    cache, step = HF.DynamicCache(config=loaded.model.config), _tensor(loaded, ids)
    for _ in range(count):
        found = loaded.model(step, past_key_values=cache, use_cache=True)
        logits = found.logits[0, -1].float().log_softmax(-1)
        (best, second), (token, _) = (part.tolist() for part in logits.topk(2))
        yield token, best, best - second
        if token == stop:
            return
        step = _tensor(loaded, [token])


@torch.inference_mode()
def _speculated(loaded: Loaded, ids: list[int], count: int) -> tuple[list[int], int]:
    """``count`` tokens by ``generate`` with speculation, and how often the model itself was run."""
    runs = 0

    def counted(*args: Any) -> None:
        nonlocal runs
        runs += 1

    hook = loaded.model.register_forward_hook(counted)
    try:
        start = _tensor(loaded, ids)
        made = loaded.model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=count, do_sample=False, **loaded.drafting
        )
    finally:
        hook.remove()
    return made[0, len(ids) :].tolist(), runs


@torch.inference_mode()
def _score(loaded: Loaded, ids: list[int]) -> Json:
    """Of each id but the first: its logprob given those before it, and the best few with theirs."""
    logits = loaded.model(_tensor(loaded, ids)).logits[0, :-1].float().log_softmax(-1)
    chosen = logits.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0]
    values, tokens = logits.topk(TOP)
    return {"logprobs": _numbers(chosen.tolist()), "top_ids": tokens.tolist(), "top": [*map(_numbers, values.tolist())]}


def _numbers(values: list[float]) -> list[float | None]:
    """JSON has no NaN."""
    return [value if math.isfinite(value) else None for value in values]


# --- HTTP --------------------------------------------------------------------------------------------------


def _complete(loaded: Loaded, body: Json) -> Json:
    ids, count = _ids(loaded, body), int(body.get("max_tokens", 16))
    stop = None if body.get("ignore_eos") else loaded.tokenizer.eos_token_id
    steps: list[tuple[int, float, float]] = []
    more: Json = {}
    if loaded.drafting:
        tokens, runs = _speculated(loaded, ids, count)
        more = {"runs": runs}
    else:
        steps = list(_greedy(loaded, ids, count, stop))
        tokens = [token for token, _, _ in steps]
        more = {"logprobs": _numbers([step[1] for step in steps]), "gaps": _numbers([step[2] for step in steps])}
    text = _until(loaded.tokenizer.decode(tokens, skip_special_tokens=True), body.get("stop"))
    choice = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": "length", **more}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
    return {"object": "completion", "model": loaded.name, "choices": [choice], "usage": usage}


def _until(text: str, stop: str | list[str] | None) -> str:
    """The text as far as the first of the ``stop`` strings, which is left out."""
    ends = [text.find(end) for end in ([stop] if isinstance(stop, str) else stop or []) if end and end in text]
    return text[: min(ends)] if ends else text


def _tokenize(loaded: Loaded, body: Json) -> Json:
    ids = _ids(loaded, body)
    return {"ids": ids, "text": loaded.tokenizer.decode(ids, skip_special_tokens=True)}


def _round(loaded: Loaded, body: Json) -> Json:
    """From now on compute with less: in another ``dtype``, or with inputs of matrices in eight bits by ``block``."""
    if "dtype" in body:
        loaded.model.to(getattr(torch, body["dtype"]))
    for module in loaded.model.modules() if "block" in body else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (_eight_bits(inputs[0], body["block"]),))
    return body


def _eight_bits(values: Any, block: int) -> Any:
    blocks = values.unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((blocks / scales).round() * scales).flatten(-2)


ANSWERS = {
    "/v1/completions": _complete,
    "/v1/chat/completions": _complete,
    "/score": lambda loaded, body: _score(loaded, body["ids"]),
    "/tokenize": _tokenize,
    "/round": _round,
}


def _handler(loaded: Loaded) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known: Json = {
                "/health": {"status": "ok"},
                "/v1/models": {"object": "list", "data": [{"id": loaded.name}]},
                "/about": {
                    "vocabulary": loaded.model.config.get_text_config().vocab_size,
                    "chat": bool(loaded.tokenizer.chat_template),
                },
            }
            self._send(200 if self.path in known else 404, known.get(self.path, {"error": "no such path"}))

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with loaded.lock:
                    found = ANSWERS[self.path](loaded, body)
            except Exception as error:
                _log(f"{type(error).__name__}: {error}")
                self._send(500, {"error": f"{type(error).__name__}: {error}"})
                return
            if body.get("stream"):
                self._stream(loaded, found["choices"][0])
            else:
                self._send(200, found)

        def _send(self, status: int, content: Json) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _stream(self, loaded: Loaded, choice: Json) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in _pieces(loaded.tokenizer, choice["token_ids"]):
                event = {"choices": [{"index": 0, "text": piece, "delta": {"content": piece}}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _pieces(tokenizer: Any, tokens: list[int]) -> Iterator[str]:
    """The text token by token: what each adds to the text of those before it, once its last character is whole."""
    done = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        if end == len(tokens) or not text.endswith("\ufffd"):
            yield text[len(done) :]
            done = text


if __name__ == "__main__":
    sys.exit(main())
