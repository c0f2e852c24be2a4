"""The transformers lint against transformers: an error where, and only where, a checkpoint is not loaded as it is meant.

Small models with random weights are quantized, loaded by transformers and asked once; a missing or an unexpected key,
an exception, or a weight far from the source's is a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

from ckptkit.checks import Subject, lint
from ckptkit.cli import main
from ckptkit.files.checkpoint import scan
from ckptkit.files.source import open_source

transformers = pytest.importorskip("transformers")
ENGINE = lint.engine("transformers")
pytestmark = pytest.mark.skipif(
    not ENGINE.versions.contains(Version(transformers.__version__)), reason="no rule is known for this version"
)


class Family(NamedTuple):
    """A model type and what its config has beside :data:`SIZES`; how its experts lie if they are stacked on disk."""

    model_type: str
    config: Mapping[str, Any]
    experts: str | None = None


SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
ROUTED = {**MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
LLAMA4 = {"intermediate_size": 128, "intermediate_size_mlp": 256, "num_local_experts": 4, "num_experts_per_tok": 1}
FAMILIES = {
    "llama": Family("llama", {}),
    "llama-tied": Family("llama", {"tie_word_embeddings": True}),
    "qwen3": Family("qwen3", {}),
    "gemma3": Family("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 64}),
    "phi3": Family("phi3", {"pad_token_id": 0}),
    "qwen3_5": Family("qwen3_5_text", LINEAR_ATTENTION),
    "qwen3_moe": Family("qwen3_moe", {**MIXTURE, "num_experts": 4}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": Family("glm4_moe", {**ROUTED, "first_k_dense_replace": 1}),
    "deepseek_v3": Family(
        "deepseek_v3", {**ROUTED, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **ROUTED,
            "layers_block_type": ["attention", "moe"],
            "moe_shared_expert_intermediate_size": 128,
            "moe_latent_size": None,
        },
    ),
    "gpt_oss": Family("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}, "columns"),
    "llama4": Family(
        "llama4_text",
        {**LLAMA4, "moe_layers": [1], "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1]},
        "columns",
    ),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

HEAD = "{targets: ['re:.*lm_head$'], scheme: W8A16, strategy: channel}"
IGNORE = "[{pattern: 're:.*lm_head$', optional: true}, {pattern: 're:.*(\\.gate|router|in_proj_[ab]|in_proj_ba)$', optional: true}]"
SCHEMES = (
    "W4A16", "W8A16", "W4A16_ASYM", "FP8_BLOCK", "FP8_DYNAMIC", "NVFP4A16", "MXFP4", "MXFP8", "W8A8"
)  # fmt: skip
# Groups as a recipe has them, the first that reaches a module wins; the config has them by name.
GROUPS = {
    "one layer in 8 bits": {"a": "{targets: ['re:.*layers.0.*'], scheme: W8A16}", "b": "W4A16"},
    "one layer in smaller groups": {"a": "{targets: ['re:.*layers.0.*'], scheme: W4A16, group_size: 32}", "b": "W4A16"},
    "shared experts first": {"a": "{targets: ['re:.*shared_experts.*'], scheme: W8A16}", "b": "W4A16"},
    "shared experts last": {"z": "{targets: ['re:.*shared_experts.*'], scheme: W8A16}", "b": "W4A16"},
    "attention otherwise": {"z": "{targets: ['re:.*self_attn.*'], scheme: FP8_BLOCK}", "b": "W4A16"},
    "one layer's experts": {"a": "{targets: ['re:.*layers.1.*experts.*'], scheme: W4A16}"},
    "experts in MXFP4": {"a": "{targets: ['re:.*experts.*'], scheme: MXFP4}"},
    "attention alone": {"a": "{targets: ['re:.*self_attn.*'], scheme: W4A16}"},
    "head in NVFP4": {"a": "{targets: ['re:.*lm_head'], scheme: NVFP4A16}"},
}


class Source(NamedTuple):
    """A checkpoint of random weights, as transformers saves it, and its tensors by the names that they have there."""

    folder: Path
    weights: Mapping[str, torch.Tensor]


Make = Callable[[str, str], Source]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Sources by family and dtype, made once."""
    made: dict[tuple[str, str], Source] = {}

    def make(family: str, dtype: str) -> Source:
        if (family, dtype) not in made:
            made[family, dtype] = _random(FAMILIES[family], DTYPES[dtype], tmp_path_factory.mktemp("source"))
        return made[family, dtype]

    return make


def _random(family: Family, dtype: torch.dtype, folder: Path) -> Source:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family.model_type](**{**SIZES, **family.config, "dtype": dtype})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.05)
    model.save_pretrained(folder)
    return Source(folder, {name: value.float() for name, value in model.state_dict().items()})


def quantized(source: Source, out: Path, groups: Mapping[str, str]) -> Path:
    recipe = out.with_suffix(".yaml")
    named = "".join(f"  {name}: {text}\n" for name, text in groups.items())
    tie = "tie: untie\n" if "head" in groups and _config(source.folder)["tie_word_embeddings"] else ""
    ignore = f"ignore: {IGNORE}\n" if "[Linear]" in named else ""
    recipe.write_text(f"schema: 1\nname: cell\ngroups:\n{named}{ignore}{tie}")
    assert main(["quantize", str(source.folder), str(out), "--recipe", str(recipe), "--quiet"]) == 0
    return out


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))


def fault(folder: Path, source: Source) -> str | None:
    """What transformers does not take as it is meant, if anything."""
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        if any(loaded.values()):
            return str({kind: sorted(map(str, names))[:2] for kind, names in loaded.items() if names})
        with torch.no_grad():
            model(torch.arange(16)[None])
    except (RuntimeError, ValueError, AttributeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    weights = {name: value.float() for name, value in model.state_dict().items()}
    far = (name for name in source.weights.keys() & weights.keys() if _far(weights[name], source.weights[name]))
    return next((f"{name} is far from the source" for name in far), None)


def _far(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Four bits miss a random weight by 0.15 of its norm at most; codes read in another way miss it by about 1."""
    return one.shape != other.shape or not bool((one - other).norm() <= 0.3 * other.norm())


def errors(folder: Path) -> list[str]:
    """The errors of the lint."""
    with open_source(str(folder)) as opened:
        checkpoint, found = scan(opened)
    subject = Subject(checkpoint, tuple(found), options={"engine": f"transformers=={transformers.__version__}"})
    fit = (probe for probe in lint.PROBES if probe.unfit(subject) is None)
    return [finding.id for probe in fit for finding in probe.run(subject).findings if finding.severity == "error"]


def agrees(source: Source, out: Path, groups: Mapping[str, str]) -> None:
    folder = quantized(source, out, groups)
    told, wrong = errors(folder), fault(folder, source)
    assert bool(told) == bool(wrong), (told, wrong)


def body(scheme: str, experts: str | None = None) -> dict[str, str]:
    """Every Linear but the head and the routers, and stacked experts where ``experts`` says how they lie."""
    stacked = {"experts": f"{{targets: ['re:.*experts.*'], scheme: {scheme}, experts: {experts}}}"} if experts else {}
    return {**stacked, "body": f"{{targets: [Linear], scheme: {scheme}}}"}


@pytest.mark.parametrize(
    ("family", "dtype", "scheme"),
    [
        ("llama", "f16", "NVFP4A16"),
        ("llama", "bf16", "NVFP4A16"),
        ("qwen3_moe", "bf16", "NVFP4A16"),
        ("qwen3_moe", "bf16", "W4A16"),
        ("mixtral", "bf16", "FP8_BLOCK"),
        ("mixtral", "bf16", "FP8_DYNAMIC"),
    ],
)
def test_the_lint_and_transformers_agree(family: str, dtype: str, scheme: str, source: Make, tmp_path: Path) -> None:
    agrees(source(family, dtype), tmp_path / "out", body(scheme))


@pytest.mark.parametrize(("family", "count"), [("llama", 0), ("qwen3_moe", 1)])
def test_a_quantized_head_beside_dense_experts(family: str, count: int, source: Make, tmp_path: Path) -> None:
    made = quantized(source(family, "bf16"), tmp_path / "out", {"head": HEAD})
    assert errors(made) == ["lint.transformers-experts-dense"] * count
    assert bool(fault(made, source(family, "bf16"))) == bool(count)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), list(product(FAMILIES, (*SCHEMES, None))))
def test_every_family_in_every_scheme(family: str, scheme: str | None, source: Make, tmp_path: Path) -> None:
    """Without a scheme it is the head that is quantized."""
    agrees(source(family, "bf16"), tmp_path / "out", body(scheme) if scheme else {"head": HEAD})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme"), [(name, scheme) for name, scheme in product(FAMILIES, SCHEMES) if FAMILIES[name].experts]
)
def test_stacked_experts_taken_apart(family: str, scheme: str, source: Make, tmp_path: Path) -> None:
    agrees(source(family, "bf16"), tmp_path / "out", body(scheme, FAMILIES[family].experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "scheme"), list(product(("llama", "gemma3", "qwen3_moe"), ("f16", "f32"), SCHEMES))
)
def test_sources_of_other_dtypes(family: str, dtype: str, scheme: str, source: Make, tmp_path: Path) -> None:
    agrees(source(family, dtype), tmp_path / "out", body(scheme))


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "dtype"), list(product(GROUPS, ("bf16", "f16"))))
def test_several_groups(groups: str, dtype: str, source: Make, tmp_path: Path) -> None:
    texts = {name: text if "{" in text else body(text)["body"] for name, text in GROUPS[groups].items()}
    agrees(source("glm4_moe" if "shared" in groups else "qwen3_moe", dtype), tmp_path / "out", texts)


def test_the_models_that_merge_experts_are_those_of_transformers() -> None:
    from transformers import conversion_mapping

    rules = {rule.id: rule for rule in ENGINE.rules}
    globs = rules["lint.transformers-experts-dense"].when["models"]["any_of"]
    known = [re.compile(glob.replace("*", ".*")) for glob in globs]
    merging = {
        model_type
        for model_type, conversions in conversion_mapping._build_checkpoint_conversion_mapping().items()
        for conversion in conversions
        if any(re.search(r"experts\.\*\.", str(pattern)) for pattern in conversion.source_patterns)
    }
    assert len(merging) > 40
    assert [name for name in sorted(merging) if not any(glob.fullmatch(name) for glob in known)] == []
