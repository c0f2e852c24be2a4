"""YAML with lines: against PyYAML's own loader where both accept, and by a table of what is refused."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.recipe.yaml_lines import MalformedYaml, parse

SCALARS = st.none() | st.booleans() | st.integers(-9999, 9999) | st.text("abc: #'\"-", max_size=8)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
)


@given(DATA, st.booleans())
def test_reads_what_pyyaml_reads(data: object, flow: bool) -> None:
    assert parse(yaml.safe_dump(data, default_flow_style=flow)).data == data


def test_lines_of_keys_and_items() -> None:
    text = "a: 1\nb:\n  - x\n  - {c: 2,\n     d: [3]}\n"
    lines = parse(text).lines
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4, ("b", 1, "d"): 5,
                     ("b", 1, "d", 0): 5}  # fmt: skip


def test_aliases_are_expanded_apart() -> None:
    data = parse("a: &x {b: [1]}\nc: *x\n").data
    assert data == {"a": {"b": [1]}, "c": {"b": [1]}}
    data["a"]["b"].append(2)
    assert data["c"] == {"b": [1]}


def test_numbers_are_decimal_and_text_is_left() -> None:
    data = parse("[0, 10, -7, 0.5, 1.5e+3, .5, '010', '1:30', 2x2, \"\\U0001F600\"]").data
    assert data == [0, 10, -7, 0.5, 1500.0, 0.5, "010", "1:30", "2x2", "\U0001f600"]


def test_an_empty_text_is_none() -> None:
    assert parse("").data is None
    assert parse("# only a comment\n").data is None


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 3),
        ("x:\n  on: 1\n", 2),
        ("1: a\n", 1),
        ("? [a]\n: b\n", 1),
        ("a: 1\n\tb: 2\n", 2),
        ("a: [1, 2\nb: 3\n", 2),
        ("a: b: c\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: *nowhere\n", 1),
        ("b: 1\na: 010\n", 2),
        ("a: 0x10\n", 1),
        ("a: 0b11\n", 1),
        ("a: 1:30\n", 1),
        ("a: 1:30.5\n", 1),
        ("a: 1_000\n", 1),
        ('b: 1\na: "x\\ud800"\n', 2),
        ('"x\\udfff": 1\n', 1),
        ("a: &x {b: 1}\nc: {<<: *x}\n", 2),
        ("a: 1\nb: !!python/object/apply:os.getcwd []\n", 2),
        ("a: !!set {x}\n", 1),
        ("a: 2024-13-45\n", 1),
        ("a: " + "9" * 5000, 1),
        ("a: 1\nb: \x01\n", 2),
        ('a: "re:.*\\.gate$"\n', 1),
        ("a: 'open\n", 2),
        ("a: &a [*a]\n", 1),
        ("[" * 3000, 1),
        (BOMB, None),
    ],
)
def test_refused(text: str, line: int | None) -> None:
    with pytest.raises(MalformedYaml) as caught:
        parse(text)
    assert line is None or caught.value.line == line


@given(st.text("ab:-[]{}&*!|>'\"#\n\t ,?%@`\\0", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """By PyYAML too, but for what is read here more strictly."""
    try:
        data = parse(text).data
    except MalformedYaml:
        return
    assert data == yaml.safe_load(text)
