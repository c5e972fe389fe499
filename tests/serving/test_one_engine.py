"""One engine in two runtimes: below the budget each request's tokens are those of the transformers adapter."""

from functools import cache
from typing import Any

import pytest
import torch
from engines import Engines, answers, by_transformers, core, greedy, prompts
from transformers import AutoModelForCausalLM
from vllm import LLM

from saccade.checkpoints.bundled import model_path
from walking import among

POLICIES = (
    "streaming:budget=64,rectify=4",
    "quest:budget=64,rectify=8",
    "quest:budget=64,page=32,heads=query,min_pages=3,keep_last=false",
    "lychee_cluster:budget=96,buffer=16",
    "resa:min_pages=2,ratio=0.05,rectify=16",
    "resa:min_pages=2,ratio=0.05,rectify=none",
    "tidal:budget=64,reselect=7",
    "tidal:budget=64,reselect=7,heads=query,rectify=8",
    "tidal:rule=top_p,top_p=0.9,budget=256,reselect=7,sinks=4,window=32",
    "less_is_more:budget=64,reselect=7",
    "less_is_more:budget=64,reselect=7,rectify=5",
    "lychee_decode:budget=64,roles=every:4,rectify=8",
    "lychee_decode:rule=threshold,threshold=0.002,roles=layers:0+2+7",
    "lychee_cluster:budget=64,rectify=8",
    "token_clusters:budget=96,group=256",
    "token_clusters:budget=96,rectify=8,heads=query",
    "exact_topk:budget=48,rectify=5",
    "composed:scorer=page_bounds,budget=64,pooling=mass,dense_layers=2",
)
WALKED = (3, 5, 6, 7, 9, 15, 17)
EVERY_TIME = tuple(policy for place, policy in enumerate(POLICIES) if place not in WALKED)
"""By kind: a window, bounds of pages, a published set with every rule, a union, an index of its own; most rectified."""
LENGTHS, STEPS = (400, 130, 64, 780), 20


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def expected_of(policy: str, asked: list[list[int]], steps: int = STEPS) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in by_transformers(model(), policy, asked, steps)]


@pytest.mark.parametrize("policy", among(POLICIES, EVERY_TIME))
def test_tokens_are_those_of_the_transformers_adapter(policy: str, visited: LLM) -> None:
    """Alone and inside a mixed batch of 4, whose prompts are prefilled in chunks while others decode."""
    asked = prompts(*LENGTHS)
    expected = expected_of(policy, asked)
    (alone,) = answers(visited, asked[:1], greedy(STEPS))
    together = [answer.tokens for answer in answers(visited, asked, greedy(STEPS))]
    assert alone.tokens == expected[0]
    assert together == expected


@pytest.mark.parametrize("policy", ["quest:budget=96,rectify=8", "lychee_cluster:budget=96,rectify=8"])
def test_rows_that_steps_have_no_room_for_lose_nothing(policy: str, engines: Engines) -> None:
    """Fourteen tokens a step for dense passes of nine: requests wait, leave the batch and come back."""
    asked = prompts(130, 157, 91, 140, 64, 120, 110, 99)
    expected = expected_of(policy, asked, 20)
    engine = engines.sparse(policy, max_num_batched_tokens=14)
    scheduler, held = core(engine).scheduler, []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *rest: (held.append(len(scheduler._held)), schedule(*rest))[1]
    assert [answer.tokens for answer in answers(engine, asked, greedy(20))] == expected
    assert any(held), "every pass had room: this shows nothing about waiting"
