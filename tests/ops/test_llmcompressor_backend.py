"""``--backend llmcompressor``: the same tensors from that library itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.errors import USAGE, UserError
from ckptkit.files.header import Spec
from ckptkit.ops import Block, Context, NonFinite, operation
from ckptkit.ops.llmcompressor_backend import make_whole
from ops.runner import NAMES, run
from ops.samples import normal
from ops.schemes import bytes_of, chosen


def whole(name: str, inputs: dict[str, Tensor], context: Context | None = None, **args: Any) -> list[tuple[str, bytes]]:
    """Outputs by name, as bytes, of a step made through the library."""
    dtype = NAMES[next(iter(inputs.values())).dtype]
    id, found = chosen(name, dtype)
    found = {**found, **args}
    outputs = operation(id).specs([Spec(n, dtype, tuple(w.shape)) for n, w in inputs.items()], found)
    blocks = [Block(bytearray(bytes_of(w)), dtype, *w.shape) for w in inputs.values()]
    made = make_whole(blocks, outputs, found, context or Context())
    return [(spec.name, array.tobytes()) for spec, array in zip(outputs, made, strict=True)]


def native(name: str, inputs: dict[str, Tensor], **args: Any) -> list[tuple[str, bytes]]:
    id, found = chosen(name, NAMES[next(iter(inputs.values())).dtype])
    return [(n, bytes_of(tensor)) for n, tensor in run(id, {**found, **args}, inputs).items()]


class TestWithTheLibrary:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("llmcompressor")

    @pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8_BLOCK", "w8-tensor", "MXFP4"])
    def test_same_bytes_as_native(self, name: str) -> None:
        inputs = {"model.layers.0.mlp.down_proj.weight": normal(40, 256, "BF16")}
        assert whole(name, inputs, modules=["m"]) == native(name, inputs, modules=["m"])

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("own", [1, 2, 3])
    def test_fused_sets_of_any_names(self, count: int, own: int) -> None:
        """Also sets that the library does not know (experts, q_a with kv_a), and sets cut by a shard boundary."""
        inputs = {f"w{i}.weight": normal(32, 128, "BF16", i) * (i + 1) for i in range(count)}
        modules = [f"made.{i}" for i in range(min(own, count))]
        assert whole("NVFP4A16", inputs, modules=modules) == native("NVFP4A16", inputs, modules=modules)

    def test_columns(self) -> None:
        inputs = {"experts.gate_up_proj": normal(128, 20, "BF16")}
        args = {"modules": ["m"], "columns": [{"start": 1, "step": 2, "count": 10}]}
        assert whole("W4A16", inputs, **args) == native("W4A16", inputs, **args)

    def test_nan_is_found_where_it_is(self) -> None:
        inputs = {"a.weight": normal(32, 128, "BF16"), "b.weight": normal(32, 128, "BF16")}
        inputs["b.weight"][5, 5] = torch.nan
        with pytest.raises(NonFinite) as caught:
            whole("NVFP4A16", inputs, modules=["a", "b"])
        assert (caught.value.index, caught.value.what) == (1, "NaN")
        assert len(whole("NVFP4A16", inputs, Context(nonfinite_error=False), modules=["a", "b"])) == 6


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setitem(sys.modules, "llmcompressor.entrypoints.model_free.converter", None)
    with pytest.raises(UserError) as caught:
        whole("W4A16", {"m.weight": normal(8, 128, "BF16")}, modules=["m"])
    assert [finding.id for finding in caught.value.findings] == ["usage.backend"]
    assert caught.value.exit_code == USAGE
