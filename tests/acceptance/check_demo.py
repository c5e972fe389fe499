"""Does the demo's results folder hold what the README promises? `python check_demo.py results/demo`; exits 1 if not.

At the larger budget: dense at least 0.9 right, streaming at least 0.3 below dense, less_is_more at most 0.1 below
dense; at least 48 questions; every promised file there, the report free of anything it would have to fetch.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

POLICIES = ("dense", "streaming", "quest", "tidal", "less_is_more")
ROW_NAMES = {"policy", "budget", "share_attended", "recall", "correct", "n", "ms_per_token", "speedup"}
SAMPLE_NAMES = {"policy", "budget", "question", "expected", "answer", "correct"}
QUESTIONS = 48


class Checks:
    """Prints one line per check and remembers whether all held."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def that(self, holds: bool, what: str) -> None:
        self.passed += holds
        self.failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {what}")


def accuracy(row: dict[str, Any]) -> float:
    return float(row["correct"]) / int(row["n"])


def row_of(rows: list[dict[str, Any]], policy: str, budget: int) -> dict[str, Any]:
    """The policy's row at a budget, or its only row if it has no budget."""
    own = [row for row in rows if row["policy"].partition(":")[0] == policy]
    return next((row for row in own if row["budget"] == budget), None) or next(row for row in own if not row["budget"])


def check(folder: Path) -> Checks:
    checks = Checks()
    for name in ("results.json", "samples.jsonl", "config.json", "report.html"):
        checks.that((folder / name).is_file(), f"{folder / name} is there")
    if checks.failed:
        return checks

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    rows = results["rows"]
    checks.that(bool(results.get("environment")), "results.json has an environment")
    checks.that(all(set(row) >= ROW_NAMES for row in rows), f"every row has {', '.join(sorted(ROW_NAMES))}")
    present = {row["policy"].partition(":")[0] for row in rows}
    checks.that(present >= set(POLICIES), f"rows for {', '.join(POLICIES)}")
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    checks.that(len(budgets) >= 2, f"two budgets or more: {budgets}")
    if checks.failed:
        return checks

    larger = budgets[-1]
    fewest = min(row["n"] for row in rows)
    checks.that(fewest >= QUESTIONS, f"{fewest} questions per row, {QUESTIONS} needed")
    right = {policy: accuracy(row_of(rows, policy, larger)) for policy in POLICIES}
    print(f"       right at budget {larger}: " + ", ".join(f"{policy} {share:.3f}" for policy, share in right.items()))
    dense = right["dense"]
    checks.that(dense >= 0.9, f"dense {dense:.3f} >= 0.9")
    checks.that(right["streaming"] <= dense - 0.3 + 1e-9, f"streaming {right['streaming']:.3f} <= dense - 0.3")
    less = right["less_is_more"]
    checks.that(less >= dense - 0.1 - 1e-9, f"less_is_more {less:.3f} >= dense - 0.1")
    for row in rows:
        share, recall, time = row["share_attended"], row["recall"], row["ms_per_token"]
        sound = all(value is not None and 0 <= value <= 1 + 1e-6 for value in (share, recall)) and time > 0
        checks.that(sound, f"{row['policy']} at {row['budget']}: share {share}, recall {recall}, {time} ms/token")

    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    checks.that(all(set(sample) >= SAMPLE_NAMES for sample in samples), f"samples have {', '.join(SAMPLE_NAMES)}")
    checks.that(len(samples) == sum(row["n"] for row in rows), f"{len(samples)} samples, one per row and question")
    counted = sum(bool(sample["correct"]) for sample in samples)
    checks.that(counted == sum(row["correct"] for row in rows), f"{counted} right answers in samples and rows alike")

    report = (folder / "report.html").read_text(encoding="utf-8")
    fetched = re.findall(r"""<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=["'](?!data:|#)[^"']*""", report)
    checks.that(not fetched, f"report.html fetches nothing {fetched[:3] or ''}")
    checks.that("<svg" in report or "data:image/" in report, "report.html has figures")
    return checks


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results/demo")
    checks = check(folder)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
