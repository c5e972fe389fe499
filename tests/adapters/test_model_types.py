"""Every text model that the installed transformers knows is accepted and equal to stock, or refused with the reason."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers

from acceptance import model_types
from acceptance.model_types import ACCEPTED, NOT_BUILT, REFUSED, WRONG, Outcome
from saccade.checkpoints.versions import TRIED
from walking import walk

from .ways import VERSION

ON_PAGE = model_types.listed(model_types.on_page())
REWRITE = "run tests/acceptance/model_types.py --write"
NEWEST = TRIED["transformers"][-1]
OF_PAGE = f"{transformers.__version__}.".startswith(f"{NEWEST}.")
"""The page is of the newest version that was tried: `make contract` and the nightly run hold it to that one."""


def agrees(name: str, outcome: Outcome) -> bool:
    """Whether the page says what became of a type; of other versions it says nothing."""
    return not OF_PAGE or ON_PAGE.get(name) == model_types.said_of(outcome)


# Others are asked below their budgets every time: test_families, test_layer_kinds.
KINDS = "llama qwen2 mistral gemma3_text phi3 granite olmo2 glm4 qwen3_moe falcon mpt bloom gptj stablelm mamba jamba"
KINDS += " deepseek_v3 gpt2 dbrx"
OTHERS = "T5ForConditionalGeneration BertForMaskedLM LlavaForConditionalGeneration Qwen2_5_VLForConditionalGeneration"
FLOAT32 = (RuntimeError, "Double|double")
NOT_COMPARED: dict[str, tuple[type[Exception], str]] = {}
"""What stock cannot do that the walk asks for, with its words."""
if VERSION < (5,):
    NOT_COMPARED = dict.fromkeys(("dots1", "ernie4_5_moe", "glm4_moe"), FLOAT32)  # experts mix dtypes
    NOT_COMPARED["fuyu"] = (AssertionError, "never built tiny: AttributeError: 'PersimmonConfig'")
    # Its float32 is 0.01 from its own float64.
    NOT_COMPARED["PaliGemmaForConditionalGeneration"] = (AssertionError, "a set of 6 tokens changes logits by .* only")


def walked(names: Iterable[str], every_time: str) -> list[Any]:
    """Names to walk over, of which some are asked every time; of those not compared, the walk must end so."""
    marks = {
        name: [pytest.mark.xfail(raises=pytest.RaisesExc(kind, match=words), strict=True)]
        for name, (kind, words) in NOT_COMPARED.items()
    }
    chosen = every_time.split()
    return [pytest.param(name, marks=[*marks.get(name, ()), *([] if name in chosen else [walk])]) for name in names]


@pytest.mark.parametrize("kind", walked(model_types.causal(), KINDS))
def test_causal_type(kind: str) -> None:
    """It decodes as stock does or is refused; and the page says which."""
    outcome = model_types.outcome_of(kind)
    assert outcome.word != WRONG, outcome.reason
    assert agrees(kind, outcome), REWRITE


@pytest.mark.parametrize("name", walked(model_types.others(), OTHERS))
def test_other_text_model(name: str) -> None:
    """Encoders and encoder-decoders are refused, models of images and sound too or decode text as stock does."""
    outcome = model_types.outcome_of_other(name)
    assert outcome.word != WRONG, outcome.reason
    if outcome.word == ACCEPTED:
        assert agrees(name, outcome), REWRITE


def test_page_is_of_the_newest_version_tried() -> None:
    section = model_types.on_page()
    told = re.search(rf"transformers {re.escape(NEWEST)}\.\d+, (\d+) types", section)
    assert told is not None, REWRITE
    types = [kind for kind in ON_PAGE if kind[:1].islower()]
    assert len(types) == int(told[1])
    counts = [int(count) for count in re.findall(r"^\*\*(?:Accepted|Refused|Not built), (\d+)", section, re.MULTILINE)]
    assert sum(counts) == len(types)
    assert counts[0] == sum(ON_PAGE[kind].startswith(ACCEPTED) for kind in types)
    readme = " ".join((model_types.PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"{counts[0]} of the {len(types)} types of causal language models in transformers {NEWEST}" in readme
    if OF_PAGE:
        assert sorted(types) == sorted(model_types.causal()), REWRITE
        assert f"**Others, {len(model_types.others())}**" in section, REWRITE


def test_page_says_what_the_walk_found() -> None:
    found = {
        "one": Outcome(ACCEPTED, wide=True),
        "two": Outcome(ACCEPTED),
        "mixed": Outcome(ACCEPTED, others="conv, sliding_attention"),
        "three": Outcome(REFUSED, "found 3 plain attention layers for 4 decoder layers; and more"),
        "four": Outcome(REFUSED, "found 5 plain attention layers for 6 decoder layers"),
        "five.5": Outcome(REFUSED, "sliding_window=3: layers of type mini3 see 4"),
        "six-6": Outcome(NOT_BUILT, "ValueError: `seven` is missing: `eight`"),
    }
    section = model_types.table(found, {"Nine": Outcome(REFUSED, "multimodal")})
    assert model_types.listed(section) == {kind: model_types.said_of(outcome) for kind, outcome in found.items()}
    assert "- full attention in every layer: `one`*, `two`\n" in section
    assert "- full attention beside conv, sliding_attention: `mixed`\n" in section
    assert "its decoder layers: `three`, `four`\n" in section


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that nothing could stop would show nothing: a millionth part of a mistake is a mistake."""
    from saccade.adapters.hf import attention

    right = attention.attend

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return right(*args, **kwargs) * 1.0001

    monkeypatch.setattr(attention, "attend", wrong)
    outcome = model_types.outcome_of("llama")
    assert outcome.word == WRONG and "from float64" in outcome.reason, outcome


def test_an_error_of_another_kind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not one of ours")

    monkeypatch.setattr("saccade.sparsify", failing)
    assert model_types.outcome_of("llama") == Outcome(WRONG, "RuntimeError: not one of ours")
