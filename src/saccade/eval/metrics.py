"""How an answer to RULER is scored, 0 to 1: by the references that it holds (Hsieh et al., 2024, arXiv 2404.06654).

Scores of other benchmarks are lm-evaluation-harness's: `saccade.lm_eval` runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def metric_of(row: Mapping[str, Any], given: str | None, name: str) -> Metric:
    """How a benchmark's row is scored: as `given` on the command line, as its `metric` says, or as its `task` is.

    Raises:
        DocumentError: an unknown one; the message begins with the row's `name` or the option, and lists the valid ones.
    """
    told = given or row.get("metric")
    task = str(row.get("task", ""))
    if told is None and task not in TASKS:
        valid = f"give --metric ({', '.join(METRICS)}) or a column metric; known tasks: {', '.join(TASKS)}"
        raise DocumentError(f"{name}: no metric is known of task {task!r}; {valid}")
    metric = TASKS[task] if told is None else str(told)
    if metric not in METRICS:
        where = "--metric" if given else name
        raise DocumentError(f"{where}: unknown metric {metric!r}; valid: {', '.join(METRICS)}")
    return METRICS[metric]
