"""Small tokenizers of every kind, trained on a few sentences, with special and plain added tokens beyond their models."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog; the dog sleeps, and the fox is quick again.",
    "def order(rows): return [rows[i] for i in sorted(range(len(rows)))]  # rows, rows, rows",
    "Größe, Straße, naïve café — ünïcödé 12,345.67 and emoji 🙂🙃 日本語のテキスト",
    "low lower lowest new newer newest wide wider widest   spaces\tand\nlines",
)
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
ADDED = (AddedToken("<|tool|>", special=True), AddedToken("<|im_start|>", special=True), AddedToken("zebra crossing"))


def corpus() -> list[str]:
    """The texts, plain and with every special and added token between, before and within their words."""
    names = [*SPECIALS, *(token.content for token in ADDED)]
    mixed = [f"{names[i % len(names)]}{text} {names[(i + 1) % len(names)]}" for i, text in enumerate(TEXTS * 2)]
    return [*TEXTS, *mixed, "".join(names), "".join(f"a{name}b" for name in names), "", "zzz qqq \x00 \ufffd"]


def _template(tokenizer: Tokenizer) -> processors.PostProcessor:
    first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    pair = "<s> $A </s> $B:1 </s>:1"
    return processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", first), ("</s>", last)]
    )


def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    template = _template(tokenizer)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def byte_fallback() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=[*SPECIALS, *bytes_of], limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>"))
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=list(SPECIALS), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = _template(tokenizer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=list(SPECIALS), show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(
        ("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>"))
    )
    return tokenizer


def wordlevel() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=list(SPECIALS), show_progress=False))
    tokenizer.post_processor = _template(tokenizer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker for maker in (bpe, byte_fallback, unigram, wordpiece, wordlevel)
}


def made(kind: str) -> Tokenizer:
    """A tokenizer of that kind with all of ADDED and padding."""
    tokenizer = KINDS[kind]()
    for token in ADDED:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>", length=40)
    return tokenizer
