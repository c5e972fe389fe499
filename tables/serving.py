"""vLLM's decoding steps under policies, from what `saccade bench serve --json` writes."""

from collections.abc import Sequence

from lab.markdown import table
from saccade.bench.variants import STOCK_AGAIN

from .page import Results, Row, named, told

SHORT = 4096
"""Tokens up to which a row is short: there is little to save."""
_DAY = {"seconds": "day_over_stock", "tokens_per_second": "over_stock", "alone_tokens_per_second": "alone_over_stock"}
_CUT_OFF = "The run was cut off before stock came again: how much it drifted is not known."


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


def drifted(rows: dict[str, Row]) -> bool:
    """Whether stock's two runs differ too much for a comparison."""
    return any(row.get("void") for row in rows.values())


def speed(results: Results, file: str) -> list[str]:
    """Milliseconds per step and, in brackets, how many times faster than stock, where stock's two runs agree."""
    chosen = policies(results)
    body, void = [], []
    for (context, batch), rows in points(results).items():
        point = f"{size(context)} × {batch}"
        if not rows.keys() >= set(chosen):
            continue
        if drifted(rows):
            void.append(f"{point} ({rows[chosen[0]]['drift']:+.1%})")
        body.append([point, *compared(rows, chosen, "{:.2f}", " ({:.2f})")])
    lines = table(["context × batch", "stock vLLM", *named(chosen).values()], body)
    if void:
        lines += ["", f"Stock's two runs differ too much for a comparison at {', '.join(void)}."]
    if results["environment"]["device"] != "cpu" and STOCK_AGAIN not in results.get("engines", {}):
        lines += ["", _CUT_OFF]
    command = results.get("command", "saccade bench serve")
    ran = {f"vLLM {one['vllm']}, model runner {one['model_runner']}" for one in results.get("engines", {}).values()}
    parts = [f"{results['shape']} with random weights", *sorted(ran)]
    return [*lines, "", f"{', '.join(parts)}, {told(results['environment'], command, file)}"]


def versions(results: Results, file: str) -> list[str]:
    """As `speed`, of several runs on one card in turn; floors are left out."""
    runs = results["runs"]
    chosen, body = policies(runs[0]), []
    for context, batch in points(runs[0]):
        for run in runs if context > SHORT else ():
            (version,) = {one["vllm"] for one in run["engines"].values()}
            rows = points(run)[context, batch]
            body.append([f"{size(context)} × {batch}", version, *compared(rows, chosen, "{:.2f}", " ({:.2f})")])
    lines = table(["context × batch", "vLLM", "stock vLLM", *named(chosen).values()], body)
    where = told(runs[0]["environment"], runs[0]["command"], file)
    return [*lines, "", f"Versions in turn on one card, {runs[0]['shape']} with random weights, {where}"]


def compared(rows: dict[str, Row], chosen: Sequence[str], time: str, faster: str) -> list[str]:
    """Stock's time in a format, then those of `chosen` and, where stock's two runs agree, how many times faster."""
    base, times = stock(rows), [rows[one]["ms_per_token"] for one in chosen]
    agree = not drifted(rows)
    return [time.format(base), *(time.format(one) + (faster.format(base / one) if agree else "") for one in times)]


def load(results: Results, file: str, command: str | None = None) -> list[str]:
    """Requests per second and, in brackets, over stock, where stock's two runs agree; and how long tokens take."""
    rows, names = results["rows"], _whose(results)
    by_row = "row_tokens_per_second" in rows[0]  # not in results of before
    streamed = rows[0].get("stream")
    body = []
    for row in rows:
        over = "" if row["void"] or row["policy"].startswith("stock") else f" ({row['over_stock']:.2f})"
        cells = [f"{row['requests_per_second']:.3f}{'' if streamed else over}", f"{row['tokens_per_second']:.1f}"]
        cells += [f"{row['first_ms'] / 1e3:.1f}", f"{row['first_ms_p99'] / 1e3:.1f}"]
        cells += [f"{row['next_ms']:.0f}", f"{row['next_ms_p99']:.0f}", f"{row['firsts']}, {row['gaps']}"]
        cells += [f"{row['row_tokens_per_second']:.1f}{over if streamed else ''}"] if by_row else []
        body.append([str(row["clients"]), names[row["policy"]], *cells])
    head = ["clients", "", "requests per s", "tokens per s", "first token, s", "p99", "between tokens, ms", "p99", "n"]
    head += ["tokens per s of a row"] if by_row else []
    held = f"{min(row['cached_share'] for row in rows):.0%} of prompts in the prefix cache"
    return [*table(head, body), *_noted(results, file, "clients", command, held)]


def day(results: Results, file: str) -> list[str]:
    """An agent's day: how long it takes and tokens per second while rows decode, in brackets over stock's."""
    body, names = [], _whose(results)
    head = ["conversations", "", "the day, s", "tokens per s, decoding", "while no prompt waits", "first token, s"]
    head += ["cached of a prompt, first turn to last"]
    for row in results["rows"]:
        cells = [str(row["conversations"]), names[row["policy"]]]
        for what, over in _DAY.items():
            ratio = "" if row["void"] or row["policy"].startswith("stock") else f" ({row[over]:.2f})"
            cells.append(f"{row[what]:.0f}{ratio}")
        first, *_, last = row["cached_tokens"]
        body.append([*cells, f"{row['first_ms'] / 1e3:.3f}", f"{first:,.0f} to {last:,.0f}"])
    again = [] if STOCK_AGAIN in results["engines"] else ["", _CUT_OFF]
    return [*table(head, body), *again, *_noted(results, file, "conversations")]


def _whose(results: Results) -> dict[str, str]:
    return named(row["policy"] for row in results["rows"]) | {"stock": "stock vLLM", STOCK_AGAIN: "stock vLLM, last"}


def _noted(results: Results, file: str, setting: str, command: str | None = None, *about: str) -> list[str]:
    first = (row for row in results["rows"] if row["policy"] == "stock")
    void = ", ".join(f"{row[setting]} ({row['drift']:+.1%})" for row in first if row["void"])
    apart = ["", f"Stock's two runs differ too much for a comparison at {setting}: {void}."] if void else []
    ran = sorted({f"vLLM {one['vllm']}" for one in results["engines"].values()})
    notes = [line for note in results["notes"] for line in ("", f"{note[0].upper()}{note[1:]}.")]
    parts = ", ".join([f"{results['shape']} with random weights", *about, *ran])
    return [*apart, *notes, "", f"{parts}, {told(results['environment'], command or results['command'], file)}"]


def ceiling(results: Results, least: int | None = None) -> list[str]:
    """Shares of what the bytes allow, at contexts of at least so many tokens; by default at the longest ones."""
    chosen = policies(results)
    least = least or max(context for context, _ in points(results))
    body = [
        [f"{size(context)} × {batch}", *(f"{rows[one]['share_of_ceiling']:.0%}" for one in chosen)]
        for (context, batch), rows in points(results).items()
        if context >= least
    ]
    return table(["context × batch", *named(chosen).values()], body)


def slower(results: Results) -> list[str]:
    """The worst of every policy against stock, for short rows and for longer ones, where stock's two runs agree."""
    chosen, body = policies(results), []
    for policy in chosen:
        cells = []
        for wanted in (True, False):
            own = {
                point: rows[policy]["ms_per_token"] / stock(rows)
                for point, rows in points(results).items()
                if (point[0] <= SHORT) == wanted and not drifted(rows)
            }
            context, batch = max(own, key=own.__getitem__, default=(0, 0))
            cells.append(f"{own[context, batch]:.2f} ({size(context)} × {batch})" if own else "–")
        body.append([*named([policy]).values(), *cells])
    return table(["policy", f"worst up to {size(SHORT)} tokens", "worst beyond"], body)


def engines(results: Results) -> list[str]:
    """What starting and capturing cost."""
    names = {**named(policies(results)), "stock": "stock"}
    body = [
        [names[policy], f"{one['start_seconds']:.0f}", f"{one['cudagraph_bytes'] / 1e9:.2f}", f"{one['tokens']:,}"]
        for policy, one in results["engines"].items()
        if policy != "stock (last)"
    ]
    return table(["policy", "start, s", "graphs, GB", "tokens that fit into the cache"], body)
