"""`python -m benchmarks speculation` from end to end on a tiny random model, and what its claim reads of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speculation
from claims.designs.readings import speculation as read
from commands import Invoke

SMALL = ("--context", "120", "--texts", "2", "--rounds", "2", "--periods", "2", "--every", "4")
POLICY = ("--policy", "resa:page=4,min_pages=2", "--dtype", "float32")
NAMES = ["stock", "dense", "resa:page=4,min_pages=2,rectify=4", "resa:page=4,min_pages=2,rectify=4:verify"]


def test_all_decoders_take_turns(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, int]] = []
    generate = speculation.Speculation._generate

    def watched(reader: Any, token: int, count: int) -> int:
        token = generate(reader, token, count)
        said.append((count, token))
        return token

    monkeypatch.setattr(speculation.Speculation, "_generate", staticmethod(watched))
    file = tmp_path / "speculation.json"
    result = invoke("speculation", "--model", model_folder, *SMALL, *POLICY, "--json", file)
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())
    rows = results["rows"]
    assert results["complete"] and results["environment"]["model"] == str(model_folder)
    assert sorted(row["policy"] for row in rows) == sorted(NAMES)
    assert all(row["turns"] == 4 and row["ms_fast"] <= row["ms_per_token"] <= row["ms_slow"] for row in rows)
    by_name = {row["policy"]: row for row in rows}
    # Two timed periods of four turns: a pass in each, whatever it rewrites; drafts are checked as often as it takes.
    assert by_name[NAMES[2]]["passes"] == 2 * 4 and by_name[NAMES[2]]["accepted"] is None
    assert by_name[NAMES[3]]["passes"] >= 2 * 4 and 0 <= by_name[NAMES[3]]["accepted"] <= 4
    assert by_name["dense"]["passes"] == 0 and by_name["dense"]["speedup_over_dense"] == 1
    # Every decoder ends with the same token in both rounds, and all but the rectified one with dense attention's.
    assert [count for count, _ in said] == [5, 10] * 16
    turns = [said[at : at + 2] for at in range(0, len(said), 2)]
    for begin in (0, 8):
        first, second = turns[begin : begin + 4], turns[begin + 4 : begin + 8]
        assert first == second[::-1]
        assert first[0] == first[1] == first[3]
    samples = {(sample.text, sample.arm): sample.values for sample in read(results)}
    arms = {f"{'transformers' if name == 'stock' else 'saccade'} {name}" for name in NAMES}
    assert set(samples) == {(f"120, text {number}", arm) for number in (0, 1) for arm in arms}
    accepted = [samples[f"120, text {number}", f"saccade {NAMES[3]}"]["accepted"] for number in (0, 1)]
    assert min(accepted) <= by_name[NAMES[3]]["accepted"] <= max(accepted)
