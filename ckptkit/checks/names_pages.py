"""The pages of the checks of names."""

from __future__ import annotations

from . import Level, Page

PAGES = (
    Page(
        "names.weight-without-scale",
        Level.STATIC,
        "error",
        "Quantized weights have no scale",
        "Codes (FP8, INT8, packed INT4 or FP4) mean nothing without the scales they are multiplied by. Engines that do "
        "not find one take 1.0 or whatever memory holds: weights too large by a factor of thousands, or noise. Looked for are the names of compressed-tensors "
        "(weight_scale), DeepSeek (weight_scale_inv, scale), ModelOpt (weight_scale, weight_scale_2), GPTQ and AWQ "
        "(scales), gpt-oss (_scales) and bitsandbytes (absmax, SCB).",
        "model.layers.3.mlp.up_proj.weight F8_E4M3, and no model.layers.3.mlp.up_proj.weight_scale_inv",
        "Take the scale from the source. A cast to a wider dtype does not help: what is missing is the factor.",
    ),
    Page(
        "names.scale-without-weight",
        Level.STATIC,
        "error",
        "A scale has no weight",
        "A tensor says how to read a weight that is not stored: a weight was lost, or renamed without its scale. "
        "Engines stop at a name that they do not know, or leave the module uninitialised.",
        "model.layers.3.mlp.up_proj.weight_scale alone",
        "Take the weight from the source; ckptkit reshard SRC OUT --drop NAME where the scale is a leftover.",
    ),
    Page(
        "names.unknown-scale",
        Level.STATIC,
        "error",
        "A scale has a name that no format knows",
        "Beside codes without a scale lies a tensor that is called like one, under a suffix that no format uses. Engines "
        "skip it with a warning or without, and read the codes unscaled.",
        "model.layers.3.mlp.up_proj.scale_weight beside model.layers.3.mlp.up_proj.weight F8_E4M3",
        "Rename it to what the declared format uses: ckptkit reshard SRC OUT --rename "
        r"'re:\.scale_weight$=.weight_scale'. First make sure of its sense: some formats store what weights are divided by.",
    ),
    Page(
        "names.incomplete-layer",
        Level.STATIC,
        "error",
        "A layer lacks a tensor that layers like it have",
        "Layers of one kind have the same tensors. One or two that lack some of them have lost them, or hold them under "
        "a name of their own (a typing error in a rename). Engines leave the parameter as it was initialised; few say "
        "so. A warning where a whole block (all of mlp) or the first layer's norm is missing, which some models have by "
        "design. Kinds of layers (dense and MoE, linear and full attention) are told apart by what they hold, and by "
        "layer_types and the like in the config.",
        "model.layers.7 has k_proj, v_proj and o_proj, and no q_proj",
        "Take the tensor from the source, or rename it back: ckptkit reshard SRC OUT --rename OLD=NEW",
    ),
    Page(
        "names.incomplete-experts",
        Level.STATIC,
        "error",
        "A layer's experts are not all there",
        "An expert, or one of its projections, is missing, or num_experts (n_routed_experts, num_local_experts) is not "
        "the number stored. The router still sends tokens to the missing expert, whose weights are whatever memory "
        "holds; where the config says less, experts at the end are dropped and the router's rows do not fit.",
        'model.layers.3.mlp.experts.0 to 126 with "num_experts": 128',
        "Take the experts from the source, or correct the number in config.json after pruning.",
    ),
    Page(
        "names.incomplete-model",
        Level.STATIC,
        "error",
        "The token embedding or the last norm is missing",
        "A language model needs an embedding before its layers and a norm after them. Without one, engines start with "
        "an uninitialised one, or stop.",
        "model.layers.0 to model.layers.31 and lm_head, and no model.norm.weight",
        "Take the tensor from the source.",
    ),
    Page(
        "names.draft-missing",
        Level.STATIC,
        "error",
        "Declared draft layers have no tensors",
        "The config declares layers that predict further tokens (num_nextn_predict_layers, mtp_num_hidden_layers, "
        "dspark_target_layer_ids), and none of their tensors is stored: saving through a model class that does not "
        "know them dropped them without a word. Decoding without speculation is not affected; with it, the engine "
        "stops, or drafts from uninitialised weights and accepts next to nothing.",
        '"num_nextn_predict_layers": 1, and no model.layers.61 nor mtp.0',
        "Take the layers from the source, or set the key to 0.",
    ),
    Page(
        "names.orphan",
        Level.STATIC,
        "warning",
        "Tensors that belong to something else",
        "States of an optimizer, an adapter that was not merged, buffers of a training framework: engines leave them out "
        "at best. An error where the names of the weights themselves begin with a wrapper (module., _orig_mod., "
        "base_model.model.), as torch.compile, DistributedDataParallel, FSDP and PEFT write them: no engine finds a "
        "weight under such a name.",
        "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "ckptkit reshard SRC OUT --rename '_orig_mod.=' takes the prefix away; --drop '*.lora_*' leaves tensors out. An "
        "adapter is merged with the library that trained it.",
    ),
)
