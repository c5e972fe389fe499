"""The comparison as tables: a short one in README, a whole one in docs/policies.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.markdown import table
from saccade.methods.registry import describe
from saccade.report.labels import family, full_layers, labels
from saccade.report.wording import NOTHING, Row, frame, grouped

PAIRED = {"less_quest": "minus `quest`", "loss_above_dense": "loss above dense"}
"""Differences text by text, and what tables call them."""
_VARIED = ("dense_layers=", "cluster_size=", "sinks=")
"""Options of arms that the short table leaves out."""
_SHARES = ("ratio=", "min_pages=")
"""What stands for a budget in the specs of a method that keeps a share."""


def short(results: Mapping[str, Any]) -> list[str]:
    """A row for each method: right answers and what is read at every budget, without arms that vary an option."""
    budgets, body = _budgets(results), []
    heads = ["paper", "policy", *(f"right at {budget:,}" for budget in budgets), "cache read, index too"]
    for name, own in _by_method(results).items():
        if not any(option in name for option in _VARIED):
            at = [own.get(budget, own.get(None)) for budget in budgets]
            read = [f"{row['cache_read']:.0%}" for row in at if row]
            paper = describe(next(iter(own.values()))["policy"]).source
            told = read[0] if len({*read}) == 1 else " / ".join(read)
            body.append([paper, f"`{name}`", *map(_right, at), told])
    return [*table(heads, body, heads[:2]), "", _about(results)]


def whole(results: Mapping[str, Any]) -> list[str]:
    """A row for each arm: beside that its frame, and right answers less Quest's at the same budget."""
    budgets, body = _budgets(results), []
    heads = ["policy", "sinks + window, dense layers"]
    paired = {name: called for name, called in PAIRED.items() if any(name in row for row in results["rows"])}
    heads += [f"{what} at {budget:,}" for budget in budgets for what in ("right", *paired.values(), "cache read")]
    for name, own in _by_method(results).items():
        cells = [f"`{name}`", frame(next(iter(own.values())))]
        for budget in budgets:
            row = own.get(budget, own.get(None))
            cells += [_right(row), *(_less(row, name) for name in paired)]
            cells.append(f"{row['cache_read']:.1%}" if row else NOTHING)
        body.append(cells)
    return [*table(heads, body), "", _about(results)]


def _budgets(results: Mapping[str, Any]) -> list[int]:
    return sorted({row["budget"] for row in results["rows"]} - {None})


def _by_method(results: Mapping[str, Any]) -> dict[str, dict[int | None, Row]]:
    """Rows by label and budget."""
    here = results["environment"]
    plain = {row["spec"]: _unsized(row["spec"]) for row in results["rows"]}
    named = labels(plain.values(), here["kv_heads"], len(full_layers(here)))
    found = grouped(results["rows"], lambda row: named[plain[row["spec"]]])
    return {name: {row["budget"]: row for row in rows} for name, rows in found.items()}


def _unsized(spec: str) -> str:
    name, _, options = family(spec).partition(":")
    return ":".join(filter(None, (name, ",".join(one for one in options.split(",") if not one.startswith(_SHARES)))))


def _right(row: Row | None) -> str:
    return NOTHING if row is None else _with("{:.2f}", row["right"], "–", row["interval"])


def _less(row: Row | None, name: str) -> str:
    if row is None or name not in row:
        return NOTHING
    return _with("{:+.3f}", row[name], " to ", row[f"{name}_interval"])


def _with(form: str, value: float, between: str, interval: Sequence[float] | None) -> str:
    """A number and its interval, which few texts do not have."""
    told = "" if interval is None else f" ({between.join(map(form.format, interval))})"
    return form.format(value) + told


def _about(results: Mapping[str, Any]) -> str:
    row = results["rows"][0]
    asked = f"{row['n']} questions about {row['texts']} texts of {results['context']:,} tokens"
    if "loss" in row:
        asked += f", and the loss of the last tokens of {row['plain_texts']} of code and prose"
    return f"{asked}; `resa` keeps the budget's share of each row (`ratio`, with `min_pages=1`), reads are counted"
