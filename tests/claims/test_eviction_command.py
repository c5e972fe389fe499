"""`python -m claims eviction` from end to end, with a stand-in for kvpress's side; and the page of its figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from claims.eviction.report import section
from commands import Invoke

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--context", "1100", "--limit", "3", "--budget", "48,64", "--policy", "quest")

CLAIMED = (
    ("SnapKVPress(window_size=budget/4)", "query_aware", 16, 48),
    ("exact_topk:dense_layers=0", "query_aware", 16, 48),
    ("KeyDiffPress", "context", 64, 24),
    ("quest", "decoding", 64, 0),
)
"""Right answers that the page speaks of."""

STAND_IN = """#!{python}
import json, pathlib, sys
isolated, *given = sys.argv[1:]
assert isolated == "-I"
if given[0] != "-c":
    assert pathlib.Path(given[0]).name == "presses.py"
    prompts, texts, answers = map(pathlib.Path, given[1:4])
    assert given[5:] == ["--budgets", "48", "64", "--threads", "1"]
    assert len(texts.read_text().splitlines()) == 50
    said = [json.loads(line) for line in prompts.with_name("saccade.jsonl").read_text().splitlines()[1:]]
    records = [{{"versions": {{"kvpress": "0", "transformers": "0"}}}}]
    records.append({{"pipeline": {{"compared": 1, "same": 1}}}})
    records += [one for one in said if one["method"] == "dense"]
    name = {{"method": "TOVAPress", "protocol": "context", "budget": 48}}
    records += [{{**name, "prompt": place, "read": 70, "tokens": [1]}} for place in range(3)]
    records.append({{"method": "DuoAttentionPress", "protocol": "context", "budget": None, "refused": "no patterns"}})
    answers.write_text("".join(json.dumps(record) + "\\n" for record in records))
    sys.exit({code})
"""


def stand_in(folder: Path, code: int = 0) -> Path:
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, code=code))
    path.chmod(0o755)
    return path


def test_a_run_joins_both_sides(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = ("--output-dir", tmp_path / "exchange", "--json", tmp_path / "inner" / "eviction.json")
    result = invoke("eviction", "--kvpress", stand_in(tmp_path), "--model", model_folder, *SMALL, *files)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "inner" / "eviction.json").read_text())
    cells = [(row["side"], row["method"], row["protocol"], row["budget"], row["n"]) for row in results["rows"]]
    assert cells == [
        ("saccade", "dense", "dense", None, 3),
        ("saccade", "quest", "decoding", 48, 3),
        ("saccade", "quest", "query_aware", 48, 3),
        ("saccade", "quest", "decoding", 64, 3),
        ("saccade", "quest", "query_aware", 64, 3),
        ("kvpress", "dense", "dense", None, 3),
        ("kvpress", "TOVAPress", "context", 48, 3),
    ]
    read = {(row["method"], row["budget"]): row["read"] for row in results["rows"] if row["side"] == "saccade"}
    assert 48 < read["quest", 48] < read["quest", 64] < read["dense", None]
    assert results["dense"] == {"prompts": 3, "same_tokens": 3}
    assert results["versions"]["kvpress"]["kvpress"] == "0"
    assert "`DuoAttentionPress`, `context`: no patterns" in result.stdout
    assert "| kvpress | `TOVAPress` | `context` | 0/3 (0%–56%), 70 | - | - |" in section(results)


def test_a_failure_of_the_other_side_is_told(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = ("--output-dir", tmp_path / "exchange", "--json", tmp_path / "eviction.json")
    result = invoke("eviction", "--kvpress", stand_in(tmp_path, 3), "--model", model_folder, *SMALL, *files)
    assert result.exit_code == 2
    assert "kvpress's side ended with exit code 3" in result.stderr
    assert (tmp_path / "eviction.json").read_text() == ""


def test_the_published_results_are_whole() -> None:
    file = ROOT / "docs/results/eviction.json"
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["dense"]["same_tokens"] == results["dense"]["prompts"] == 48
    assert results["pipeline"]["same"] == results["pipeline"]["compared"]
    assert {row["n"] for row in results["rows"]} == {48}
    # Nothing of the machine that it was made on.
    assert not re.search(r"/(home|root|tmp|work|usr)\b", file.read_text(encoding="utf-8"))
    right = {(row["method"], row["protocol"], row["budget"]): row["correct"] for row in results["rows"]}
    for method, protocol, budget, counted in CLAIMED:
        assert right[method, protocol, budget] == counted
