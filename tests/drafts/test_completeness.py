"""Whole drafts pass; each that is broken in one place is told by the tensor's name. Names are those of made checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dsv4 import Dims, configured, make
from headers import config, specs

from ckptkit.drafts.completeness import check, stored_form
from ckptkit.drafts.identify import Draft, Kind, Layout, disagreements, facts, identify
from ckptkit.drafts.layouts import from_hf, to_hf
from ckptkit.drafts.tables import Form, dspark, form_of
from ckptkit.errors import Finding
from ckptkit.files.header import nbytes
from ckptkit.plan import Ref

Shapes = dict[str, tuple[str, tuple[int, ...]]]
TINY = Dims(hidden=128, experts=1, draft_experts=1, layers=3, vocab=64, rank=32, per_token=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "official": {}, "bf16": {"form": "bf16"}, "fp8": {"form": "fp8"}, "v41": {"v41": True},
}  # fmt: skip
OPTIONAL = (".gate.bias_vl",)


def refs(shapes: Shapes) -> dict[str, Ref]:
    return {name: Ref("f", name, dtype, shape, 0, nbytes(dtype, shape)) for name, (dtype, shape) in shapes.items()}


def found_in(shapes: Shapes, keys: dict[str, Any]) -> list[Finding]:
    draft = identify(refs(shapes), keys)
    form = stored_form(draft.tensors, form_of(keys))
    return [*disagreements(draft, keys), *check(draft, dspark(keys, draft.stages, form))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Shapes, dict[str, Any]]]:
    known: dict[str, tuple[Shapes, dict[str, Any]]] = {}

    def make_once(variant: str) -> tuple[Shapes, dict[str, Any]]:
        if variant not in known:
            one = make(tmp_path_factory.mktemp(variant), TINY, **VARIANTS[variant])
            known[variant] = one.shapes, one.config
        return known[variant]

    return make_once


def names(variant: str) -> list[str]:
    """The draft's names of a variant, which the tests are parametrized with; written down again, not taken from it."""
    return list(_names(variant))


def _names(variant: str) -> Iterator[str]:
    ends = ["weight"] if variant == "bf16" else ["weight", "scale"]
    linears = ["attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b"]
    linears += [f"ffn.{of}.w{n}" for of in ("shared_experts", "experts.0") for n in (1, 2, 3)]
    plain = ["attn.attn_sink", "attn.q_norm.weight", "attn.kv_norm.weight", "attn_norm.weight", "ffn_norm.weight"]
    plain += ["ffn.gate.weight", "ffn.gate.bias"] + [
        f"hc_{a}_{b}" for a in ("attn", "ffn") for b in ("fn", "base", "scale")
    ]
    for stage in range(3):
        yield from (f"mtp.{stage}.{linear}.{end}" for linear in linears for end in ends)
        yield from (f"mtp.{stage}.{name}" for name in plain)
    yield from (f"mtp.0.main_proj.{end}" for end in ends)
    yield "mtp.0.main_norm.weight"
    heads = ["embed", "head"] if variant == "v41" else ["markov_w1", "markov_w2"]
    yield from (
        f"mtp.2.{name}.weight" for name in ("norm", *(f"markov_head.{head}" for head in heads), "confidence_head.proj")
    )
    if variant != "v41":
        yield from (f"mtp.2.hc_head_{name}" for name in ("fn", "base", "scale"))


CASES = [(variant, name) for variant in VARIANTS for name in names(variant)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_draft_is_told_and_passes(variant: str, made: Any) -> None:
    shapes, keys = made(variant)
    draft = identify(refs(shapes), keys)
    assert draft.kind is (Kind.DSPARK_V41 if variant == "v41" else Kind.DSPARK_V4)
    assert (draft.layout, draft.stages) == (Layout.SERVING, 3)
    assert draft.tensors.keys() - {name for name in draft.tensors if name.endswith(OPTIONAL)} == set(names(variant))
    assert not found_in(shapes, keys)


@pytest.mark.parametrize("fixture", ["deepseek-v4-flash-dspark", "deepseek-v4-pro-dspark"])
def test_the_published_drafts_pass(fixture: str) -> None:
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in specs(fixture)}
    assert not found_in(shapes, config(fixture))


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_each_tensor_left_out_is_named(variant: str, name: str, made: Any) -> None:
    shapes, keys = made(variant)
    found = found_in({other: shape for other, shape in shapes.items() if other != name}, keys)
    id = "confidence-head-missing" if ".confidence_head." in name else "draft.missing"
    assert (id, name) in [(finding.id, finding.tensor) for finding in found]
    assert all(finding.severity == "error" for finding in found)


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_each_tensor_renamed_is_missed_and_its_new_name_refused(variant: str, name: str, made: Any) -> None:
    shapes, keys = made(variant)
    stage, _, rest = name.removeprefix("mtp.").partition(".")
    other = f"mtp.{stage}.x{rest}"
    found = found_in({other if n == name else n: shape for n, shape in shapes.items()}, keys)
    told = {(finding.id, finding.tensor) for finding in found}
    assert ("draft.unknown", other) in told
    assert name in {finding.tensor for finding in found}


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_each_tensor_of_another_shape_is_named(variant: str, name: str, made: Any) -> None:
    shapes, keys = made(variant)
    dtype, shape = shapes[name]
    found = found_in(shapes | {name: (dtype, (*shape[:-1], shape[-1] + 1))}, keys)
    assert ("draft.shape", name) in [(finding.id, finding.tensor) for finding in found]


@pytest.mark.parametrize(("variant", "name"), CASES[:: len(CASES) // 60])
def test_each_tensor_of_another_dtype_is_named(variant: str, name: str, made: Any) -> None:
    shapes, keys = made(variant)
    found = found_in(shapes | {name: ("I64", shapes[name][1])}, keys)
    assert [(finding.id, finding.tensor) for finding in found] == [("draft.dtype", name)]


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("mtp.0.embed.weight", "draft.vendor-extra"),
        ("mtp.2.head.weight", "draft.vendor-extra"),
        ("mtp.1.attn.compressor.ape", "draft.target-tensor"),
        ("mtp.0.attn.indexer.wq_b.weight", "draft.target-tensor"),
        ("mtp.0.ffn.gate.tid2eid", "draft.target-tensor"),
        ("mtp.0.e_proj.weight", "draft.mixed"),
        ("mtp.0.enorm.weight", "draft.mixed"),
        ("mtp.1.main_proj.weight", "draft.misplaced"),
        ("mtp.0.norm.weight", "draft.misplaced"),
        ("mtp.1.hc_head_fn", "draft.misplaced"),
        ("mtp.1.markov_head.markov_w1.weight", "draft.misplaced"),
        ("mtp.0.ffn.experts.1.w1.weight", "draft.unknown"),
        ("mtp.70.attn.wq_a.weight", "draft.unknown"),
        ("mtp.x.norm.weight", "draft.unknown"),
        ("mtp.norm.weight", "draft.unknown"),
        ("mtp.0.attn.wq_a.bias", "draft.unknown"),
        ("mtp.0.attn.wq_a.weight_scale_inv", "draft.unknown"),
    ],
)
def test_a_tensor_too_much_is_told_by_what_it_is(name: str, id: str, made: Any) -> None:
    shapes, keys = made("official")
    found = found_in(shapes | {name: ("BF16", (8, 8))}, keys)
    assert [(finding.id, finding.tensor) for finding in found] == [(id, name)]
    assert all((finding.severity == "warning") == (id == "draft.vendor-extra") for finding in found)


def test_heads_at_the_first_stage_count_as_those_of_the_last(made: Any) -> None:
    shapes, keys = made("official")
    heads = ("markov_head.", "confidence_head.")
    at_first = {n.replace("mtp.2.", "mtp.0.") if any(h in n for h in heads) else n: s for n, s in shapes.items()}
    assert not found_in(at_first, keys)
    both = at_first | {"mtp.2.confidence_head.proj.weight": shapes["mtp.2.confidence_head.proj.weight"]}
    assert [f.tensor for f in found_in(both, keys)] == ["mtp.0.confidence_head.proj.weight"]


def test_a_stage_without_tensors_is_one_finding(made: Any) -> None:
    shapes, keys = made("official")
    found = found_in({name: shape for name, shape in shapes.items() if not name.startswith("mtp.1.")}, keys)
    assert [(finding.id, finding.tensor) for finding in found] == [("draft.stage-missing", "mtp.1")]


def test_unknown_names_of_the_hf_layout_are_not_passed_over(made: Any) -> None:
    shapes, keys = made("bf16")
    native = {}
    for name, (dtype, shape) in shapes.items():
        place = to_hf(name)
        if name.startswith("mtp.") and place:
            members = 2 if place.name.endswith("gate_up_proj") else 1
            native[place.name] = dtype, (1, shape[0] * members, *shape[1:]) if place.order else shape
    assert not found_in(native, keys)
    found = found_in(native | {"layers.0.self_attn.extra.weight": ("BF16", (4, 4))}, keys)
    assert [(f.id, f.tensor) for f in found] == [("draft.unknown", "layers.0.self_attn.extra.weight")]


# --- what kind it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "kind"), [("nextn", Kind.NEXTN), ("declared", Kind.DECLARED), ("none", Kind.NONE)])
def test_others_are_told_apart(draft: str, kind: Kind, tmp_path: Path) -> None:
    made = make(tmp_path / "made", TINY, draft=draft)
    assert identify(refs(made.shapes), made.config).kind is kind


@pytest.mark.parametrize("fixture", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_published_bases_hold_nextn(fixture: str) -> None:
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in specs(fixture)}
    assert identify(refs(shapes), config(fixture)).kind is Kind.NEXTN


def test_no_single_telling_tensor_decides(made: Any) -> None:
    """Without its projection a DSpark draft is not taken for a NextN layer."""
    shapes, keys = made("official")
    for name in [name for name in shapes if name.startswith(("mtp.0.main_", "mtp.2."))]:
        assert identify(refs({n: s for n, s in shapes.items() if n != name}), keys).kind is Kind.DSPARK_V4


# --- tensors against config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"dspark_target_layer_ids": [1, 2]}, {"stages", "number of taps"}),
        ({"dspark_target_layer_ids": [1, 2, 3]}, {"taps"}),
        ({"n_mtp_layers": 2}, {"stages"}),
        ({"dspark_block_size": None}, {"block size"}),
        ({"dspark_block_size": 0}, {"block size"}),
        ({"dspark_noise_token_id": 64}, {"noise token"}),
        ({"dspark_noise_token_id": None}, {"noise token"}),
        ({"dspark_markov_rank": 16}, {"rank"}),
        ({"dflash_config": {"mask_token_id": 5}}, {"noise token"}),
        ({"dflash_config": {"target_layer_ids": [0, 2, 1]}}, {"taps"}),
        ({"model_type": "deepseek_v41"}, {"kind"}),
        ({}, set()),
    ],
)
def test_disagreements_are_named(change: dict[str, Any], what: set[str], made: Any) -> None:
    shapes, keys = made("official")
    keys = {key: value for key, value in (keys | change).items() if value is not None}
    found = list(disagreements(identify(refs(shapes), keys), keys))
    assert {finding.data["what"] for finding in found} == what
    assert {finding.id for finding in found} <= {"draft.config"}


def test_facts_say_who_says_what(made: Any) -> None:
    shapes, keys = made("official")
    told = {fact.what: dict(fact.said) for fact in facts(identify(refs(shapes), keys), keys)}
    assert told["stages"] == {"tensors": 3, "number of dspark_target_layer_ids": 3}
    assert set(told["rank"].values()) == {32}
    assert json.dumps(told)


def test_the_stored_form_wins_over_the_declared_one(made: Any) -> None:
    shapes, keys = made("bf16")
    assert stored_form(refs(shapes), Form("fp4", "fp8")) == Form("bf16", "bf16")
    shapes, keys = made("fp8")
    assert stored_form(refs(shapes), form_of(configured(TINY))) == form_of(keys)


# --- names -------------------------------------------------------------------------------------------------


def test_every_tensor_has_one_place_in_the_hf_layout(made: Any) -> None:
    """There and back, by names and shapes: what the stacks hold is what was put into them."""
    shapes, keys = made("bf16")
    whole = refs({name: shape for name, shape in shapes.items() if name.startswith("mtp.")})
    places = {name: to_hf(name) for name in whole}
    assert all(places.values())
    assert len(set(places.values())) == len(places)
    native: dict[str, Ref] = {}
    for name, place in places.items():
        assert place is not None
        ref = whole[name]
        if place.order is not None:
            rows, columns = ref.shape
            members = 2 if place.name.endswith("gate_up_proj") else 1
            shape = (1, rows * members, columns)
            ref = Ref("f", place.name, "BF16", shape, 0, nbytes("BF16", shape))
        native[place.name] = ref._replace(name=place.name)
    back = from_hf(native)
    assert back.keys() == whole.keys()
    assert all(back[name].shape == ref.shape for name, ref in whole.items())
    w1, w3 = (back[f"mtp.0.ffn.experts.0.w{n}.weight"] for n in (1, 3))
    assert (w1.start, w1.stop, w3.start) == (0, w3.start, w1.nbytes)
    drafted: Draft = identify(native, keys)
    assert (drafted.layout, drafted.stages, drafted.kind) == (Layout.HF, 3, Kind.DSPARK_V4)
