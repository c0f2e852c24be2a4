"""Tokens counted in a corpus: against the tokenizers library on the whole text, and against counting by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ckptkit.errors import UserError
from ckptkit.vocab import corpus as reading
from ckptkit.vocab.corpus import Label, Piece, corpus, documents, pieces
from ckptkit.vocab.counting import Counting, Counts, count_tokens
from ckptkit.vocab.coverage import coverage, most_frequent

WORDS = ["<unk>", "a", "b", "c", "d", "e"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def count(
    files: list[str], tokenizer: str, held_out: float = 0.0, jobs: int = 1, roles: tuple[str, ...] = ()
) -> Counts:
    return count_tokens(corpus(files), Counting(tokenizer, len(WORDS), held_out, roles), jobs, lambda nbytes: None)


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    return caught.value.findings[0].id


def test_text_is_counted(tmp_path: Path, tokenizer: str) -> None:
    found = count([write(tmp_path / "x.txt", "a b a\na zzz\n\ne")], tokenizer)
    assert found.ranked.tolist() == [1, 3, 1, 0, 0, 1]
    assert found.documents == 1


@pytest.mark.parametrize(
    ("record", "counts"),
    [
        ({"text": "a b"}, [0, 1, 1, 0, 0, 0]),
        ({"content": "a b"}, [0, 1, 1, 0, 0, 0]),
        ("c c", [0, 0, 0, 2, 0, 0]),
        ([1, 1, 5], [0, 2, 0, 0, 0, 1]),
        ({"input_ids": [1, 5]}, [0, 1, 0, 0, 0, 1]),
        ({"token_ids": []}, [0] * 6),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, [0, 1, 1, 0, 0, 0]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "image"}]}]},
            [0, 0, 0, 0, 1, 0],
        ),
        ({"conversations": [{"from": "gpt", "value": "e"}, {"from": "human", "value": None}]}, [0, 0, 0, 0, 0, 1]),
        ({"messages": [], "text": "a"}, [0] * 6),
    ],
)
def test_records(tmp_path: Path, tokenizer: str, record: object, counts: list[int]) -> None:
    assert count([write(tmp_path / "x.jsonl", f"\n{json.dumps(record)}\n")], tokenizer).ranked.tolist() == counts


def test_only_what_a_role_says(tmp_path: Path, tokenizer: str) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = write(tmp_path / "x.jsonl", json.dumps(talk))
    assert count([path], tokenizer, roles=("assistant",)).ranked.tolist() == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("form", ["x.npy", "x.ids"])
def test_files_of_token_ids(tmp_path: Path, tokenizer: str, form: str) -> None:
    ids = np.random.default_rng(0).integers(0, 6, 5000).astype(np.uint16)
    if form == "x.npy":
        np.save(tmp_path / form, ids)
    else:
        write(tmp_path / form, "\n".join(" ".join(map(str, ids[i : i + 7])) for i in range(0, 5000, 7)))
    found = count([str(tmp_path / form)], tokenizer, 0.5)
    both = found.ranked + found.held_out[Label("x")]
    assert both.tolist() == np.bincount(ids, minlength=6).tolist()
    assert found.documents > 0 < found.documents_held_out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"a \xff b"),
        ("x.txt", b"a \xc3"),
        ("x.jsonl", b'{"text": "a"'),
        ("x.jsonl", b"[" * 100_000),
        ("x.jsonl", b'{"prompt": "a"}'),
        ("x.jsonl", b"3"),
        ("x.jsonl", b'["a"]'),
        ("x.ids", b"1 two"),
        ("x.ids", b"1 6"),
        ("x.ids", b"-1"),
        ("x.npy", b"not one"),
    ],
)
def test_what_is_no_corpus(tmp_path: Path, tokenizer: str, name: str, content: bytes) -> None:
    assert refused(lambda: count([write(tmp_path / name, content)], tokenizer)) == "vocab.corpus"


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    assert refused(lambda: corpus([str(tmp_path / "absent")])) == "vocab.corpus"
    assert refused(lambda: corpus([str(tmp_path)])) == "vocab.corpus"


def test_labels(tmp_path: Path) -> None:
    plain = write(tmp_path / "x=y.txt", "a")
    labels = [file.label for file in corpus([plain, f"chat:zh-TW={plain}", f"code={plain}"])]
    assert labels == [Label("x=y"), Label("chat", "zh-TW"), Label("code")]


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".ids"])
def test_pieces_share_out_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    lines = [" ".join(str((i * j) % 6) for j in range(i % 9)) for i in range(300)]
    texts = {".jsonl": [json.dumps(line) for line in lines]}.get(ending, lines)
    [file] = corpus([write(tmp_path / f"x{ending}", "\n".join(texts) + "\nähm".replace("ähm", texts[-1]))])
    expected = Counter(word for line in [*lines, lines[-1]] for word in line.split())
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(reading, "PIECE", size)
        found: Counter[str] = Counter()
        for piece in pieces([file]):
            for document in documents(piece):
                found.update(document.split() if isinstance(document, str) else map(str, document))
        assert found == expected


def test_a_line_without_an_end_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LONGEST", 5)
    text = "ä€😀" * 50
    [file] = corpus([write(tmp_path / "x.txt", text)])
    assert "".join(str(document) for document in documents(Piece(file, 0, file.size))) == text
    [file] = corpus([write(tmp_path / "x.jsonl", json.dumps(text))])
    assert refused(lambda: list(documents(Piece(file, 0, file.size)))) == "vocab.corpus"


def test_the_result_does_not_depend_on_who_counts(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    lines = [" ".join(WORDS[i] for i in rng.integers(1, 6, 20)) for _ in range(2000)]
    files = [f"one:en={write(tmp_path / 'one.txt', chr(10).join(lines))}"]
    files.append(f"two={write(tmp_path / 'two.jsonl', chr(10).join(json.dumps(line) for line in lines[:300]))}")
    monkeypatch.setattr(reading, "PIECE", 20_000)
    alone, shared = count(files, tokenizer, 0.2, 1), count(files, tokenizer, 0.2, 2)
    assert alone.ranked.tolist() == shared.ranked.tolist()
    assert {k: v.tolist() for k, v in alone.held_out.items()} == {k: v.tolist() for k, v in shared.held_out.items()}
    assert set(alone.held_out) == {Label("one", "en"), Label("two")}
    total = alone.ranked + sum(alone.held_out.values())
    words = Counter(word for line in [*lines, *lines[:300]] for word in line.split())
    assert total.tolist() == [words[word] for word in WORDS]
    assert alone.documents_held_out / (alone.documents + alone.documents_held_out) == pytest.approx(0.2, abs=0.07)


def test_equal_documents_are_on_one_side(tmp_path: Path, tokenizer: str) -> None:
    texts = [f"a {'b ' * i}" for i in range(40)]
    path = write(tmp_path / "x.jsonl", "\n".join(json.dumps(text) for text in texts * 3))
    found = count([path], tokenizer, 0.5)
    assert found.documents % 3 == found.documents_held_out % 3 == 0
    assert 0 < found.documents_held_out < 120


def test_a_fault_in_another_process_is_told_the_same(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", 1000)
    path = write(tmp_path / "x.ids", "1 2\n" * 1000 + "77")
    assert refused(lambda: count([path], tokenizer, jobs=2)) == "vocab.corpus"


# --- ranking and coverage ----------------------------------------------------------------------------------


def test_most_frequent() -> None:
    counts = np.array([0, 3, 9, 3, 0, 1])
    none = np.zeros(0, np.int64)
    assert most_frequent(counts, 3, none).tolist() == [2, 1, 3]
    assert most_frequent(counts, 6, none).tolist() == [2, 1, 3, 5, 0, 4]
    assert most_frequent(counts, 4, np.array([4, 2])).tolist() == [2, 4, 1, 3]
    assert refused(lambda: most_frequent(counts, 7, none)) == "vocab.size"
    assert refused(lambda: most_frequent(counts, 1, np.array([0, 1]))) == "vocab.size"


def test_coverage_by_kind() -> None:
    rows = coverage(
        np.array([1, 2]),
        {Label("b"): np.array([1, 2, 3]), Label("a", "en"): np.array([4, 0, 0]), Label("a"): np.zeros(3, int)},
    )
    assert [(row.kind, row.language, row.tokens, row.covered) for row in rows] == [
        ("a", None, 0, 0), ("a", "en", 4, 0), ("b", None, 6, 5), (None, None, 10, 5),
    ]  # fmt: skip
    assert [row.share for row in rows] == [None, 0, pytest.approx(5 / 6), 0.5]
