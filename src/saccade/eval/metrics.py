"""How an answer to RULER is scored, 0 to 1: by the references that it holds (Hsieh et al., 2024, arXiv 2404.06654).

Scores of other benchmarks are lm-evaluation-harness's: `saccade.lm_eval` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..errors import DocumentError

Metric = Callable[[str, Sequence[str]], float]
"""Of what was said and the references, at least one."""


def string_match_all(said: str, references: Sequence[str]) -> float:
    """The share of the references that stand in what was said, whatever the case."""
    return sum(reference.lower() in said.lower() for reference in references) / len(references)


def string_match_part(said: str, references: Sequence[str]) -> float:
    """1 if one of them does."""
    return float(string_match_all(said, references) > 0)


METRICS: Mapping[str, Metric] = {"string_match_all": string_match_all, "string_match_part": string_match_part}
_NEEDLES = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery"
TASKS: Mapping[str, str] = {
    **dict.fromkeys([*(f"niah_{kind}" for kind in _NEEDLES.split()), "vt", "cwe", "fwe"], "string_match_all"),
    **dict.fromkeys(("qa_1", "qa_2"), "string_match_part"),
}


def metric_of(name: str, where: str) -> Metric:
    """The metric of that name; `where` is what errors say before.

    Raises:
        DocumentError: an unknown name; the message lists the valid ones.
    """
    if name not in METRICS:
        raise DocumentError(f"{where}: unknown metric {name!r}; valid: {', '.join(METRICS)}")
    return METRICS[name]


def metric_of_task(task: str, where: str) -> Metric:
    """The metric of a task; errors as of `metric_of`."""
    if task not in TASKS:
        told = f"give --metric ({', '.join(METRICS)}) or a column metric; known tasks: {', '.join(TASKS)}"
        raise DocumentError(f"{where}: no metric is known of task {task!r}; {told}")
    return METRICS[TASKS[task]]
