"""`python -m claims reasoning`: how long a model's answers are under policies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from saccade.cli.options import JsonFile, Seed, count, words

POLICIES = ("less_is_more", "tidal:heads=query", "quest:heads=query")


def reasoning(
    model: Annotated[str, typer.Option(metavar="DIR", help="Model folder, with a recipe beside it.")],
    policy: Annotated[
        list[str] | None, words("SPEC", f"Policy without its budget; once per policy. Default: {', '.join(POLICIES)}.")
    ] = None,
    budgets: Annotated[str, words("N,N", "Budgets in tokens.")] = "64,128,256",
    each: Annotated[int, count("Problems of every family that are asked densely.")] = 32,
    most: Annotated[int, count("Problems at most, of those that qualify, that are asked under policies.")] = 150,
    longest: Annotated[int, count("Tokens of an answer at most.")] = 4096,
    samples: Annotated[int, count("Answers drawn at a temperature of 0.7, beside the greedy one.")] = 2,
    seed: Seed = 20,
    json: JsonFile = None,
) -> None:
    """Ask problems in vLLM: densely, and what is then answered rightly, in 400 to 2,000 tokens, under every policy.

    Needs reasoning-gym (claims/reasoning/requirements.txt) and vLLM. The file gets every answer's length, how it ended,
    whether it is right, and its share of repeated phrases.

    Example:

      python -m claims reasoning --model ./Qwen2.5-Coder-1.5B --json reasoning.json
    """
    from saccade.cli.terminal import quiet_libraries, time_and_show

    from .job import Reasoning, ReasoningSettings
    from .table import reasoning_table

    quiet_libraries()
    told = ReasoningSettings(model, tuple(policy or POLICIES), budgets, each, most, longest, samples, seed)
    job: Any = Reasoning.check(told)  # runs as a GridJob does, on no grid
    time_and_show(job, reasoning_table, json)
