"""The README's tables: the methods beside what they answered, and four points of a server."""

from __future__ import annotations

from saccade.methods.registry import describe

from .page import Results, Row, named, table, told
from .quality import DASH, terms, terms_named
from .serving import compared, points, policies, size

POINTS = ((131_072, 1), (131_072, 4), (32_768, 1), (32_768, 8))
FASTEST = 4
BUDGET = 256


def methods(results: Results) -> list[str]:
    """Paper, policy, budget, right answers."""
    rows: dict[str, Row] = {}
    for row in results["rows"]:
        if row["budget"] in (None, BUDGET):
            rows[row["policy"]] = row
    here = results["environment"]
    names = named((row["spec"] for row in rows.values()), here)
    body = [
        [
            describe(one).source,
            names[row["spec"]],
            DASH if row["budget"] is None else f"{row['budget']}",
            f"{row['correct']} of {row['n']}",
            "{:.2f}–{:.2f}".format(*row["interval"]),
            *terms(row),
            f"{row['share_attended']:.0%}",
        ]
        for one, row in rows.items()
    ]
    columns = ["paper", "policy", "budget", "right", "95% interval", *terms_named(results), "cache attended"]
    lengths = here["context_tokens"]
    asked = f"{here['questions']} questions in {len(lengths)} stretches of {lengths[0]:,} tokens, bundled model"
    return [*table(columns, body, words=["policy"]), "", f"{asked}; {told(here, 'make demo', 'demo', 'docs/')}"]


def speed(results: Results) -> list[str]:
    """Four points of the fastest policies that look at the whole text."""
    chosen = [one for one in policies(results) if not one.startswith("streaming")][:FASTEST]
    found = points(results)
    body = []
    for context, batch in POINTS:
        body.append([f"{size(context)} × {batch}", *compared(found[context, batch], chosen, "{:.1f}", " ({:.2f}×)")])
    lines = table(["context × batch", "stock vLLM", *named(chosen).values()], body)
    what = f"ms per decoding step, {results['shape']} with random weights"
    return [*lines, "", f"{what}, {told(results['environment'], 'saccade bench serve', 'serve_h200', 'docs/')}"]
