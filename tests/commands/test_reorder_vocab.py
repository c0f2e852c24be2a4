"""``ckptkit reorder-vocab``: every format there and back, and results that nothing loads unawares."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptkit.cli import main
from tests.make import checkpoint, llama, llama_config
from tests.vocab.heads import FORMATS, WHOLE_WORDS, Format, rows_of, tensors_of

ORDER = "vocab_order.safetensors"


@pytest.fixture
def told(capsys):
    """A function that gives the ids of the errors that the last command told of."""

    def ids() -> list[str]:
        text, decoder, document = capsys.readouterr().out.strip(), json.JSONDecoder(), {}
        while text:
            document, end = decoder.raw_decode(text)
            text = text[end:].strip()
        return [finding["id"] for finding in document["findings"] if finding["severity"] == "error"]

    return ids


def made(folder: Path, format: Format, rows: int) -> Path:
    """A small Llama with a head in ``format``, in two shards."""
    tensors = llama(layers=1, vocab=rows, lm_head__weight=None)
    config = llama_config(layers=1, vocab=rows)
    if format.table:
        config["quantization_config"] = format.table
    return checkpoint(folder, [tensors, tensors_of(format, rows)], config)


def listed(folder: Path, tokens: list[int]) -> str:
    (folder / "list.txt").write_text("\n".join(map(str, tokens)))
    return str(folder / "list.txt")


def reorder(src: Path, out: Path, tokens: list[int], *options: str) -> int:
    chosen = listed(out.parent, tokens)
    return main(
        ["reorder-vocab", str(src), str(out), "--draft-vocab", chosen, *(options or ("--slices", "1")), "--json"]
    )


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("model*.safetensors")) for k, v in load_file(path).items()}


def slow_order(tokens: list[int], rows: int, slices: int) -> list[int]:
    """Row to token where slices are cut by floor, LightLLM's rule."""
    rest = [token for token in range(rows) if token not in tokens]
    order = []
    for a, b in ((rows * j // slices, rows * (j + 1) // slices) for j in range(slices)):
        lo, hi = len(tokens) * a // rows, len(tokens) * b // rows
        order += tokens[lo:hi] + rest[a - lo : b - hi]
    return order


def assert_same_files(a: Path, b: Path) -> None:
    """The same files with the same bytes, but for the manifest."""
    names = [sorted(path.name for path in folder.iterdir() if path.name != "ckptkit.json") for folder in (a, b)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_there_and_back(tmp_path, name):
    """Each row is the one that the order says, bit for bit; going back gives the source's files."""
    format, rows = FORMATS[name], 520 if name in WHOLE_WORDS else 517
    tokens = sorted(np.random.default_rng(3).choice(rows, 150, replace=False).tolist())
    src, out, back = made(tmp_path / "src", format, rows), tmp_path / "out", tmp_path / "back"
    assert reorder(src, out, tokens, "--slices", "3", "--engine", "lightllm") == 0
    before, after = loaded(src), loaded(out)
    order = slow_order(tokens, rows, 3)
    assert load_file(out / ORDER)["row_to_token"].tolist() == order
    old, new = rows_of(format, before, rows, "lm_head"), rows_of(format, after, rows, "lm_head.rows")
    for was, now in zip(old, new, strict=True):
        assert np.array_equal(now, was[order])
    assert not [key for key in after if key.startswith("lm_head.") and not key.startswith("lm_head.rows.")]
    assert {key for key in before if not key.startswith("lm_head.")} < after.keys()
    assert main(["verify", str(out), "--json"]) == 0
    assert main(["reorder-vocab", str(out), str(back), "--inverse", "--json"]) == 0
    assert_same_files(src, back)


@pytest.mark.parametrize("tokens", [[300], list(range(0, 512, 3)), list(range(512))], ids=["one", "third", "all"])
def test_logits_in_token_order_are_those_of_the_source(tmp_path, tokens):
    src, out = made(tmp_path / "src", FORMATS["f32"], 512), tmp_path / "out"
    assert reorder(src, out, tokens, "--slices", "2") == 0
    torch.manual_seed(1)
    hidden = torch.randn(7, 128)
    expected = hidden @ loaded(src)["lm_head.weight"].T
    head, order = loaded(out)["lm_head.rows.weight"], load_file(out / ORDER)
    assert torch.equal((hidden @ head.T)[:, order["token_to_row"].long()], expected)
    # Slice by slice, as devices compute it: the draft head is a view of each slice's first rows.
    facts = json.loads((out / "config.json").read_text())["vocab_order"]
    parts = [hidden @ part.T for part in head.split(facts["slice_rows"])]
    logits = torch.cat(parts, 1)[:, order["token_to_row"].long()]
    torch.testing.assert_close(logits, expected, atol=2e-6 * float(expected.abs().max()), rtol=0)
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    drafted = torch.cat([p[:, :k] for p, k in zip(parts, facts["slice_list_rows"], strict=True)], 1)
    torch.testing.assert_close(drafted, expected[:, order["list"].long()], atol=1e-4, rtol=0)
    assert order["list"].tolist() == tokens


def test_streaming_makes_the_same_files(tmp_path):
    src = made(tmp_path / "src", FORMATS["nvfp4"], 517)
    tokens = list(range(3, 500, 7))
    options = ("--slices", "3", "--engine", "sglang")
    assert reorder(src, tmp_path / "a", tokens, *options) == 0
    assert reorder(src, tmp_path / "b", tokens, *options, "--streaming") == 0
    assert_same_files(tmp_path / "a", tmp_path / "b")
    digests = [json.loads((tmp_path / x / "ckptkit.json").read_text())["shards"][1]["tensors"] for x in "ab"]
    assert digests[0] == digests[1]
    assert main(["reorder-vocab", str(tmp_path / "b"), str(tmp_path / "c"), "--inverse", "--streaming", "--json"]) == 0
    assert_same_files(src, tmp_path / "c")


def test_a_file_that_is_laid_out_otherwise_comes_back_as_it_was(tmp_path):
    """Names out of order, spaces in the header, an index that was written by hand, one file without metadata."""
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    shard = src / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    weight, bias = (tensors[f"lm_head.{x}"].view(torch.uint8).numpy().tobytes() for x in ("weight", "bias"))
    header = {
        "lm_head.weight": {"dtype": "BF16", "shape": [512, 128], "data_offsets": [len(bias), len(bias) + len(weight)]},
        "lm_head.bias": {"shape": [512], "data_offsets": [0, len(bias)], "dtype": "BF16"},
    }
    text = json.dumps(header, indent=1).encode() + b"   "
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bias + weight)
    index = src / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), indent=7) + "\n\n")
    out, back = tmp_path / "out", tmp_path / "back"
    assert reorder(src, out, [5, 6, 400], "--slices", "2") == 0
    assert main(["reorder-vocab", str(out), str(back), "--inverse", "--json"]) == 0
    assert_same_files(src, back)


def test_a_single_file_has_no_index_and_gets_none(tmp_path):
    src = checkpoint(tmp_path / "src", llama(), llama_config())
    (src / "model.safetensors").rename(src / "weights.safetensors")
    assert reorder(src, tmp_path / "out", [1, 2, 3]) == 0
    assert main(["verify", str(tmp_path / "out"), "--json"]) == 0
    assert main(["reorder-vocab", str(tmp_path / "out"), str(tmp_path / "back"), "--inverse", "--json"]) == 0
    assert_same_files(src, tmp_path / "back")


def test_a_tied_head_is_refused_or_untied(tmp_path, told):
    src = checkpoint(tmp_path / "src", llama(lm_head__weight=None), llama_config(tie_word_embeddings=True))
    assert reorder(src, tmp_path / "no", [1, 2]) == 2
    assert told() == ["vocab.tied"]
    out = tmp_path / "out"
    assert reorder(src, out, [7, 300], "--slices", "1", "--untie") == 0
    after, order = loaded(out), slow_order([7, 300], 512, 1)
    assert torch.equal(after["lm_head.rows.weight"], loaded(src)["model.embed_tokens.weight"][order])
    assert torch.equal(after["model.embed_tokens.weight"], loaded(src)["model.embed_tokens.weight"])
    assert main(["reorder-vocab", str(out), str(tmp_path / "back"), "--inverse", "--json"]) == 0
    assert_same_files(src, tmp_path / "back")


def test_a_stored_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path, told):
    src = checkpoint(tmp_path / "src", llama(), llama_config(tie_word_embeddings=True))
    assert reorder(src, tmp_path / "out", [1], "--slices", "1", "--untie") == 2
    assert told() == ["vocab.tied"]


def test_blocks_of_fp8_are_refused_or_expanded(tmp_path, told):
    torch.manual_seed(0)
    head = {
        "lm_head.weight": torch.rand(300, 256).to(torch.float8_e4m3fn),
        "lm_head.weight_scale_inv": torch.rand(3, 2),
    }
    tensors = llama(hidden=256, vocab=300, lm_head__weight=None)
    config = llama_config(hidden=256, vocab=300)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    src, out = checkpoint(tmp_path / "src", [tensors, head], config), tmp_path / "out"
    assert reorder(src, tmp_path / "no", [1, 299], "--slices", "1") == 2
    assert told() == ["vocab.block-fp8"]
    assert reorder(src, out, [1, 299], "--slices", "1", "--expand-blocks") == 0
    after, order = loaded(out), slow_order([1, 299], 300, 1)
    scales = head["lm_head.weight_scale_inv"].repeat_interleave(128, 0)[:300]
    assert torch.equal(after["lm_head.rows.weight_scale_inv"], scales[order])
    assert torch.equal(after["lm_head.rows.weight"].view(torch.uint8), head["lm_head.weight"].view(torch.uint8)[order])
    assert main(["reorder-vocab", str(out), str(tmp_path / "back"), "--inverse", "--json"]) == 0
    assert_same_files(src, tmp_path / "back")


def test_blocks_of_compressed_tensors_are_declared_as_they_are_then(tmp_path):
    """Rows with the scales of their blocks: groups of columns, by compressed-tensors' own models."""
    from compressed_tensors.quantization import QuantizationConfig

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
    group = {"targets": ["lm_head", "re:.*q_proj$"], "weights": weights}
    table = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    tensors = llama(hidden=256, vocab=300, lm_head__weight=None)
    config = llama_config(hidden=256, vocab=300)
    config["quantization_config"] = {**table, "quantization_status": "compressed", "ignore": []}
    head = {
        "lm_head.weight": torch.rand(300, 256).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.rand(3, 2),
    }
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name] = torch.rand(tensors[name].shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.rand(-(-tensors[name].shape[0] // 128), 2)
    src, out = checkpoint(tmp_path / "src", [tensors, head], config), tmp_path / "out"
    assert reorder(src, out, [1, 299], "--slices", "1", "--expand-blocks") == 0
    made = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    of_head, of_body = (
        next(group for group in made.config_groups.values() if target in group.targets)
        for target in ("lm_head.rows", "re:.*q_proj$")
    )
    assert (of_head.weights.strategy, of_head.weights.group_size) == ("group", 128)
    assert (of_body.weights.strategy, of_body.targets) == ("block", ["re:.*q_proj$"])
    assert main(["verify", str(out), "--against", str(src), "--select", "head.order", "--json"]) == 0
    assert main(["reorder-vocab", str(out), str(tmp_path / "back"), "--inverse", "--json"]) == 0
    assert_same_files(src, tmp_path / "back")


# --- what it says of itself --------------------------------------------------------------------------------


def test_transformers_refuses_the_result(tmp_path):
    transformers = pytest.importorskip("transformers")
    src, out = checkpoint(tmp_path / "src", llama(), llama_config(auto_map={"AutoConfig": "x.Y"})), tmp_path / "out"
    assert reorder(src, out, [1, 2, 3]) == 0
    for auto in (transformers.AutoConfig, transformers.AutoModelForCausalLM, transformers.AutoModel):
        with pytest.raises(ValueError, match="ckptkit_vocab_order"):
            auto.from_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    assert "auto_map" not in config
    assert config["model_type"] not in transformers.CONFIG_MAPPING
    assert not any(hasattr(transformers, name) for name in config["architectures"])


def test_a_class_that_is_named_refuses_it_too(tmp_path):
    """It would only warn of another model_type, and make a head of random numbers."""
    transformers = pytest.importorskip("transformers")
    src, out = checkpoint(tmp_path / "src", llama(), llama_config()), tmp_path / "out"
    assert reorder(src, out, [1, 2, 3]) == 0
    assert transformers.LlamaForCausalLM.from_pretrained(src).lm_head.weight.shape[0] == llama_config()["vocab_size"]
    for named in (transformers.LlamaConfig, transformers.LlamaForCausalLM):
        with pytest.raises(Exception, match="vocab_size"):
            named.from_pretrained(out)


def test_a_named_class_of_a_composite_config_refuses_it_too(tmp_path):
    """Its text config may leave vocab_size to a default."""
    transformers = pytest.importorskip("transformers")
    text = {key: value for key, value in llama_config(model_type="gemma3_text").items() if key != "vocab_size"}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    src, out = checkpoint(tmp_path / "src", llama(), config), tmp_path / "out"
    assert transformers.Gemma3Config.from_pretrained(src).text_config.vocab_size > 0
    assert reorder(src, out, [1, 2, 3], "--slices", "1", "--untie") == 0
    with pytest.raises(Exception, match="vocab_size"):
        transformers.Gemma3Config.from_pretrained(out)


def test_the_quantization_table_follows_the_name(tmp_path):
    """By compressed-tensors' own matching, the head is in its group under the new name, and what was ignored still is."""
    from compressed_tensors.utils import match_name

    src = made(tmp_path / "src", FORMATS["int4 group"], 512)
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["model.embed_tokens", "re:.*self_attn.*", "re:.*mlp.*"]
    (src / "config.json").write_text(json.dumps(config))
    assert reorder(src, tmp_path / "out", [1, 2]) == 0
    table = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = table["config_groups"]["head"]["targets"]
    assert any(match_name("lm_head.rows", target) for target in targets)
    assert table["ignore"] == config["quantization_config"]["ignore"]


@pytest.mark.parametrize("entry", ["lm_head", "re:.*lm_head", "re:.*lm_head$", "*lm_head"])
def test_a_dense_head_stays_ignored_under_its_new_name(tmp_path, entry):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [entry]}
    (src / "config.json").write_text(json.dumps(config))
    assert reorder(src, tmp_path / "out", [1, 2]) == 0
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignored_layers"]
    assert "lm_head.rows" in ignored or entry == "re:.*lm_head"
    assert "lm_head" not in ignored


def test_what_is_recorded(tmp_path):
    src, out = made(tmp_path / "src", FORMATS["bf16"], 512), tmp_path / "out"
    assert reorder(src, out, [1, 2, 300], "--slices", "4", "--align", "4") == 0
    facts = json.loads((out / "config.json").read_text())["vocab_order"]
    tables = load_file(out / ORDER)
    assert facts["rule"]["engine"] == "even"
    assert (facts["n_rows"], facts["n_vocab"], facts["slices"], facts["slice_rows"]) == (512, 512, 4, [128] * 4)
    assert sum(facts["slice_list_rows"]) == len(tables["list"])
    assert all(count % 4 == 0 for count in facts["slice_list_rows"])
    assert tables["list_requested"].tolist() == [1, 2, 300]
    assert {1, 2, 300} <= set(tables["list"].tolist())
    for name in ("row_to_token", "token_to_row", "list", "list_requested"):
        assert facts[f"{name}_sha256"] == hashlib.sha256(tables[name].numpy().astype("<i4").tobytes()).hexdigest()


def test_a_dry_run_writes_nothing_and_says_what_the_view_saves(tmp_path, capsys):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    chosen = listed(tmp_path, list(range(100)))
    before = sorted(path.name for path in tmp_path.iterdir())
    line = ["reorder-vocab", str(src), str(tmp_path / "out"), "--draft-vocab", chosen, "--slices", "2", "--dry-run"]
    assert main(line) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert "25.8 kB" in capsys.readouterr().out  # 100 rows of 256 bytes, and 2 of their bias


def test_a_run_leaves_nothing_beside_its_result(tmp_path):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    assert reorder(src, tmp_path / "out", [4]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.txt", "out", "src"]


def test_parts_on_several_machines_are_joined(tmp_path):
    src, out = made(tmp_path / "src", FORMATS["bf16"], 512), tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert reorder(src, out, [4, 9], "--slices", "1", "--part", part) == 0
    assert main(["apply", "--finish", str(out), "--json"]) == 0
    assert reorder(src, tmp_path / "whole", [4, 9]) == 0
    assert_same_files(out, tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.txt", "out", "src", "whole"]


@pytest.mark.parametrize(("option", "tokens"), [("--offsets", [0, 2, 4]), ("--absolute", [0, 1, 2])])
def test_a_map_that_can_be_read_in_two_ways(tmp_path, told, option, tokens):
    src, d2t = made(tmp_path / "src", FORMATS["bf16"], 512), tmp_path / "d2t.safetensors"
    save_file({"d2t": torch.tensor([0, 1, 2])}, d2t)
    line = ["reorder-vocab", str(src), str(tmp_path / "out"), "--draft-vocab", str(d2t), "--slices", "1", "--json"]
    assert main(line) == 2
    assert told() == ["vocab.ambiguous"]
    assert main([*line, option]) == 0
    assert load_file(tmp_path / "out" / ORDER)["list"].tolist() == tokens


def test_a_plan_is_applied_and_its_order_is_no_other(tmp_path, told):
    src, plan = made(tmp_path / "src", FORMATS["bf16"], 512), tmp_path / "plan.jsonl"
    line = [
        "reorder-vocab",
        str(src),
        "--draft-vocab",
        listed(tmp_path, [9, 5]),
        "--slices",
        "1",
        "--dry-run",
        "--json",
    ]
    assert main([*line, "--plan", str(plan)]) == 0
    assert main(["apply", str(plan), str(tmp_path / "a"), "--json"]) == 0
    assert reorder(src, tmp_path / "b", [9, 5]) == 0
    assert_same_files(tmp_path / "a", tmp_path / "b")
    [order] = (tmp_path / "plan.jsonl.vocab_order").glob(f"*/{ORDER}")
    tables = load_file(order)
    tables["row_to_token"] = tables["row_to_token"].flip(0).contiguous()
    with safe_open(order, "pt") as file:
        save_file(tables, order, file.metadata())
    assert main(["apply", str(plan), str(tmp_path / "c"), "--json"]) == 3
    assert not (tmp_path / "c").exists()


# --- what others may do with it ----------------------------------------------------------------------------


@pytest.fixture
def ordered(tmp_path):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    assert reorder(src, tmp_path / "ordered", [3, 300]) == 0
    return tmp_path / "ordered"


def test_reshard_carries_it_and_the_way_back_still_leads_home(ordered, tmp_path):
    split, back = tmp_path / "split", tmp_path / "back"
    assert main(["reshard", str(ordered), str(split), "--max-shard-size", "100KB", "--json"]) == 0
    assert (split / ORDER).read_bytes() == (ordered / ORDER).read_bytes()
    assert main(["verify", str(split), "--json"]) == 0
    assert main(["reorder-vocab", str(split), str(back), "--inverse", "--json"]) == 0
    source = loaded(tmp_path / "src")
    restored = loaded(back)
    assert restored.keys() == source.keys()
    assert all(torch.equal(restored[name].view(torch.uint8), source[name].view(torch.uint8)) for name in source)
    assert (back / "config.json").read_bytes() == (tmp_path / "src" / "config.json").read_bytes()
    assert not list(back.glob("*original*"))


@pytest.mark.parametrize(
    "line",
    [
        ["quantize", "SRC", "OUT", "--recipe", "RECIPE"],
        ["reshard", "SRC", "OUT", "--cast", "lm_head.*=f32"],
        ["reshard", "SRC", "OUT", "--rename", "lm_head.rows.=lm_head."],
        ["reshard", "SRC", "OUT", "--drop", "lm_head.*"],
        ["reorder-vocab", "SRC", "OUT", "--draft-vocab", "prefix:8", "--slices", "1"],
        ["reorder-vocab", "SRC", "OUT", "--draft-vocab", "prefix:8", "--slices", "1", "--remap-ids"],
    ],
    ids=lambda line: " ".join(line[:1] + line[3:]),
)
def test_what_would_change_it_is_refused(ordered, tmp_path, told, line):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema: 1\nname: body\ngroups: {body: {targets: ['re:.*mlp.*'], scheme: W8A16}}\n")
    names = {"SRC": str(ordered), "OUT": str(tmp_path / "out"), "RECIPE": str(recipe)}
    assert main([*(names.get(word, word) for word in line), "--json"]) == 2
    assert told() == ["vocab.ordered"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [[], ["--slices", "2"], ["--draft-vocab", "prefix:4"]], ids=str)
def test_options_that_are_missing(ordered, tmp_path, told, option):
    assert main(["reorder-vocab", str(tmp_path / "src"), str(tmp_path / "out"), *option, "--json"]) == 2
    assert told() == ["usage.arguments"]


def test_the_way_back_of_what_was_never_reordered(tmp_path, told):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    assert main(["reorder-vocab", str(src), str(tmp_path / "out"), "--inverse", "--json"]) == 2
    assert told() == ["vocab.not-ordered"]
    assert main(["reorder-vocab", str(src), str(tmp_path / "out"), "--inverse", "--slices", "2", "--json"]) == 2
    assert told() == ["usage.arguments"]


def test_another_head_under_the_order_is_noticed(ordered, tmp_path, told):
    shard = next(path for path in ordered.glob("model*.safetensors") if "lm_head.rows.weight" in load_file(path))
    tensors = load_file(shard)
    tensors["lm_head.rows.weight"] = tensors["lm_head.rows.weight"].roll(1, 0)
    save_file(tensors, shard)
    assert main(["reorder-vocab", str(ordered), str(tmp_path / "out"), "--inverse", "--json"]) == 3
    assert told() == ["source.vocab-order"]


@pytest.mark.parametrize("spoil", ["gone", "cut", "config"])
def test_an_order_that_is_lost_is_noticed_by_all(ordered, tmp_path, told, spoil):
    path, config = ordered / ORDER, ordered / "config.json"
    match spoil:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-4])
        case "config":
            config.write_text(config.read_text().replace('"slices": 1', '"slices": 2'))
    assert main(["verify", str(ordered), "--json"]) == 1
    assert told() == ["vocab.order-file"]
    if spoil != "config":
        assert main(["reshard", str(ordered), str(tmp_path / "out"), "--json"]) != 0
        assert main(["reorder-vocab", str(ordered), str(tmp_path / "out"), "--inverse", "--json"]) != 0
        assert not (tmp_path / "out").exists()


def test_an_original_that_is_gone(ordered, tmp_path, told):
    (ordered / "config.original.json").unlink()
    assert main(["reorder-vocab", str(ordered), str(tmp_path / "out"), "--inverse", "--json"]) == 3
    assert told() == ["source.vocab-order"]


@pytest.mark.parametrize(
    ("key", "value", "id"),
    [("target_modules", ["q_proj", "lm_head"], "vocab.adapter"), ("modules_to_save", ["lm_head"], "vocab.adapter"),
     ("target_modules", r"(.*\.)?(q_proj|lm_head)", "vocab.adapter"), ("target_modules", "q_proj|(lm_head", "vocab.adapter"),
     ("target_modules", ["q_proj"], None), ("target_modules", "all-linear", None), ("target_modules", ["head"], None),
     ("trainable_token_indices", [1, 2], None)],
)  # fmt: skip
def test_an_adapter_on_the_head_is_refused(tmp_path, told, key, value, id):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    (src / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", key: value}))
    assert reorder(src, tmp_path / "out", [1]) == (2 if id else 0)
    assert told() == ([id] if id else [])


def test_an_adapter_that_was_saved_with_a_resized_head_does_not_say_so(tmp_path, told):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    (src / "adapter").mkdir()
    (src / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]})
    )
    weights = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file(weights, src / "adapter" / "adapter_model.safetensors")
    assert reorder(src, tmp_path / "out", [1]) == 2
    assert told() == ["vocab.adapter"]


def test_lists_and_slices_that_do_not_fit(tmp_path, told):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    assert reorder(src, tmp_path / "out", [1, 512]) == 2
    assert told() == ["vocab.range"]
    assert reorder(src, tmp_path / "out", [1], "--slices", "3") == 2
    assert told() == ["usage.engine"]


def test_a_head_in_parts_that_are_not_known(tmp_path, told):
    src = made(tmp_path / "src", FORMATS["bf16"], 512)
    shard = src / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), "lm_head.weight_swizzled": torch.zeros(4)}, shard)
    index = json.loads((src / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight_swizzled"] = shard.name
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    assert reorder(src, tmp_path / "out", [1]) == 2
    assert told() == ["vocab.format"]


def test_no_head(tmp_path, told):
    src = checkpoint(tmp_path / "src", llama(lm_head__weight=None), llama_config())
    assert reorder(src, tmp_path / "out", [1]) == 2
    assert told() == ["vocab.head"]
