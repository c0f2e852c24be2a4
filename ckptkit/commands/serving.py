"""The options of ``ckptkit verify --serve``; :mod:`.served` is the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..errors import fail

Function = TypeVar("Function", bound=Callable[..., Any])

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, or ``90s``, ``20m``, ``2h``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if not found or float(found[1]) <= 0:
            self.fail(f"{value!r} is no duration: 90s, 20m, 2h", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class How:
    """The options of ``--serve`` as they were given."""

    url: str | None
    engine_python: str | None
    engine_cmd: str | None
    engine_arg: tuple[str, ...]
    draft: tuple[str, ...]
    golden: str | None
    record: str | None
    prompts: str | None
    long_context: int | None
    max_tokens: int
    eval: str | None
    eval_runner: str | None
    journal: str | None
    min_accept_length: float | None
    min_score: float | None
    tolerance: float | None
    gap: float
    timeout: float
    no_static: bool
    no_launch_refused: bool
    keep_serving: bool
    probe: str | None


_OPTIONS = (
    click.option("--serve", is_flag=True, help="Serve it on an engine and judge what is decoded (--engine, --url)."),
    click.option("--url", metavar="URL", help="A server that runs already; nothing is started."),
    click.option("--engine-python", metavar="PY", help="The interpreter that has the engine."),
    click.option("--engine-cmd", metavar="CMD", help="The words that start the engine."),
    click.option("--engine-arg", multiple=True, metavar="ARG", help="One more word for the engine: --engine-arg=--tp=2."),
    click.option("--draft", multiple=True, metavar="NAME=PATH", help="The draft of a way to speculate: eagle3=./draft."),
    click.option("--golden", metavar="FILE", help="Judge by what --record wrote, without the model it was made from."),
    click.option("--record", metavar="FILE", help="Write what CKPT decodes in float32, for --golden."),
    click.option("--prompts", metavar="FILE", help="JSON lines of {name, text} or {name, messages}."),
    click.option("--long-context", type=click.IntRange(1), metavar="N", help="Also a prompt of N tokens or somewhat more."),
    click.option("--max-tokens", type=click.IntRange(1), default=32, metavar="N", help="Tokens of a completion."),
    click.option("--eval", metavar="NAME", help="Also an evaluation: gsm8k:FILE, tasks, lm-eval:TASK."),
    click.option("--eval-runner", metavar="sglang|PY", help="SGLang's own gsm8k beside it; what has lm-eval installed."),
    click.option("--journal", metavar="DIR", help="Keep the evaluation's replies there, and go on from them."),
    click.option("--min-accept-length", type=click.FloatRange(1), metavar="X", help="Of speculation, over all requests."),
    click.option("--min-score", type=click.FloatRange(0, 1), metavar="X", help="Of --eval, 0 to 1."),
    click.option("--tolerance", type=click.FloatRange(0), metavar="NATS", help="From --against on average (default: by format)."),
    click.option("--gap", type=click.FloatRange(0), default=0.5, metavar="NATS", help="Below this lead a token is a near-tie."),
    click.option("--timeout", type=Duration(), default="20m", help="Of a start (default: 20m)."),
    click.option("--no-static", is_flag=True, help="Serve without looking at headers, index and config first."),
    click.option("--no-launch-refused", is_flag=True, help="Do not serve what static checks or engine lint refuse."),
    click.option("--keep-serving", is_flag=True, help="Leave the last server running."),
    click.option("--probe", metavar="CMD", help="Also run this while it serves: $CKPTKIT_URL, $CKPTKIT_MODEL."),
)  # fmt: skip


def serving_options(function: Function) -> Function:
    """Declare the options; the command gets them as ``how``, None without ``--serve``."""

    def collected(*args: Any, **given: Any) -> Any:
        mine = {field.name: given.pop(field.name) for field in fields(How)}
        asked = given.pop("serve")
        typed = click.get_current_context().get_parameter_source
        alone = [name for name in mine if typed(name) is ParameterSource.COMMANDLINE]
        if alone and not asked:
            raise fail("usage.arguments", f"--{alone[0].replace('_', '-')} is about serving", hint="--serve")
        return function(*args, how=How(**mine) if asked else None, **given)

    collected.__name__, collected.__doc__ = function.__name__, function.__doc__
    collected.__dict__.update(function.__dict__)
    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected  # type: ignore[return-value]
