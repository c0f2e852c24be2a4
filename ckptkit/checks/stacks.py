"""Stacks of layers: where names count, and what each layer of a stack holds.

A layer's *templates* are the names of its weights and parameters without the stack and the number, with ``#`` for
further numbers: ``mlp.experts.#.up_proj.weight``. Whatever is stored of a quantized weight counts as ``weight``, so
that layers which differ in their format only are alike.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ..families import Kind, config_value, draft_part
from ..naming.names import split
from ..stored import COMPANIONS, WEIGHTS, split_name
from . import Subject

_TEXT = re.compile(
    r"(?:(?:thinker|language_model|text_model|llm|model|transformer|backbone|gpt_neox|decoder)\.)*(?:layers|h|blocks)"
)
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class Stack(NamedTuple):
    """Layers by number, each with the number of tensors of every template. ``part`` is set where they draft tokens."""

    prefix: str
    part: Kind | None
    layers: Mapping[int, Mapping[str, int]]

    @property
    def is_text(self) -> bool:
        """Whether these are the language model's own layers."""
        return self.part is None and _TEXT.fullmatch(self.prefix) is not None


def stacks(subject: Subject) -> list[Stack]:
    """Every stack. Tensors that only the index knows of count too: that they are lost is said elsewhere."""
    part_of = draft_part(subject.config)
    found: dict[tuple[str, Kind | None], _Layers] = defaultdict(lambda: defaultdict(lambda: defaultdict(Counter)))
    for name, number in _names(subject):
        place = _place(name)
        if place is not None:
            prefix, layer, template, last = place
            found[prefix, part_of(name)][layer][template][last] += number
    return [Stack(prefix, part, _numbers(layers)) for (prefix, part), layers in found.items()]


# By layer and template, the numbers of tensors by the last parts of their names.
_Layers = dict[int, dict[str, Counter[str]]]


def _numbers(layers: _Layers) -> dict[int, dict[str, int]]:
    """The number of modules of each template: so many as have the part that most of them have."""
    return {
        layer: {template: max(parts.values()) for template, parts in templates.items()}
        for layer, templates in layers.items()
    }


def lost_tensors(subject: Subject) -> list[str]:
    """Tensors that the index names and no file holds."""
    return [finding.tensor for finding in subject.found if finding.id == "index.missing-tensor" and finding.tensor]


def _names(subject: Subject) -> Iterable[tuple[str, int]]:
    yield from ((cell.first.name, cell.number) for cell in subject.survey.cells.values())
    yield from ((name, 1) for name in lost_tensors(subject))


def _place(name: str) -> tuple[str, int, str, str] | None:
    """A tensor as (stack, layer, template, last part); None for what lies in no layer."""
    module, last = split_name(name)
    template, indices = split(module)
    prefix, number, rest = template.partition("#")
    if not number:
        return None
    last = "weight" if last in WEIGHTS else last
    whole = "weight" if last in COMPANIONS else last
    return prefix.removesuffix("."), int(indices[0]), f"{rest}.{whole}".removeprefix("."), last


def declared_depth(config: Mapping[str, Any]) -> int | None:
    """The number of layers that the language model has by its config."""
    found = (config_value(config, key) for key in _DEPTHS)
    return next((depth for depth in found if type(depth) is int and depth > 0), None)


def text_stack(found: Iterable[Stack]) -> Stack | None:
    """The language model's layers, if there is one stack that they can be."""
    own = [stack for stack in found if stack.is_text]
    return own[0] if len(own) == 1 else None


def absent(numbers: Container[int], count: int) -> list[int]:
    """Which of 0 to ``count`` - 1 are not among ``numbers``; the first thousand, should a config name a silly count."""
    return list(islice((number for number in range(count) if number not in numbers), 1000))


def runs(numbers: Iterable[int]) -> str:
    """Numbers in few words: ``0-3, 7``."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in _spans(sorted(numbers)))


def _spans(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], numbers[at - 1]
            first = at
