"""The table of the eviction experiment, for the page and for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.markdown import table
from saccade.report.wording import NOTHING, grouped

CELL = ("side", "method", "protocol")
LONGEST = 50
"""Characters of a method's name in the table."""


def answers(results: Mapping[str, Any]) -> list[str]:
    """Markdown: a line per method and protocol, right answers and tokens read at every budget."""
    rows, body = results["rows"], []
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    heads = ["", *CELL[1:], *map(str, budgets), "no budget"]
    for (side, method, protocol), own in grouped(rows, lambda row: tuple(row[one] for one in CELL)).items():
        found = {row["budget"]: row for row in own}
        # A list of heads says nothing to a reader; the results file has it.
        named = method if len(method) <= LONGEST else method.partition(":")[0]
        body.append([side, f"`{named}`", f"`{protocol}`", *(_cell(found.get(budget)) for budget in (*budgets, None))])
    return table(heads, body, heads)


def refusals(results: Mapping[str, Any]) -> list[str]:
    """Markdown: what kvpress could not run, in its own words; once where every budget has the same reason."""
    said = dict.fromkeys((row["method"], row["protocol"], row["refused"]) for row in results["refused"])
    return [f"- `{method}`, `{protocol}`: {reason}" for method, protocol, reason in said]


def section(results: Mapping[str, Any]) -> list[str]:
    """Markdown: what was checked, the table, and what kvpress could not run."""
    dense, pipeline, versions = results["dense"], results["pipeline"], results["versions"]["kvpress"]
    checked = (
        f"kvpress {versions['kvpress']}, transformers {versions['transformers']}. Dense attention says the same "
        f"tokens in both environments on {dense['same_tokens']} of {dense['prompts']} prompts; kvpress's own pipeline "
        f"gives the same answer as the script in {pipeline['same']} of {pipeline['compared']} cells."
    )
    return [checked, "", *answers(results), "", "Not run, in kvpress's words:", "", *refusals(results)]


def summary(results: Mapping[str, Any]) -> Sequence[str]:
    """Lines for a terminal."""
    lines = [
        f"{row['side']:<8} {row['method']:<44} {row['protocol']:<12} budget {row['budget'] or NOTHING!s:>4}  "
        f"read {row['read']:>8,.1f}  right {row['correct']:>3} of {row['n']}  "
        f"({row['interval'][0]:.0%} to {row['interval'][1]:.0%})"
        for row in results["rows"]
    ]
    dense = results["dense"]
    told = f"dense attention: the same tokens on both sides for {dense['same_tokens']} of {dense['prompts']} prompts"
    return [*lines, told, *(line.removeprefix("- ") for line in refusals(results))]


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    low, high = row["interval"]
    return f"{row['correct']}/{row['n']} ({low:.0%}–{high:.0%}), {row['read']:,.0f}"
