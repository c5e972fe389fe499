"""Run by test_two_ranks.py in processes of its own: prints the tokens that a policy gives on two ranks."""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from engines import DEFAULTS, answers, greedy, prompts
from vllm import LLM
from vllm.v1.executor import multiproc_executor

from saccade.checkpoints.bundled import model_path

LENGTHS = (330, 90, 200)
STEPS = 32


def tokens(engine: LLM) -> list[list[int]]:
    """What one engine answers."""
    return [list(answer.tokens) for answer in answers(engine, prompts(*LENGTHS), greedy(STEPS))]


def settings(policy: str, ranks: int) -> dict[str, Any]:
    """Of an engine on so many ranks."""
    return {
        **DEFAULTS,
        "model": str(model_path()),
        "attention_backend": "CUSTOM",
        "additional_config": {"saccade": {"policy": policy}},
        "tensor_parallel_size": ranks,
    }


if __name__ == "__main__":
    # vLLM spawns ranks on a CPU, each of which imports it anew.
    multiproc_executor.get_mp_context = partial(get_context, "fork")
    with patch.object(gc, "collect"):  # as in `engines`, and so in the ranks, which begin inside
        engine = LLM(**settings(sys.argv[1], 2))
    sys.stdout.write("\nTOKENS " + json.dumps(tokens(engine)) + "\n")
