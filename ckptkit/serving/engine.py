"""What an engine is to ``verify --serve``: how to start it, know it is ready, ask it, and read what it says.

Each engine's module has one :class:`Engine`, called ``ENGINE``: functions and tables, no state. Starting, waiting and
stopping are :mod:`.process`'s, HTTP is :mod:`.client`'s, and what the figures mean is :mod:`.judge`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ..errors import fail
from ..naming.patterns import nearest

# Names for --engine, and the module of each.
ENGINES = {"transformers": "transformers", "sglang": "sglang", "vllm": "vllm", "llama-server": "llama_server"}

NONE = "none"
METHODS = (NONE, "mtp", "eagle", "eagle3", "dflash", "dspark", "domino", "ngram", "draft")


class Method(NamedTuple):
    """How a server is to speculate: one ``--speculative NAME[:key=value,…]``. None is an engine's own default.

    ``draft_tokens`` is the number that is verified at a time (SGLang's), ``steps`` the number drafted in a row, ``block``
    the size of a block of DFLASH or DSPARK, ``draft`` the draft's folder; ``arguments`` go to the engine as they are.
    """

    name: str = NONE
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    block: int | None = None
    draft: Path | None = None
    arguments: tuple[str, ...] = ()


class Launch(NamedTuple):
    """One server that is to be started.

    ``python`` is ``--engine-python``: the interpreter that has the engine; ``program`` is ``--engine-cmd``, the words
    that start it otherwise; ``arguments`` are those of ``--engine-arg``. ``scratch`` is a folder for the engine's files.
    """

    checkpoint: Path
    port: int
    scratch: Path
    python: str | None = None
    program: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    method: Method = Method()


class Server(NamedTuple):
    """A server that answers, or may: ``model`` is what requests call the model, ``timeout`` seconds for one of them."""

    url: str
    model: str
    timeout: float = 120.0


class Speculation(NamedTuple):
    """Counts of speculation: verification ``steps``, drafted tokens that were ``accepted``, tokens ``drafted``.

    ``by_position`` counts accepted tokens by their place in the draft.
    """

    steps: int
    accepted: int
    drafted: int = 0
    by_position: tuple[int, ...] = ()

    @property
    def accept_length(self) -> float | None:
        """Tokens for each verification, the engine's own included; None where there was none."""
        return 1 + self.accepted / self.steps if self.steps else None


class Answer(NamedTuple):
    """A greedy completion.

    ``tokens`` are the decoded ids, None where the engine does not tell them; ``logprobs`` those of these tokens, in
    nats, and ``gaps`` by how much each leads the second best, None where it gives none. ``speculation`` counts what
    this request did, where that is told.
    """

    text: str
    tokens: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    seconds: float
    speculation: Speculation | None = None
    gaps: tuple[float, ...] | None = None


class Rule(NamedTuple):
    """A line of an engine's log that means something: the ``id`` of a finding, and what it looks like.

    Ids of ``engine.…`` say that the machine is at fault, those of ``serve.…`` that the checkpoint is (or that this
    engine does not take it). A group called ``tensor`` is what the line is about. Rules that are ``fatal`` say why a
    server ended, the others what is wrong with one that lives on.
    """

    id: str
    pattern: re.Pattern[str]
    fatal: bool = True


def _in_float32(command: Sequence[str]) -> bool:
    return any(word.endswith("float32") for word in command)


class Engine(NamedTuple):
    """An engine.

    ======================  ====================================================================================
    ``name``, ``label``     as ``--engine`` has it, and as people write it
    ``lint``                its name among the engines of :mod:`ckptkit.checks.lint`
    ``methods``             the methods that it can be asked for, by our name: its own name
    ``version``             the installed version. Raises UserError ``engine.missing`` where it is not installed
    ``command``             the words that start a server; variables are set by a leading ``env`` (:func:`words`)
    ``model``               what requests call the model
    ``ready``               one look: whether it says that it is healthy. False on any failure to connect
    ``complete``            greedy tokens after a prompt of ids, going on after the end of text where the engine can as
                            after any other. Raises ``client.Failed``
    ``score``               logprobs of ``ids[1:]``, each given the ids before it; None where it cannot be had
    ``counters``            what was speculated since the start; None where only answers tell, or nothing does
    ``windows``             accept lengths that a part of the log tells of, a figure for each line
    ``interval``            decoding steps that such a line is of
    ``rules``               what its log says, root causes first
    ``kernels``             lines of its log that name kernels and attention backends
    ``is_exact``            whether a server that these words started computes in float32
    ``grace``               seconds that it may take to stop
    ======================  ====================================================================================
    """

    name: str
    label: str
    lint: str
    methods: Mapping[str, str]
    version: Callable[[Launch], str]
    command: Callable[[Launch], Sequence[str]]
    ready: Callable[[Server], bool]
    complete: Callable[[Server, Sequence[int], int], Answer]
    score: Callable[[Server, Sequence[int]], Sequence[float] | None]
    model: Callable[[Launch], str] = lambda launch: str(launch.checkpoint)
    counters: Callable[[Server], Speculation | None] = lambda server: None
    windows: Callable[[str], Sequence[float]] = lambda log: ()
    interval: int | None = None
    rules: tuple[Rule, ...] = ()
    kernels: re.Pattern[str] | None = None
    is_exact: Callable[[Sequence[str]], bool] = _in_float32
    grace: float = 15.0


def engine(name: str) -> Engine:
    """The engine that ``--engine`` names. Raises UserError (``usage.engine``)."""
    if name not in ENGINES:
        hint = f"--engine {nearest(name, ENGINES) or next(iter(ENGINES))}"
        raise fail("usage.engine", f"engine {name!r} is not known: {', '.join(ENGINES)}", hint=hint)
    found: Engine = import_module(f".{ENGINES[name]}", __package__).ENGINE
    return found


def words(program: Sequence[str | Path], **variables: str) -> list[str]:
    """A command line with its variables in front, so that what is shown can be typed: ``env A=1 vllm serve …``."""
    given = [f"{name}={value}" for name, value in variables.items()]
    return [*(["env", *given] if given else []), *map(str, program)]


def added(counts: Sequence[Speculation | None]) -> Speculation | None:
    """The sum; None where nothing was counted."""
    known = [count for count in counts if count is not None]
    places = zip_longest(*(count.by_position for count in known), fillvalue=0)
    return (
        Speculation(
            sum(count.steps for count in known),
            sum(count.accepted for count in known),
            sum(count.drafted for count in known),
            tuple(map(sum, places)),
        )
        if known
        else None
    )


def since(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    """What was counted between two looks at counters that only grow."""
    if before is None or after is None:
        return after
    places = zip_longest(after.by_position, before.by_position, fillvalue=0)
    return Speculation(
        after.steps - before.steps,
        after.accepted - before.accepted,
        after.drafted - before.drafted,
        tuple(new - old for new, old in places),
    )
