"""The pages of the checks on captured features, for ``ckptkit checks ID`` and docs/checks.md."""

from __future__ import annotations

from ..checks import Level, Page

_AGAIN = "Capture the sample again, and write it under another name that is renamed when it is whole."

PAGES = (
    # --- how they are stored ---------------------------------------------------------------------------------
    Page(
        "features.truncated", Level.STATIC, "error", "A file of features is cut off",
        "A capture that was killed, or a full disk, leaves a file that ends early: gzip without its end, a zip without "
        "its directory, a shard that is shorter than its index says. Trainers open files when it is their turn, so "
        "such a one ends a run after hours.",
        "rows_0-2000/data_7.ckpt is cut off: its zip has no end",
        f"Remove the file, or: {_AGAIN}",
    ),
    Page(
        "features.unreadable", Level.STATIC, "error", "A file of features is no dict of tensors that torch.save wrote",
        "A .ckpt must be a zip written by torch.save (torch 1.6 and newer), its entries stored uncompressed: SpecForge "
        "maps the tensors from the file. A .ckpt.gz is gzip around the same. It holds a dict of tensors.",
        "data_7.ckpt is no file that torch.save has written since torch 1.6",
        "Write it again: torch.save({...}, path) without _use_new_zipfile_serialization=False.",
    ),
    Page(
        "features.unsafe", Level.STATIC, "error", "A file of features asks for code to be run",
        "A pickle may name any function and have it called when it is loaded. Trainers load features with "
        "weights_only=False and would run it. Here only tensors and plain values are loaded, ever; what the file asks "
        "for is named and not run.",
        "data_7.ckpt needs code to be run that it names: os.system; it was not",
        "Do not train on files of unknown origin. Save tensors, numbers and strings only.",
    ),
    Page(
        "features.manifest", Level.STATIC, "error", "The manifest of a DeepSpec cache does not fit",
        "manifest.json must be of version 2, with bfloat16 states, int32 tokens, uint8 masks and records of 56 bytes; "
        "hidden_size and target_layer_ids must be those of the draft's config, the layers rising; shards numbered "
        "from 0.",
        "manifest.json names the tapped layers [1, 9, 17, 25], the draft's config [1, 9, 17, 25, 33]",
        "Capture with the draft's config; a cache of more layers must be written again with those that are tapped.",
    ),
    Page(
        "features.index", Level.STATIC, "error", "A record of samples.idx cannot be",
        "Records are numbered from 0 without gaps, name a shard of the manifest and have at least one token; in a shard "
        "the samples lie one after the other, and the five tensors of a sample apart from each other.",
        "samples.idx: record 12 says sample 13, shard 0, 2,048 tokens",
        "Finish the capture again: the index was merged wrongly, or written by another version.",
    ),
    Page(
        "features.duplicate", Level.STATIC, "error", "One sample is stored twice",
        "SpecForge takes every .ckpt and .ckpt.gz below the folder. A capture that was run again with --compress, or "
        "with another group size, leaves both forms of a sample, and both are trained on.",
        "rows_0-2000/data_7.ckpt and rows_0-2000/data_7.ckpt.gz are the same sample: it would be trained twice",
        "Remove one of the two.",
    ),
    Page(
        "features.dialect", Level.STATIC, "error", "The keys are not those that the draft's trainer reads",
        "Two sets of keys go under the name specforge_hidden_states_v1: hidden_states with target_last_hidden_states, "
        "which SpecForge's DSpark reads, and aux_hidden_state with hidden_state, which its EAGLE-3 reads and branches "
        "for DeepSeek-V4 take for DSpark too (a warning then). A folder holds one of them. DeepSpec has a store of "
        "its own.",
        "the features have the keys hidden_states and target_last_hidden_states; trainers of eagle3 read "
        "aux_hidden_state, hidden_state",
        "Rename the keys when the features are written, or capture for the trainer that will read them.",
    ),
    Page(
        "features.keys", Level.STATIC, "error", "A sample lacks a tensor",
        "input_ids, loss_mask, the tapped states and, unless the draft is a DFlash one, the last states are needed, "
        "each as a tensor.",
        "data_7.ckpt: there is no target_last_hidden_states; it holds hidden_states, input_ids, loss_mask",
        "Capture again with what is missing.",
    ),
    Page(
        "features.dtype", Level.STATIC, "error", "A tensor has a dtype that trainers do not take",
        "Tokens are int64 (int32 in DeepSpec's store), masks numbers or booleans, states bfloat16, float16 or float32.",
        "data_7.ckpt: input_ids is int32 [2048]; it is read as int64",
        "Cast when the features are written.",
    ),
    Page(
        "features.shape", Level.STATIC, "error", "A tensor has the wrong number of dimensions",
        "Tokens and mask are [tokens]: of [1, tokens] trainers take the first dimension for the tokens, and find one. "
        "States are [tokens, width] or [1, tokens, width].",
        "data_7.ckpt: input_ids is int64 [1, 2048], and [tokens] is read",
        "Write input_ids[0] and loss_mask[0]; one file holds one sample.",
    ),
    Page(
        "features.length", Level.STATIC, "error", "Tensors of a sample differ in length",
        "There is one state, one token and one mask value for each position. Trainers cut all to the longest length "
        "allowed before they compare, so a difference behind that passes unseen and one before it ends the run.",
        "data_7.ckpt: lengths differ: input_ids 2,048, loss_mask 2,048, hidden_states 2,047, ...",
        "Capture again; a state less is often that of the last token, which generation never computes.",
    ),
    Page(
        "features.width", Level.STATIC, "error", "States are not as wide as the draft's config means",
        "Tapped states are taps x hidden wide, last ones hidden. DeepSeek-V4 keeps several residual streams (hc_mult, "
        "4): a tap is their mean, and a tensor of 4 x hidden holds the streams of one place, flattened, instead of "
        "three taps. The right number for other taps of the same count cannot be told from the width.",
        "data_7.ckpt: hidden_states is 16384 wide, and the draft's config means 12288 (3 x 4096): these are the 4 "
        "residual streams of one place, flattened and not folded",
        "Capture the outputs of the tapped layers, the mean over the streams taken, in the order of the taps.",
    ),
    Page(
        "features.width-ambiguous", Level.STATIC, "warning", "The width cannot tell taps from streams",
        "The draft taps as many layers as the target has residual streams: folded taps and flattened streams are "
        "equally wide, and the check of widths proves nothing.",
        "4 taps of 4096 and 4 residual streams of 4096 are both 16384 wide",
        "Make sure by hand that the capture takes the mean over the streams at each tap.",
    ),
    Page(
        "features.max-len", Level.STATIC, "warning", "A sample is longer than trainers read",
        "Trainers take the first --max-len tokens of a sample. The answer, which is what is trained on, stands at the "
        "end: of long samples it is what is cut.",
        "data_7.ckpt: 9,216 tokens, of which trainers read the first 4,096",
        "Train with a larger max_length, or capture with a smaller one.",
    ),
    # --- what they hold --------------------------------------------------------------------------------------
    Page(
        "features.tokens", Level.DATA, "error", "A token id is outside of the vocabulary",
        "Token ids run from 0 to below vocab_size of the draft's config. Another tokenizer, or padding with -100, "
        "gives others; on a GPU they end the run with an assertion that names no sample.",
        "data_7.ckpt: token 151936 at 12 (and 3 more) is outside of the vocabulary of 151,936",
        "Capture with the target's tokenizer; store no padding.",
    ),
    Page(
        "features.noise", Level.DATA, "error", "The noise token stands in the text",
        "The draft sees the noise token (dspark_noise_token_id, mask_token_id) where tokens are still to be drafted; "
        "in the context it teaches the draft that there is nothing there.",
        "data_7.ckpt: the noise token 128799 stands 3 times among the tokens",
        "Remove the sample, or choose a noise token that no text has.",
    ),
    Page(
        "features.mask", Level.DATA, "error", "The loss mask leaves nothing to train on",
        "The loss mask is 1 for tokens that are trained on and 0 elsewhere, other values weigh tokens unnoticed. A "
        "block is a token and those after it, so DSpark and DFlash need two neighbours that are 1, within the first "
        "--max-len tokens; SpecForge ends the run where there are none. EAGLE-3 needs one. In the aux dialect the last "
        "token does not count, unless loss_mask_is_token_aligned says that it does.",
        "data_7.ckpt: nothing to train on: no two neighbours are 1 in the loss mask (1 of 2,048 are)",
        "Remove the sample; if many are so, the chat template of the capture does not find the answers.",
    ),
    Page(
        "features.nonfinite", Level.DATA, "error", "A state holds NaN or Inf",
        "One such state makes the loss NaN, and from then on the draft. float16 captures overflow at 65,504, which "
        "states before the final norm reach.",
        "data_7.ckpt: tap 2: 1 of 2,048 states hold NaN or Inf",
        "Capture in bfloat16; remove the sample.",
    ),
    Page(
        "features.dead-tap", Level.DATA, "error", "A tap says the same for all tokens",
        "All states of one tap are equal: the buffer was never filled, or the hook reads something that is no hidden "
        "state. The draft learns to pass it over.",
        "data_7.ckpt: tap 1 is the same for all 2,048 tokens",
        "Look at the hook of that layer in the capture; capture again.",
    ),
    Page(
        "features.zero-states", Level.DATA, "error", "Some states are all zeros",
        "No layer of a model gives a state of zeros. Rows of padding, a file with a hole where a disk was full, a "
        "buffer that was longer than what was written into it look like this.",
        "data_7.ckpt: last: 48 of 2,048 states are all zeros",
        "Capture the sample again; store no padding.",
    ),
    Page(
        "features.same-taps", Level.DATA, "error", "Two taps hold the same states",
        "Each tap is another layer, whose outputs differ. Equal ones come of a hook that reads one buffer for all taps "
        "(fused residual additions write into it), or of a layer that is named twice. A tap that is equal to the last "
        "states is the last layer's output: the final norm was not applied to them.",
        "data_7.ckpt: tap 0 and tap 1 hold the same states",
        "Clone the state in the hook, after the residual is added; for the last states take the output of the norm.",
    ),
    Page(
        "features.repeated", Level.DATA, "warning", "Two samples have the same tokens",
        "The same tokens were captured twice, under other numbers. They count double in training, and if one of them "
        "is in the set for evaluation its figures are too good.",
        "rows_2000-4000/data_2007.ckpt: the tokens are those of an earlier sample",
        "Remove one, unless it is meant.",
    ),
    # --- against the target ----------------------------------------------------------------------------------
    Page(
        "features.target", Level.NUMERIC, "error", "--target is another model than the draft's target",
        "hidden_size and vocab_size of the checkpoint and of the draft's config must agree.",
        "./Qwen3-8B is not the draft's target: hidden_size 4096 there, 2560 in the draft's config",
        "Give the checkpoint that the features were captured from.",
    ),
    Page(
        "features.pre-norm", Level.NUMERIC, "error", "Last states were captured before the final norm",
        "Trainers put the last states straight into the target's head, so they must have passed its final norm. Divided "
        "by the norm's weight such a state has an RMS of 1, which rounding to bfloat16 changes by less than 0.5 %; "
        "states before the norm are several times to a thousand times as large. Every state must be within 2 %. A "
        "capture before the norm trains without an error, on a distribution that the target does not have.",
        "data_7.ckpt: 2,048 of 2,048 last states have not passed the target's final norm: over its weight their RMS is "
        "38.2, and 1 after it",
        "Capture the output of the final norm (of DeepSeek-V4: after its streams are folded), and before the head.",
    ),
    Page(
        "features.next-token", Level.NUMERIC, "error", "The head does not read the next tokens off the last states",
        "The target's head, applied to up to 512 of the last states, should put the token that comes next first: for "
        "the target's own text mostly, for text by others in some 40 % of places, for states of another model or "
        "another head in next to none. Below 20 % is an error, and so is it if the token itself or the one after the "
        "next is put first more often than the next (by three standard deviations): then states and tokens are "
        "shifted against each other. The share stands in the report.",
        "the head puts the token itself first for 71% of 512 last states, the next token for 3%",
        "Store the state of a token at that token's place; capture from the checkpoint that is given as --target.",
    ),
)  # fmt: skip
