"""vLLM's decoding steps under policies, from what `saccade bench serve --json` writes."""

from __future__ import annotations

from .page import Results, Row, named, table, told

SHORT = 4096
"""Tokens up to which a row is short: there is little to save."""


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def points(results: Results) -> dict[tuple[int, int], dict[str, Row]]:
    """Rows by context and batch, then by policy; long contexts first."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["context"], row["batch"]), {})[row["policy"]] = row
    return dict(sorted(found.items(), key=lambda item: (-item[0][0], item[0][1])))


def policies(results: Results) -> list[str]:
    """Every policy but stock, in the order of their time at the largest point."""
    rows = max(points(results).items(), key=lambda item: item[0][0] * item[0][1])[1]
    named = [policy for policy in rows if not policy.startswith("stock")]
    return sorted(named, key=lambda policy: rows[policy]["ms_per_token"])


def stock(rows: dict[str, Row]) -> float:
    """Milliseconds of stock, which runs first and, on a GPU, last too."""
    times = [row["ms_per_token"] for policy, row in rows.items() if policy.startswith("stock")]
    return float(sum(times) / len(times))


def speed(results: Results, file: str) -> list[str]:
    """Milliseconds per step and, in brackets, how many times faster than stock, where stock's two runs agree."""
    chosen = policies(results)
    body, void = [], []
    for (context, batch), rows in points(results).items():
        base, point = stock(rows), f"{size(context)} × {batch}"
        drift = rows[chosen[0]].get("drift") if rows[chosen[0]].get("void") else None
        if drift is not None:
            void.append(f"{point} ({drift:+.1%})")
        times = [rows[one]["ms_per_token"] for one in chosen]
        cells = (f"{time:.2f}" + (f" ({base / time:.2f})" if drift is None else "") for time in times)
        body.append([point, f"{base:.2f}", *cells])
    lines = table(["context × batch", "stock vLLM", *named(chosen).values()], body)
    if void:
        lines += ["", f"Stock's two runs differ too much for a comparison at {', '.join(void)}."]
    command = results.get("command", "saccade bench serve")
    ran = {f"vLLM {one['vllm']}, model runner {one['model_runner']}" for one in results.get("engines", {}).values()}
    parts = [f"{results['shape']} with random weights", *sorted(ran)]
    return [*lines, "", f"{', '.join(parts)}, {told(results['environment'], command, file)}"]


def ceiling(results: Results) -> list[str]:
    """Shares of what the bytes allow, at the longest contexts."""
    chosen = policies(results)
    longest = max(context for context, _ in points(results))
    body = [
        [f"{size(context)} × {batch}", *(f"{rows[one]['share_of_ceiling']:.0%}" for one in chosen)]
        for (context, batch), rows in points(results).items()
        if context == longest
    ]
    return table(["context × batch", *named(chosen).values()], body)


def slower(results: Results) -> list[str]:
    """The worst of every policy against stock, for short rows and for longer ones."""
    chosen, body = policies(results), []
    names = named(chosen)
    for policy in chosen:
        cells = []
        for wanted in (True, False):
            own = {
                point: rows[policy]["ms_per_token"] / stock(rows)
                for point, rows in points(results).items()
                if (point[0] <= SHORT) == wanted
            }
            (context, batch), worst = max(own.items(), key=lambda item: item[1])
            cells.append(f"{worst:.2f} ({size(context)} × {batch})")
        body.append([names[policy], *cells])
    return table(["policy", f"worst up to {size(SHORT)} tokens", "worst beyond"], body)


def engines(results: Results) -> list[str]:
    """What starting and capturing cost."""
    names = {**named(policies(results)), "stock": "stock"}
    body = [
        [
            names[policy],
            f"{engine['start_seconds']:.0f}",
            f"{engine['cudagraph_bytes'] / 1e9:.2f}",
            f"{engine['tokens']:,}",
        ]
        for policy, engine in results["engines"].items()
        if policy != "stock (last)"
    ]
    return table(["policy", "start, s", "graphs, GB", "tokens that fit into the cache"], body)
