"""Decode from two checkpoints and compare them token by token.

    python demo/decode.py SOURCE RESULT

Two kinds of figures. Over every candidate prompt: the relative error of the result's logits and how often its best
token is the source's, both along the text that the source decodes. And for the prompts where a change of tokens would
be the quantization's fault, the two texts side by side: those prompts whose best token leads the second by at least
MIN_GAP logits at each greedy step of the source. Everything is computed in float32 from the weights as they are
stored. Exits 1 if a chosen prompt decodes to other tokens, or if too few are chosen.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

STEPS = 16
MIN_GAP = 0.5
MIN_CHOSEN = 4

TEXTS = (
    "1, 2, 3, 4, 5, 6,",
    "2, 4, 6, 8, 10,",
    "10, 20, 30, 40,",
    "a b c d e f g",
    "line 1\nline 2\nline 3\nline 4\n",
    "The capital of France is",
    "Once upon a time, there was a",
    "if __name__ ==",
)
QUESTIONS = (
    "Count from 1 to 10.",
    "How many days are in a week?",
    "What color is the sky?",
    "What is the largest ocean?",
)


class Decoded(NamedTuple):
    """What the source makes of a prompt: prompt and greedy continuation, logits [steps, vocabulary], smallest gap."""

    prompt: str
    tokens: torch.Tensor
    length: int
    logits: torch.Tensor
    gap: float


def main(source_folder: str, result_folder: str) -> int:
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source_folder)
    source, result = load(source_folder), load(result_folder)
    decoded = [decode(source, tokenizer, text, text) for text in TEXTS]
    decoded += [decode(source, tokenizer, question, as_chat(tokenizer, question)) for question in QUESTIONS]
    print_agreement(result, decoded)
    chosen = [item for item in decoded if item.gap >= MIN_GAP]
    print(
        f"\n{len(chosen)} prompts whose best token leads by {MIN_GAP} logits or more at each of {STEPS} greedy steps:"
    )
    differing = [item.prompt for item in chosen if not print_pair(result, tokenizer, item)]
    if len(chosen) < MIN_CHOSEN or differing:
        print(f"\nFAIL: {len(differing)} of {len(chosen)} prompts differ (at least {MIN_CHOSEN} must be chosen)")
        return 1
    print(f"\nok: the result decodes the source's tokens for all {len(chosen)} prompts")
    return 0


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def as_chat(tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@torch.inference_mode()
def greedy(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` [n] and up to STEPS more; it ends early at the end of text."""
    mask = torch.ones_like(tokens)[None]
    return model.generate(tokens[None], attention_mask=mask, max_new_tokens=STEPS, do_sample=False)[0]


@torch.inference_mode()
def next_logits(model: Any, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Logits [steps, vocabulary] that ``tokens`` after the first ``length`` were chosen from."""
    return model(tokens[None]).logits[0, length - 1 : -1].float()


def decode(source: Any, tokenizer: Any, prompt: str, text: str) -> Decoded:
    start = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    tokens = greedy(source, start)
    logits = next_logits(source, tokens, len(start))
    best, second = logits.topk(2).values.unbind(1)
    return Decoded(prompt, tokens, len(start), logits, float((best - second).min()))


def print_agreement(result: Any, decoded: list[Decoded]) -> None:
    ours = torch.cat([next_logits(result, item.tokens, item.length) for item in decoded])
    reference = torch.cat([item.logits for item in decoded])
    error = float((ours - reference).norm() / reference.norm())
    same = int((ours.argmax(1) == reference.argmax(1)).sum())
    print(f"over all {len(decoded)} candidate prompts, along the source's greedy text:")
    print(f"  relative logit error  {error:.4f}   (norm of the difference / norm of the source's logits)")
    print(f"  top-1 agreement       {same}/{len(reference)} tokens")


def print_pair(result: Any, tokenizer: Any, item: Decoded) -> bool:
    """Print both continuations of a prompt; True if they are the same tokens."""
    tokens = greedy(result, item.tokens[: item.length])
    same = torch.equal(tokens, item.tokens)
    print(f"\n  prompt  {item.prompt!r}   (smallest lead {item.gap:.2f})")
    print(f"  source  {tokenizer.decode(item.tokens[item.length :])!r}")
    print(f"  result  {tokenizer.decode(tokens[item.length :])!r}   {'same' if same else 'DIFFERENT'}")
    return same


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
