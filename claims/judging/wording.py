"""How effects and bounds are written, on the terminal and on the page."""

from typing import Any


def effect(test: dict[str, Any]) -> str:
    """An effect and its interval: +0.12 (+0.05 to +0.20), ratios and plain values without a sign; of a benchmark the
    median of its points and how far their quartiles reach."""
    if test["value"] is None:
        return "–"
    form = _form(test)
    told = form.format(test["value"])
    if test["interval"] is None:
        return told
    where = f" over {len(test['points'])} points" if test["points"] else ""
    low, high = map(form.format, test["interval"])
    return f"{told} ({low} to {high}{where})".replace("-", "−")


def wanted(test: dict[str, Any]) -> str:
    """What would confirm it."""
    sign = ">" if test["direction"] == "above" else "<"
    return f"{sign} {_form(test).format(test['bound'])}".replace("-", "−")


def reported(test: dict[str, Any]) -> str:
    """What the paper reports."""
    return "–" if test["reported"] is None else _form(test).format(test["reported"]).replace("-", "−")


def _form(test: dict[str, Any]) -> str:
    return "{:+.3f}" if test["kind"] == "difference" and test["against"] is not None else "{:.3f}"
