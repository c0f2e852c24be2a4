"""YAML read safely, strictly and with line numbers: how a file that people write by hand is parsed.

Plain mappings, sequences and scalars only. Keys are text and stand once; anchors and aliases work, merge keys and
tags do not, and numbers are decimal. Size, depth and the number of values (aliases expanded) are bounded.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

MAX_BYTES = 1_000_000
_MAX_VALUES = 20_000
_MAX_DEPTH = 32
# Numbers of YAML 1.1 that look like others: octal 010, hexadecimal, binary, base sixty 1:30, digits parted by _.
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9xb_]|.*[_:]")

Key = tuple[str | int, ...]
Lines = dict[Key, int]


class Document(NamedTuple):
    """What a YAML document holds, and the line (from 1) of each key and item by its path of keys and indices."""

    data: Any
    lines: Lines


class MalformedYaml(ValueError):
    """Not YAML, or not of the kind read here. ``line`` counts from 1."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


def parse(text: str) -> Document:
    """The one document in ``text``; None for an empty one. Raises MalformedYaml."""
    lines: Lines = {(): 1}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return Document(None if node is None else _value(loader, node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or str(error)
        if "escape character" in what:
            what += " (in single quotes a backslash stands for itself)"
        raise MalformedYaml(what, mark.line + 1 if mark else 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise MalformedYaml(f"the character U+{error.character:04X} is not allowed", line) from None
    except RecursionError:
        raise MalformedYaml("nested too deeply", 1) from None


def _value(loader: yaml.SafeLoader, node: yaml.Node, at: Key, lines: Lines) -> Any:
    line = node.start_mark.line + 1
    if len(at) > _MAX_DEPTH:
        raise MalformedYaml("nested too deeply", line)
    if len(lines) > _MAX_VALUES:
        raise MalformedYaml("too many values", line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node)
    if node.tag == loader.DEFAULT_MAPPING_TAG:
        return {key: _value(loader, child, (*at, key), lines) for key, child in _items(loader, node, at, lines)}
    if node.tag == loader.DEFAULT_SEQUENCE_TAG:
        lines |= {(*at, index): item.start_mark.line + 1 for index, item in enumerate(node.value)}
        return [_value(loader, item, (*at, index), lines) for index, item in enumerate(node.value)]
    raise MalformedYaml(f"the tag {node.tag!r} is not allowed", line)


def _items(loader: yaml.SafeLoader, node: yaml.Node, at: Key, lines: Lines) -> list[tuple[str, yaml.Node]]:
    """Keys and value nodes of a mapping; the keys' lines are noted."""
    items: dict[str, yaml.Node] = {}
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(loader, key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            spelled = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "that is a collection"
            raise MalformedYaml(f"the key {spelled} is not text: quote it", line)
        if key in items:
            raise MalformedYaml(f"the key {key!r} stands twice, first on line {lines[*at, key]}", line)
        items[key] = child
        lines[*at, key] = line
    return list(items.items())


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    line = node.start_mark.line + 1
    try:
        value = loader.construct_object(node)
    except yaml.MarkedYAMLError:
        raise MalformedYaml(f"the tag {node.tag!r} is not allowed", line) from None
    except ValueError as error:  # a date or a number that is none
        what = str(error).partition(";")[0]
        raise MalformedYaml(f"{node.value[:40]!r}: {what}", line) from None
    if isinstance(value, (int, float)) and _NOT_DECIMAL.match(node.value):
        raise MalformedYaml(f"{node.value[:40]!r} would be the number {value}: write that, or quote it", line)
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise MalformedYaml("half of a surrogate pair (\\ud800 to \\udfff) is no character", line)
    return value


__all__ = ["MAX_BYTES", "Document", "Key", "Lines", "MalformedYaml", "parse"]
