"""``reorder-vocab --remap-ids``: transformers says of the result what it says of the source, token by token, id by id."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ckptkit.errors import OK, USAGE
from vocab.tokenizers_made import KINDS, corpus, made

Told = Callable[..., tuple[int, dict[str, Any]]]


def errors(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"] if finding["severity"] == "error"}


def folder_of(path: Path, kind: str = "bpe", tied: bool = False, rows: int | None = None) -> Path:
    """A tiny Llama in float32 with a tokenizer of that kind, as transformers writes both."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made(kind), bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows or len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=fast.bos_token_id, eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id, tie_word_embeddings=tied, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.suppress_tokens = [5, 6]
    model.generation_config.bad_words_ids = [[7], [8, 9]]
    model.generation_config.save_pretrained(path)
    model.save_pretrained(path)
    return path


def listed(folder: Path, ids: list[int]) -> Path:
    path = folder / "list.txt"
    path.write_text(" ".join(map(str, ids)))
    return path


def remapped(told: Told, source: Path, *options: object, slices: int = 2, ids: list[int] | None = None) -> Path:
    out = source.with_name(f"{source.name}-remapped")
    path = listed(source.parent, ids or [*range(11, 47, 3), 2, 49])
    given = ["--draft-vocab", path, "--slices", slices, "--engine", "sglang", "--remap-ids", *options]
    code, document = told("reorder-vocab", source, out, *given)
    assert code == OK, document["findings"]
    return out


def new_ids(out: Path) -> np.ndarray[Any, Any]:
    """The new id by the old one, as the record beside the result says it the other way about."""
    return np.argsort(json.loads((out / "vocab_remap.json").read_text())["row_to_token"])


@pytest.mark.parametrize("kind", KINDS)
def test_both_libraries_give_the_old_ids_mapped(kind: str, tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source", kind)
    out = remapped(told, source)
    mapping = new_ids(out)
    assert (mapping != np.arange(len(mapping))).sum() > 30
    rust = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (source, out)]
    auto = [AutoTokenizer.from_pretrained(folder) for folder in (source, out)]
    for text in corpus():
        old, new = (tokenizer.encode(text) for tokenizer in rust)
        assert new.ids == [mapping[id] for id in old.ids], text
        assert new.tokens == old.tokens
        old, new = (tokenizer(text)["input_ids"] for tokenizer in auto)
        assert new == [mapping[id] for id in old], text
        assert auto[1].decode(new) == auto[0].decode(old)
    old, new = auto
    assert new.all_special_tokens == old.all_special_tokens
    assert new.all_special_ids == [mapping[id] for id in old.all_special_ids]
    assert new.get_vocab() == {token: mapping[id] for token, id in old.get_vocab().items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("slices", [1, 3])
def test_the_model_says_the_same(tied: bool, slices: int, tmp_path: Path, told: Told) -> None:
    """Equal greedy text, and logits bitwise equal at the new ids."""
    source = folder_of(tmp_path / "source", tied=tied, rows=576)
    out = remapped(told, source, slices=slices)
    mapping = torch.from_numpy(new_ids(out))
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (source, out)]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, out)]
    texts = []
    for model, tokenizer in zip(models, tokenizers, strict=True):
        given = tokenizer("The quick<|tool|> brown", return_tensors="pt")["input_ids"]
        made_ids = model.generate(given, max_new_tokens=20, do_sample=False)
        texts.append(tokenizer.decode(made_ids[0]))
    assert texts[0] == texts[1]
    given = torch.tensor([tokenizers[0]("def order(rows)")["input_ids"]])
    with torch.no_grad():
        before, after = models[0](given).logits, models[1](mapping[given]).logits
    assert torch.equal(after[..., mapping], before)


def test_every_file_with_ids(tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source")
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    (source / "vocab.json").write_text(json.dumps(vocabulary))
    (source / "added_tokens.json").write_text(json.dumps({"<|tool|>": 404}))
    (source / "preprocessor_config.json").write_text(json.dumps({"image_token_id": 12, "size": [5, 6]}))
    config = json.loads((source / "config.json").read_text())
    config |= {"image_token_index": 11, "audio": {"audio_token_id": 17, "layers": [1, 2]}, "eos_token_id": [2, 14]}
    (source / "config.json").write_text(json.dumps(config))
    out = remapped(told, source)
    new = new_ids(out)
    got = {name: json.loads((out / name).read_text()) for name in (
        "config.json", "generation_config.json", "vocab.json", "added_tokens.json", "preprocessor_config.json",
    )}  # fmt: skip
    assert got["config.json"]["image_token_index"] == new[11]
    assert got["config.json"]["audio"] == {"audio_token_id": new[17], "layers": [1, 2]}
    assert got["config.json"]["eos_token_id"] == [new[2], new[14]]
    assert got["config.json"]["pad_token_id"] == new[config["pad_token_id"]]
    assert got["generation_config.json"]["suppress_tokens"] == [new[5], new[6]]
    assert got["generation_config.json"]["bad_words_ids"] == [[new[7]], [new[8], new[9]]]
    assert got["vocab.json"] == {token: new[id] for token, id in vocabulary.items()}
    assert got["added_tokens.json"] == {"<|tool|>": new[404]}
    assert got["preprocessor_config.json"] == {"image_token_id": new[12], "size": [5, 6]}


def test_list_tokens_come_first_in_each_slice(tmp_path: Path, told: Told) -> None:
    """What the whole is for: row order is id order, and a slice's first rows are the list's."""
    source = folder_of(tmp_path / "source", rows=512)
    ids = [*range(0, 100, 4)]
    out = remapped(told, source, ids=ids)
    head = [load_file(folder / "model.safetensors")["lm_head.weight"] for folder in (source, out)]
    counts = json.loads((out / "vocab_remap.json").read_text())["slice_list_rows"]
    views = torch.cat([head[1][: counts[0]], head[1][256 : 256 + counts[1]]])
    assert torch.equal(views, head[0][sorted(ids)])


def with_tensors(source: Path, more: dict[str, torch.Tensor]) -> Path:
    file = source / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return source


def test_all_tables_that_go_by_tokens(tmp_path: Path, told: Told) -> None:
    """MTP's own, a DSpark Markov head's, a bias, experts chosen by token, a shorter table, and maps of a draft."""
    source = folder_of(tmp_path / "source", rows=448)
    random = torch.Generator().manual_seed(1)
    tables = {
        "mtp.embed_tokens.weight": (448, 8), "mtp.0.shared_head.head.weight": (448, 8), "lm_head.bias": (448,),
        "mtp.2.markov_head.markov_w1.weight": (448, 4), "mtp.2.markov_head.markov_w2.weight": (448, 4),
        "final_logits_bias": (1, 448), "model.embed_tokens_per_layer.weight": (440, 6),
    }  # fmt: skip
    more = {name: torch.randn(shape, generator=random) for name, shape in tables.items()}
    more["layers.0.ffn.gate.tid2eid"] = torch.randint(0, 8, (448, 2), generator=random)
    tokens = torch.tensor([0, 1, 5, 7, 11, 440])
    more |= {"d2t": tokens - torch.arange(6), "t2d": torch.zeros(448, dtype=torch.bool)}
    more["t2d"][tokens] = True
    out = remapped(told, with_tensors(source, more), slices=1)
    new = torch.from_numpy(new_ids(out))
    got = load_file(out / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", *tables, "layers.0.ffn.gate.tid2eid", "t2d"):
        old = load_file(source / "model.safetensors")[name]
        axis = 1 if name == "final_logits_bias" else 0
        assert torch.equal(got[name].index_select(axis, new[: old.shape[axis]]), old), name
    assert torch.equal(got["d2t"] + torch.arange(6), new[tokens])
    same = [name for name in got if name.startswith("model.layers")]
    assert same
    assert all(torch.equal(got[name], load_file(source / "model.safetensors")[name]) for name in same)


def test_a_quantized_head_goes_with_a_dense_embedding(tmp_path: Path, told: Told) -> None:
    """Rows of codes and scales; those of every layout are tests of reorder-vocab's own."""
    source = folder_of(tmp_path / "source", rows=448)
    assert told("quantize", source, tmp_path / "w8", "--recipe", "lm_head-w8a16")[0] == OK
    out = remapped(told, tmp_path / "w8")
    new = torch.from_numpy(new_ids(out))
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "w8", out))
    for name in ("lm_head.weight_packed", "lm_head.weight_scale", "model.embed_tokens.weight"):
        assert torch.equal(after[name][new], before[name]), name
    assert torch.equal(after["lm_head.weight_shape"], before["lm_head.weight_shape"])


# --- refusals ----------------------------------------------------------------------------------------------


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda source: (source / name).write_bytes(data) and None


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | changes))

    return change


def _tokenizer_config(**changes: Any) -> Callable[[Path], None]:
    return _write("tokenizer_config.json", json.dumps(changes))


def _tensor(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda source: with_tensors(source, {name: torch.zeros(shape)}) and None


BROKEN = [
    (_write("tokenizer.model", b"\x0a\x00"), {"vocab.tokenizer-file"}, True),
    (_write("qwen.tiktoken", "IQ== 0\n"), {"vocab.tokenizer-file"}, True),
    (_config(stop_numbers=[3, 4]), {"vocab.unknown-ids"}, True),
    (_config(talker_config={"vocab_size": 77, "bos_token_id": 3}), {"vocab.unknown-ids"}, True),
    (_write("odd.json", '{"sequence_bias": {"(1, 2)": 3.5}}'), {"vocab.unknown-ids"}, True),
    (_tensor("model.strange.weight", 448, 3), {"vocab.table"}, True),
    (_tensor("model.engram.weight", 5, 3), {"vocab.remap"}, False),
    (_write("vocab_remap.json", "{}"), {"vocab.remap"}, False),
    (_write("adapter_config.json", '{"modules_to_save": ["embed_tokens"]}'), {"vocab.adapter"}, False),
    (_write("adapter_config.json", '{"trainable_token_indices": [5]}'), {"vocab.adapter"}, False),
    (_write("odd.json", "{"), {"config.parse"}, False),
    (_write("tokenization_own.py", "EOS = 2"), {"vocab.unknown-ids"}, True),
    (_write("vocab.json", '{"a": "b"}'), {"vocab.tokenizer"}, False),
    (_write("vocab.txt", "a\nb"), {"vocab.remap"}, False),
    (_tokenizer_config(added_tokens_decoder={"x": 1}), {"vocab.tokenizer"}, False),
    (lambda source: (source / "tokenizer.json").unlink(), {"vocab.tokenizer-file"}, False),
]


@pytest.mark.parametrize(("change", "expected", "allowed"), BROKEN)
def test_refused(change: Any, expected: set[str], allowed: bool, tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source", rows=448)
    if expected == {"vocab.tokenizer-file"} and not allowed:
        (source / "tokenizer.model").write_bytes(b"\x0a\x00")
    change(source)
    given = ["--draft-vocab", listed(tmp_path, [5, 6, 7]), "--slices", 2, "--engine", "vllm", "--remap-ids"]
    code, document = told("reorder-vocab", source, tmp_path / "out", *given)
    assert errors(document) == expected
    assert code != OK
    assert not (tmp_path / "out").exists()
    code, document = told("reorder-vocab", source, tmp_path / "out", *given, "--allow", ",".join(expected))
    assert (code == OK) == allowed
    if allowed:
        assert not (tmp_path / "out" / "tokenizer.model").exists()


def test_options_that_exclude_each_other(tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source", rows=448)
    for option in ("--inverse", "--untie", "--expand-blocks"):
        given = ["--draft-vocab", listed(tmp_path, [5]), "--slices", 1, "--remap-ids", option]
        code, document = told("reorder-vocab", source, tmp_path / "out", *given)
        assert (code, errors(document)) == (USAGE, {"usage.arguments"})


def test_a_dry_run_and_a_plan_file(tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source", rows=448)
    out = remapped(told, source)
    plan = tmp_path / "plan.jsonl"
    given = ["--draft-vocab", tmp_path / "list.txt", "--slices", 2, "--engine", "sglang", "--remap-ids"]
    code, _ = told("reorder-vocab", source, tmp_path / "again", *given, "--dry-run", "--plan", plan)
    assert code == OK
    assert not (tmp_path / "again").exists()
    assert told("apply", plan, tmp_path / "again")[0] == OK
    names = {path.name for path in out.iterdir()} - {"ckptkit.json"}
    assert names == {path.name for path in (tmp_path / "again").iterdir()} - {"ckptkit.json"}
    assert all((out / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    shutil.rmtree(out)


SMOLLM2 = Path(os.environ.get("CKPTKIT_SMOLLM2", Path(__file__).parents[2] / ".cache" / "smollm2-135m-bf16"))


def test_only_the_source_s_own_files_are_told_to_be_left_out(tmp_path: Path, told: Told) -> None:
    source = folder_of(tmp_path / "source")
    (source / "training.log").write_text("")
    given = ["--draft-vocab", listed(tmp_path, [5, 6, 7]), "--slices", 1, "--remap-ids", "--dry-run"]
    _, document = told("reorder-vocab", source, *given)
    assert {item["name"] for item in document["plan"]["left_out"]} <= {path.name for path in source.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2: python demo/source.py FOLDER")
def test_smollm2_says_the_same(tmp_path: Path, told: Told) -> None:
    """The real model and its chat template: ids mapped, greedy text equal."""
    out = tmp_path / "out"
    ids = np.random.default_rng(0).permutation(49_152)[:16_000].tolist()
    given = ["--draft-vocab", listed(tmp_path, ids), "--slices", 2, "--engine", "sglang", "--remap-ids"]
    code, document = told("reorder-vocab", SMOLLM2, out, *given)
    assert code == OK, document["findings"]
    mapping = new_ids(out)
    chat = [{"role": "user", "content": "How many days are in a week?"}]
    texts = []
    for folder in (SMOLLM2, out):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), "def fib(n):\n"]
        batch = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
        generated = [model.generate(given, max_new_tokens=16, do_sample=False)[0] for given in batch]
        texts.append(([found[0].tolist() for found in batch], [tokenizer.decode(found) for found in generated]))
    (old, before), (new, after) = texts
    assert after == before
    assert new == [[mapping[id] for id in found] for found in old]
