"""`python -m claims compare`: its arms, its rows against sums by hand, and the tables that pages show of them."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from claims import stored
from claims.comparison import page
from claims.comparison.rows import arms_of
from claims.judging.study import Study
from claims.stored import stored_json
from claims.subject import plain_subject
from commands import Fails, Invoke
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.recipes.recipe import Recipe

ASK = ("--context", 160, "--texts", 3, "--asked", 2, "--plain", 3, "--budgets", "48", "--device", "cpu")
ROLES = "heads:0+1+2.0+3"
PACKED = gzip.compress(b"{}")


def known(model: Path, folder: Path, roles: str | None) -> Path:
    shutil.copytree(model, folder)
    shape = plain_subject(str(folder), "cpu", "auto").shape
    recipe = Recipe(shape, Policy.from_spec("streaming"), reselect=(3,), roles=roles, layers={"tidal": (4,)})
    recipe.write(folder / "saccade.json")
    return folder


def test_rows_are_means_of_the_samples_in_pairs(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("claims.comparison.rows.DECODED", 16)
    model, out, file = known(model_folder, tmp_path / "known", ROLES), tmp_path / "out", tmp_path / "rows.json"
    few = ("--methods", "less_is_more,resa", "--output-dir", out, "--json", file)
    asked = ("compare", "--model", model, *ASK, *few)
    done = invoke(*asked)
    assert done.exit_code == 0, done.output
    results: dict[str, Any] = json.loads(file.read_text())
    rows = {row["spec"]: row for row in results["rows"]}
    head, *samples = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
    assert head["settings"]["lengths"] == [160, 160] and len(samples) == 3 * len(rows) == 3 * 6
    right = {(one["spec"], one["problem"]): sum(one["right"]) / 2 for one in samples}
    pages = [right["quest:budget=48", text] for text in range(3)]
    shown = {line.split()[0].partition(",role")[0] for line in done.stdout.splitlines() if line.strip()}
    for spec, row in rows.items():
        own = [right[spec, text] for text in range(3)]
        assert (row["n"], row["texts"], row["correct"]) == (6, 3, sum(own) * 2)
        assert row["right"] == pytest.approx(sum(own) / 3) and spec.partition(",roles=")[0] in shown
        if spec in ("dense", "quest:budget=48"):
            assert "less_quest" not in row
        else:
            assert row["less_quest"] == pytest.approx(sum(own) / 3 - sum(pages) / 3)
    decoded = list(map(json.loads, (out / "plain" / "samples.jsonl").read_text().splitlines()))[1:]
    loss = {(one["spec"], one["problem"]): one["values"][0]["loss"] for one in decoded}
    assert len(loss) == 6 * len(rows)
    for spec, row in rows.items():
        above = [loss[spec, text] - loss["dense", text] for text in range(6)]
        assert row["plain_texts"] == 6 and row.get("loss_above_dense", 0.0) == pytest.approx(sum(above) / 6, abs=1e-9)
        if spec != "dense":
            low, high = row["loss_above_dense_interval"]
            assert min(above) <= low <= row["loss_above_dense"] <= high <= max(above)
    assert "loss_above_dense" not in rows["dense"] and any("loss_above_dense" in row for row in rows.values())
    assert {"less_is_more:budget=48,reselect=3", "resa:ratio=0.3,min_pages=1"} < set(rows)
    # Really sparse.
    assert rows["dense"]["share_attended"] == 1 > rows["quest:budget=48"]["share_attended"]
    assert {row["budget"] for row in results["rows"][1:]} == {48} and rows["dense"]["budget"] is None
    kept = (out / "samples.jsonl").read_text()
    assert invoke(*asked).exit_code == 0 and (out / "samples.jsonl").read_text() == kept
    assert page.whole(results)[2].count("|") == page.whole(results)[0].count("|")


def test_arms_follow_the_recipe_and_methods_are_chosen(fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    study = Study(str(known(model_folder, tmp_path / "known", ROLES)), tmp_path / "out", "cpu")
    letter = "lychee_decode:budget=48,sinks=0,window=0"
    every = study.policies(arms_of(study, (48,), 256, ()))
    # Layers of one's own method or of the recipe, and its roles.
    assert {"tidal:budget=48,reselect=4", "less_is_more:budget=48,reselect=3",
            f"lychee_decode:budget=48,roles={ROLES}"} < set(map(str, every.values()))  # fmt: skip
    assert letter in every and len(every) == 16
    asked = arms_of(study, (48,), 256, ("lychee_decode", "resa"))
    shares = ["resa:ratio=0.1875,min_pages=1", "resa:ratio=0.1875,min_pages=1,dense_layers=2"]
    quest = ["quest:budget=48", "quest:budget=48,heads=query"]
    assert list(asked) == ["dense", *quest, "lychee_decode:budget=48", letter, *shares]
    without = known(model_folder, tmp_path / "without", None)
    for name, said in (("quests", "did you mean quest?"), ("lychee_decode", "which no recipe beside the model has")):
        assert said in fails("compare", "--model", without, *ASK, "--methods", name, "--output-dir", tmp_path / "out")
    study = Study(str(without), tmp_path / "out", "cpu")
    assert not [arm for arm in arms_of(study, (48, 64), 256, ()) if arm.startswith("lychee_decode")]
    said = fails("compare", "--model", model_folder, *ASK, "--output-dir", tmp_path / "out")
    assert "nobody has calibrated tidal:budget=48" in said


def test_a_broken_file_of_results_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    for name, content in (
        ("a.json.gz", b"no gzip"),
        ("b.json.gz", PACKED[:-3]),
        ("c.json", b"{"),
        ("d.json.gz", PACKED[:10] + b"\x07" + PACKED[11:]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SaccadeError, match=f"{name} is broken .*; `made by` makes it"):
            stored_json(name.removesuffix(".gz"), "made by")


def test_pages_show_every_method_once_and_no_pair_of_quest_with_itself() -> None:
    results = stored_json("compared_8k.json", "python -m claims compare")
    short, whole = page.short(results), page.whole(results)
    policies = {row["policy"] for row in results["rows"]}
    shown = [line.split("`")[1] for line in short[2:-2]]
    assert {name.partition(":")[0] for name in shown} == policies and len({*shown}) == len(shown)
    rows = {row["spec"]: row for row in results["rows"]}
    assert "less_quest" in rows["quest:budget=256,heads=query"] and "less_quest" not in rows["quest:budget=256"]
    (quest,) = (line for line in whole if line.startswith("| `quest` |"))
    assert quest.count("| - |") == 2 and "+0.000" not in quest
    (all_read,) = (line for line in whole if line.startswith("| `dense` |"))
    assert all_read.count("100.0%") == 2
    dense = next(row for row in results["rows"] if row["spec"] == "dense")
    assert f"{dense['right']:.2f}" in short[2] and f"{dense['n']} questions about {dense['texts']} texts" in short[-1]
