"""Values: NaN, Inf, zeros, scales that cannot be, codes that are saturated, rows of embeddings and heads alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import Finding
from ..families import Kind
from ..plan import Ref
from . import Level, Page, Probe, Seen, Subject
from .folding import fold
from .roles import Role, What, is_spread
from .vocabulary import odd_rows, used_rows

if TYPE_CHECKING:
    from .tally import Tally

# E4M3's least normal number and float32's 1, as bits.
_E4M3_NORMAL, _ONE = 0x08, 0x3F800000
_LAST_CODE = 15  # of 4 bits


def judge(subject: Subject) -> Callable[[Ref, Role, Tally], list[Finding]]:
    """What is odd about a tensor, from its tally."""
    used = used_rows(subject)

    def of_tensor(ref: Ref, role: Role, tally: Tally) -> list[Finding]:
        found = [*_nonfinite(ref, role, tally)]
        match role.what:
            case What.SCALE:
                found += _scale(ref, role, tally)
            case What.SHAPE:
                found += _stated_shape(ref, role, tally)
            case What.CODES if not tally.nan:
                found += _codes(ref, role, tally)
            case What.TABLE:
                found += _zeros(ref, role, tally) or odd_rows(ref, tally.rows, used)
            case What.WEIGHT:
                found += _zeros(ref, role, tally)
        return found

    return of_tensor


def _finding(id: str, ref: Ref, text: str, severity: str = "error", hint: str | None = None, **data: Any) -> Finding:
    return Finding(id, f"{ref.name} {text}", ref.file, ref.name, hint, severity, data)


def _nonfinite(ref: Ref, role: Role, tally: Tally) -> Iterator[Finding]:
    numbers = math.prod(ref.shape)
    if role.what is What.SCALE:
        if tally.nan or tally.inf:
            text = f"holds {tally.nan + tally.inf:,} NaN or Inf in {numbers:,} scales: what they scale is NaN or Inf"
            yield _finding("data.scale-nonfinite", ref, text, nan=tally.nan, inf=tally.inf)
        return
    if tally.nan:
        yield _finding("data.nan", ref, f"holds {tally.nan:,} NaN in {numbers:,} numbers", nan=tally.nan)
    if tally.inf:
        yield _finding("data.inf", ref, f"holds {tally.inf:,} Inf in {numbers:,} numbers", inf=tally.inf)


def _zeros(ref: Ref, role: Role, tally: Tally) -> list[Finding]:
    """A vector of zeros may be meant: norms that add one to their weight begin so; and so may any bias, stacked or not."""
    if tally.peak or math.prod(ref.shape) < 2 or ref.name.endswith("bias"):
        return []
    severity = "error" if len(ref.shape) > 1 and role.kind not in {Kind.NORM, Kind.OTHER} else "warning"
    return [_finding("data.all-zero", ref, "is all zeros", severity)]


def _scale(ref: Ref, role: Role, tally: Tally) -> Iterator[Finding]:
    numbers = math.prod(ref.shape)
    if tally.zero:
        text = f"is zero in {tally.zero:,} of {numbers:,} scales: the weights there are all zero"
        yield _finding("data.scale-zero", ref, text, zero=tally.zero)
    if tally.negative:
        text = f"is negative in {tally.negative:,} of {numbers:,} scales"
        yield _finding("data.scale-negative", ref, text, "warning", negative=tally.negative)
    if role.label.startswith("nvfp4") and ref.dtype == "F8_E4M3" and 0 < tally.peak < _E4M3_NORMAL:
        text = "lies below E4M3's normal numbers throughout: the scale of the scales is far too small"
        yield _finding("data.scale-range", ref, text)
    if ref.name.endswith(".weight_global_scale") and tally.peak == _ONE and numbers == 1:
        text = "is exactly 1, which is what a global scale becomes that overflows"
        yield _finding("data.scale-range", ref, text)


def _stated_shape(ref: Ref, role: Role, tally: Tally) -> Iterator[Finding]:
    rows, words = role.packed[-2:]
    stated = tally.values
    fits = len(stated) >= 2 and stated[-2] == rows and -(-stated[-1] * role.bits // 32) == words
    if not fits:
        text = f"says {list(stated)}, but {rows} x {words} words of {role.bits}-bit numbers are stored"
        yield _finding("data.weight-shape", ref, text)


def _codes(ref: Ref, role: Role, tally: Tally) -> Iterator[Finding]:
    if is_spread(ref.name) and tally.high > _LAST_CODE:
        text = f"holds the byte {tally.high}, and codes of 4 bits end at {_LAST_CODE}"
        yield _finding("data.codes", ref, text, largest=tally.high)
    elif not tally.peak:
        yield _finding("data.all-zero", ref, "holds nothing but the code of zero")
    elif tally.low == tally.high and ref.nbytes > 1:
        yield _finding("data.saturated", ref, f"holds the byte {tally.low:#04x} and no other", constant=tally.low)
    elif tally.counted and tally.ends > most_at_ends(role) * tally.counted:
        share = tally.ends / tally.counted
        text = f"has {share:.0%} of its codes at the ends of their range ({most_at_ends(role):.0%} is much)"
        yield _finding("data.saturated", ref, text, "warning", share=round(share, 4))


def most_at_ends(role: Role) -> float:
    """The share of codes at the ends of their range from which on a tensor counts as saturated.

    Twice what a uniform distribution over the range has there, and two for each scale: weights are denser towards
    zero, and of those that share a scale the largest reaches an end.
    """
    # Floats: what is rounded to the last code, from 5 of 6 in E2M1, from 53,248 of 57,344 in E5M2, less in E4M3.
    floats = 1 / 6 if "fp4" in role.label else 1 / 14
    uniform = 2 / (1 << role.bits) if role.label.startswith("int") else floats
    return 2 * uniform + 2 / role.share


def _values(subject: Subject) -> Seen:
    looked = subject.looked
    findings = fold(finding for seen in looked.spans if not seen.unlike for finding in seen.findings)
    return Seen(list(findings), sum(seen.tensors for seen in looked.spans))


_IDS = (
    "data.nan", "data.inf", "data.all-zero", "data.scale-zero", "data.scale-nonfinite", "data.scale-negative",
    "data.scale-range", "data.saturated", "data.codes", "data.weight-shape", "data.repeated-rows", "data.near-zero-rows",
)  # fmt: skip

PROBES = (Probe(_IDS, Level.DATA, _values),)

PAGES = (
    Page(
        "data.nan", Level.DATA, "error", "NaN in a weight",
        "One NaN in a weight makes NaN of every output that it takes part in, from there on of everything. It comes "
        "from training that diverged, from a division by zero in a conversion, or from flipped bits. Integer formats "
        "cannot hold it and MXFP4 hides it, so it must be found before a weight is quantized.",
        "model.layers.7.mlp.down_proj.weight holds 1 NaN in 24,903,680 numbers",
        "Take the tensor from a sound checkpoint; fetch the file again if its digest differs from the Hub's.",
    ),
    Page(
        "data.inf", Level.DATA, "error", "Inf in a weight",
        "An infinite weight gives infinite or NaN outputs. Usually a float32 or bfloat16 value did not fit into "
        "float16, whose largest number is 65,504.",
        "A bfloat16 checkpoint cast to float16: model.embed_tokens.weight holds 3 Inf.",
        "Make it in bfloat16 instead: ckptkit dequantize ./source ./out --dtype bf16, or ckptkit reshard ./source "
        "./out --cast '*=BF16'",
    ),
    Page(
        "data.all-zero", Level.DATA, "error", "A whole weight is zero",
        "Nothing is stored but zeros: the layer passes nothing on. A file that was preallocated and never filled, a "
        "tensor that was made and never loaded, or a sparse copy looks like this. Biases are not looked at, and a "
        "vector is a warning: norms that add one to their weight begin at zero.",
        "model.layers.30.self_attn.o_proj.weight is all zeros",
        "Fetch or make the file again; compare with the source: ckptkit diff ./source ./model --level values",
    ),
    Page(
        "data.scale-zero", Level.DATA, "error", "A scale is zero",
        "All weights under that scale read as zero, whatever their codes. Quantizers write a small scale instead of "
        "zero where there is nothing to scale.",
        "model.layers.0.mlp.up_proj.weight_scale is zero in 1 of 9,728 scales",
        "Quantize the module again from its source.",
    ),
    Page(
        "data.scale-nonfinite", Level.DATA, "error", "A scale is NaN or Inf",
        "All weights under that scale are NaN or Inf. In E8M0, the scale of the MX formats, byte 255 is NaN. Usually "
        "the source held a NaN or Inf when it was quantized.",
        "lm_head.weight_scale holds 1 NaN or Inf in 151,936 scales: that token's logit is NaN in every step.",
        "Look for data.nan in the source, mend it, and quantize again.",
    ),
    Page(
        "data.scale-negative", Level.DATA, "warning", "A scale is negative",
        "A few quantizers write negative scales on purpose (AutoRound, for symmetric integers); elsewhere a sign bit "
        "was flipped, and the weights under that scale have the wrong sign.",
        "model.layers.0.mlp.up_proj.weight_scale is negative in 1 of 9,728 scales",
        "Compare with the source: ckptkit verify ./model --against ./source --level numeric",
    ),
    Page(
        "data.scale-range", Level.DATA, "error", "NVFP4 scales outside of E4M3's normal numbers",
        "NVFP4 has an E4M3 scale for 16 weights and one float32 scale for all; the second is chosen so that the "
        "largest of the first is 448. Either all of the first are below 2^-6, where E4M3 has at most three bits, or "
        "the second is exactly 1, which would suit weights of up to 2,688: the weights are much less exact than the "
        "format allows. llmcompressor 0.14 writes such files for float16 weights whose largest magnitude is below "
        "about 0.04: its global scale overflows and becomes 1.",
        "weight_global_scale is 1.0 and most of weight_scale is below 0.0156.",
        "Quantize again: ckptkit quantize ./source ./out --recipe nvfp4a16",
    ),
    Page(
        "data.saturated", Level.DATA, "warning", "Codes crowd at the ends of their range",
        "More codes lie at the ends of their range than weights can explain: twice what a uniform distribution has "
        "there, and two for each scale, is much. Scales that are too small cut the weights off. An error if a tensor "
        "holds one byte value and no other.",
        "55 % of an int4 tensor's codes are -8 or 7: its scales were computed for a quarter of the range.",
        "Quantize the module again; compare with the source: ckptkit verify ./model --against ./source --level numeric",
    ),
    Page(
        "data.codes", Level.DATA, "error", "A byte that is no 4-bit code",
        "ckptkit unpack keeps FP4 codes one a byte, 0 to 15. A larger byte stands for no number, and packed it would "
        "change the code beside it. Whatever edited the codes wrote something else, or bits were flipped.",
        "model.layers.0.mlp.up_proj.weight_codes holds the byte 23, and codes of 4 bits end at 15",
        "Unpack the module again from its source.",
    ),
    Page(
        "data.weight-shape", Level.DATA, "error", "weight_shape does not fit the packed weight",
        "compressed-tensors cuts the unpacked weight to what weight_shape says, so a wrong one loses columns or "
        "cannot be loaded.",
        "weight_shape says [4096, 2048] beside weight_packed [4096, 512] of 4-bit numbers, which are 4096 columns.",
        "Quantize the module again, or copy weight_shape from a sound checkpoint.",
    ),
    Page(
        "data.repeated-rows", Level.DATA, "warning", "Many rows of an embedding or a head are equal",
        "More than 5 % of the rows in use are equal to an earlier one: their tokens cannot be told apart. Reserved "
        "tokens, which nobody trains, may be equal; padding behind the vocabulary is not looked at. A resized "
        "vocabulary whose new rows were filled with a mean looks like this, and a piece of a file written twice.",
        "model.embed_tokens.weight: 16,384 of 151,646 rows in use repeat an earlier one",
        "Compare with the source: ckptkit diff ./source ./model --level values",
    ),
    Page(
        "data.near-zero-rows", Level.DATA, "warning", "Many rows of an embedding or a head are near zero",
        "More than 5 % of the rows in use have no number above 1 % of what rows usually have. Their tokens are not "
        "understood, or never said. Padding behind the vocabulary is not looked at.",
        "lm_head.weight: 64,000 of 128,256 rows in use are near zero",
        "Compare with the source: ckptkit diff ./source ./model --level values",
    ),
)  # fmt: skip
