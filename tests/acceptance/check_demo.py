"""Does the demo's results folder hold what the README promises? `python check_demo.py results/demo`; exits 1 if not.

At least 48 questions under all ten policies; the claims of `LEAST`, `MOST` and `check_recalls` hold; every promised
file is there, and the report free of anything it would have to fetch.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import saccade

POLICIES = tuple(name for name, method in saccade.policies().items() if method.compared)
ROW_NAMES = {
    *("policy", "budget", "share_attended", "recall", "recall_with_dense", "recall_per_layer"),
    *("token_recall", "token_recall_with_dense", "token_recall_per_layer", "heads_with_set_per_layer"),
    *("overflow", "index_bytes", "build_seconds", "correct", "n", "ms_per_token", "speedup"),
}
SAMPLE_NAMES = {"policy", "budget", "question", "expected", "answer", "correct"}
RECALL_NAMES = {"policy", "budget", "spec", "context", "question", "step", "attention_recall", "token_recall"}
QUESTIONS = 48

# All claims about this model, at the larger budget where a policy has one.
DENSE_LEAST = 0.9
LEAST = {"tidal": -0.1, "less_is_more": -0.1, "lychee_decode": -0.1, "token_clusters": -0.1, "exact_topk": -0.1}
"""Answers right, at least dense's plus this.

resa was among these: it had 47 of 48 on the bundled model of commit 69f211f, and has 35 of 48 on the present one. A
tenth of the pages, found by their bounds, is not always enough there; sets by exact scores are (exact_topk: 48 with
16 tokens).
"""
OVER_STREAMING = {"resa": 0.3, "quest": 0.1}
"""Answers right, at least streaming's plus this: bounds of pages find part of the facts."""
MOST = {"streaming": -0.3, "quest": -0.3}
"""Answers right, at most dense's plus this."""
GAIN = {"tidal": 0.1, "less_is_more": 0.3}
"""Answers right at the larger budget, at least the smaller's plus this: the model tells budgets apart."""
INDEXED = ("quest", "lychee_cluster", "token_clusters", "resa")
"""Policies that keep an index beside the cache."""
ABOVE_STREAMING = {
    # A set that is reused far from where it was chosen holds no more attention mass than recent tokens do.
    "recall_per_layer": ("quest", "lychee_cluster", "token_clusters", "resa"),
    # Nor do lychee_decode's, which reuse over the most layers; it was here while its dense heads counted as 1.
    "token_recall_per_layer": ("quest", "tidal", "less_is_more", "lychee_cluster", "resa"),
}
"""Whose recall of heads with a set lies above that of recent tokens; exact_topk's lies above all of them."""


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


def check_recalls(checks: Checks, rows: dict[str, dict[str, Any]]) -> None:
    """What must hold of recalls: exact scores in every layer are the measure of all others, position alone is worst."""
    exact, streaming = rows["exact_topk"], rows["streaming"]
    for policy, row in rows.items():
        if policy in ("dense", "streaming", "exact_topk"):
            continue
        for name, above_streaming in ABOVE_STREAMING.items():
            for better, worse in ((row, streaming), (exact, row)):
                if worse is streaming and policy not in above_streaming:
                    continue
                # Layers in which both have heads with a set.
                pairs = [pair for pair in zip(better[name], worse[name], strict=True) if None not in pair]
                means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
                told = f"{better['policy']} {means[0]:.3f} > {worse['policy']} {means[1]:.3f}"
                what = f"{name.removesuffix('_per_layer')} of heads with a set: {told} in {len(pairs)} layers"
                checks.that(means[0] > means[1], what)


def check(folder: Path) -> Checks:
    checks = Checks()
    for name in ("results.json", "samples.jsonl", "recall.jsonl", "config.json", "report.html"):
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
    checks.that(dense >= DENSE_LEAST, f"dense {dense:.3f} >= {DENSE_LEAST}")
    for policy, gap in MOST.items():
        checks.that(right[policy] <= dense + gap + 1e-9, f"{policy} {right[policy]:.3f} <= dense {gap:+}")
    for policy, gap in LEAST.items():
        checks.that(right[policy] >= dense + gap - 1e-9, f"{policy} {right[policy]:.3f} >= dense {gap:+}")
    smaller = {policy: accuracy(row_of(rows, policy, budgets[0])) for policy in GAIN}
    for policy, gap in OVER_STREAMING.items():
        what = f"{policy} {right[policy]:.3f} >= streaming {right['streaming']:.3f} {gap:+}"
        checks.that(right[policy] >= right["streaming"] + gap - 1e-9, what)
    for policy, gap in GAIN.items():
        what = f"{policy} {right[policy]:.3f} >= {smaller[policy]:.3f} at budget {budgets[0]} {gap:+}"
        checks.that(right[policy] >= smaller[policy] + gap - 1e-9, what)
    for row in rows:
        share, time = row["share_attended"], row["ms_per_token"]
        with_dense = (row["recall_with_dense"], row["token_recall_with_dense"])
        recalls = [value for name in ("recall", "token_recall") for value in (row[name], *row[f"{name}_per_layer"])]
        dense = row["policy"] == "dense"
        sound = all(value is not None and 0 <= value <= 1 + 1e-6 for value in (share, *with_dense)) and time > 0
        sound &= all(value is None or 0 <= value <= 1 + 1e-6 for value in recalls) and (row["recall"] is None) == dense
        of_sets = "no head with a set" if dense else f"recall {row['recall']:.3f}, token {row['token_recall']:.3f}"
        what = f"share {share:.3f}, {of_sets}; with dense heads as 1 {with_dense[0]:.3f}, {with_dense[1]:.3f}"
        checks.that(sound, f"{row['policy']} at {row['budget']}: {what}; {time:.2f} ms/token")
        indexed = row["policy"] in INDEXED
        checks.that((row["index_bytes"] > 0) == (row["build_seconds"] > 0) == indexed, f"  index: {indexed}")
    check_recalls(checks, {policy: row_of(rows, policy, larger) for policy in POLICIES})

    recall_lines = [json.loads(line) for line in (folder / "recall.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = {(line["spec"], line["context"], line["question"]) for line in recall_lines}
    checks.that(
        all(set(line) >= RECALL_NAMES for line in recall_lines), f"recalls have {', '.join(sorted(RECALL_NAMES))}"
    )
    checks.that(len(answers) == sum(row["n"] for row in rows), f"recalls of {len(answers)} answers")

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
