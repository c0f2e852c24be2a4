from __future__ import annotations

import pytest

from ckptkit.errors import USAGE, UserError
from ckptkit.naming.renaming import rename, rename_rule

NAMES = ["model.layers.1.up.weight", "model.layers.10.up.weight", "lm_head.weight", "lm_head2.weight"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["model.="], ["layers.1.up.weight", "layers.10.up.weight", *NAMES[2:]]),
        (["=x."], [f"x.{name}" for name in NAMES]),
        (["model.layers.1=model.layers.2"], ["model.layers.2.up.weight", *NAMES[1:]]),
        (["lm_head=output"], [*NAMES[:2], "output.weight", "lm_head2.weight"]),
        (["lm_head.weight=output"], [*NAMES[:2], "output", "lm_head2.weight"]),
        ([r"re:layers\.(\d+)=blocks.\1"], ["model.blocks.1.up.weight", "model.blocks.10.up.weight", *NAMES[2:]]),
        (["re:weight$=w"], [name.replace("weight", "w") for name in NAMES]),
        (["re:(?=lm)=a."], [*NAMES[:2], "a.lm_head.weight", "a.lm_head2.weight"]),
        (["lm_head=a", "a=b"], [*NAMES[:2], "b.weight", "lm_head2.weight"]),
    ],
)
def test_names(rules: list[str], expected: list[str]) -> None:
    found, findings = rename(NAMES, [*map(rename_rule, rules)])
    assert [new.name for new in found.values()] == expected
    assert list(found) == NAMES
    assert not findings
    assert all(bool(new.rules) == (old != new.name) for old, new in found.items())


@pytest.mark.parametrize(
    ("rule", "id"),
    [
        ("head=lm", "usage.pattern-unmatched"),
        ("re:nothing=x", "usage.pattern-unmatched"),
        ("lm_head=lm_head", "usage.pattern-unmatched"),
        ("re:head2?=head", "plan.rename-collision"),
        ("re:.*=", "usage.rename"),
        ("re:^.*$=__metadata__", "usage.rename"),
    ],
)
def test_what_is_wrong_with_the_result(rule: str, id: str) -> None:
    _, findings = rename(NAMES, [rename_rule(rule)])
    assert id in {finding.id for finding in findings}
    assert all(finding.hint and finding.exit_code == USAGE for finding in findings)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("lm_head", "usage.rename"),
        ("re:(a)=\\2", "usage.rename"),
        ("re:a=\\g<b>", "usage.rename"),
        ("re:(=x", "recipe.pattern"),
    ],
)
def test_rules_that_make_no_sense(text: str, id: str) -> None:
    with pytest.raises(UserError) as caught:
        rename_rule(text)
    assert [finding.id for finding in caught.value.findings] == [id]
    assert caught.value.exit_code == USAGE
