"""config.json as a plan writes it: the source's, with what each module becomes declared in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from ..consumers import by_compressed_tensors, declared
from ..errors import Finding
from ..families import Kind, tie_locations
from ..files.checkpoint import Checkpoint
from ..naming.names import to_template
from ..recipe.recipe import Recipe
from ..stored import declaration
from . import quant_config
from .documents import json_text, put
from .existing import quantized_modules
from .experts import Slice
from .generalise import by_template
from .quant_config import Modules
from .selection import Choice, tied_head


def config_text(
    checkpoint: Checkpoint, recipe: Recipe, choices: Sequence[Choice], pieces: Mapping[str, list[Slice]]
) -> tuple[str, list[Finding]]:
    """config.json as it will be written, and where a consumer would misread it."""
    present = declaration(checkpoint.config or {})
    merged = present.table if present is not None and recipe.existing == "merge" else None
    names = quant_config.group_names([group.name for group in recipe.groups], merged)
    modules = list(_modules(checkpoint, choices, pieces, names, merged))
    schemes = {names[group.name]: group.scheme for group in recipe.groups}
    table = quant_config.build(modules, schemes, merged)
    config = deepcopy(dict(checkpoint.config or {}))
    path: tuple[str, ...] = ("quantization_config",)
    if present is not None:
        put(config, present.path, table if merged else None)
        path = present.path if merged else path
    put(config, path, table)
    if recipe.tie == "untie" and tied_head(checkpoint) is not None:
        for location in tie_locations(config):
            put(config, location, False)
    return json_text(config), list(quant_config.disagreements(table, modules))


def _modules(
    checkpoint: Checkpoint,
    choices: Sequence[Choice],
    pieces: Mapping[str, list[Slice]],
    names: Mapping[str, str],
    merged: Mapping[str, Any] | None,
) -> Iterator[Modules]:
    """Every matrix of the result, with the group of the written config that it belongs to."""
    on_disk = {} if merged is None else quantized_modules(checkpoint)
    stacks: set[str] = set()
    for choice in choices:
        group = None if choice.group is None else names[choice.group.name]
        if choice.is_experts and group is not None:
            made = by_template(piece.module for module in choice.modules for piece in pieces[module])
            yield from (Modules(template, Kind.LINEAR, group, found) for template, found in made.items())
            continue
        left = [module for module in choice.modules if choice.is_float or module not in on_disk]
        if left:
            yield Modules(choice.alike.template, choice.kind, group, left)
        if choice.is_experts:
            stacks |= {module.rpartition(".")[0] for module in choice.modules}
    yield from (Modules(template, Kind.OTHER, None, found) for template, found in by_template(sorted(stacks)).items())
    if merged is not None:
        dense = set(chain.from_iterable(choice.modules for choice in choices if choice.is_float))
        yield from _declared_already(merged, [module for module in on_disk if module not in dense])


def _declared_already(merged: Mapping[str, Any], modules: Iterable[str]) -> Iterator[Modules]:
    """What is quantized on disk, with the group that the config to merge onto has for it."""
    config = declared(merged)
    found: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for module in modules:
        found[to_template(module), by_compressed_tensors(config, module)].append(module)
    return (Modules(template, Kind.LINEAR, group, names) for (template, group), names in found.items())
