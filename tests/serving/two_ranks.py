"""Run by test_two_ranks.py in processes of its own: prints the tokens that a policy gives on two ranks."""

import json
import sys
from functools import partial
from multiprocessing import get_context

from engines import Engines, answers, greedy, prompts
from vllm import LLM
from vllm.v1.executor import multiproc_executor

LENGTHS = (170, 60, 110)
STEPS = 12


def tokens(engine: LLM) -> list[list[int]]:
    """What one engine answers."""
    return [list(answer.tokens) for answer in answers(engine, prompts(*LENGTHS), greedy(STEPS))]


if __name__ == "__main__":
    # vLLM spawns ranks on a CPU, each of which imports it anew.
    multiproc_executor.get_mp_context = partial(get_context, "fork")
    found = tokens(Engines().sparse(sys.argv[1], tensor_parallel_size=2))
    sys.stdout.write("\nTOKENS " + json.dumps(found) + "\n")
