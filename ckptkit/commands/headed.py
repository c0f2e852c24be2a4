"""The options of ``ckptkit verify --head``, and what is said of its result; the checks are :mod:`ckptkit.heads.pages`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..console import Table
from ..errors import fail
from ..heads import telling
from ..heads.pages import Asked
from ..vocab.slices import ENGINES

if TYPE_CHECKING:
    from .verify import Asked as Options

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

_OPTIONS = (
    click.option("--head", is_flag=True, help="The output head under vocabulary-parallel serving (--ranks, --engine)."),
    click.option(
        "--ranks", "--slices", type=click.IntRange(1), metavar="N", help="Slices of the head, a process each (default: 2)."
    ),
    click.option("--topk", type=click.IntRange(1), metavar="K", help="Candidates that a rank sends (default: 128)."),
    click.option("--logits", type=click.Choice(list(DTYPES)), help="What they are computed in (default: the model's)."),
    click.option("--hidden", metavar="FILE", help="Also real hidden states, after the final norm: .npy, .safetensors."),
)  # fmt: skip


def head_options(function: Function) -> Function:
    """Declare the options; the command gets them as ``head``, None without ``--head``, and ``hidden``."""

    def collected(*args: Any, **given: Any) -> Any:
        asked, ranks, topk, logits = (given.pop(name) for name in ("head", "ranks", "topk", "logits"))
        alone = next((name for name, value in (("ranks", ranks), ("topk", topk), ("logits", logits)) if value), None)
        if alone and not asked:
            raise fail("usage.arguments", f"--{alone} is about the head under serving", hint="--head")
        head = Asked(ranks, topk or 128, None, DTYPES.get(logits or "")) if asked else None
        return function(*args, head=head, **given)

    collected.__name__, collected.__doc__ = function.__name__, function.__doc__
    collected.__dict__.update(function.__dict__)
    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected  # type: ignore[return-value]


def by_engine(asked: Options) -> Options:
    """With --head the engine is the one that cuts it, and is not linted.

    Raises UserError ``usage.arguments`` for one of which it is not known how it cuts a head.
    """
    if asked.head is None or asked.engine is None:
        return asked
    name = asked.engine.partition("==")[0]
    if name not in ENGINES:
        message = f"--engine {asked.engine}: how it cuts a head is not known"
        raise fail("usage.arguments", message, hint=f"--engine {'|'.join(ENGINES)}")
    return replace(asked, head=asked.head._replace(engine=name), engine=None)


def lines(figure: Any) -> Iterator[str | Table]:
    """What is said of a head after the checks; nothing without the figure ``head``."""
    if isinstance(figure, Mapping):
        yield Table(telling.COLUMNS, [*telling.rows(figure)], "<>>>>>>")
        yield from telling.sentences(figure)
