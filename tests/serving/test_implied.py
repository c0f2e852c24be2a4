"""What the manifest of a folder says of serving it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import UserError
from ckptkit.serving import llama_server, sglang, vllm
from ckptkit.serving.implied import implied

LINE = (
    "--speculative-algorithm DSPARK --speculative-draft-model-path {out} --speculative-draft-model-quantization unquant"
)


def manifest(command: str, uri: str) -> dict[str, Any]:
    launch = {"SGLang": LINE, "vLLM": '--speculative-config \'{"method": "dspark"}\': not loadable beside a target'}
    return {"command": command, "source": {"uri": uri}, "settings": {"launch": launch}}


def test_a_draft_stands_for_its_target_with_it(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    checkpoint, method = implied(draft, manifest("extract-dspark", str(target)), sglang.ENGINE)
    assert checkpoint == str(target)
    assert method is not None
    assert (method.name, method.draft) == ("dspark", draft)
    assert method.arguments == ("--speculative-draft-model-quantization", "unquant")


@pytest.mark.parametrize("engine", [vllm.ENGINE, llama_server.ENGINE], ids=lambda engine: engine.name)
def test_an_engine_whose_adapter_says_it_all(tmp_path: Path, engine: Any) -> None:
    _, method = implied(tmp_path, manifest("extract-mtp", str(tmp_path)), engine)
    assert method is not None
    assert (method.name, method.steps, method.arguments) == ("mtp", 3, ())


@pytest.mark.parametrize("content", [None, {}, manifest("quantize", "elsewhere"), {"command": None, "source": None}])
def test_what_is_no_draft_stands_for_itself(content: dict[str, Any] | None) -> None:
    assert implied(Path("model"), content, sglang.ENGINE) == ("model", None)


@pytest.mark.parametrize("source", [{"uri": "/no/such/target"}, {}, None])
def test_a_draft_whose_target_is_gone(source: Any) -> None:
    with pytest.raises(UserError) as raised:
        implied(Path("draft"), {"command": "extract-mtp", "source": source}, sglang.ENGINE)
    assert [finding.id for finding in raised.value.findings] == ["usage.arguments"]
