"""A lossless engine answers what vLLM answers, whatever is drafted; drafts are sparse, and all else is dense."""

import json
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import product
from typing import Any

import pytest
from engines import Engines, prompts
from loads import CARRIED, EVERY_TIME, FEW, SETTINGS, TIDAL, Heard, by_stock, check_heard, found, started_every_time
from scipy.stats import chi2_contingency
from test_one_engine import POLICIES
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from walking import walk

DRAFTING = [*dict.fromkeys(re.sub(",rectify=[^,]*", "", policy) for policy in POLICIES)]


@pytest.fixture(scope="module")
def stock(all_engines: Engines) -> dict[str, dict[str, Heard]]:
    """What vLLM answers, on model runner V1."""
    return all_engines.by_stock(by_stock, **SETTINGS)


def check_steps(one: dict[str, Any]) -> None:
    """One dense step a step of the scheduler's, `drafts` sparse ones behind each that ends a prompt or decodes."""
    steps = one["steps"]
    assert one["runner"] == "vllm.v1.worker.cpu.model_runner" and steps["dense"] == steps["scheduled"]
    assert steps["sparse"] == steps["cycles"] * one["drafts"]
    assert 0 < steps["cycles"] < steps["dense"], "no step was of prompts alone"
    assert steps["counted"] == [steps["drafted"], steps["accepted"]]


ASKED = [(one, load) for one in EVERY_TIME for load in one["loads"] if load != "kept"]


@pytest.mark.parametrize(("engine", "load"), ASKED)
def test_answers_are_those_of_vllm(engine: dict[str, Any], load: str, stock: Any) -> None:
    one = started_every_time()[engine["policy"], 4, load]
    check_heard(one["heard"], stock[load.partition(":")[0]])
    check_steps(one)
    steps, how = one["steps"], load.partition(":")[2]
    assert steps["ahead"] == 1 + bool(engine.get("ahead")), "steps are scheduled ahead where they may"
    if how == "foreign":
        assert steps["accepted"] < steps["drafted"] / 8, "what nobody drafted was taken"
    elif how == "covered":
        # But what is behind the end of an answer is drafted, and verified, in vain.
        assert steps["selecting"] == 0 and steps["accepted"] == steps["drafted"] > 0
    else:
        assert steps["selecting"] > 2 * steps["covered"], "drafts were dense"
        assert steps["drafted"] > steps["accepted"] > steps["drafted"] / 8, "nothing is shown of either"
        assert steps["planted"] == ("cluster" in engine["policy"]) * steps["selecting"]


@pytest.mark.parametrize("engine", EVERY_TIME)
def test_nothing_that_a_load_is_for_is_left_out(engine: dict[str, Any]) -> None:
    """One token, an abort, a stop, the model's length among drafts; where blocks are few, a request that loses them."""
    one = started_every_time()[engine["policy"], 4, engine["loads"][0]]
    heard, steps = one["heard"], one["steps"]
    assert [*map(len, (heard["one"]["tokens"], heard["edge"]["tokens"]))] == [1, SETTINGS["max_model_len"] - 500]
    assert [heard[name]["ended"] for name in ("gone", "ended")] == [["abort", None], ["stop", "."]]
    assert steps["beyond"] > 0
    assert (steps["preempted"] > 0) == ("num_gpu_blocks_override" in engine.get("settings", {}))


def test_answers_are_found_in_the_prefix_cache(stock: Any) -> None:
    """Those of a second turn as far as vLLM finds them; one that has the whole prompt computes its last block."""
    heard, block = started_every_time()[TIDAL["policy"], 4, "whole"]["heard"], 32
    for name in ("same", "sibling", "turn"):
        assert heard[name]["cached"] == stock["whole"][name].cached > 0
    assert heard["turn"]["cached"] > 200 + 36 - 1 - block


def test_what_a_connector_carries_is_dense(stock: Any) -> None:
    """A prompt and an answer that the offloading alone has: stock answers so. What drafts have written is spoiled."""
    one = started_every_time()[CARRIED["policy"], 4, "turns:spoiled"]
    check_heard(one["heard"], stock["turns"])
    check_steps(one)
    assert one["steps"]["selecting"] > 2 * one["steps"]["covered"], "drafts were dense"
    assert [told.cached for told in stock["turns"].values()] == [0, 0, 0]
    # Whole blocks of 184 tokens, and of 10 more that were answered.
    assert [told["cached"] for told in one["heard"].values()] == [0, 160, 192]


@walk
@pytest.mark.parametrize("policy", DRAFTING)
def test_every_policy_answers_what_vllm_answers(policy: str, stock: Any) -> None:
    for drafts, load in product((1, 4, 8, 16), ("small", "whole")):
        Engines.started += load == "small"
        # A cluster's set holds what three cycles leave in none.
        asked = re.sub("budget=(64|96)", "budget=128", policy) if "cluster" in policy else policy
        one = found(json.dumps([{"policy": asked, "drafts": drafts, "loads": ["small", "whole"]}]))
        check_heard(one[asked, drafts, load]["heard"], stock[load])
        check_steps(one[asked, drafts, load])


COUNT, STOCK_COUNT, TOKENS = 192, 2000, 4
DRAWING: dict[str, Any] = {"max_num_seqs": 48, "max_num_batched_tokens": 1024, "max_model_len": 512}
DRAWING |= {"enable_prefix_caching": True}


def sampled(engine: LLM) -> list[list[int]]:
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


@walk
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_tokens_and_pairs_are_drawn_as_by_vllm(method: str, all_engines: Engines) -> None:
    """Sampled answers, whether drafts are the likeliest tokens or are drawn themselves."""
    stock = all_engines.by_stock(sampled, **DRAWING)
    Engines.started += 1
    policy, drafts, load = "streaming:budget=24", 3, f"drawn:{COUNT}"
    asked = {"policy": policy, "drafts": drafts, "loads": [load], "settings": {**DRAWING, "block_size": 32}}
    one = found(json.dumps([{**asked, "sampled": method}]))[policy, drafts, load]
    ours, steps = one["drawn"], one["steps"]
    for place in range(TOKENS):
        assert alike([row[place] for row in ours], [row[place] for row in stock]) > 1e-3, place
    for place in range(1, TOKENS - 1):
        pairs = [[(row[place], row[place + 1]) for row in rows] for rows in (ours, stock)]
        assert alike(*pairs) > 1e-3, place
    # Drafts of so few tokens err often, so that what stands and what is drawn anew are both much.
    assert 0.05 < steps["accepted"] / steps["drafted"] < 0.95


def test_blocks_of_answers_are_those_of_a_dense_prompt() -> None:
    """Keys, values and bounds of pages of what was drafted and verified, against the same text as a prompt."""
    kept = started_every_time()[FEW["policy"], 4, "kept"]["kept"]
    assert kept["blocks"] > 4 and kept["layers"] == kept["bounded"] + 2
    assert kept["scale"] > 1
    assert kept["keys and values"] < 1e-4 * kept["scale"]
    assert kept["bounds"] < 1e-4 * kept["scale"]
