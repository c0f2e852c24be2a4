"""What every quantizing operation keeps to, whatever it computes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptkit.errors import USAGE, UserError
from ckptkit.files.header import Spec
from ckptkit.ops import Context, NonFinite, operation
from ckptkit.ops.select import select
from ops.runner import DTYPES, run
from ops.samples import SOURCES, normal
from ops.schemes import differing

# One scheme for each operation, as QuantizationArgs' fields and a format.
INT, FLOAT = {"type": "int"}, {"type": "float"}
SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "pack_int@1": ({**INT, "num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized"),
    "int8@1": ({**INT, "num_bits": 8, "strategy": "channel"}, "int-quantized"),
    "fp8_channel@1": ({**FLOAT, "num_bits": 8, "strategy": "channel"}, "float-quantized"),
    "fp8_block@1": ({**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [16, 48]}, "float-quantized"),
    "mxfp8@1": (
        {**FLOAT, "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        "mxfp8-quantized",
    ),
    "nvfp4@1": (
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        "nvfp4-pack-quantized",
    ),
    "mxfp4@1": (
        {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        "mxfp4-pack-quantized",
    ),
}
GENERIC: dict[str, tuple[dict[str, Any], str]] = {
    "asymmetric": ({**INT, "num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}, "pack-quantized"),
    "tensor": ({**INT, "num_bits": 8, "strategy": "tensor", "symmetric": False}, "int-quantized"),
}
ALL = SCHEMES | GENERIC


def chosen(name: str, dtype: str = "BF16", **more: Any) -> tuple[str, dict[str, Any]]:
    weights, form = ALL[name]
    id, args = select(weights, form, dtype, "compat")
    return id, {**args, "modules": ["m"], **more}


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_has_its_operation(name: str) -> None:
    assert {chosen(name, dtype)[0] for dtype in SOURCES} == {name}
    assert chosen(name, "F64")[0] == "ct_generic@1"


@pytest.mark.parametrize("name", GENERIC)
def test_other_schemes_are_generic(name: str) -> None:
    assert chosen(name)[0] == "ct_generic@1"


@pytest.mark.parametrize("change", [{"symmetric": False}, {"scale_dtype": "torch.float16"}, {"strategy": "tensor"}])
def test_a_scheme_that_differs_in_anything_is_generic(change: dict[str, Any]) -> None:
    weights, form = SCHEMES["pack_int@1"]
    assert select({**weights, **change}, form, "BF16", "compat")[0] == "ct_generic@1"


def test_arguments_hold_what_decides_the_bytes_and_no_more() -> None:
    weights = {**SCHEMES["pack_int@1"][0], "observer": "minmax", "dynamic": False, "zp_dtype": "torch.int8"}
    same = select(SCHEMES["pack_int@1"][0], "pack-quantized", "BF16", "compat")
    assert select(weights, "pack-quantized", "BF16", "compat") == same
    assert select(weights, "pack-quantized", "BF16", "float32") != same
    channel = select({"num_bits": 8, "strategy": "channel"}, "pack-quantized", "BF16", "compat")
    assert (
        select({"num_bits": 8, "strategy": "channel", "group_size": -1}, "pack-quantized", "BF16", "compat") == channel
    )
    assert select(*SCHEMES["mxfp4@1"], "BF16", "float32") == select(*SCHEMES["mxfp4@1"], "BF16", "compat")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "BOOL"])
def test_weights_that_are_no_floats_are_refused(dtype: str) -> None:
    with pytest.raises(UserError) as caught:
        chosen("pack_int@1", dtype)
    assert [finding.id for finding in caught.value.findings] == ["recipe.scheme"]
    assert caught.value.exit_code == USAGE


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys; from ckptkit.files.header import Spec; from ckptkit.ops import operation\n"
        "from ckptkit.ops.select import select\n"
        "id, args = select({'num_bits': 3, 'strategy': 'channel'}, 'pack-quantized', 'BF16', 'compat')\n"
        "args['modules'] = ['m']; specs = [Spec('m.weight', 'BF16', (8, 64))]\n"
        "op = operation(id); op.specs(specs, args); list(op.chunks(specs, args, 1)); operation('take@1')\n"
        "assert not {'torch', 'numpy', 'compressed_tensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_own_kernels_do_without_compressed_tensors() -> None:
    program = (
        "import sys; from ops.runner import run; from ops.samples import normal\n"
        "from ops.test_operations import SCHEMES, chosen\n"
        "[run(*chosen(name), {'m.weight': normal(8, 96, 'BF16')}) for name in SCHEMES]\n"
        "assert 'torch' in sys.modules and 'compressed_tensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [0, 1, 15, 50])
def test_any_cut_gives_the_same_bytes(name: str, rows: int) -> None:
    id, args = chosen(name)
    w = {"m.weight": normal(rows, 96, "BF16")}
    whole = run(id, args, w, 1 << 30)
    assert all(differing(run(id, args, w, budget), whole) == [] for budget in (1, 700, 5000))
    wanted = operation(id).specs([Spec("m.weight", "BF16", (rows, 96))], args)
    assert [(spec.name, DTYPES[spec.dtype], spec.shape) for spec in wanted] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()
    ]


@pytest.mark.parametrize("name", ALL)
def test_chunks_stay_within_the_budget(name: str) -> None:
    id, args = chosen(name)
    budget = 32 * 96 * 2  # the largest granule: 32 rows
    chunks = list(operation(id).chunks([Spec("m.weight", "BF16", (1000, 96))], args, budget))
    sizes = {(read.row_stop - read.row) * 96 * 2 for chunk in chunks for read in chunk.reads}
    assert budget / 2 < max(sizes) <= budget


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("start", "step"), [(0, 1), (5, 1), (0, 2), (1, 2)])
def test_columns_are_the_weight_transposed(name: str, start: int, step: int) -> None:
    """Of input [hidden, outputs], every so many columns from one on are the weight's rows."""
    stored = normal(96, 80, "BF16")
    count = 35
    weight = stored[:, start::step][:, :count].T.contiguous()
    columns = [{"start": start, "step": step, "count": count}]
    id, args = chosen(name)
    wanted = run(id, args, {"m.weight": weight})
    for budget in (1, 3000, 1 << 30):
        made = run(id, {**args, "columns": columns}, {"experts.gate_up_proj": stored}, budget)
        assert differing(made, wanted) == []


def test_a_fused_set_from_one_stored_tensor() -> None:
    """Gate and up that alternate: two modules of one tensor, and one global scale."""
    stored = normal(64, 48, "BF16")
    stored[3, 7] = 2.0
    columns = [{"start": i, "step": 2, "count": 24} for i in range(2)]
    id, args = chosen("nvfp4@1", modules=["gate", "up"])
    made = run(id, {**args, "columns": columns}, {"a": stored, "b": stored}, 1000)
    apart = {"gate.weight": stored[:, ::2].T.contiguous(), "up.weight": stored[:, 1::2].T.contiguous()}
    assert differing(made, run(id, args, apart)) == []
    assert made["gate.weight_global_scale"] == made["up.weight_global_scale"]


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ALL)
def test_nan_and_inf_are_found(name: str, bad: str) -> None:
    id, args = chosen(name)
    w = normal(50, 96, "F16")
    w[37, 41] = float(bad)
    with pytest.raises(NonFinite) as caught:
        run(id, args, {"m.weight": w}, 2000)
    assert (caught.value.index, caught.value.what) == (0, "NaN" if bad == "nan" else "Inf")
    kept = run(id, args, {"m.weight": w}, 2000, Context(nonfinite_error=False))
    clean = run(id, args, {"m.weight": normal(50, 96, "F16")}, 2000)
    assert kept.keys() == clean.keys()
    assert differing(kept, clean) != []


@pytest.mark.parametrize("name", ALL)
def test_threads_do_not_meet(name: str) -> None:
    id, args = chosen(name)
    weights = [normal(200, 96, "BF16", seed) for seed in range(8)]

    def one(w: Tensor) -> dict[str, Tensor]:
        return run(id, args, {"m.weight": w}, 4000)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, weights))
    assert all(differing(found, one(w)) == [] for found, w in zip(together, weights, strict=True))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_source_stays_as_it_is(name: str) -> None:
    """A kernel may not write into the weight: what was measured and what is made must be of the same bytes."""
    from ckptkit.ops.kernels import _kernel

    id, args = chosen(name, "F32")
    w = normal(48, 96, "F32")
    before = w.clone()
    _kernel(id)(w, args, [1.0, 1.0, 0.0])
    assert torch.equal(w, before)


class TestTake:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
    @pytest.mark.parametrize(("start", "step", "count"), [(0, 1, 10), (3, 1, 4), (0, 2, 5), (1, 2, 5)])
    def test_elements(self, dtype: torch.dtype, start: int, step: int, count: int) -> None:
        bias = torch.arange(10).to(dtype)
        args = {"name": "experts.0.gate_proj.bias", "start": start, "step": step, "count": count}
        made = run("take@1", args, {"experts.gate_up_proj_bias": bias})
        assert list(made) == ["experts.0.gate_proj.bias"]
        assert torch.equal(made["experts.0.gate_proj.bias"], bias[start::step][:count])


def test_an_operation_of_a_later_version_is_unknown() -> None:
    with pytest.raises(UserError) as caught:
        operation("pack_int@99")
    assert [finding.id for finding in caught.value.findings] == ["plan.unknown-op"]
    assert caught.value.exit_code == USAGE


def test_a_measured_maximum_is_exact() -> None:
    """The state is combined from reads of any size, and a fused set's covers every input."""
    id, args = chosen("nvfp4@1")
    op = operation(id)
    specs = [Spec(name, "F32", (30, 96)) for name in ("m.weight", "other.weight")]
    reads = list(op.measures(specs, args, 3000)) if op.measures else []
    seen = np.zeros((2, 30), int)
    for read in reads:
        seen[read.tensor, read.row : read.row_stop] += 1
    assert (seen == 1).all()
    w = {"m.weight": normal(30, 96, "F32"), "other.weight": 5 * normal(30, 96, "F32", 1)}
    made = run(id, args, w, 3000)
    assert made["m.weight_global_scale"].item() == (2688 / w["other.weight"].abs().max()).item()
