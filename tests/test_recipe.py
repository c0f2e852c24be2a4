"""Recipes: what is read, where each problem is said to be, what ``--set`` changes, and the built-in ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptkit.errors import USAGE, UserError
from ckptkit.naming.patterns import pattern
from ckptkit.recipe.recipe import Recipe, builtin_names, builtin_text, load, load_text
from ckptkit.recipe.schemes import resolve
from ckptkit.recipe.yaml_lines import MAX_BYTES

EXAMPLE = """\
schema: 1
name: w4a16-lm_head-w8a16
source: org/model-or-path
output: path
groups:
  head: {targets: ["re:.*lm_head$"], scheme: W8A16, strategy: channel}
  body: {targets: [Linear], scheme: W4A16}
ignore: [{pattern: "re:.*visual.*", optional: true}, {pattern: "re:.*mtp.*", optional: true}, "*.in_proj_a"]
tie: untie
existing: merge
nonfinite: keep
arithmetic: float32
"""
SHORT = "schema: 1\ngroups:\n  body:\n    targets: [Linear]\n    scheme: W4A16\n"


def refused(text: str, *sets: str) -> list[tuple[str, str, int | str | None]]:
    """Id, key and place (a line, or the override) of each problem, sorted."""
    with pytest.raises(UserError) as caught:
        load_text(text, "my.yaml", sets)
    assert caught.value.exit_code == USAGE
    places = [
        (finding.id, str(finding.data.get("key", "")), finding.data.get("line", finding.data.get("set")))
        for finding in caught.value.findings
    ]
    return sorted(places, key=str)


# --- what is read ------------------------------------------------------------------------------------------


def test_every_key() -> None:
    recipe = load_text(EXAMPLE, "my.yaml")
    assert (recipe.name, recipe.source, recipe.output) == ("w4a16-lm_head-w8a16", "org/model-or-path", "path")
    assert (recipe.tie, recipe.existing, recipe.nonfinite, recipe.arithmetic) == ("untie", "merge", "keep", "float32")
    head, body = recipe.groups
    assert (head.name, head.targets, head.scheme.weights.strategy) == ("head", ("re:.*lm_head$",), "channel")
    assert (body.name, body.targets, body.scheme, body.experts) == ("body", ("Linear",), resolve("W4A16"), None)
    assert [(item.pattern, item.optional) for item in recipe.ignore] == [
        ("re:.*visual.*", True),
        ("re:.*mtp.*", True),
        ("*.in_proj_a", False),
    ]


def test_defaults() -> None:
    recipe = load_text(SHORT, "some/where/mine.yaml")
    assert (recipe.name, recipe.source, recipe.output, recipe.ignore) == ("mine", None, None, ())
    assert (recipe.tie, recipe.existing, recipe.nonfinite, recipe.arithmetic) == ("error", "error", "error", "compat")


def test_a_full_scheme_and_experts() -> None:
    text = SHORT.replace("scheme: W4A16", "experts: rows\n    scheme: {weights: {num_bits: 4, group_size: 32}}")
    (group,) = load_text(text, "my.yaml").groups
    assert (group.experts, group.scheme.describe()) == ("rows", "W4A16 int4 group 32 symmetric")


def test_a_file_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("\N{BOM}" + SHORT, encoding="utf-8")
    (tmp_path / "mine").write_text(SHORT)
    (tmp_path / "w4a16").mkdir()  # a result's folder does not hide the built-in recipe
    monkeypatch.chdir(tmp_path)
    assert load("mine.yaml").groups == load("./mine.yaml").groups == load("mine").groups
    assert load("w4a16").origin == "w4a16"
    assert load("w4a16").ignore


# --- where problems are ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "id", "key", "line"),
    [
        ("schema: 1", "schema: 2", "recipe.invalid", "schema", 1),
        ("schema: 1", "schema: true", "recipe.invalid", "schema", 1),
        ("schema: 1", "schema: '1'", "recipe.invalid", "schema", 1),
        ("schema: 1", "", "recipe.invalid", "schema", 1),
        ("tie: untie", "tie: both", "recipe.invalid", "tie", 9),
        ("tie: untie", "tied: untie", "recipe.invalid", "tied", 9),
        ("tie: untie", "tie: off", "recipe.invalid", "tie", 9),
        ("existing: merge", "existing: [merge]", "recipe.invalid", "existing", 10),
        ("nonfinite: keep", "nonfinite:", "recipe.invalid", "nonfinite", 11),
        ("arithmetic: float32", "arithmetic: float16", "recipe.invalid", "arithmetic", 12),
        ("name: w4a16-lm_head-w8a16", "name: yes", "recipe.invalid", "name", 2),
        ("source: org/model-or-path", "source: 3", "recipe.invalid", "source", 3),
        ("output: path", "output: ''", "recipe.invalid", "output", 4),
        ("scheme: W8A16, ", "", "recipe.invalid", "groups.head.scheme", 6),
        ("scheme: W8A16", "scheme: W8A17", "recipe.scheme", "groups.head.scheme", 6),
        ("scheme: W8A16", "scheme: 8", "recipe.scheme", "groups.head.scheme", 6),
        ("scheme: W4A16", "scheme: NVFP4", "recipe.scheme", "groups.body.scheme", 7),
        ("scheme: W4A16", "scheme: {weights: {num_bit: 4}}", "recipe.invalid", "groups.body.scheme.weights.num_bit", 7),
        ("strategy: channel", "strategy: chanel", "recipe.scheme", "groups.head.strategy", 6),
        ("strategy: channel", "stratgy: channel", "recipe.invalid", "groups.head.stratgy", 6),
        ("strategy: channel", "strategy: block", "recipe.scheme", "groups.head.scheme.weights", 6),
        ("strategy: channel", "experts: diagonal", "recipe.invalid", "groups.head.experts", 6),
        ("strategy: channel", "kv_cache_scheme: {}", "recipe.invalid", "groups.head.kv_cache_scheme", 6),
        ("targets: [Linear], ", "", "recipe.invalid", "groups.body.targets", 7),
        ("targets: [Linear]", "targets: Linear", "recipe.invalid", "groups.body.targets", 7),
        ("targets: [Linear]", "targets: []", "recipe.invalid", "groups.body.targets", 7),
        ("targets: [Linear]", "targets: [Linear, 3]", "recipe.invalid", "groups.body.targets.1", 7),
        ("targets: [Linear]", "targets: [{}]", "recipe.invalid", "groups.body.targets.0", 7),
        ("targets: [Linear]", "targets: [Embedding]", "recipe.pattern", "groups.body.targets.0", 7),
        ("targets: [Linear]", "targets: ['re:(']", "recipe.pattern", "groups.body.targets.0", 7),
        ('"*.in_proj_a"', "Linear", "recipe.pattern", "ignore.2", 8),
        ('"*.in_proj_a"', "'re:'", "recipe.pattern", "ignore.2", 8),
        ('"*.in_proj_a"', "[a]", "recipe.invalid", "ignore.2", 8),
        ('"*.in_proj_a"', "{optional: true}", "recipe.invalid", "ignore.2.pattern", 8),
        ('"*.in_proj_a"', "{pattern: a, optional: 1}", "recipe.invalid", "ignore.2.optional", 8),
        ('"*.in_proj_a"', "{pattern: a, optinal: true}", "recipe.invalid", "ignore.2.optinal", 8),
        ("scheme: W4A16", "scheme: FP8_DYNAMIC", "recipe.scheme", "groups.body.scheme", 7),  # under arithmetic: float32
    ],
)
def test_one_problem(old: str, new: str, id: str, key: str, line: int) -> None:
    assert EXAMPLE.count(old) == 1
    assert refused(EXAMPLE.replace(old, new)) == [(id, key, line)]


def test_all_problems_at_once_with_the_nearest_name() -> None:
    text = SHORT.replace("Linear]", "'re:[']").replace("W4A16", "W4A61") + "ingore: []\n"
    assert refused(text) == [
        ("recipe.invalid", "ingore", 6),
        ("recipe.pattern", "groups.body.targets.0", 4),
        ("recipe.scheme", "groups.body.scheme", 5),
    ]
    with pytest.raises(UserError) as caught:
        load_text(text, "my.yaml")
    hints = {finding.data["key"]: str(finding.hint) for finding in caught.value.findings}
    assert "ignore" in hints["ingore"]
    assert "W4A16" in hints["groups.body.scheme"].split(" known")[0]
    assert all(finding.file == "my.yaml" for finding in caught.value.findings)


@pytest.mark.parametrize(
    ("text", "line"),
    [("", 1), ("# nothing\n", 1), ("- a\n", 1), ("text\n", 1), ("schema: 1\ngroups: {}\n", 2), ("schema: 1\ngroups: 3\n", 2),
     ("schema: 1\nname: x\n", 1), ("schema: 1\nschema: 1\n", 2), ("a: [\n", 2), ("schema: 1\ngroups:\n\tbody: {}\n", 3),
     ("schema: 1\ngroups:\n  body: W4A16\n", 3)],
)  # fmt: skip
def test_no_recipe(text: str, line: int) -> None:
    assert [(id, at) for id, _, at in refused(text)] == [("recipe.invalid", line)]


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_files_that_hold_no_recipe(tmp_path: Path) -> None:
    files = {
        write(tmp_path / "latin.yaml", b"schema: 1\nname: caf\xe9\n"): ("recipe.invalid", 2),
        write(tmp_path / "huge.yaml", SHORT.encode() + b"#" * MAX_BYTES): ("recipe.invalid", None),
        str(tmp_path / "absent.yaml"): ("recipe.not-found", None),
        str(tmp_path): ("recipe.not-found", None),
    }
    for file, (id, line) in files.items():
        with pytest.raises(UserError) as caught:
            load(file)
        (finding,) = caught.value.findings
        assert (finding.id, finding.data.get("line"), finding.exit_code) == (id, line, USAGE), file


def test_an_unknown_name_lists_the_built_in_ones() -> None:
    for ask in (load, builtin_text):
        with pytest.raises(UserError) as caught:
            ask("w4a61")
        (finding,) = caught.value.findings
        assert (finding.id, finding.exit_code) == ("recipe.not-found", USAGE)
        assert all(name in str(finding.hint) for name in builtin_names())


# --- overrides ---------------------------------------------------------------------------------------------


def test_overrides_replace_what_they_name() -> None:
    sets = ["groups.head.scheme=W4A16", "tie=error", "ignore=[]", "groups.body.group_size=64", "output=elsewhere"]
    sets += ["groups.gate={targets: ['re:.*gate$'], scheme: FP8_DYNAMIC}", "arithmetic=compat"]
    recipe = load_text(EXAMPLE, "my.yaml", sets)
    described = {group.name: group.scheme.describe() for group in recipe.groups}
    assert described == {
        "head": "W4A16 int4 channel symmetric",
        "body": "W4A16 int4 group 64 symmetric",
        "gate": "W8A8 fp8 channel, inputs fp8 token",
    }
    assert (recipe.tie, recipe.ignore, recipe.output) == ("error", (), "elsewhere")
    assert recipe.sets == tuple(sets)
    assert recipe.sha256 == load_text(EXAMPLE, "my.yaml").sha256


def test_the_later_override_wins_and_reaches_into_an_earlier_one() -> None:
    sets = [
        "groups.body.scheme={weights: {num_bits: 4}}",
        "groups.body.scheme.weights.num_bits=3",
        "tie=error",
        "tie=untie",
    ]
    recipe = load_text(SHORT, "my.yaml", sets)
    assert (recipe.groups[0].scheme.weights.num_bits, recipe.tie) == (3, "untie")


@pytest.mark.parametrize(
    "setting",
    ["tie", "=untie", "", "tei=untie", "groups.heda.scheme=W4A16", "groups.new=W4A16", "groups.body.shceme=W4A16",
     "groups.body.targets.0=x", "ignore.0=x", "tie.x=1", "groups.body.scheme.weights.num_bits=4", "groups..scheme=W4A16",
     "tie=[", "ignore=[a", "groups.body.scheme={weights: {num_bits: 4}}.x=1", "lm_head=W8A16"],
)  # fmt: skip
def test_overrides_that_cannot_be_applied(setting: str) -> None:
    assert refused(SHORT, setting) == [("recipe.set", setting.partition("=")[0], setting)]


@pytest.mark.parametrize(
    ("setting", "id", "key"),
    [
        ("tie=both", "recipe.invalid", "tie"),
        ("groups.body.scheme=FP8", "recipe.scheme", "groups.body.scheme"),
        ("groups.body.bits=4", "recipe.set", "groups.body.bits"),
        ("groups.body={scheme: W4A16}", "recipe.invalid", "groups.body.targets"),
        ("groups.body.targets=['re:(']", "recipe.pattern", "groups.body.targets.0"),
        ("ignore=[{pattern: a, optinal: true}]", "recipe.invalid", "ignore.0.optinal"),
        ("groups.body.observer=mse", "recipe.scheme", "groups.body.observer"),
    ],
)
def test_what_an_override_makes_wrong_is_laid_to_it(setting: str, id: str, key: str) -> None:
    assert refused(SHORT, setting) == [(id, key, setting)]


# --- what is recorded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_names())
def test_the_record_is_json_and_a_recipe_that_means_the_same(name: str) -> None:
    recipe = load(name, ["nonfinite=keep"])
    record = json.loads(json.dumps(recipe.as_dict()))
    assert (record["name"], record["set"], record["sha256"]) == (name, ["nonfinite=keep"], recipe.sha256)
    again = load_text(yaml.safe_dump(record["recipe"], sort_keys=False), "record")
    for field in ("name", "groups", "ignore", "tie", "existing", "nonfinite", "arithmetic"):
        assert getattr(again, field) == getattr(recipe, field)


# --- built-in recipes --------------------------------------------------------------------------------------

LINEAR = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.3.mlp.gate_proj",
    "model.layers.3.mlp.experts.7.down_proj",
    "model.language_model.layers.0.linear_attn.in_proj_qkv",
    "model.language_model.layers.0.linear_attn.out_proj",
    "model.layers.0.block_sparse_moe.experts.0.w1",
    "model.layers.9.self_attn.kv_a_proj_with_mqa",
    "transformer.h.0.attn.c_attn",
    "gpt_neox.layers.0.attention.dense",
    "layers.4.ffn.shared_experts.w2",
    "encoder.layer.0.attention.output.dense",
]
HEADS = ["lm_head", "language_model.lm_head", "embed_out", "transformer.output_layer", "head", "output", "score"]
LEFT_ALONE = [
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.shared_expert_gate",
    "model.layers.0.block_sparse_moe.gate",
    "model.layers.0.mlp.router",
    "model.layers.0.feed_forward.router",
    "model.layers.0.block_sparse_moe.router.layer",
    "model.layers.0.mlp.gate.wg",
    "layers.4.ffn.gate",
    "model.visual.blocks.0.attn.qkv",
    "visual.merger.mlp.0",
    "vision_tower.encoder.layers.0.self_attn.q_proj",
    "model.vision_model.patch_embedding.linear",
    "multi_modal_projector.linear_1",
    "audio_tower.layers.0.fc1",
    "mtp.fc",
    "mtp.layers.0.mlp.down_proj",
    "mtp.0.ffn.experts.3.w1",
    "model.mtp_layers.0.self_attn.q_proj",
    "model.language_model.layers.0.linear_attn.in_proj_a",
    "model.language_model.layers.0.linear_attn.in_proj_b",
    "model.layers.0.linear_attn.in_proj_ba",
]


def won_by(recipe: Recipe, module: str) -> str | None:
    """The group that takes a Linear module: ignore first, then the first group that matches."""
    if any(pattern(item.pattern).matches(module) for item in recipe.ignore):
        return None
    for group in recipe.groups:
        if "Linear" in group.targets or any(pattern(target).matches(module) for target in group.targets):
            return group.name
    return None


SCHEMES: dict[str, dict[str, str]] = {
    "lm_head-w8a16": {"head": "W8A16 int8 channel symmetric"},
    "w4a16": {"body": "W4A16 int4 group 128 symmetric"},
    "w4a16-lm_head-w8a16": {"head": "W8A16 int8 channel symmetric", "body": "W4A16 int4 group 128 symmetric"},
    "fp8-dynamic": {"body": "W8A8 fp8 channel, inputs fp8 token"},
    "fp8-block": {"body": "W8A8 fp8 block 128x128, inputs fp8 group 128"},
    "nvfp4a16": {"body": "W4A16 nvfp4 group 16"},
    "mxfp4": {"body": "W4A4 mxfp4 group 32, inputs fp4 group 32"},
}


def test_the_built_in_recipes() -> None:
    made: dict[str, Any] = {
        name: {group.name: group.scheme.describe() for group in load(name).groups} for name in builtin_names()
    }
    assert made == SCHEMES
    for name in builtin_names():
        text = builtin_text(name)
        assert text.startswith("# ")
        assert load(name).name == name
        assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_what_a_built_in_recipe_reaches(name: str) -> None:
    recipe = load(name)
    body = "body" if "body" in SCHEMES[name] else None
    assert {won_by(recipe, module) for module in LINEAR} == {body}
    assert {won_by(recipe, module) for module in LEFT_ALONE} == {None}
    head = "head" if "head" in SCHEMES[name] else None
    assert {won_by(recipe, module) for module in HEADS[:2]} == {head}
    assert head or {won_by(recipe, module) for module in HEADS} == {None}


def test_commands_in_the_recipes_comments_work() -> None:
    for name in builtin_names():
        for line in builtin_text(name).splitlines():
            _, found, setting = line.partition("#   --set ")
            if found:
                load(name, [setting.strip("'")])
