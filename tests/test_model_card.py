"""The section of a model card: where it goes, what stays, what it says of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.model_card import BEGIN, END, Facts, card


def facts(served: str | None = "org/draft", **manifest: Any) -> Facts:
    made = {
        "command": "extract-mtp",
        "tool": {"version": "1.0"},
        "plan": "ab" * 32,
        "settings": {},
        "source": {"uri": "/home/somebody/secret/GLM-4.5-Air"},
        **manifest,
    }
    return Facts(made, {"model.safetensors": (1234567, "cd" * 32)}, "org/draft", served)


@pytest.mark.parametrize(
    "text",
    [
        "# a card\n",
        "---\nlicense: mit\n---\r\n# a card with \\1 and \\g<0>\r\n",
        f"# before\n{BEGIN}\nold\n{END}\nafter\n",
        f"{BEGIN}\nan end that was lost\n# mine\n",
        f"{BEGIN}\nlost\n# mine\n{BEGIN}\nold\n{END}\nafter\n",
        f"{END}\n# mine\n",
        "",
    ],
)
def test_an_author_s_words_stay_and_a_second_time_changes_nothing(text: str) -> None:
    once = card(text, facts())
    old = f"{BEGIN}\nold\n{END}\n"
    before, _, after = text.partition(old) if old in text else (text.rstrip(), "", "")
    assert once.startswith(before)
    assert once.endswith(after)
    assert "cd" * 32 in once
    assert card(once, facts()) == once


def test_a_new_card_has_metadata_only_of_what_is_known() -> None:
    assert "base_model" not in card(None, facts())
    of_hub = {"uri": f"hf://org/base@{'e' * 40}/part", "revision": "e" * 40}
    text = card(None, facts(source=of_hub, command="quantize"))
    assert text.startswith("---\nbase_model: org/base\nbase_model_relation: quantized\n")


def test_where_a_local_source_lay_is_not_told() -> None:
    text = card(None, facts())
    assert "GLM-4.5-Air" in text
    assert "somebody" not in text


def test_recorded_lines_name_the_place_where_the_result_is() -> None:
    launch = {
        "SGLang": "--speculative-algorithm EAGLE --speculative-draft-model-path ./draft --speculative-num-steps 1",
        "vLLM": '--speculative-config \'{"method": "mtp", "model": "./my draft", "num_speculative_tokens": 1}\'',
        "other": "none known",
    }
    text = card(None, facts(settings={"launch": launch}))
    assert "--speculative-draft-model-path org/draft --speculative-num-steps 1" in text
    assert '"model": "org/draft", "num_speculative_tokens": 1' in text
    assert "- other: none known" in text
    assert "./" not in text
    branch = card(None, facts(served="org/draft@w8", settings={"launch": launch}))
    assert "-path org/draft --speculative-draft-model-revision w8 --speculative-num-steps 1" in branch
    assert '"model": "org/draft", "revision": "w8", "num' in branch
    assert "serve" not in card(None, facts(settings={"launch": {}}))


def test_what_no_engine_reads_from_has_no_launch_lines() -> None:
    assert "Serving" not in card(None, facts(served=None))
    assert "vllm serve org/draft" in card(None, facts())
    assert "--revision w8" in card(None, facts(served="org/draft@w8"))
