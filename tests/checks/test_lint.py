"""Every rule of the engine lint on a checkpoint that it is about and on one like it that is right."""

from __future__ import annotations

import copy
import inspect
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import headers
import pytest
from lint_models import (
    BODY,
    HEAD,
    H,
    Model,
    V,
    deepseek_v4,
    deepseek_v4_nextn,
    dense,
    draft,
    fp8_body,
    linears,
    mixture,
    packed_head,
    with_mtp,
)
from make import checkpoint, llama, llama_config
from packaging.version import Version

from ckptkit.checks import Level, Probe, Subject, lint, run
from ckptkit.checks.predicates import PREDICATES
from ckptkit.cli import main
from ckptkit.errors import Finding, UserError
from ckptkit.families.experts import MERGED, STACKED, STACKED_DENSE
from ckptkit.files.checkpoint import scan
from ckptkit.files.source import open_source

RULES = {rule.id: (found, rule) for found in map(lint.engine, lint.ENGINES) for rule in found.rules}


class Case(NamedTuple):
    """A command line, a checkpoint that the rule is about, and one that it is not about."""

    engine: str
    speculative: tuple[str, ...]
    wrong: Model
    right: Model


def cases() -> Iterator[tuple[str, Case]]:
    yield from sglang_heads()
    yield from sglang_models()
    yield from sglang_drafts()
    yield from vllm_heads()
    yield from vllm_drafts()
    yield from transformers()
    yield from llama_cpp()


def sglang_heads() -> Iterator[tuple[str, Case]]:
    packed, plain = packed_head(), dense()
    new = "sglang==0.5.23"
    gptq = dense().gptq("lm_head").having(quantization_config={"quant_method": "gptq", "bits": 4, "lm_head": True})
    yield "lint.sglang-quantized-head-dropped", Case("sglang==0.5.17", (), packed, plain)
    yield "lint.sglang-packed-head-nextn", Case(new, ("nextn",), packed, plain)
    yield "lint.sglang-qweight-head-nextn", Case("sglang==0.5.18", ("EAGLE",), gptq, plain)
    for variant in ("multi-layer-eagle", "dflash", "dflash-selector", "dflash-lilicorr", "dflash-domino", "dspark"):
        yield f"lint.sglang-packed-head-{variant}", Case(new, (variant,), packed, plain)
    yield "lint.sglang-quantized-head-token-map", Case(new, ("NEXTN",), packed, plain)
    yield "lint.sglang-packed-head-fp32", Case(new, (), packed, plain)
    fp8 = dense().fp8("lm_head").declared(HEAD, ignore=(BODY,), type="float")
    taken_over = fp8.having(architectures=["Qwen3_5ForCausalLM"])
    yield "lint.sglang-scaled-head-nextn", Case(new, ("NEXTN",), fp8, taken_over)
    by_class = dense().packed("lm_head").declared("Linear")
    yield "lint.sglang-head-not-named", Case(new, (), by_class, by_class.declared("Linear", "lm_head"))
    yield "lint.sglang-quantized-and-ignored", Case(new, (), packed.declared(HEAD, ignore=(BODY, "lm_head")), packed)
    block = dense().fp8("lm_head", block=True).declared(HEAD, ignore=(BODY,), type="float", strategy="block")
    yield "lint.sglang-block-fp8-head", Case(new, (), block, fp8)
    whole = fp8_body().fp8("lm_head", scale="weight_scale_inv", block=True)
    yield "lint.sglang-fp8-head-unscaled", Case(new, (), whole, fp8_body())
    undeclared = gptq.having(quantization_config={"quant_method": "gptq", "bits": 4})
    yield "lint.sglang-qweight-head-undeclared", Case(new, (), undeclared, gptq)
    yield "lint.sglang-asymmetric-head-rows", Case(new, (), asymmetric(V + 1), asymmetric(V))


def asymmetric(rows: int) -> Model:
    return dense(vocab=rows).packed("lm_head", zero_points=True).declared(HEAD, ignore=(BODY,), symmetric=False)


def sglang_models() -> Iterator[tuple[str, Case]]:
    new = "sglang==0.5.23"
    embedding = dense().packed("model.embed_tokens").declared("re:.*embed_tokens$", ignore=(BODY,))
    yield "lint.sglang-quantized-embedding", Case(new, (), embedding, packed_head())
    yield "lint.sglang-unmatched-linear", Case(new, (), packed_head().declared(HEAD), packed_head())
    odd, possible, fitting = shaped(H + 64, H + 64), shaped(H, H + 64), shaped(H, H)
    yield "lint.sglang-wna16-shape", Case(new, (), odd, possible)
    yield "lint.sglang-wna16-minimum", Case(new, (), possible, fitting)
    yield "lint.sglang-gpt-oss-experts", gpt_oss(new)
    drafting = packed_head("MiMoForCausalLM").plus(model__mtp_layers__0__mlp__down_proj__weight=("BF16", (H, H)))
    none = drafting.minus("model.mtp_layers.")
    yield "lint.sglang-mimo-mtp-dense", Case("sglang==0.5.17", ("NEXTN",), drafting, none)
    yield "lint.sglang-missing-tensors", Case(new, (), dense().minus("model.layers.1."), dense())


def gpt_oss(engine: str) -> Case:
    """Experts one by one in gpt-oss, and in a model of which engines load them so."""
    return Case(engine, (), mixture("int4").having(architectures=["GptOssForCausalLM"]), mixture("int4"))


def shaped(outputs: int, inputs: int) -> Model:
    """A model with one packed matrix, [outputs, inputs]."""
    module = "model.layers.0.self_attn.o_proj"
    model = dense().instead(module, {"weight": ("BF16", (outputs, inputs))}).packed(module)
    return model.declared(
        rf"re:^{module}$", ignore=(r"re:.*\.[qkv]_proj$", r"re:.*\.mlp\..*", "model.layers.1.self_attn.o_proj")
    )


def sglang_drafts() -> Iterator[tuple[str, Case]]:
    new = "sglang==0.5.23"
    dspark, nextn = deepseek_v4(), deepseek_v4_nextn()
    yield "lint.sglang-nextn-on-dspark", Case(new, ("NEXTN",), dspark, nextn)
    yield "lint.sglang-dspark-on-nextn", Case(new, ("DSPARK",), nextn, dspark)
    yield "lint.sglang-nextn-without-mtp", Case(new, ("NEXTN",), dense(), with_mtp(dense()))
    yield "lint.sglang-dspark-metadata-only", Case(new, ("DSPARK",), dspark.minus("mtp."), dspark)
    yield "lint.sglang-dspark-stages", Case(new, ("DSPARK",), dspark.having(dspark_target_layer_ids=[40, 41]), dspark)
    yield "lint.sglang-dspark-taps-absent", Case(new, ("DSPARK",), dspark.having(dspark_target_layer_ids=None), dspark)
    named = dspark.having(architectures=["DSparkDraftModel"])
    yield "lint.sglang-dspark-architecture", Case(new, (), named, dspark)
    small, whole = draft("Qwen3DSparkModel", d2t=V // 2), draft("Qwen3DSparkModel")
    yield "lint.sglang-draft-vocabulary", Case(new, (), small, whole)
    listed = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}
    mtp = with_mtp(fp8_body())
    yield "lint.sglang-dense-draft", Case(new, ("NEXTN",), mtp, mtp.having(quantization_config=listed))


def vllm_heads() -> Iterator[tuple[str, Case]]:
    packed, new = packed_head(), "vllm==0.33"
    by_class = dense().packed("lm_head").declared("Linear")
    yield "lint.vllm-head-not-named", Case(new, (), by_class, by_class.declared("Linear", "lm_head"))
    yield "lint.vllm-quantized-and-ignored", Case(new, (), packed.declared(HEAD, ignore=("lm_head",)), packed)
    exact = packed.declared("lm_head", ignore=(BODY,))
    yield "lint.vllm-head-target-as-draft", Case("vllm==0.26", ("draft_model",), exact, packed)
    mimo, other = packed_head("MiMoForCausalLM"), packed_head("Qwen3_5ForCausalLM")
    yield "lint.vllm-mtp-packed-head", Case("vllm==0.26", ("mtp",), mimo, other)
    yield "lint.vllm-packed-head-eagle3", Case("vllm==0.26", ("eagle3",), packed, dense())
    drafting = packed_head("MiMoForCausalLM").plus(model__mtp_layers__0__mlp__down_proj__weight=("BF16", (H, H)))
    none = drafting.minus("model.mtp_layers.")
    yield "lint.vllm-mimo-mtp-dense", Case("vllm==0.26", ("mtp",), drafting, none)
    channel = dense().fp8("lm_head").declared(HEAD, ignore=(BODY,), type="float")
    block = dense().fp8("lm_head", block=True).declared(HEAD, ignore=(BODY,), type="float", strategy="block")
    yield "lint.vllm-block-fp8-head", Case(new, (), block, channel)
    yield (
        "lint.vllm-fp8-head",
        Case(new, (), fp8_body().fp8("lm_head", scale="weight_scale_inv", block=True), fp8_body()),
    )
    yield "lint.vllm-asymmetric-head-rows", Case(new, (), asymmetric(V + 1), asymmetric(V))
    yield "lint.vllm-missing-tensors", Case(new, (), packed.minus("lm_head.weight_scale"), packed)
    embedding = dense().packed("model.embed_tokens")
    named = embedding.declared("re:.*embed_tokens$", ignore=(BODY,))
    yield "lint.vllm-embedding-not-named", Case(new, (), embedding.declared("Linear"), named)
    fp8 = dense().fp8("model.embed_tokens").declared("re:.*embed_tokens$", ignore=(BODY,), type="float")
    yield "lint.vllm-embedding-format", Case(new, (), fp8, named)
    yield "lint.vllm-gpt-oss-experts", gpt_oss(new)
    yield "lint.vllm-embedding-architecture", Case(new, (), named.having(architectures=["MixtralForCausalLM"]), named)


def vllm_drafts() -> Iterator[tuple[str, Case]]:
    new, dspark, nextn = "vllm==0.33", deepseek_v4(), deepseek_v4_nextn()
    yield "lint.vllm-mtp-on-dspark", Case(new, ("mtp",), dspark, nextn)
    yield "lint.vllm-dspark-on-nextn", Case(new, ("dspark",), nextn, dspark)
    two = deepseek_v4(stages=2)
    yield "lint.vllm-dspark-stages", Case(new, ("dspark",), two, two.having(n_mtp_layers=2))
    other = draft("DSparkDraftModel", model_type="llama")
    yield "lint.vllm-dspark-architecture", Case(new, (), other, draft("DSparkDraftModel"))
    qwen = draft("DSparkDraftModel")
    yield "lint.vllm-dspark-architecture-qwen3", Case("vllm==0.26", (), qwen, draft("Qwen3DSparkModel"))
    own = dspark.plus(mtp__0__embed__weight=("BF16", (V, H)))
    yield "lint.vllm-dspark-own-vocabulary", Case(new, ("dspark",), own, dspark)
    yield "lint.vllm-dspark-draft-vocabulary", Case(new, (), dspark.plus(d2t=("I64", (V // 2,))), dspark)
    alone = dspark.minus("layers.", "embed.", "head.", "norm.")
    yield "lint.vllm-dspark-dense-draft", Case(new, (), alone, dspark)
    mtp = with_mtp(fp8_body())
    listed = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}
    yield "lint.vllm-dense-draft", Case(new, ("mtp",), mtp, mtp.having(quantization_config=listed))
    eagle = "LlamaForCausalLMEagle3"
    yield "lint.vllm-eagle3-identity-map", Case(new, (), draft(eagle, d2t=V), draft(eagle, d2t=V // 2))


def transformers() -> Iterator[tuple[str, Case]]:
    name, packed = "transformers==5.17.0", packed_head()
    yield "lint.transformers-missing-tensors", Case(name, (), dense().minus("model.layers.0."), dense())
    ignored = packed.declared(HEAD, ignore=(BODY, "re:lm_head"))
    yield "lint.transformers-quantized-and-ignored", Case(name, (), ignored, packed)
    embedding = dense().packed("model.embed_tokens")
    named = embedding.declared("model.embed_tokens", ignore=(BODY,))
    yield "lint.transformers-embedding-not-named", Case(name, (), embedding.declared("Linear"), named)
    yield "lint.transformers-tied-quantized-head", Case(name, (), packed.having(tie_word_embeddings=True), packed)
    mtp = with_mtp(dense("Qwen3NextForCausalLM"))
    yield "lint.transformers-mtp-left-out", Case(name, ("mtp",), mtp, mtp.having(architectures=["Glm4MoeForCausalLM"]))
    yield from transformers_experts()
    fp4 = dense().nvfp4("lm_head").declared(HEAD, ignore=(BODY,), num_bits=4, type="float", strategy="tensor_group")
    half = fp4.having(torch_dtype="float16")
    yield "lint.transformers-bfloat16-only", Case(name, (), half, fp4.having(torch_dtype="bfloat16"))
    tower = {"visual__blocks__0__attn__proj__weight": ("BF16", (H, H))}
    vision = packed_head("Qwen2_5_VLForConditionalGeneration").plus(**tower).having(model_type="qwen2_5_vl")
    exact, open_ = (vision.declared("Linear", HEAD, ignore=(BODY, f"re:{start}visual.*")) for start in ("", ".*"))
    yield "lint.transformers-renamed", Case(name, (), exact, open_)


def transformers_experts() -> Iterator[tuple[str, Case]]:
    name, good = "transformers==5.17.0", mixture("int4")
    yield "lint.transformers-experts-dense", Case(name, (), mixture("int4", "dense"), good)
    yield "lint.transformers-experts-form", Case(name, (), mixture("fp8-block"), mixture("fp8"))
    yield "lint.transformers-experts-scale", Case(name, (), mixture("nvfp4"), good)
    yield "lint.transformers-experts-group", Case(name, (), mixture("int8", "int4"), good)
    yield "lint.transformers-experts-apart", Case(name, (), mixture("int4", model_type="gpt_oss"), good)
    stacked = {"model__layers__0__feed_forward__experts__gate_up_proj": ("BF16", (2, H, 2 * H))}
    llama4 = packed_head("Llama4ForCausalLM").having(model_type="llama4_text")
    yield "lint.transformers-experts-stacked", Case(name, (), llama4.plus(**stacked), llama4)


def llama_cpp() -> Iterator[tuple[str, Case]]:
    name = "llama.cpp==b11434"
    grouped = packed_head().declared(HEAD, ignore=(BODY,), strategy="group", group_size=128)
    table = grouped.config["quantization_config"]
    two = {**table, "config_groups": {"a": table["config_groups"]["group_0"], "b": {"targets": ["x"], "weights": {}}}}
    yield "lint.llamacpp-several-groups", Case(name, (), grouped.having(quantization_config=two), grouped)
    yield "lint.llamacpp-packed-channel", Case(name, (), packed_head(), grouped)
    mxfp4 = grouped.having(quantization_config={**table, "format": "mxfp4-pack-quantized"})
    yield "lint.llamacpp-format", Case(name, (), mxfp4, grouped)
    awq = dense().having(quantization_config={"quant_method": "awq"})
    yield "lint.llamacpp-method", Case(name, (), awq, fp8_body())


CASES = dict(cases())


def probe(id: str) -> Probe:
    return next(found for found in lint.PROBES if found.ids == (id,))


def findings(id: str, subject: Subject) -> list[Finding]:
    """What the probe of a rule finds; it must be fit to run."""
    assert probe(id).unfit(subject) is None
    return list(probe(id).run(subject).findings)


def everything(subject: Subject) -> list[Finding]:
    return [finding for found in lint.PROBES if not found.unfit(subject) for finding in found.run(subject).findings]


# --- rules -------------------------------------------------------------------------------------------------


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("id", CASES)
def test_a_rule_finds_what_it_is_about(id: str, tmp_path: Path) -> None:
    engine, speculative, wrong, _ = CASES[id]
    subject = wrong.subject(tmp_path, engine, *speculative)
    (finding,) = findings(id, subject)
    assert (finding.id, finding.severity) == (id, RULES[id][1].severity)
    assert finding.tensor is None or finding.tensor in subject.checkpoint.tensors
    assert finding.file in {None, "config.json", "model.safetensors"}
    assert finding.data["engine"] == engine.partition("==")[0]


@pytest.mark.parametrize("id", CASES)
def test_a_rule_leaves_alone_what_is_right(id: str, tmp_path: Path) -> None:
    engine, speculative, _, right = CASES[id]
    assert findings(id, right.subject(tmp_path, engine, *speculative)) == []


@pytest.mark.parametrize("id", CASES)
def test_a_rule_is_unfit_without_its_engine(id: str, tmp_path: Path) -> None:
    engine, speculative, wrong, _ = CASES[id]
    other = next(name for name in lint.ENGINES if name != engine.partition("==")[0])
    assert probe(id).unfit(wrong.subject(tmp_path / "none")) == "no --engine"
    assert probe(id).unfit(wrong.subject(tmp_path / "other", other))
    if speculative:
        assert probe(id).unfit(wrong.subject(tmp_path / "plain", engine))


def test_versions_decide_which_rule_applies(tmp_path: Path) -> None:
    model = packed_head()
    before, after = model.subject(tmp_path / "a", "sglang==0.5.18"), model.subject(tmp_path / "b", "sglang==0.5.19")
    assert "lint.sglang-quantized-head-dropped" in {finding.id for finding in everything(before)}
    assert probe("lint.sglang-quantized-head-dropped").unfit(after)
    qwen = draft("DSparkDraftModel")
    assert everything(qwen.subject(tmp_path / "c", "vllm==0.28"))
    assert everything(qwen.subject(tmp_path / "d", "vllm==0.29")) == []


def test_shapes_count_what_engines_fuse(tmp_path: Path) -> None:
    """q, k and v have 32 rows each: 96 together do not divide by 64, with 64 rows of v 128 do."""

    def model(rows_of_v: int) -> Model:
        layer = "model.layers.0.self_attn"
        parts = {"q_proj": 32, "k_proj": 32, "v_proj": rows_of_v}
        found = dense(layers=1)
        for part, rows in parts.items():
            found = found.instead(f"{layer}.{part}", {"weight": ("BF16", (rows, H))})
        return found.packed(*(f"{layer}.{part}" for part in parts)).declared("Linear")

    id = "lint.sglang-wna16-shape"
    (finding,) = findings(id, model(32).subject(tmp_path / "odd", "sglang"))
    assert finding.tensor == "model.layers.0.self_attn.q_proj.weight_packed"
    assert findings(id, model(64).subject(tmp_path / "even", "sglang")) == []


def test_a_missing_head_and_a_missing_layer_are_missed(tmp_path: Path) -> None:
    id, model = "lint.vllm-missing-tensors", packed_head()
    for number, broken in enumerate((model.minus("lm_head."), model.minus("model.layers.1."))):
        assert findings(id, broken.subject(tmp_path / str(number), "vllm==0.26"))
    tied = model.minus("lm_head.").having(tie_word_embeddings=True)
    assert findings(id, tied.subject(tmp_path / "tied", "vllm==0.26")) == []


@pytest.mark.parametrize(
    ("stored", "id"),
    [
        (("zeros",), "lint.transformers-experts-form"),
        (("int8-plain",), "lint.transformers-experts-form"),
        (("fp8-block",), "lint.transformers-experts-form"),
        (("dense",), "lint.transformers-experts-dense"),
        (("fp8", "int4"), "lint.transformers-experts-group"),
        (("nvfp4",), "lint.transformers-experts-scale"),
        (("int8",), None),
        (("fp8",), None),
    ],
)
def test_experts_in_each_format_have_their_one_error(stored: tuple[str, ...], id: str | None, tmp_path: Path) -> None:
    found = everything(mixture(*stored).subject(tmp_path, "transformers"))
    assert [finding.id for finding in found if finding.severity == "error"] == ([id] if id else [])


def test_shared_experts_can_give_experts_their_scheme(tmp_path: Path) -> None:
    """The group that comes first counts if a regex of it has ``experts`` in it."""
    shared = "model.layers.0.mlp.shared_experts.up_proj"
    model = mixture("int4").plus(**{f"{shared}.weight".replace(".", "__"): ("BF16", (H, H))}).packed(shared)
    table = model.config["quantization_config"]
    group = {"targets": [r"re:.*shared_experts.*"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    for number, (groups, count) in enumerate(
        [({"a": group, **table["config_groups"]}, 12), ({**table["config_groups"], "z": group}, 0)]
    ):
        changed = model.having(quantization_config={**table, "config_groups": groups})
        found = findings("lint.transformers-experts-group", changed.subject(tmp_path / str(number), "transformers"))
        assert sum(finding.data["count"] for finding in found) == count


@pytest.mark.parametrize("stated", [{}, {"dtype": "float32"}, {"torch_dtype": "float16"}])
def test_the_dtype_is_the_configs_or_that_of_the_first_weight(stated: dict[str, str], tmp_path: Path) -> None:
    id = "lint.transformers-bfloat16-only"
    model = dense().nvfp4("model.layers.0.mlp.up_proj").declared("Linear", ignore=(HEAD,), num_bits=4, type="float")
    found = findings(id, model.having(**stated).subject(tmp_path, "transformers"))
    assert [finding.tensor for finding in found] == ["model.layers.0.mlp.up_proj.weight_packed"] * bool(stated)


# --- silly configs -----------------------------------------------------------------------------------------

COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_experts", "n_routed_experts", "num_local_experts",
    "num_nextn_predict_layers", "n_mtp_layers", "mtp_num_hidden_layers", "vocab_size", "draft_vocab_size",
    "hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
)  # fmt: skip


@pytest.mark.parametrize("key", COUNTS)
def test_no_check_counts_up_to_what_a_config_says(key: str, tmp_path: Path) -> None:
    """Ten million would show in memory; what is more than an index of a list can be would end in an OverflowError."""
    for number, model in enumerate((mixture("int4"), with_mtp(fp8_body()), deepseek_v4(), draft("Qwen3DSparkModel"))):
        for count in (10**7, 10**30):
            changed = model.having(**{key: count})
            subject = changed.subject(tmp_path / str(number), "vllm", "mtp", "dspark")
            others = (changed.subject(tmp_path / str(number), engine) for engine in lint.ENGINES)
            tracemalloc.start()
            try:
                run(subject, Level.STATIC)
                for other in others:
                    everything(other)
                assert tracemalloc.get_traced_memory()[1] < 50 << 20
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, ["re:x"], {"a": 5}])
@pytest.mark.parametrize("key", ["targets", "weights", "num_bits", "type", "strategy", "group_size"])
def test_silly_groups_stop_no_rule(key: str, value: object, tmp_path: Path) -> None:
    model = mixture("int8", "int4")
    table = copy.deepcopy(model.config["quantization_config"])
    group = table["config_groups"]["int8"]
    (group if key in group else group["weights"])[key] = value
    for engine in lint.ENGINES:
        assert all(
            finding.id in RULES
            for finding in everything(model.having(quantization_config=table).subject(tmp_path, engine))
        )


# --- findings ----------------------------------------------------------------------------------------------


def test_many_modules_are_one_finding(tmp_path: Path) -> None:
    model = dense()
    names = linears(model)
    subject = model.packed(*names).declared("Linear", ignore=(BODY,)).subject(tmp_path, "sglang")
    (finding,) = findings("lint.sglang-quantized-and-ignored", subject)
    assert finding.data["count"] == len(names)
    assert 1 < len(finding.data["examples"]) < len(names)


# --- good checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", lint.ENGINES)
def test_a_dense_checkpoint_has_no_error_on_any_engine(engine: str, tmp_path: Path) -> None:
    for number, algorithm in enumerate(("", *lint.engine(engine).speculative)):
        subject = dense().subject(tmp_path / str(number), engine, *filter(None, [algorithm]))
        assert [finding for finding in everything(subject) if finding.severity == "error"] == []


@pytest.mark.parametrize("fixture", ["llama-3.2-1b", "qwen3-8b-fp8", "qwen3-8b-w4a16", "mimo-7b", "gpt2", "gemma-3-4b"])
def test_published_checkpoints_have_no_finding(fixture: str, tmp_path: Path) -> None:
    folder = headers.materialize(fixture, tmp_path)
    with open_source(str(folder)) as source:
        checkpoint_, _ = scan(source)
    for engine in lint.ENGINES:
        assert everything(Subject(checkpoint_, options={"engine": engine})) == []


def test_what_quantize_makes_has_no_error(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "src", llama(), llama_config())
    out = tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--recipe", "w4a16-lm_head-w8a16", "--quiet"]) == 0
    with open_source(str(out)) as opened:
        checkpoint_, _ = scan(opened)
    for engine in ("sglang", "vllm", "transformers"):
        found = everything(Subject(checkpoint_, options={"engine": engine}))
        assert [finding.id for finding in found if finding.severity == "error"] == []


# --- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "speculative"),
    [
        ("vlm", ()),
        ("", ()),
        ("sglang==", ()),
        ("sglang==newest", ()),
        ("sglang==0.5.24", ()),
        ("sglang==0.4.9", ()),
        ("vllm==0.34", ()),
        ("transformers==4.57", ()),
        ("llama.cpp==b9999", ()),
        ("vllm", ("NEXTN",)),
    ],
)
def test_what_is_not_known_is_refused(engine: str, speculative: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        lint.choose(engine, speculative)
    assert ({finding.id for finding in raised.value.findings}, raised.value.exit_code) == ({"usage.engine"}, 2)
    assert all(finding.hint for finding in raised.value.findings)


@pytest.mark.parametrize(
    ("engine", "version"),
    [
        ("sglang", "0.5.23"),
        ("vllm", "0.33"),
        ("vllm==0.26", "0.26.0"),
        ("transformers", "5.17"),
        ("llama.cpp", "11434"),
    ],
)
def test_without_a_version_the_newest_known_is_meant(engine: str, version: str) -> None:
    assert lint.choose(engine).version == Version(version)


def test_algorithms_are_spelled_as_the_engine_does() -> None:
    assert lint.choose("sglang", ("multi-layer-eagle", "dspark")).speculative == {"MULTI_LAYER_EAGLE", "DSPARK"}


# --- the data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", RULES)
def test_a_rule_is_well_formed(id: str) -> None:
    found, rule = RULES[id]
    assert re.fullmatch(r"lint\.(sglang|vllm|transformers|llamacpp)-[a-z0-9-]+", id)
    assert rule.severity in {"error", "warning"}
    assert re.match(r"(measured|read|reported) (on|in) ", rule.source)
    assert set(rule.speculative) <= set(found.speculative)
    assert rule.when
    for name, arguments in rule.when.items():
        inspect.signature(PREDICATES[name]).bind(None, **arguments)


def test_ids_are_unique_and_have_pages() -> None:
    assert len(lint.PROBES) == len(RULES)
    assert [page.id for page in lint.PAGES] == list(RULES)
    assert all(page.meaning and page.example and page.repair for page in lint.PAGES)


def test_layouts_of_experts_are_those_of_the_rules() -> None:
    """`unpack` says of the same models that they load experts in a layout, or fill them with random numbers."""
    patterns = {
        rule.id: rule.when["models"]["any_of"] for rule in lint.engine("transformers").rules if "models" in rule.when
    }
    assert list(MERGED) == patterns["lint.transformers-experts-dense"]
    assert list(STACKED) == patterns["lint.transformers-experts-apart"]
    assert list(STACKED_DENSE) == patterns["lint.transformers-experts-stacked"]
