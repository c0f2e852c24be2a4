"""``--speculative``: names, keys, defaults, and the block that a draft's config states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import UserError
from ckptkit.serving.engine import METHODS, Method
from ckptkit.serving.speculative import longest, method_name, parse, resolved

NOWHERE = Path("nowhere")


def refused(text: str) -> str:
    with pytest.raises(UserError) as raised:
        parse(text)
    assert raised.value.exit_code == 2
    return raised.value.findings[0].id


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


@pytest.mark.parametrize("name", METHODS)
def test_each_name_is_its_own(name: str) -> None:
    assert parse(name).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NEXTN", "mtp"), ("draft-mtp", "mtp"), ("deepseek_mtp", "mtp"), ("qwen3_next_mtp", "mtp"),
        ("STANDALONE", "draft"), ("draft_model", "draft"), ("draft-simple", "draft"),
        ("EAGLE3", "eagle3"), ("draft-eagle3", "eagle3"), ("DFLASH", "dflash"), ("draft-dspark", "dspark"),
        ("ngram-simple", "ngram"), ("Domino", "domino"),
    ],
)  # fmt: skip
def test_the_spellings_of_engines(spelling: str, name: str) -> None:
    assert method_name(spelling) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Method()),
        ("mtp", Method("mtp", 3, 1, 4)),
        ("mtp:steps=5", Method("mtp", 5, 1, 6)),
        ("mtp:draft-tokens=2", Method("mtp", 1, 1, 2)),
        ("nextn: steps = 2 , topk=1", Method("mtp", 2, 1, 3)),
        ("eagle:topk=4,draft-tokens=8", Method("eagle", 3, 4, 8)),
        ("ngram", Method("ngram", draft_tokens=4)),
        ("dflash:block=8", Method("dflash", block=8)),
        ("draft:draft='a,b/c'", Method("draft", 3, 1, 4, draft=Path("a,b/c"))),
        ("mtp:arg='--x 1,2',arg=\"--y 'a b'\"", Method("mtp", 3, 1, 4, arguments=("--x", "1,2", "--y", "a b"))),
    ],
)
def test_keys_and_what_they_leave_open(text: str, expected: Method) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "mtb", "mtp:steps", "mtp:steps=", "mtp:steps=0", "mtp:steps=-1", "mtp:steps=x", "mtp:block=4", "dflash:steps=3",
        "ngram:steps=3", "none:steps=1", "mtp:steps=3,draft-tokens=5", "mtp:draft-tokens=1", "mtp:topk=2",
        "mtp:arg='--x", "mtp:arg=\"--x 'a\"", "mtp:steps=3 4", "",
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    assert refused(text) == "usage.speculative"


def test_the_draft_is_that_of_its_name_unless_the_method_has_its_own() -> None:
    drafts = {"eagle3": Path("e"), "draft": Path("d")}
    assert resolved(parse("eagle3"), drafts, NOWHERE).draft == Path("e")
    assert resolved(parse("draft:draft=own"), drafts, NOWHERE).draft == Path("own")
    assert resolved(parse("mtp"), drafts, NOWHERE).draft is None


@pytest.mark.parametrize("name", ["eagle", "eagle3", "draft", "dflash", "domino"])
def test_a_draft_that_cannot_lie_within_the_target_must_be_given(name: str) -> None:
    with pytest.raises(UserError) as raised:
        resolved(parse(name), {}, NOWHERE)
    assert raised.value.findings[0].id == "usage.speculative"


def test_the_block_is_what_the_config_of_the_draft_states(tmp_path: Path) -> None:
    top = folder(tmp_path / "top", {"block_size": 16})
    nested = folder(tmp_path / "nested", {"block_size": 4, "dflash_config": {"block_size": 8}})
    target = folder(tmp_path / "target", {"dspark_block_size": 5})
    assert resolved(parse("dflash"), {"dflash": top}, NOWHERE).block == 16
    assert resolved(parse("domino"), {"domino": nested}, NOWHERE).block == 8
    assert resolved(parse("dspark"), {}, target).block == 5
    assert resolved(parse("dspark:block=3"), {"dspark": top}, target).block == 3


def test_what_no_config_states_is_left_to_the_engine(tmp_path: Path) -> None:
    silent = folder(tmp_path / "silent", {"block_size": "many"})
    assert resolved(parse("dflash"), {"dflash": silent}, NOWHERE).block is None
    assert resolved(parse("dflash"), {"dflash": tmp_path / "none"}, NOWHERE).block is None


@pytest.mark.parametrize(
    ("text", "most"),
    [("none", None), ("mtp", 4), ("eagle:steps=2,topk=4,draft-tokens=8", 3), ("ngram:draft-tokens=6", 6),
     ("dflash:block=16", 16), ("dspark:block=7", 8), ("dspark", None)],
)  # fmt: skip
def test_the_longest_that_can_be_accepted(text: str, most: int | None) -> None:
    """SGLang's verify windows: block of DFLASH, block + 1 of DSpark, steps + 1 of a chain."""
    assert longest(parse(text)) == most
