"""The README's tables: the methods beside what they answered, and four points of a server."""

from __future__ import annotations

from saccade.methods.registry import describe

from .page import Results, Row, table, told
from .quality import policy
from .serving import name, points, policies, size, stock

POINTS = ((131_072, 1), (131_072, 4), (32_768, 1), (32_768, 8))
FASTEST = 4
BUDGET = 256


def methods(results: Results) -> list[str]:
    """Method, paper, spec, right answers."""
    rows: dict[str, Row] = {}
    for row in results["rows"]:
        if row["budget"] in (None, BUDGET):
            rows[row["policy"]] = row
    body = [
        [
            describe(one).source,
            policy(row["spec"]),
            f"{row['correct']} of {row['n']}",
            f"{row['share_attended']:.0%}",
        ]
        for one, row in rows.items()
    ]
    columns = ["paper", "spec", f"right at {BUDGET} tokens", "cache read"]
    lengths, here = results["environment"]["context_tokens"], results["environment"]
    asked = f"{here['questions']} questions in {len(lengths)} stretches of {lengths[0]:,} tokens, bundled model"
    return [*table(columns, body, words=["spec"]), "", f"{asked}; {told(here, 'make demo', 'demo', 'docs/')}"]


def speed(results: Results) -> list[str]:
    """Four points of the fastest policies that look at the whole text."""
    chosen = [one for one in policies(results) if not one.startswith("streaming")][:FASTEST]
    found = points(results)
    body = []
    for context, batch in POINTS:
        rows = found[context, batch]
        base = stock(rows)
        cells = (f"{rows[one]['ms_per_token']:.1f} ({base / rows[one]['ms_per_token']:.2f}×)" for one in chosen)
        body.append([f"{size(context)} × {batch}", f"{base:.1f}", *cells])
    lines = table(["context × batch", "stock vLLM", *map(name, chosen)], body)
    what = f"ms per decoding step, {results['shape']} with random weights"
    return [*lines, "", f"{what}, {told(results['environment'], 'saccade bench serve', 'serve_h200', 'docs/')}"]
