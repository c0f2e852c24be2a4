"""What the ids of :mod:`.quantization` mean."""

from __future__ import annotations

from . import Level, Page

_AGAIN = "Take the config that belongs to these weights, or quantize again from the dense source: ckptkit quantize."

PAGES = (
    Page(
        "config.quant-undeclared",
        Level.STATIC,
        "error",
        "A module is quantized on disk and not declared to be",
        "Engines make the layer's parameters from the declaration. Declared dense, it gets a dense weight, and the "
        "codes and scales on disk have nowhere to go: they are dropped with a warning or without one, the weight keeps "
        "whatever the memory held, and the model decodes nonsense. FP8 codes are even copied into the dense weight, "
        "without their scale. The declaration is missing, does not reach the module, or lists it as left dense.",
        'lm_head.weight_packed I32 [151936, 640]\nconfig.json: "ignore": ["lm_head"]',
        "Take the entry that covers the module out of ignore, exclude_modules or modules_to_not_convert, add a target "
        "that names it, or take the config that belongs to these weights. In GPTQ a head needs lm_head: true.",
    ),
    Page(
        "config.quant-dense",
        Level.STATIC,
        "error",
        "A module is declared quantized and stored dense",
        "The engine makes packed parameters and finds none of them. transformers initialises them at random and says "
        "so in a report; vLLM and SGLang keep what the memory held, or copy 16-bit weights into an FP8 parameter with "
        "no scale. For MTP layers the sign is an acceptance rate of zero.",
        'model.layers.61.eh_proj.weight BF16 [7168, 14336]\nconfig.json: "targets": ["Linear"], "ignore": ["lm_head"]',
        "Add the module to the list of those left dense: ignore (compressed-tensors), exclude_modules (ModelOpt), "
        "modules_to_not_convert (FP8, AWQ, MXFP4).",
    ),
    Page(
        "config.quant-target-unmatched",
        Level.STATIC,
        "error",
        "A target matches no module",
        "A target is the name of a module, not of its weight, re: and a regex matched from the start of the name, or "
        "the class of a module. One that finds nothing quantizes nothing: a typo, a name of another family, a head "
        "that is tied and so not stored. It is a warning where other targets of the group do find modules.",
        'config.json: "targets": ["lm_haed"]',
        "Correct the target; ckptkit inspect CKPT --group module lists the names that there are.",
    ),
    Page(
        "config.quant-ignore-unmatched",
        Level.STATIC,
        "warning",
        "An entry of the list of dense modules matches no module",
        "Engines accept it, and leave nothing dense for it. Often the name lacks its path (embed_tokens for "
        "model.embed_tokens), ends in .weight, or lacks re: before a regex; then what it was meant for was quantized.",
        'config.json: "ignore": ["lm_head.weight", "backbone\\\\.embeddings"]',
        "Correct the entry, or take it out. See what became of the module that it was meant for.",
    ),
    Page(
        "config.quant-both",
        Level.STATIC,
        "error",
        "A target's modules are all on the ignore list too",
        "Ignore wins in every engine, so the target finds nothing: a quantized head that is still in ignore is loaded "
        "as a dense one. A warning where the modules are stored dense.",
        'config.json: "targets": ["re:.*lm_head$"], "ignore": ["lm_head"]',
        "Take the entry out of ignore if the modules are quantized, else take the target out.",
    ),
    Page(
        "config.quant-format",
        Level.STATIC,
        "error",
        "The declared format is not that of the tensors",
        "The format says which tensors a module has (weight_packed, weight, qweight, _blocks) and of which dtype. "
        "Engines look for these names and find others: the load fails, or the weights stay uninitialised. Seen where a "
        "checkpoint was quantized a second time by another method and only the config was replaced.",
        'config.json: "format": "pack-quantized"\nmodel.layers.0.mlp.up_proj.qweight I32 [512, 11008]',
        _AGAIN,
    ),
    Page(
        "config.quant-bits",
        Level.STATIC,
        "error",
        "Bits, groups, blocks or zero points are not as declared",
        "Codes packed into words do not say how many bits each has: engines unpack them as declared. With shapes that "
        "happen to fit, 8-bit codes are read as 4-bit ones and nothing fails; else the load stops at a size mismatch. "
        "The same holds for the size of FP8 blocks and for zero points, which a symmetric scheme does not look at.",
        'config.json: "num_bits": 8, "strategy": "channel"\nlm_head.weight_packed I32 [512, 32], weight_scale [512, 2]',
        "Correct num_bits, group_size, strategy, block_structure or symmetric (bits, group_size, weight_block_size in "
        "other methods), or quantize the module again.",
    ),
    Page(
        "config.quant-consumers",
        Level.STATIC,
        "error",
        "Engines would read the declaration in different ways",
        "compressed-tensors takes exact names before regexes, and regexes in alphabetical order; vLLM takes the first "
        "target in the file that fits; and vLLM looks for fused layers (qkv_proj) by their own name first. Where "
        "targets overlap, 8-bit codes are unpacked as 4-bit ones by one of them without an error. vLLM also finds "
        "entries of ModelOpt's and AWQ's lists anywhere in a name. And files beside config.json may say something "
        "else than it does.",
        '"attention": {"targets": ["re:.*layers.0.*q_proj"], …}, "body": {"targets": ["re:.*_proj"], …}',
        "Write targets that do not overlap, each anchored: re:^(?:.*\\.)?layers\\.0\\.self_attn\\.q_proj$. Remove "
        "declarations that are out of date.",
    ),
    Page(
        "config.quant-fused",
        Level.STATIC,
        "error",
        "Parts of what engines fuse are quantized in different ways",
        "vLLM and SGLang load q, k and v into one layer, gate and up into another, all experts of a layer into a "
        "third, each with one scheme. Where the parts differ, or some are dense, vLLM refuses the checkpoint with "
        "'different quantization schemes for the shards'.",
        "self_attn.q_proj.weight BF16, self_attn.k_proj.weight_packed U8, self_attn.v_proj.weight_packed U8",
        "Quantize all parts alike, or leave all of them dense.",
    ),
    Page(
        "config.quant-class-head",
        Level.STATIC,
        "error",
        "A quantized head that no target names",
        "The class target Linear reaches a head in transformers. In vLLM a head is a ParallelLMHead, whose name holds "
        "no Linear, and SGLang looks at name targets only: both make a dense head, and its packed codes are dropped. "
        "Under quant_method fp8 there is no way to declare a head for them.",
        'config.json: "targets": ["Linear"], "ignore": []\nlm_head.weight_packed I32 [151936, 640]',
        "Give the head a group of its own with the target re:^(?:.*\\.)?lm_head$, before the others; under fp8, "
        "dequantize it.",
    ),
    Page(
        "config.quant-embedding",
        Level.STATIC,
        "error",
        "An embedding is quantized",
        "A data-free quantizer that takes every matrix takes embeddings too, and Linear in the config then reaches "
        "none of them: the embedding is newly initialised and every token looks the same. Declared by name it is a "
        "warning: vLLM takes integers in groups or rows, for some models; SGLang loads none.",
        'model.embed_tokens.weight_packed I32 [151936, 320]\nconfig.json: "targets": ["Linear"]',
        "Quantize again with the embedding left dense, or dequantize it.",
    ),
    Page(
        "config.quant-router",
        Level.STATIC,
        "error",
        "A router is quantized",
        "Engines make the small matrix that picks experts dense whatever the config says: vLLM fails on its packed "
        "name, others leave it uninitialised, and tokens go to the wrong experts. A warning where a target names it.",
        "model.layers.3.mlp.gate.weight_packed I32 [64, 256]",
        "Quantize again with re:.*\\.gate$ in ignore, or dequantize it.",
    ),
    Page(
        "config.quant-draft",
        Level.STATIC,
        "warning",
        "Layers that draft tokens were quantized in passing",
        "MTP, NextN and DSpark layers are many engines' unquantized special case, and rounding costs acceptance. "
        "Reached by the class target Linear, they were probably not meant.",
        'mtp.0.e_proj.weight_packed I32 [4096, 512]\nconfig.json: "targets": ["Linear"]',
        "Quantize again with these layers in ignore, or name them in a target.",
    ),
    Page(
        "config.quant-status",
        Level.STATIC,
        "error",
        "The config contradicts itself about what is stored",
        "Groups are declared and nothing on disk is quantized (format: dense is what a quantizer writes whose targets "
        "found nothing); or the format is dense and there are packed modules; or quantization_status is not "
        "compressed, for which transformers expects dense weights (a warning: other engines do not read it).",
        'config.json: "format": "dense", "quantization_status": "compressed", "config_groups": {"head": …}',
        _AGAIN + " For a dense checkpoint take quantization_config out.",
    ),
    Page(
        "config.quant-version",
        Level.STATIC,
        "error",
        "The declaration cannot be parsed",
        "compressed-tensors and vLLM parse groups with models that take no field they do not know and no value out of "
        "range, and the load ends there. A warning where the config says that a newer version wrote it. Activation "
        "ordering by groups was taken out of compressed-tensors and vLLM in 2026.",
        '"weights": {"num_bits": 4, "groupsize": 128}',
        "Correct the field that the message names.",
    ),
    Page(
        "config.quant-kv",
        Level.STATIC,
        "warning",
        "The declared KV cache and the scales on disk disagree",
        "A static kv_cache_scheme needs k_scale and v_scale tensors; without them engines quantize the cache by a "
        "scale of 1.0. Scales without a scheme are dropped. vLLM takes symmetric 8-bit floats only.",
        'config.json: "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": false}   (no k_scale anywhere)',
        "Take kv_cache_scheme out, or calibrate again with it.",
    ),
)
