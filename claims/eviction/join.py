"""Both sides' answers as one table: judged by one rule, counted by cell."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import fmean
from typing import Any

from saccade.errors import OutputError
from saccade.eval.facts import Fact, is_right
from saccade.eval.interval import wilson

from .asking import DENSE
from .exchange import Prompt, Said


def rows_of(side: str, said: Iterable[Said], prompts: Sequence[Prompt], tokenizer: Any) -> list[dict[str, Any]]:
    """A row per cell of one side, in the order of their first answers."""
    cells: dict[Any, list[Said]] = {}
    for one in said:
        cells.setdefault(one.cell, []).append(one)
    rows = []
    for cell, answers in cells.items():
        right = [is_right(str(tokenizer.decode(one.tokens)), Fact("", prompts[one.prompt].answer)) for one in answers]
        counts = {"correct": sum(right), "n": len(right), "interval": wilson(sum(right), len(right))}
        by_context = [
            sum(right for _, right in group)
            for _, group in groupby(
                sorted(zip((one.prompt for one in answers), right, strict=True)),
                key=lambda pair: prompts[pair[0]].context,
            )
        ]
        read = round(fmean(one.read for one in answers), 1)
        rows.append({"side": side, **asdict(cell), "read": read, **counts, "correct_by_context": by_context})
    return rows


def agreement(ours: Iterable[Said], theirs: Iterable[Said]) -> dict[str, int]:
    """How many prompts dense attention answers with the same tokens in both environments.

    Raises:
        OutputError: if one side has no dense answers.
    """
    found = [{one.prompt: one.tokens for one in side if one.cell == DENSE} for side in (ours, theirs)]
    if not found[0] or found[0].keys() != found[1].keys():
        raise OutputError(
            f"dense attention answers {len(found[0])} prompts on saccade's side and {len(found[1])} on kvpress's; "
            "without it nothing can be compared"
        )
    same = sum(tokens == found[1][prompt] for prompt, tokens in found[0].items())
    return {"prompts": len(found[0]), "same_tokens": same}
