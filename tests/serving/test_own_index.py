"""Indexes that are not ours, found by their entry points: vLLM decodes what transformers does."""

from pathlib import Path
from typing import Any

import pytest
from engines import Engines, answers, core, greedy, prompts
from test_one_engine import STEPS, expected_of

from own_index import BUDGET, MODULE, NAMES
from own_method import installed
from saccade.adapters.vllm.server.serve import RefusedError, prepare
from saccade.selection.scorers.exact import ExactScorer

LENGTHS = (250, 251, 252, 249, 64)


@pytest.mark.parametrize(("name", "rectify"), zip(NAMES, ["", ",rectify=6"], strict=True))
def test_tokens_are_those_of_the_transformers_adapter(
    name: str, rectify: str, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mixed batch of prompts in chunks, in so little room that requests are preempted, and in a second turn."""
    spec, asked = f"{name}:budget={BUDGET}{rectify}", prompts(*LENGTHS)
    with installed(tmp_path, MODULE, POSITIVE=NAMES[0], STOPS=NAMES[1]):
        engine = engines.sparse(
            spec, enable_prefix_caching=True, max_num_batched_tokens=96, num_gpu_blocks_override=33, max_model_len=1024
        )
        scheduler, preempted = core(engine).scheduler, list[str]()
        preempt = scheduler._preempt_request

        def watched(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", watched)
        expected = expected_of(spec, asked)
        assert [answer.tokens for answer in answers(engine, asked, greedy(STEPS))] == expected
        turn = [*asked[0], *expected[0], *asked[1][:40]]
        assert answers(engine, [turn], greedy(STEPS))[0].tokens == expected_of(spec, [turn])[0]
        assert preempted


def test_an_index_of_pages_that_is_no_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pages have room for bounds alone, so that nobody would ever make or update it."""
    monkeypatch.setattr(ExactScorer, "new_index", lambda self, kv: object())
    with pytest.raises(RefusedError, match="exact_topk:budget=64 keeps something of pages other than bounds"):
        prepare([], policy="exact_topk:budget=64")
