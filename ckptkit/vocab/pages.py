"""The pages of the checks on draft vocabularies, for ``ckptkit checks ID`` and docs/checks.md."""

from __future__ import annotations

from ..checks import Level, Page

_TRAINED = "Take list, map and head from the checkpoint that they were trained with; never make the map anew."

PAGES = (
    Page(
        "vocab.range", Level.STATIC, "error", "A token id is outside the target's vocabulary",
        "Every id must be at least 0 and below the rows of the target's head. Beyond it an engine reads another tensor's "
        "memory, or ends with an index assertion. Offsets read as ids, and ids read as offsets, show so too.",
        "draft.txt: 151936 is no token of a vocabulary of 151,936",
        "Take the list that was made for this target, or say what its numbers are: --offsets, --absolute.",
    ),
    Page(
        "vocab.duplicate", Level.STATIC, "error", "A token stands more than once in the list",
        "A second entry wastes a row, and takes probability from the first: the draft's logits of both are scattered to one "
        "token. Offsets of a map that are read as token ids repeat nearly always.",
        "d2t.npy: token 3 stands more than once in the list",
        "Keep one of each; if the numbers are offsets, say --offsets.",
    ),
    Page(
        "vocab.ambiguous", Level.STATIC, "error", "A map can be offsets as well as token ids",
        "EAGLE-3's reference, SpecForge, SGLang, vLLM and TensorRT-LLM hold offsets in d2t, token = i + d2t[i]; llama.cpp "
        "holds token ids. Both read without an error, one of them as other tokens. Where neither t2d nor the vocabulary's "
        "size tells them apart, nothing is assumed.",
        "draft.safetensors: d2t can be offsets as well as token ids, and nothing in it tells which",
        "Say --offsets or --absolute, or --n-vocab with the rows of the target's head.",
    ),
    Page(
        "vocab.mapping", Level.STATIC, "error", "Two maps of one draft give other tokens",
        "d2t and t2d of a draft must be of the same tokens. Engines read one of them and skip the other, each its own.",
        "draft.safetensors: d2t gives other tokens than t2d marks",
        _TRAINED,
    ),
    Page(
        "vocab.head-map", Level.STATIC, "error", "The map beside the head is of other tokens than the list",
        "Row i of a draft's head is of the token that its map gives for i. A map or list that was made anew under an old head "
        "has the right size, and everything else looks right too: only what the draft proposes is wrong.",
        "draft.txt and the d2t of ./draft give other tokens",
        _TRAINED,
    ),
    Page(
        "vocab.size", Level.STATIC, "error", "The list is of a vocabulary of another size",
        "t2d has an entry for every row of the target's head, padding included: vocab_size of the target's config.json, not "
        "the number of its tokenizer's tokens.",
        "draft.safetensors is of a vocabulary of 128,000 tokens, not of 128,256",
        "Take the list that was made for this target.",
    ),
    Page(
        "vocab.order", Level.STATIC, "warning", "A map's tokens are not in ascending order",
        "SpecForge and speculators keep them ascending, and llama.cpp's views need it. Engines serve any order, as long as the "
        "head's rows have the same.",
        "draft.safetensors: d2t gives token 12 before token 7",
        "Keep it if head and map are of one training; else convert the list again.",
    ),
    Page(
        "vocab.untrained-map", Level.STATIC, "warning", "A map gives the first tokens of the vocabulary",
        "d2t of zeros is what a draft is created with, before the real map is put in: draft id i is token i. As a list made of "
        "a prefix on purpose it is right, under a head trained with another map it is not.",
        "draft.safetensors: d2t gives the tokens 0 to 31,999",
        "Look into the training's mapping; a prefix that is meant needs nothing.",
    ),
    Page(
        "vocab.head-rows", Level.STATIC, "error", "The head has not the rows that the list needs",
        "A draft's head has one row for each token of the list; a target's has at least as many as its largest id says.",
        "lm_head.weight has 32,000 rows, the list 32,768 tokens",
        _TRAINED,
    ),
    Page(
        "vocab.config", Level.STATIC, "error", "draft_vocab_size is not the number of tokens",
        "Engines make the draft's head and map of the size that config.json declares, and load what is there into it.",
        "config.json declares draft_vocab_size 32,000, the list has 32,768 tokens",
        "Let draft_vocab_size in the draft's config.json be the number of tokens in its map.",
    ),
    Page(
        "vocab.specials", Level.STATIC, "warning", "A token that ends a text is not in the list",
        "A draft that cannot propose the end of a text, or of a turn, is rejected at each.",
        "draft.txt lacks 151645, which ends a text",
        "ckptkit draft-vocab build --force-special puts all special tokens first.",
    ),
    Page(
        "vocab.fingerprint", Level.STATIC, "error", "The list was made for another tokenizer",
        "The list records a digest of all tokens of its tokenizer in the order of ids. With another tokenizer its ids are "
        "other tokens, also where the vocabularies have one size.",
        "draft.txt was made for a tokenizer of fingerprint 81f0…, and ./Qwen3-8B has d2c4…",
        "Build the list again with this target's tokenizer.",
    ),
    Page(
        "vocab.coverage", Level.DATA, "error", "The list covers too little of a kind of text",
        "A token outside the list is never proposed, so what is accepted per step falls with the share of tokens that are in "
        "it. A list made of English chat covers code and other languages badly. The threshold is --min-coverage.",
        "code: 91.20% of its tokens are in the list, less than 95%",
        "Add such text to the corpus and build the list again, or with a larger --size.",
    ),
)  # fmt: skip
