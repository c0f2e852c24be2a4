"""Rules for the logs of engines in Python: what they say when they refuse a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .engine import Rule

_REFUSALS = (
    ("serve.unsupported", r"Model architectures .+ (?:are not supported|failed to be inspected).*"),
    ("serve.unknown-tensors", r"(?:^|[\])] )KeyError: '(?P<tensor>\w+(?:\.\w+){2,})'"),
    # Not of a request's logprobs: a server refuses these and goes on.
    (
        "serve.unsupported",
        r"(?:^|[\])] )(?:\w+\.)*\w+Error: (?!.*logprob).*(?i:not support|unsupported|not implemented)",
    ),
)


def rules(*own: tuple[str, str], warnings: Sequence[tuple[str, str]] = ()) -> tuple[Rule, ...]:
    """An engine's own pairs of id and pattern, then those that SGLang and vLLM share.

    ``warnings`` are what it says and lives on.
    """
    fatal = [Rule(id, re.compile(pattern)) for id, pattern in (*own, *_REFUSALS)]
    return (*fatal, *(Rule(id, re.compile(pattern), fatal=False) for id, pattern in warnings))
