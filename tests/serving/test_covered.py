"""While the budget covers the context every policy answers what stock vLLM answers, through our path and past it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Answer, Engines, answers, force_own_path, greedy, prompts
from vllm import LLM

POLICIES = (
    "streaming:budget=4096",
    "quest:budget=4096",
    "quest:budget=4096,page=32,heads=query,rectify=6",
    "resa:ratio=1",
    "tidal:budget=4096,reselect=7",
    "tidal:rule=ratio,ratio=1,reselect=7,rectify=5",
    "less_is_more:budget=4096,reselect=7",
    "lychee_decode:budget=4096,roles=every:4",
    "lychee_cluster:budget=4096",
    "lychee_cluster:budget=4096,rectify=8",
    "exact_topk:budget=4096",
)
LENGTHS = (230, 17, 129, 64, 310, 33, 1, 145)
STEPS = 20
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    engines = Engines()
    found = answers(engines.stock(**CHUNKED), prompts(*LENGTHS), greedy(STEPS))
    engines.close()
    return found


@pytest.fixture(scope="module", params=POLICIES)
def engine(request: pytest.FixtureRequest, expected: list[Answer]) -> Iterator[LLM]:
    """Made after stock is gone: whichever engine ends takes the process's groups of ranks with it."""
    engines = Engines()
    yield engines.sparse(request.param, **CHUNKED)
    engines.close()


@pytest.mark.parametrize("own_path", [False, True], ids=["vLLM's path", "own path"])
def test_answers_are_those_of_stock(
    engine: LLM, own_path: bool, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continuous batches of 4 of 8 prompts, prefilled in chunks; float32, log-probabilities within 1e-4."""
    if own_path:
        force_own_path(monkeypatch)
    found = answers(engine, prompts(*LENGTHS), greedy(STEPS))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
