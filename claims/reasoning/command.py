"""`python -m claims reasoning`: how long a model's answers are under policies."""

from typing import Annotated, Any

import typer

from saccade.cli.options import JsonFile, Memory, Seed, words

POLICIES, BUDGETS, SEED = ("less_is_more", "tidal:heads=query", "quest:heads=query"), "64,128,256", 20
"""What claims rest on."""


def reasoning(
    model: Annotated[str, typer.Option(metavar="DIR", help="Model folder, with a recipe beside it.")],
    policy: Annotated[
        list[str] | None, words("SPEC", f"Policy without its budget; once per policy. Default: {', '.join(POLICIES)}.")
    ] = None,
    budgets: Annotated[str, words("N,N", "Budgets in tokens.")] = BUDGETS,
    seed: Seed = SEED,
    memory: Memory = 0.9,
    json: JsonFile = None,
) -> None:
    """Ask problems in vLLM; those that dense attention answers rightly, in 400 to 2,000 tokens, under every policy.

    Needs vLLM and claims/reasoning/requirements.txt. The file gets length, end and rightness of answers.

    Example:

      python -m claims reasoning --model ./Qwen2.5-Coder-1.5B --json reasoning.json
    """
    from saccade.cli.terminal import quiet_libraries, time_and_show

    from .job import Reasoning, reasoning_table

    quiet_libraries()
    job: Any = Reasoning.check(model, policy or POLICIES, budgets, seed, memory)  # runs as a GridJob does, on no grid
    time_and_show(job, reasoning_table, json)
