"""Sampled answers are distributed as vLLM's, whether drafts are the likeliest tokens or are drawn themselves."""

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from engines import Engines, prompts
from lossless_runs import found
from scipy.stats import chi2_contingency
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from walking import walk

COUNT, STOCK_COUNT, TOKENS = 192, 2000, 4
SETTINGS: dict[str, Any] = {"max_num_seqs": 48, "max_num_batched_tokens": 1024, "max_model_len": 512}
SETTINGS |= {"enable_prefix_caching": True}


def by_stock(engine: LLM) -> list[list[int]]:
    """Without seeds, with which vLLM's CPU build stops at a prompt in several chunks."""
    (ids,) = prompts(200, start=30000)
    settings = SamplingParams(temperature=1, ignore_eos=True, max_tokens=TOKENS)
    answers = engine.generate([TokensPrompt(prompt_token_ids=ids)] * STOCK_COUNT, settings, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in answers]


def alike(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> float:
    """The chance that samples of one distribution differ as much as these; what is rare counts as one thing."""
    sides = Counter(ours), Counter(theirs)
    share = len(ours) / (len(ours) + len(theirs))
    often = [one for one in {*ours, *theirs} if share * (sides[0][one] + sides[1][one]) >= 5]
    table = [[*(side[one] for one in often), side.total() - sum(side[one] for one in often)] for side in sides]
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    assert len(columns) > 2, "too few kinds to tell"
    return float(chi2_contingency([list(row) for row in zip(*columns, strict=True)]).pvalue)


def engine(method: str) -> dict[str, Any]:
    return {
        "policy": "streaming:budget=24",
        "drafts": 3,
        "loads": [f"drawn:{COUNT}"],
        "settings": {**SETTINGS, "block_size": 32},
        "sampled": method,
    }


@walk
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_tokens_and_pairs_are_drawn_as_by_vllm(method: str, all_engines: Engines) -> None:
    stock = all_engines.by_stock(by_stock, **SETTINGS)
    Engines.started += 1
    one = found(json.dumps([engine(method)]))["streaming:budget=24", 3, f"drawn:{COUNT}"]
    ours, steps = one["drawn"], one["steps"]
    for place in range(TOKENS):
        assert alike([row[place] for row in ours], [row[place] for row in stock]) > 1e-3, place
    for place in range(1, TOKENS - 1):
        pairs = [[(row[place], row[place + 1]) for row in rows] for rows in (ours, stock)]
        assert alike(*pairs) > 1e-3, place
    # Drafts of so few tokens err often, so that what stands and what is drawn anew are both much.
    stood = steps["accepted"] / steps["drafted"]
    assert 0.05 < stood < 0.95
