"""Lossless serving on a CUDA device: graphs of drafts against the same kernels launched one by one, and stock's tokens.

vLLM computes what does not depend on who else is in the batch (`VLLM_BATCH_INVARIANT=1`). Its FlashAttention still cuts
five tokens of a row otherwise than one, so that stock which drafts from n-grams is not stock in bfloat16: that is the
bound, for how many answers are others and for how much less likely their first other token is.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_engines import CudaEngines, core, runner, say, text
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.lossless import ADAPTIVE, lengths
from saccade.adapters.vllm.scheduler.draft_length import DraftLength
from saccade.adapters.vllm.worker.speculator import SelfSpeculator

DRAFTS, ROWS, LONGEST = 4, 6, 2048
"""k; rows of a batch, which is no size that vLLM captures by itself; tokens of a row."""
SHOWN = 5
LENGTHS = (0, 1, 3, 3, 0, 0, 1, 1, 3)
"""What the scheduler of drafts that adapt is told to choose, over and over."""
PROFILED = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3}
"""Memory of graphs is measured by a capture that is thrown away."""
ENGINES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "less_is_more": (f"less_is_more:budget=192,reselect=7,rectify={DRAFTS}:verify", PROFILED),
    "quest": (f"quest:budget=192,rectify={DRAFTS}:verify", {}),
    "adaptive": (f"quest:budget=192,rectify={DRAFTS}:verify", {"scheduler_cls": ADAPTIVE}),
    "n-grams": (None, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}),
}
ASKS = [(700 * number, 40 + 67 * number % 1500, 24 + 13 * number % 60) for number in range(63)] + [(9000, 2000, 90)]
"""Where prompts begin, their lengths, and most tokens of answers; the last one ends at the longest row."""


@dataclass
class Found:
    """What an engine answered, and how it ran.

    Attributes:
        answers: by request; likely: of each token the likeliest ones with their log-probabilities, of stock alone.
        graphs: rows of graphs of drafts that were captured; replays: how often each was replayed.
        eager: drafts that were launched kernel by kernel, beside those that were asked for.
        verifying: tokens a row of full graphs of the target that were replayed; verified: steps of it with drafts.
        drafted, accepted: tokens, as the rejection sampler has it.
        compared, others: drafts of graphs that were drafted again kernel by kernel, and those that came out otherwise.
    """

    answers: list[list[int]] = field(default_factory=list)
    likely: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    replays: dict[int, int] = field(default_factory=dict)
    eager: int = 0
    verifying: dict[int, int] = field(default_factory=dict)
    verified: int = 0
    drafted: int = 0
    accepted: int = 0
    compared: int = 0
    others: int = 0


@contextmanager
def watched(engine: Any, found: Found) -> Iterator[None]:
    """Draft every cycle again kernel by kernel, from the same tokens, and count what runs."""
    speculator, target = runner(engine).speculator, runner(engine).cudagraph_manager
    graphs, verifying, replays = speculator._graphs, Counter[int](), Counter[int]()
    found.graphs = sorted(desc.num_reqs for desc in graphs.graphs)
    propose, draft = SelfSpeculator.propose, SelfSpeculator._draft
    replay, replay_target = graphs.run_fullgraph, target.run_fullgraph

    def replayed(desc: Any) -> None:
        replays[desc.num_reqs] += 1
        replay(desc)

    def replayed_target(desc: Any) -> Any:
        verifying[desc.num_tokens // desc.num_reqs] += 1
        return replay_target(desc)

    def drafted(one: Any, *given: Any) -> None:
        found.eager += 1
        draft(one, *given)

    def proposed(one: Any, batch: Any, *given: Any, **more: Any) -> Any:
        drafts = propose(one, batch, *given, **more).clone()
        found.drafted += batch.num_draft_tokens
        found.accepted += batch.num_draft_tokens - int(given[5].sum())
        found.verified += batch.num_draft_tokens > 0
        before, graphs._graphs_captured = found.eager, False
        again = propose(one, batch, *given, **more)
        graphs._graphs_captured, found.eager = True, before
        ended = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        chosen = torch.from_numpy(ended).to(drafts.device)
        found.compared += int(chosen.sum()) * drafts.shape[1]
        found.others += int((drafts != again)[chosen].sum())
        return drafts

    with (
        patch.object(graphs, "run_fullgraph", replayed),
        patch.object(target, "run_fullgraph", replayed_target),
        patch.object(SelfSpeculator, "_draft", drafted),
        patch.object(SelfSpeculator, "propose", proposed),
    ):
        yield
    found.replays, found.verifying = dict(replays), dict(verifying)


def answered(engine: Any, found: Found, shown: int | None) -> None:
    """Requests come while others decode; a batch grows and shrinks. `shown`: how many tokens' chances are asked for."""
    waiting, numbers, ended = list(enumerate(ASKS)), count(), dict[str, Any]()
    while waiting or engine.llm_engine.has_unfinished_requests():
        if waiting and next(numbers) % 3 == 0:
            number, (place, length, tokens) = waiting.pop(0)
            settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, logprobs=shown)
            prompt = TokensPrompt(prompt_token_ids=text()[place:][:length])
            engine.llm_engine.add_request(str(number), prompt, settings)
        for output in engine.llm_engine.step():
            ended[output.request_id.partition("-")[0]] = output.outputs[0]
    for number in range(len(ASKS)):
        found.answers.append(list(ended[str(number)].token_ids))
        steps = ended[str(number)].logprobs or ()
        found.likely.append([[(token, one.logprob) for token, one in step.items()] for step in steps])


def main(name: str) -> dict[str, Any]:
    """What one engine answered."""
    engines, found, (policy, settings) = CudaEngines(), Found(), ENGINES[name]
    given = {"dtype": "bfloat16", "max_model_len": LONGEST, "max_num_seqs": ROWS, "max_num_batched_tokens": 512}
    engine = engines.make(policy, **{**given, "logits_processors": [], **settings})
    told = cycle(LENGTHS)
    chosen = patch.object(DraftLength, "next", lambda *_: next(told))
    with watched(engine, found) if policy else nullcontext(), chosen if name == "adaptive" else nullcontext():
        answered(engine, found, SHOWN if name == "stock" else None)
    told = {**asdict(found), "mode": core(engine).vllm_config.compilation_config.cudagraph_mode.name}
    engines.close()
    return told


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Side by side, in processes of their own: what does not depend on the batch is chosen for all of a process."""
    environment, pipes = {**os.environ, "VLLM_BATCH_INVARIANT": "1"}, {"stdout": subprocess.PIPE, "text": True}
    running = {
        name: subprocess.Popen([sys.executable, __file__, name], env=environment, stderr=subprocess.STDOUT, **pipes)  # type: ignore[call-overload]
        for name in ENGINES
    }
    told = {}
    for name, process in running.items():
        said, _ = process.communicate(timeout=500)
        lines = [line for line in said.splitlines() if line.startswith("FOUND ")]
        assert lines, f"{name} did not answer:\n{said[-6000:]}"
        told[name] = json.loads(lines[0].removeprefix("FOUND "))
        say(f"{name}: { ({**told[name], 'answers': sum(map(len, told[name]['answers'])), 'likely': None}) }")
    return told


def gaps(one: dict[str, Any], stock: dict[str, Any]) -> list[float]:
    """Of answers that are not stock's, how much more stock prefers its own first token that is another."""
    found = []
    for mine, theirs, likely in zip(one["answers"], stock["answers"], stock["likely"], strict=True):
        assert len(mine) == len(theirs)
        place = next((place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            chances = dict(likely[place])
            found.append(chances[theirs[place]] - chances.get(mine[place], -torch.inf))
    return found


@pytest.mark.parametrize("name", ["less_is_more", "quest", "adaptive"])
def test_answers_are_those_of_stock_that_verifies(name: str, found: dict[str, Any]) -> None:
    """As often as stock that drafts from n-grams but for chance, as near, and mostly the same ones."""
    stock, other = found["stock"], found["n-grams"]
    ours, theirs = gaps(found[name], stock), gaps(other, stock)
    apart = sum(mine != another for mine, another in zip(found[name]["answers"], other["answers"], strict=True))
    say(f"{name}: {len(ours)} of {len(ASKS)} answers, up to {max(ours, default=0)} less likely")
    say(f"n-grams: {len(theirs)}, {max(theirs, default=0)}; {apart} are not the same in both")
    assert len(ours) <= len(theirs) + 2 * len(theirs) ** 0.5
    assert max(ours, default=0) <= 2 * max(theirs, default=0)
    # Rows of other numbers of tokens round otherwise.
    assert apart <= len(theirs) / 2 or name == "adaptive"
    assert 0 < found[name]["accepted"] < found[name]["drafted"]


@pytest.mark.parametrize("name", ["less_is_more", "quest", "adaptive"])
def test_drafts_are_replayed_graphs(name: str, found: dict[str, Any]) -> None:
    """Every batch has one, none is launched kernel by kernel, and both draft the same tokens."""
    one = found[name]
    assert {int(rows) for rows in one["replays"]} == {*one["graphs"]}
    assert max(one["graphs"]) == ROWS
    assert (one["eager"], one["others"]) == (0, 0)
    assert one["compared"] > 1000


@pytest.mark.parametrize("name", ["less_is_more", "quest"])
def test_passes_that_verify_are_replayed_graphs(name: str, found: dict[str, Any]) -> None:
    """But where a prompt is among the rows, as in most steps here, or a row ends at the longest."""
    assert found[name]["verifying"][str(DRAFTS + 1)] > found[name]["verified"] / 4


def test_each_length_has_graphs(found: dict[str, Any]) -> None:
    """Also where nothing was drafted, and a step is stock's."""
    verifying = found["adaptive"]["verifying"]
    assert {*map(int, verifying)} == {length + 1 for length in lengths(DRAFTS)}
    assert min(verifying.values()) > 10 and sum(verifying.values()) > found["adaptive"]["verified"] / 2


if __name__ == "__main__":
    sys.stdout.write("\nFOUND " + json.dumps(main(sys.argv[1])) + "\n")
