"""Decoding steps in our engine on a CPU, from what `saccade bench decode --json` writes."""

from __future__ import annotations

from saccade.report.wording import grouped

from .page import Results, Row, named, table, told
from .serving import size


def _time(row: Row) -> str:
    return f"{row['ms_per_token']:.1f} ({row['speedup_over_best_dense']:.2f})"


def _who(row: Row) -> str:
    """A dense decoder, or a policy's spec."""
    return {"stock": "stock transformers", "dense": f"dense, {row['runtime']}"}.get(row["policy"], str(row["policy"]))


def steps(results: Results, command: str) -> list[str]:
    """Milliseconds per token and, in brackets, the speed-up over the best dense decoder of the run."""
    contexts = sorted({row["context"] for row in results["rows"]})
    lines, names = [], named(row["policy"] for row in results["rows"])
    for (batch, threads), rows in grouped(results["rows"], lambda row: (row["batch"], row["threads"])).items():
        body = []
        for who, own in grouped(rows, _who).items():
            found = {row["context"]: row for row in own}
            cells = (_time(found[one]) for one in contexts)
            last = found[contexts[-1]]
            body.append([names.get(who, who), *cells, f"{last['share_of_ceiling']:.0%}"])
        setting = f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"
        lines += [*table([setting, *(f"{size(one)} tokens" for one in contexts), "share of the ceiling"], body), ""]
    return [*lines, told(results["environment"], command, "decode_cpu")]
