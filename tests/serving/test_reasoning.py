"""`python -m claims reasoning`: which problems qualify and what is kept of answers; engines answer by script."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from claims.designs.readings import reasoning as read
from claims.judging.discovery import found
from claims.judging.study import Study
from claims.judging.verdicts import judge
from claims.reasoning import job
from claims.reasoning.command import BUDGETS, POLICIES, SEED
from claims.reasoning.job import MOST, RULES, Reasoning, reasoning_table
from claims.reasoning.problems import Problem, problems_of
from saccade.errors import SaccadeError

SPARSE = "quest:budget=64,heads=query", "tidal:budget=64,reselect=6,heads=query"
PLAIN = "less_is_more:budget=64,reselect=7"


def answers(llm: str, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> Iterator[Any]:
    """Problem i is answered in 300 + i tokens; every third wrongly, every fifth without an end; sparsely in twice."""
    assert not use_tqdm and all((one.temperature > 0) == (one.seed > 0) for one in params), "one is greedy"
    for prompt, _ in zip(prompts, params, strict=True):
        number = prompt["prompt_token_ids"][0]
        length = (300 + number) * (1 + (llm in SPARSE)) + (llm != "None") * number % 7
        text, reason = "Answer: 2 or\nAnswer: **4**." if number % 3 else "Answer: 5", "stop" if number % 5 else "length"
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(length), text=text, finish_reason=reason)])


def test_long_right_answers_are_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    @contextmanager
    def engine(_: Reasoning, policy: Any) -> Iterator[Any]:
        yield SimpleNamespace(generate=lambda *given, use_tqdm: [*answers(str(policy), *given, use_tqdm)])

    monkeypatch.setattr(job, "prepare_process", lambda **_: None)
    monkeypatch.setattr(Reasoning, "_engine", engine)
    asked = tuple((Problem(f"sum {n}", "2 + 2?", lambda said: float(said == "4")), [n]) for n in range(400))
    policies = Study(None, tmp_path).policies((*SPARSE, PLAIN))
    results = Reasoning(Study(None, tmp_path), policies, asked, 0, RULES, 0.5).run(lambda *_: None)
    able = [number for number in range(100, 400) if number % 3 and number % 5]
    assert results["qualified"] == len(able) == 160
    samples = {(sample.text, sample.arm): sample.values for sample in read(results)}
    assert {arm for _, arm in samples} == {"stock", *SPARSE, PLAIN} and len(samples) == 4 * MOST
    assert {f"sum {able[0]}", f"sum {able[-2]}"} < {name for name, _ in samples}, "from first to last"
    for (name, arm), values in samples.items():
        number = int(name.split()[1])
        tokens = (300 + number) * (1 + (arm in SPARSE)) + (arm != "stock") * number % 7
        assert values == {"ended@enough": 1, "tokens": tokens, "ended": 1, "right": 1}
    assert len(reasoning_table(results).rows) == 4
    claim = found()["C10"].claim.published
    assert claim is not None and judge(claim, read(results)).verdict == "holds"
    assert claim.settings.rules == (*RULES, POLICIES, BUDGETS, SEED), "what chooses problems is among the criteria"
    assert judge(claim, read(results | {"qualified": 99})).verdict == "cannot be told"


def test_a_share_of_memory_is_one() -> None:
    with pytest.raises(SaccadeError, match=r"memory=1\.0 is not valid: a share of the device's"):
        Reasoning.check("nowhere", POLICIES, BUDGETS, SEED, 1.0)


def test_without_problems_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SaccadeError, match=r"reasoning_gym is missing: pip install --requirement claims/reasoning/"):
        problems_of(1, 0)
