"""`python -m claims promise`: how often `saccade tune` passes what it should not, and what it should."""

from pathlib import Path
from typing import Annotated, Any

from lab.markdown import line, table
from saccade.cli.options import Seed, count, words


def promise(
    runs: Annotated[int, count("Runs of every world.")] = 600,
    again: Annotated[int, count("Runs of those worlds in which more than 5% passed.")] = 20_000,
    json: Annotated[Path, words("FILE", "Results file, overwritten.")] = Path("results/promise.json"),
    seed: Seed = 0,
) -> None:
    """Simulate answers whose questions fail together by text, and judge them as `saccade tune` does.

    Candidates whose ratio of accuracies is just below what is wanted: how often do they pass? And candidates that
    answer as dense attention does. Designs with too few texts are refused, and counted. You get two tables and JSON.

    Example:

      python -m claims promise --runs 200 --json results/promise.json
    """
    # Imported here, so that --help does not wait for scipy.
    from saccade.calibrate.promise import ALPHA, CORRELATION
    from saccade.cli.terminal import output, say
    from saccade.eval.output import check_file, write_json
    from saccade.recipes.machine import versions

    from .simulation import Grid, errors, power

    json.parent.mkdir(parents=True, exist_ok=True)
    check_file(json)
    same = Grid((30, 60, 100, 200), (4, 12, 24), (0.5, 0.75, 0.9, 1.0), (0.0,), (0.1, 0.3, 0.6), gains=(0.0,))
    results: dict[str, Any] = {"alpha": ALPHA, "correlation": CORRELATION, "seed": seed, "versions": versions()}
    results |= {"errors": errors(Grid(), runs, again, seed), "power": power(same, 0.97, runs, seed)}
    write_json(json, results, indent=None)
    found = results["errors"]
    counted = f"{found['worlds']:,} worlds, {found['exceed']} of them above {ALPHA:.0%} beyond chance"
    say(output(), counted, "", *error_table(found), "", *power_table(results["power"]))


def error_table(found: dict[str, Any]) -> list[str]:
    """Markdown: the worst world's rate by texts and correlation, and how many designs were refused."""
    rows, designs, body = found["rows"], ("texts", "asked", "loss"), list[list[str]]()
    correlations = sorted({row["correlation"] for row in rows})
    heads = ["texts", *(f"correlation {one:g}" for one in correlations), "designs judged", "refused"]
    for texts in sorted({one["texts"] for one in [*rows, *found["refused"]]}):
        own = [row for row in rows if row["texts"] == texts]
        cells = [str(texts)]
        for correlation in correlations:
            rates = [row["rate"] for row in own if row["correlation"] == correlation]
            cells.append(f"{max(rates):.1%}" if rates else "–")
        cells.append(str(len({tuple(row[name] for name in designs) for row in own})))
        cells.append(str(sum(one["texts"] == texts for one in found["refused"])))
        body.append(cells)
    return table(heads, body, heads)


def power_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: the least favourable way's rate, by texts, questions and correlation."""
    correlations, accuracies = (sorted({row[name] for row in rows}) for name in ("correlation", "accuracy"))
    heads = ["texts × questions", "correlation", *(f"accuracy {one:g}" for one in accuracies)]
    lines = table(heads, (), heads)
    for texts, asked in dict.fromkeys((row["texts"], row["asked"]) for row in rows):
        own = [row for row in rows if (row["texts"], row["asked"]) == (texts, asked)]
        if own[0]["rate"] is None:
            lines.append(f"| {texts} × {asked} | refused: {own[0]['needed']} texts needed" + " |" * (len(heads) - 1))
            continue
        for correlation in correlations:
            cells = [
                min(row["rate"] for row in own if row["correlation"] == correlation and row["accuracy"] == accuracy)
                for accuracy in accuracies
            ]
            lines.append(line(f"{texts} × {asked}", f"{correlation:g}", *(f"{one:.1%}" for one in cells)))
    return lines
