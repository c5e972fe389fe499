"""While the budget covers the context every policy answers what stock vLLM answers, through our path and past it."""

from typing import Any

import pytest
from engines import Answer, Engines, answers, force_own_path, greedy, prompts
from torch import Tensor
from vllm import LLM

from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.types import KVView
from walking import among

POLICIES = (
    "dense",
    "quest:budget=4096,page=32,heads=query,rectify=6",
    "tidal:rule=ratio,ratio=1,reselect=7,rectify=5",
    "lychee_decode:budget=4096,roles=every:4",
    "lychee_cluster:budget=4096,rectify=8",
    "streaming:budget=4096",
    "less_is_more:budget=4096,reselect=7",
)
"""By kind, those first that are asked every time; others are those of test_one_engine."""
LENGTHS = (230, 17, 129, 64, 310, 33, 1, 145)
STEPS = 12
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_prefix_caching": True}


def asked(engine: LLM) -> list[Answer]:
    return answers(engine, prompts(*LENGTHS), greedy(STEPS))


@pytest.mark.parametrize("policy", among(POLICIES, POLICIES[:5]))
def test_answers_are_those_of_stock(policy: str, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batches of 4 of 8 prompts, prefilled in chunks, by vLLM's path and by ours; float32, 1e-4."""
    expected = engines.by_stock(asked, **CHUNKED)
    engine, bounded, update = engines.sparse(policy, **CHUNKED), list[int](), BlockBounds.update

    def noting(self: BlockBounds, kv: KVView, start: Tensor, count: int) -> None:
        # A prompt's last chunk may be one token too.
        bounded.extend(((start + 1) % self.page).tolist() if count == 1 else ())
        update(self, kv, start, count)

    monkeypatch.setattr(BlockBounds, "update", noting)
    for own_path in (False, True):
        if own_path:
            force_own_path(monkeypatch)
        found = asked(engine)
        assert own_path or not any(bounded), "a page that is not full waits: it costs what stock's step costs"
        assert own_path or policy != "dense" or found == expected, "bit by bit"
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected], f"{own_path=}"
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
