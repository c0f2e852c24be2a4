"""Drafts as their layers are published, read plainly in float32, and what of them greedy verification accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, scaled_dot_product_attention, silu

NEW = 32  # tokens of a completion
HEAD_DIM = 64
Draft = Callable[[Sequence[int]], Sequence[int]]


def model(path: Path) -> Any:
    """The checkpoint in float32, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def follow(follows: Sequence[int], token: int, count: int) -> list[int]:
    found = [token]
    for _ in range(count):
        found.append(follows[found[-1]])
    return found[1:]


@torch.no_grad()
def scored(loaded: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logprobs of every token at every place."""
    return log_softmax(loaded(torch.tensor([ids])).logits[0].float(), -1)


def normed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Reading:
    """A draft's layers as they are published, in float32: all rows at once, nothing cached."""

    def __init__(self, path: Path) -> None:
        self.tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return normed(self.tensors[f"{name}.weight"], x)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return torch.nn.functional.linear(x, self.tensors[f"{name}.weight"], bias)

    def _heads(self, at: str, name: str, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(f"{at}self_attn.{name}_proj", x).unflatten(-1, (-1, HEAD_DIM))
        if f"{at}self_attn.{name}_norm.weight" in self.tensors:
            found = self.norm(f"{at}self_attn.{name}_norm", found)
        return (found if name == "v" else self._turned(found, name)).transpose(0, 1)

    def _turned(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Rotary positions; the last row of queries and of keys has the same one."""
        places = torch.arange(-len(x), 0.0)
        angles = places[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def attention(self, at: str, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """Causal over the rows; or of the rows over a context and each other."""
        over = x if context is None else torch.cat([context, x])
        query, key, value = self._heads(at, "q", x), self._heads(at, "k", over), self._heads(at, "v", over)
        found = scaled_dot_product_attention(query, key, value, is_causal=context is None, enable_gqa=True)
        return self.linear(f"{at}self_attn.o_proj", found.transpose(0, 1).flatten(1))

    def mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        gate = silu(self.linear(f"{at}mlp.gate_proj", x))
        return self.linear(f"{at}mlp.down_proj", gate * self.linear(f"{at}mlp.up_proj", x))

    def layer(self, at: str, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(at, self.norm(f"{at}input_layernorm", x), context)
        return x + self.mlp(at, self.norm(f"{at}post_attention_layernorm", x))


def mtp_draft(path: Path, steps: int) -> Draft:
    """MiMo's one layer, run once a step; hidden states of the target are noise, which shows that they do not count."""
    mtp, at = Reading(path), "model.mtp_layers.0."
    embeddings = mtp.tensors["model.embed_tokens.weight"]

    def draft(ids: Sequence[int]) -> list[int]:
        ids, hidden = list(ids), torch.randn(len(ids), embeddings.shape[1], generator=torch.Generator().manual_seed(3))
        for _ in range(steps):
            token, state = mtp.norm(f"{at}token_layernorm", embeddings[ids]), mtp.norm(f"{at}hidden_layernorm", hidden)
            found = mtp.layer(at, mtp.linear(f"{at}input_proj", torch.cat([state, token], -1)))
            found = mtp.norm(f"{at}final_layernorm", found)
            ids.append(int(mtp.linear("lm_head", found[-1]).argmax()))
            hidden = torch.cat([hidden, found[-1:]])
        return ids[-steps:]

    return draft


def qwen35_draft(path: Path, steps: int) -> Draft:
    """Qwen3.5's, whose norms are stored less one; attention and MLP add nothing, since their last matrices are zero."""
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    assert not any(tensors[f"mtp.layers.0.{name}_proj.weight"].any() for name in ("self_attn.o", "mlp.down"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return normed(1 + tensors[f"mtp.{name}.weight"], x)

    def draft(ids: Sequence[int]) -> list[int]:
        ids, hidden = (
            list(ids),
            torch.randn(tensors["mtp.norm.weight"].shape, generator=torch.Generator().manual_seed(6)),
        )
        for _ in range(steps):
            token = norm("pre_fc_norm_embedding", tensors["model.language_model.embed_tokens.weight"][ids[-1]])
            joined = torch.cat([token, norm("pre_fc_norm_hidden", hidden)])
            hidden = norm("norm", tensors["mtp.fc.weight"] @ joined)
            ids.append(int((tensors["lm_head.weight"] @ hidden).argmax()))
        return ids[-steps:]

    return draft


def eagle3_draft(path: Path, target: Path, steps: int) -> Draft:
    """EAGLE3: what a step leaves in the residual stream is the hidden state of the next."""
    eagle, at = Reading(path), "midlayer."
    embeddings = Reading(target).tensors["model.embed_tokens.weight"]

    def draft(ids: Sequence[int]) -> list[int]:
        taps = torch.randn(len(ids), eagle.tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(4))
        ids, hidden = list(ids), eagle.linear("fc", taps)
        for _ in range(steps):
            token, state = eagle.norm(f"{at}input_layernorm", embeddings[ids]), eagle.norm(f"{at}hidden_norm", hidden)
            x = hidden + eagle.attention(at, torch.cat([token, state], -1))
            x = x + eagle.mlp(at, eagle.norm(f"{at}post_attention_layernorm", x))
            ids.append(int(eagle.linear("lm_head", eagle.norm("norm", x[-1])).argmax()))
            hidden = torch.cat([hidden, x[-1:]])
        return ids[-steps:]

    return draft


def block_draft(path: Path, target: Path, count: int, has_markov: bool) -> Draft:
    """DFLASH: an anchor and ``count`` masks, each of which drafts its own place. DSpark: an anchor and ``count - 1``, of
    which each drafts the place after it, with the Markov head's say on what follows the token before."""
    block, own = Reading(path), Reading(target)
    config = json.loads((path / "config.json").read_text("utf-8"))
    markov = [block.tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2)] if has_markov else None

    def draft(ids: Sequence[int]) -> list[int]:
        taps = torch.randn(len(ids), block.tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(5))
        context = block.norm("hidden_norm", block.linear("fc", taps))
        masks = [config["mask_token_id"]] * (count - 1 if has_markov else count)
        x = block.layer("layers.0.", own.tensors["model.embed_tokens.weight"][[ids[-1], *masks]], context)
        logits = own.linear("lm_head", block.norm("norm", x))
        if markov is None:
            return logits[1:].argmax(-1).tolist()
        found = [ids[-1]]
        for row in logits:
            found.append(int((row + markov[1] @ markov[0][found[-1]]).argmax()))
        return found[1:]

    return draft


def ngram_draft(count: int) -> Draft:
    """What followed the last three tokens, or two, or one, where they stood first."""

    def draft(ids: Sequence[int]) -> list[int]:
        for size in (3, 2, 1):
            for at in range(len(ids) - size):
                if ids[at : at + size] == ids[-size:]:
                    return list(ids[at + size : at + size + count])
        return []

    return draft


def model_draft(path: Path, steps: int) -> Draft:
    loaded = model(path)

    def draft(ids: Sequence[int]) -> list[int]:
        ids = list(ids)
        for _ in range(steps):
            ids.append(int(scored(loaded, ids)[-1].argmax()))
        return ids[-steps:]

    return draft


def accept_length(draft: Draft, follows: Sequence[int], prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a verification: those drafted that greedy text would have, as far as the first that it would not, and one."""
    verified = accepted = 0
    for prompt in prompts:
        ids = [*prompt, follows[prompt[-1]]]
        while len(ids) < len(prompt) + NEW:
            drafted = draft(ids)
            wanted = follow(follows, ids[-1], len(drafted) + 1)
            right = next((n for n, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(drafted))
            ids += wanted[: right + 1]
            verified, accepted = verified + 1, accepted + right
    return 1 + accepted / verified
