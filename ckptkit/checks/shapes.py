"""Checks of shapes and dtypes: a quantized weight's parts among themselves, and weights against the config's sizes.

Everything is told by headers. What the parts of each format must be is in :mod:`.forms`, what a config says of sizes
in :mod:`.architecture`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import Finding
from ..families import Kind
from ..files.header import FLOATS
from ..inspecting.survey import Cell
from ..naming.names import unwrapped
from ..stored import COMPANIONS
from . import Level, Page, Probe, Seen, Subject
from .architecture import KNOWN, MATRICES, Size, sizes, unjudged
from .forms import form_of, matrix, misfits, outputs
from .weights import CODES, Fault, Weight, tell, weights

_OF_PARTS = ("shapes.packed", "shapes.scale", "shapes.zero-point", "shapes.weight-shape", "shapes.dtype")
_AGAIN = "fetch the file again; if it is as published, quantize the module again from its source"
# How many tensors must agree before the one that does not is told.
_MAJORITY = 4


def _parts(subject: Subject) -> Seen:
    """The parts of quantized weights among themselves, and weights that are neither numbers nor codes."""
    found = weights(subject)
    faults = [fault for weight in found for fault in _of_parts(weight)]
    return Seen(tell(faults), sum(weight.number for weight in found))


def _of_parts(weight: Weight) -> Iterator[Fault]:
    form = form_of(weight)
    if form is not None:
        yield from (Fault(item.id, weight, item.text, item.ref, _AGAIN) for item in misfits(weight, form))
    elif weight.part == "weight" and weight.ref.dtype not in FLOATS | CODES:
        yield Fault("shapes.dtype", weight, f"is {weight.ref.dtype}, no dtype of a weight", None, _AGAIN)


def _sizes(subject: Subject) -> Seen:
    """Weights of the language model against the sizes in config.json."""
    found = [weight for weight in weights(subject) if unwrapped(weight.template) in KNOWN]
    faults = (fault for weight in found for fault in _unlike_config(weight, subject.config))
    return Seen(tell(faults), sum(weight.number for weight in found))


def _unlike_config(weight: Weight, config: Mapping[str, Any]) -> Iterator[Fault]:
    form = form_of(weight)
    if weight.kind is Kind.EXPERTS or (weight.quantized and form is None):
        return
    sides = {"length": weight.ref.shape[0]} if len(weight.ref.shape) == 1 else {}
    dense, rows = matrix(weight, form), outputs(weight, form)
    if dense is not None:
        sides = {"outputs": dense[0], "inputs": dense[1]}
    elif rows is not None:
        sides = {"outputs": rows}
    elif len(weight.ref.shape) == 1 and not weight.quantized and unwrapped(weight.template) in MATRICES:
        hint = f"fetch {weight.ref.file} again"
        yield Fault(
            "shapes.config", weight, f"is {weight.ref.shape[0]:,} numbers in a row, no matrix", weight.ref, hint
        )
    for size in sizes(weight.template, config):
        has = sides.get(size.side)
        if has is not None and (has % size.size if size.multiple else has != size.size):
            yield _unlike(weight, has, size)


def _unlike(weight: Weight, has: int, size: Size) -> Fault:
    text = f"has {has:,} {size.side}" if size.side != "length" else f"is {has:,} long"
    hint = f"correct {size.key} in config.json, or fetch {weight.ref.file} again"
    return Fault("shapes.config", weight, f"{text}, and config.json says {size.key} {size.size:,}", weight.ref, hint)


def _layers(subject: Subject) -> Seen:
    """Dense tensors that differ in one layer, or one expert, from those of the same name in all others."""
    alike: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for (place, last, dtype, _), cell in subject.survey.cells.items():
        if place[1] and dtype in FLOATS and last not in COMPANIONS:
            alike[place[0], last, dtype].append(cell)
    findings = [finding for cells in alike.values() for finding in _odd_one(cells)]
    return Seen(findings, sum(cell.number for cells in alike.values() for cell in cells))


def _odd_one(cells: Sequence[Cell]) -> Iterator[Finding]:
    numbers: Counter[tuple[int, ...]] = Counter()
    for cell in cells:
        numbers[cell.first.shape] += cell.number
    if len(numbers) != 2:
        return
    (usual, most), (odd, one) = numbers.most_common()
    if one > 1 or most < _MAJORITY:
        return
    ref = next(cell.first for cell in cells if cell.first.shape == odd)
    message = f"{ref.name} is {list(odd)}; the other {most:,} tensors of that name are {list(usual)}"
    hint = f"fetch {ref.file} again; --ignore shapes.layer if the model is meant to be so"
    yield Finding("shapes.layer", message, file=ref.file, tensor=ref.name, hint=hint, severity="warning")


PROBES = (
    Probe(_OF_PARTS, Level.STATIC, _parts),
    Probe(("shapes.config",), Level.STATIC, _sizes, lambda subject: unjudged(subject.config)),
    Probe(("shapes.layer",), Level.STATIC, _layers),
)

PAGES = (
    Page(
        "shapes.packed",
        Level.STATIC,
        "error",
        "Packed codes have a shape that nothing can be unpacked from",
        "The codes of a quantized weight are a matrix whose packed side counts whole words: GPTQ's qweight "
        "[inputs x bits / 32, outputs], AWQ's [inputs, outputs x bits / 32], gpt-oss's blocks [experts, rows, blocks, "
        "16]. Here codes have another rank, or do not fit the g_idx beside them. Engines fail while loading, or unpack "
        "values into the wrong columns.",
        "a.q_proj.qweight I32 [16, 64]   (16 x 8 = 128 inputs at 4 bits)\na.q_proj.g_idx I32 [96]",
        _AGAIN[0].upper() + _AGAIN[1:] + ".",
    ),
    Page(
        "shapes.scale",
        Level.STATIC,
        "error",
        "A scale does not fit its weight",
        "A scale is one number a tensor, a row, a group of columns or a block, so its shape follows from the weight's: "
        "[rows, columns / 16] for NVFP4, [rows, columns / 32] for MXFP4 and MXFP8, blocks counted up at the edges for "
        "FP8; NVFP4 has a scale of the scales besides. Where the shapes disagree, engines stop while loading, or, where "
        "a kernel reads by offset, multiply each weight by a neighbour's scale.",
        "a.up_proj.weight F8_E4M3 [512, 256]\na.up_proj.weight_scale_inv F32 [4, 3]   (256 columns are 2 blocks of 128)",
        _AGAIN[0].upper() + _AGAIN[1:] + ".",
    ),
    Page(
        "shapes.zero-point",
        Level.STATIC,
        "error",
        "Zero points do not fit their scales",
        "Zero points go with scales one by one, packed like codes: compressed-tensors packs them down the rows "
        "[rows x bits / 32, groups], GPTQ and AWQ along the outputs [groups, outputs x bits / 32].",
        "a.up_proj.weight_scale BF16 [512, 8]\na.up_proj.weight_zero_point I32 [512, 8]   (not packed: 64 rows at 4 bits)",
        _AGAIN[0].upper() + _AGAIN[1:] + ".",
    ),
    Page(
        "shapes.weight-shape",
        Level.STATIC,
        "error",
        "weight_shape is missing or holds no shape",
        "compressed-tensors keeps the dense weight's shape beside packed codes, one integer for each dimension, and "
        "unpacks by it. vLLM and SGLang load it as a parameter of exactly that size.",
        "a.up_proj.weight_packed I32 [512, 32]\na.up_proj.weight_shape I64 [3]",
        "Write the module again with a weight_shape of two integers: quantize it from its source.",
    ),
    Page(
        "shapes.dtype",
        Level.STATIC,
        "error",
        "A part of a quantized weight has a dtype that its format does not have",
        "The dtype says how the bytes are read: an MXFP4 scale is an exponent in U8 or F8_E8M0, an NVFP4 scale F8_E4M3, "
        "a scale of scales F32, zero points packed into I32. Engines copy what they find into the parameter that they "
        "made, converting without a word: an exponent byte of 120, meant as 2 to the power of -7, becomes 120.0.",
        "a.up_proj.weight_packed U8 [512, 128]\na.up_proj.weight_scale BF16 [512, 8]   (MXFP4: U8)",
        "View the bytes as the right dtype in the program that wrote them; if they were converted, quantize again.",
    ),
    Page(
        "shapes.config",
        Level.STATIC,
        "error",
        "A weight is not as large as config.json says",
        "Engines make a model's parameters from the sizes in config.json (hidden_size, intermediate_size, head_dim) and "
        "load tensors into them. A different size stops the load, or is sliced to fit by loaders that cut tensors for "
        "tensor parallelism. Only weights of the language model are looked at whose sizes follow from the config in "
        "every family that has them.",
        'config.json: "hidden_size": 4096\nmodel.layers.0.self_attn.q_proj.weight BF16 [4096, 2048]',
        "Take the config.json that belongs to these weights; if it does, fetch the file of the weight again.",
    ),
    Page(
        "shapes.layer",
        Level.STATIC,
        "warning",
        "One layer's tensor has another shape than all other layers'",
        "Layers of a model are mostly alike. A single tensor whose shape differs from that of the same tensor in all "
        "other layers, or all other experts, was probably cut or padded by a tool. Models whose layers do differ "
        "exist, so this is a warning.",
        "model.layers.7.mlp.up_proj.weight BF16 [11007, 4096], in 31 other layers [11008, 4096]",
        "Fetch the file again. If the model is meant to be so: --ignore shapes.layer.",
    ),
)
