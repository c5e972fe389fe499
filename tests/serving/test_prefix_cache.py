"""The prefix cache: later turns reuse what dense steps wrote and nothing else."""

from __future__ import annotations

import pytest
from engines import answer_of, greedy, prompt_of, prompts
from vllm import LLM
from vllm.inputs import TokensPrompt

from walking import among

POLICIES = (
    "quest:budget=64",
    "quest:budget=64,rectify=8",
    "resa:min_pages=2,ratio=0.05,rectify=16",
    "tidal:budget=64,reselect=7",
    "lychee_cluster:budget=64",
    "lychee_cluster:budget=64,rectify=8",
)


@pytest.mark.parametrize("policy", among(POLICIES, POLICIES[1:]))
def test_a_second_turn_is_what_it_is_without_the_cache(policy: str, visited: LLM) -> None:
    """Three turns, each of which begins with the one before, its sparse answer included; and one behind a dense one."""
    every = 8 if "rectify=8" in policy else 16 if "rectify=16" in policy else None
    prompt, steps, last = prompts(300)[0], 40, 0
    for turn in range(4):
        shared = TokensPrompt(prompt_token_ids=prompt, cache_salt="second turn")
        # The third answer opts out, which the fourth turn finds whole, with the bounds of pages that it has filled.
        params = greedy(steps, extra_args={"saccade": "off"} if turn == 2 else None)
        # Beside each other: a step of two rows takes what a step of one does.
        output, alone = visited.generate([shared, prompt_of(prompt)], params, use_tqdm=False)
        expected = answer_of(alone.outputs[0])
        assert answer_of(output.outputs[0]).tokens == expected.tokens
        if turn:
            # Of the last turn: its prompt, and with rectification every whole phase of every + 1 tokens after it.
            rewritten = 0 if every is None else (steps - 1) // (every + 1) * (every + 1)
            clean = last + (steps - 1 if turn == 3 else rewritten)
            assert output.num_cached_tokens == clean // 32 * 32
        last = len(prompt)
        prompt = [*prompt, *expected.tokens, *prompts(40, start=5000 + 100 * turn)[0]]
