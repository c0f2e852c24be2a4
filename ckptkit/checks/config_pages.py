"""The pages of the checks of config.json."""

from __future__ import annotations

from . import Level, Page

PAGES = (
    Page(
        "config.parse",
        Level.STATIC,
        "error",
        "config.json cannot be read",
        "It is no JSON object, is not UTF-8, has a key twice in one object (JSON readers differ in which of two they "
        "take), or escapes half of a surrogate pair, which is no character and which no program can write.",
        '{"vocab_size": 32000, "vocab_size": 32064}',
        "Correct the file; where it is no JSON, python -m json.tool config.json points at the place where it breaks off.",
    ),
    Page(
        "config.missing",
        Level.STATIC,
        "error",
        "There is no config.json",
        "Engines build the model from it: without one there is nothing that the tensors could be loaded into, and "
        "nothing that says how quantized ones are to be read.",
        "a folder of shards and an index",
        "hf download ORG/NAME config.json --local-dir DIR",
    ),
    Page(
        "config.layout",
        Level.STATIC,
        "error",
        "ckptkit_layout is not what ckptkit unpack wrote",
        "The key holds what the way back to the layout before needs to know: the layouts, the names of projections, how "
        "stacked weights lie, and the keys of the config that were changed. One that was edited leads nowhere, and "
        "where model_type says that no engine reads the result, nothing else tells which model it was.",
        '"ckptkit_layout": {"from": "fused", "to": "per-expert", "names": 5}',
        "Take config.json from the result of the ckptkit unpack that wrote it, or make it again.",
    ),
    Page(
        "config.arch",
        Level.STATIC,
        "error",
        "architectures does not name a model class",
        "vLLM and SGLang choose the implementation by the first of architectures and stop without one. A string in "
        "place of a list is read letter by letter.",
        '"architectures": "LlamaForCausalLM"',
        '"architectures": ["LlamaForCausalLM"]',
    ),
    Page(
        "config.dtype",
        Level.STATIC,
        "warning",
        "The stated dtype is not that of the weights",
        "Engines load the weights in the dtype that config.json states (dtype, or torch_dtype in older ones) and convert "
        "what is stored otherwise. From BF16 to F16 values beyond 65,504 become infinite; from F32 to BF16 precision is "
        "lost; from F16 to F32 memory doubles. The dtype of most elements of the dense weights counts: norms and "
        "routers in F32 are usual, and quantized weights have no say.",
        '"torch_dtype": "float16" beside BF16 weights',
        "Correct dtype in config.json, or convert what is stored: ckptkit reshard SRC OUT --cast '*=bf16'",
    ),
    Page(
        "config.tie",
        Level.STATIC,
        "error",
        "The tie of head and embedding does not fit what is stored",
        "With tie_word_embeddings the output head is the token embedding itself. Without the tie and without a stored "
        "head, the head is whatever it was initialised with: fluent nonsense, or a load error. With the tie, a stored "
        "head is ignored by some engines and loaded by others; where it differs from the embedding in dtype, shape or "
        "format (a quantized head, above all) engines compute different things or fail to load it, so that is an "
        "error. One of the same dtype and shape is a warning: data.tie compares the bytes. Where the config does not say, "
        "the model type's default counts.",
        '"tie_word_embeddings": true beside lm_head.weight_packed',
        '"tie_word_embeddings": false in config.json, at the top level and in text_config, where the stored head is '
        "meant; ckptkit reshard SRC OUT --drop lm_head.weight where it is not.",
    ),
    Page(
        "config.vocab",
        Level.STATIC,
        "error",
        "vocab_size is not the number of rows of the embedding",
        "Engines allocate embedding and head by vocab_size. transformers refuses another number of rows; vLLM and "
        "SGLang fail an assertion or load a part. A config whose vocab_size was rounded up, or an embedding that was "
        "resized and saved without its config, looks like this.",
        '"vocab_size": 32000 with model.embed_tokens.weight [32064, 4096]',
        "Set vocab_size to the number of rows.",
    ),
    Page(
        "vocab.rows",
        Level.STATIC,
        "error",
        "Embedding, head and tokenizer do not have the same tokens",
        "The head has other rows than the embedding (and the config has no draft_vocab_size of that number), or the "
        "tokenizer has ids past the last row: such a token reads memory out of bounds on a GPU, or stops the server. "
        "Tokens that were added to a tokenizer without resizing the model are the usual cause. More rows than tokens "
        "are padding, and fine; so are tokens past the end that stand for images or sound in a tokenizer shared with a "
        "multimodal model.",
        "tokenizer.json has '<|im_start|>' with id 32000; model.embed_tokens.weight is [32000, 4096]",
        "Resize the model (model.resize_token_embeddings(len(tokenizer)) in transformers), or take the tokenizer of the "
        "model as it was.",
    ),
    Page(
        "config.layers",
        Level.STATIC,
        "error",
        "num_hidden_layers is not the number of layers stored",
        "A declared layer without any tensor keeps what it was initialised with; a stored layer past the last declared "
        "one is left out, and the model computes something else. Past it, layers that hold parts of their own "
        "(eh_proj, hnorm) draft tokens: without num_nextn_predict_layers no engine uses them, which is a warning.",
        '"num_hidden_layers": 32 with model.layers.0 to model.layers.30',
        "Correct num_hidden_layers, or fetch the shards that hold what is missing.",
    ),
)
