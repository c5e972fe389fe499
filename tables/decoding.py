"""Decoding steps in our engine on a CPU, from what `saccade bench decode --json` writes."""

from lab.markdown import table
from saccade.report.wording import grouped

from .page import Results, Row, named, told
from .serving import size


def _time(row: Row) -> str:
    return f"{row['ms_per_token']:.1f} ({row['speedup_over_best_dense']:.2f})"


def _who(row: Row) -> str:
    """A dense decoder, or a policy's spec."""
    return {"stock": "stock transformers", "dense": f"dense, {row['runtime']}"}.get(row["policy"], str(row["policy"]))


def passes(results: Results, command: str, file: str) -> list[str]:
    """Milliseconds of a layer's dense pass, beside those of one dense token.

    Runs that timed sparse steps, too, say which share of a rectified period's attention the pass is.
    """
    body, shared = [], all("rectified" in point for point in results["points"])
    for point in results["points"]:
        query, kv, _ = point["heads"]
        token, whole, masked = (point["times"][name]["ms"] for name in ("one dense token", "pass", "torch, masked"))
        cells = [f"{token:.3f}", f"{whole:.3f} ({whole / token:.2f})", f"{masked:.2f}"]
        cells += [f"{point['rectified']['share']:.0%}"] if shared else []
        body.append([f"{query} on {kv}", f"{size(point['context'])} × {point['batch']}", *cells])
    head = ["heads", "context × batch", "one token", f"pass of {results['tokens']}", "torch's masked attention"]
    head += ["the pass's share under `resa`"] if shared else []
    return [*table(head, body), "", told({**results["environment"], "dtype": "bfloat16"}, command, file)]


def steps(results: Results, command: str, file: str = "decode_cpu") -> list[str]:
    """Milliseconds per token and, in brackets, the speed-up over the best dense decoder of the run.

    Of the longest contexts also the share of the ceiling, and the most that the bytes allow over dense attention.
    """
    contexts = sorted({row["context"] for row in results["rows"]})
    lines, names = [], named(row["policy"] for row in results["rows"])
    for (batch, threads), rows in grouped(results["rows"], lambda row: (row["batch"], row["threads"])).items():
        body = []
        for who, own in grouped(rows, _who).items():
            found = {row["context"]: row for row in own}
            cells = (_time(found[one]) for one in contexts)
            last = found[contexts[-1]]
            # The first rows are those of dense decoders.
            everything = next(row["bytes"] for row in rows if row["context"] == contexts[-1])
            shares = (f"{last['share_of_ceiling']:.0%}", f"{everything / last['bytes']:.2f}")
            body.append([names.get(who, who), *cells, *shares])
        setting = f"batch {batch}, {threads} thread{'s' if threads > 1 else ''}"
        heads = [setting, *(f"{size(one)} tokens" for one in contexts), "share of the ceiling", "bytes allow"]
        lines += [*table(heads, body), ""]
    return [*lines, told(results["environment"], command, file)]
