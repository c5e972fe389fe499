"""Lossless serving on a CUDA device: graphs of drafts against the same kernels launched one by one, and stock's tokens.

vLLM computes what does not depend on who else is in the batch (`VLLM_BATCH_INVARIANT=1`): in bfloat16 every token is
stock's, or, where stock that drafts from n-grams is not stock's own, no more often another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_engines import CudaEngines, core, runner, say, text
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.worker.speculator import SelfSpeculator

DRAFTS, ROWS, LONGEST = 4, 6, 2048
"""k; rows of a batch, which is no size that vLLM captures by itself; tokens of a row."""
PROFILED = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3}
"""Memory of graphs is measured by a capture that is thrown away."""
ENGINES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "less_is_more": (f"less_is_more:budget=192,reselect=7,rectify={DRAFTS}:verify", PROFILED),
    "quest": (f"quest:budget=192,rectify={DRAFTS}:verify", {}),
    "n-grams": (None, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}),
}
ASKS = [(700 * number, 40 + 67 * number % 1500, 24 + 13 * number % 60) for number in range(63)] + [(9000, 2000, 90)]
"""Where prompts begin, their lengths, and most tokens of answers; the last one ends at the longest row."""


@dataclass
class Found:
    """What an engine answered, and how it ran.

    Attributes:
        answers: by request.
        graphs: rows of graphs of drafts that were captured; replays: how often each was replayed.
        eager: drafts that were launched kernel by kernel, beside those that were asked for.
        verifying: rows of full graphs of the target that were replayed; verified: steps of the target with drafts.
        drafted, accepted: tokens, as the rejection sampler has it.
        compared, others: drafts of graphs that were drafted again kernel by kernel, and those that came out otherwise.
    """

    answers: list[list[int]] = field(default_factory=list)
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
        verifying[desc.num_reqs] += 1
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


def answered(engine: Any) -> list[list[int]]:
    """Requests come while others decode; a batch grows and shrinks."""
    waiting, numbers, answers = list(enumerate(ASKS)), count(), dict[str, list[int]]()
    while waiting or engine.llm_engine.has_unfinished_requests():
        if waiting and next(numbers) % 3 == 0:
            number, (place, length, tokens) = waiting.pop(0)
            settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
            prompt = TokensPrompt(prompt_token_ids=text()[place:][:length])
            engine.llm_engine.add_request(str(number), prompt, settings)
        for output in engine.llm_engine.step():
            answers[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
    return [answers[str(number)] for number in range(len(ASKS))]


def main(name: str) -> dict[str, Any]:
    """What one engine answered."""
    engines, found, (policy, settings) = CudaEngines(), Found(), ENGINES[name]
    given = {"dtype": "bfloat16", "max_model_len": LONGEST, "max_num_seqs": ROWS, "max_num_batched_tokens": 512}
    engine = engines.make(policy, **{**given, "logits_processors": [], **settings})
    with watched(engine, found) if policy else nullcontext():
        found.answers = answered(engine)
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
        say(f"{name}: { ({**told[name], 'answers': sum(map(len, told[name]['answers']))}) }")
    return told


def differing(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Requests with another answer."""
    return sum(mine != theirs for mine, theirs in zip(one["answers"], other["answers"], strict=True))


@pytest.mark.parametrize("name", ["less_is_more", "quest"])
def test_every_token_is_that_of_stock(name: str, found: dict[str, Any]) -> None:
    bound = differing(found["n-grams"], found["stock"])
    say(f"{name}: {differing(found[name], found['stock'])} of {len(ASKS)} answers differ, {bound} with n-grams")
    assert differing(found[name], found["stock"]) <= bound
    assert 0 < found[name]["accepted"] < found[name]["drafted"]


@pytest.mark.parametrize("name", ["less_is_more", "quest"])
def test_drafts_are_replayed_graphs(name: str, found: dict[str, Any]) -> None:
    """Every batch has one, none is launched kernel by kernel, and both draft the same tokens."""
    one = found[name]
    assert one["graphs"] == [1, 2, 4, ROWS]
    assert {int(rows) for rows in one["replays"]} == {*one["graphs"]}
    assert one["eager"] == 0
    assert one["compared"] > 1000
    # Our kernels split rows by how many there are, and padding is among them: sums in another order.
    assert one["others"] <= one["compared"] / 100


@pytest.mark.parametrize("name", ["less_is_more", "quest"])
def test_passes_that_verify_are_replayed_graphs(name: str, found: dict[str, Any]) -> None:
    """But where a prompt is among the rows, or a row ends at the longest."""
    assert sum(found[name]["verifying"].values()) > found[name]["verified"] / 3


if __name__ == "__main__":
    sys.stdout.write("\nFOUND " + json.dumps(main(sys.argv[1])) + "\n")
