"""A tuning from texts to the recipe: who chooses and who judges, what is shown, and what is taken up again."""

import json
from dataclasses import replace
from datetime import date
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import pytest
from searching import make_task, tune_settings
from transformers import AutoModelForCausalLM

from commands import invoker
from learning import nothing
from one_line import refused
from saccade.adapters.hf.probe import KINDS, TOLD, Probe
from saccade.adapters.hf.run import attached
from saccade.calibrate import tune
from saccade.calibrate.passages import Texts
from saccade.calibrate.promise import JUDGED, SEARCHING, texts_needed
from saccade.calibrate.tune import Tuning
from saccade.checkpoints.load import ModelSource
from saccade.cli import app
from saccade.cli.calibrate import run_and_show
from saccade.errors import OutputError, SaccadeError
from saccade.eval.output import read_json
from saccade.methods.policy import Policy
from saccade.recipes.acceptance import Acceptance
from saccade.recipes.recipe import Recipe
from saccade.report.page import tune_page
from saccade.report.tune import front_columns, front_notes, front_table

PASSAGES = Texts.passages  # of which the conftest lets searches read five
POLICIES = ("streaming", "exact_topk:dense_layers=1", "exact_topk:dense_layers=0")


def settings(folder: Path, output: Path, **changes: Any) -> tune.TuneSettings:
    return tune_settings(folder, output, **{"policies": POLICIES, "budgets": "16,50", **changes})


def shares(probes: list[Probe], spec: str) -> list[float]:
    """Of key tokens that keep dense attention's likeliest one, by kind, from the outside."""
    told = [probe.measure(Policy.from_spec(spec))[0] for probe in probes]
    found = [sum((one[kind].equal & one[kind].key).sum() for one in told) for kind in KINDS]
    keys = [sum(one[kind].key.sum() for one in told) for kind in KINDS]
    return [float(equal / count) for equal, count in zip(found, keys, strict=True) if count]


def test_some_texts_choose_and_others_judge(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that was interrupted goes on."""
    monkeypatch.setattr(Texts, "passages", lambda texts, tokenizer, _: PASSAGES(texts, tokenizer, 9))
    tuning = Tuning.check(settings(folder, tmp_path))
    units: list[str] = []
    results = tuning.run(units.append)
    searched, judged = (results["texts"][what] for what in ("searched", "judged"))
    assert not {*searched} & {*judged} and {*searched} | {*judged} == {*range(9)} and len(judged) == 7
    assert len(units) <= tuning.units
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = [Probe(model, [passage], attach=attached) for passage in tuning.judged.passages]
    first, others = ([read[number] for number in texts] for texts in (searched, judged))
    rows = {row["spec"]: row for row in results["rows"]}
    for spec, row in rows.items():
        assert row["searched"] == pytest.approx(min(shares(first, spec)), abs=1e-6)
        assert (row["ratio"] is None) == (row["status"] == "not judged")
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(min(shares(others, spec)), abs=1e-6)
            assert row["shown"] < row["ratio"]
    told = [row for row in rows.values() if row["ratio"] is not None]
    assert 0 < len(told) <= JUDGED
    # A walk from the best down: who is behind a failed one costs less than it.
    failed = [row["bytes"] for row in told if row["status"] == "failed"]
    assert len(failed) <= 1 and all(row["bytes"] < failed[0] for row in told if row["status"] == "behind a failed one")
    kept = [row for row in told if row["status"] == "kept"]
    assert kept and all(row["shown"] >= 0.1 for row in kept)
    assert results["chosen"] == min(kept, key=lambda row: row["bytes"])["spec"]
    recipe = Recipe.read(tmp_path / "saccade.json")
    assert recipe.tuned and str(recipe.policy) == results["chosen"]
    found = recipe.found["tune"]
    assert found["measure"] == "agreement" and found["n"] == results["n"] > 0 and found["confidence"] == 0.95
    assert (found["texts"], found["bound"]) == (len(judged), round(rows[results["chosen"]]["shown"], 4))
    # Four candidates are judged by each of the last texts: one was asked about a text, three were not.
    ledger = tmp_path / "probe.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    for done in (9, len(lines) - 7):  # it was searching, it was judging
        rest = list[str]()
        ledger.write_text("".join(lines[:done]))
        (tmp_path / "saccade.json").unlink()
        assert Tuning.check(settings(folder, tmp_path)).run(rest.append) == results
        assert ledger.read_text() == "".join(lines) and len(rest) == len(lines) - done
    with pytest.raises(OutputError, match="seed=0"):
        Tuning.check(settings(folder, tmp_path, seed=1)).run(nothing)


def test_a_layer_is_searched_on_texts_that_do_not_judge(folder: Path, tmp_path: Path) -> None:
    tuning = Tuning.check(settings(folder, tmp_path, policies=(), budgets="50"))
    results = tuning.run(nothing)
    about = json.loads((tmp_path / "layers" / "probe.jsonl").read_text().splitlines()[0])["settings"]
    own = [tuning.judged.passages[number] for number in results["texts"]["searched"]]
    assert about["passages"] == tuning.judged.texts.sha256(own)
    specs = [row["spec"] for row in results["rows"]]
    assert any("reselect" in spec for spec in specs) and Recipe.read(tmp_path / "saccade.json").reselect is not None
    # The probe rectifies nothing, so that a rectified twin would be the same.
    assert not any("rectify" in spec for spec in specs) and any(spec.startswith("resa") for spec in specs)
    # Whoever goes on keeps the texts on which the layer was searched, however many more there are time for.
    (tmp_path / "saccade.json").unlink()
    again = Tuning.check(settings(folder, tmp_path, policies=(), budgets="50"))
    more = replace(again, wanted=0.95, order=tuple(range(200)), total=200)
    assert len(more.searching) == len(own) < SEARCHING and len(more.judging) == 200 - len(own)
    assert again.run(nothing)["rows"] == results["rows"]


def test_texts_without_key_tokens_judge_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.adapters.hf.probe.KEY", 1e9)
    with refused(SaccadeError, "no token needs a long context, so no candidate can be told"):
        Tuning.check(settings(folder, tmp_path)).run(nothing)
    assert not (tmp_path / "saccade.json").exists()


def test_minutes_are_as_many_texts_as_fit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is read in a minute, a step in none; with seconds for a step, fewer."""
    monkeypatch.setattr(tune, "_seconds", lambda *_: [60.0, 0.0])
    timed = Tuning.check(settings(folder, tmp_path, minutes=4.5)).timed()
    assert (timed.total, timed.minutes) == (4, 4.0) and "4 texts, about 4.0 minutes: 2 choose" in timed.design
    more = ("lychee_cluster", "streaming")
    for policies in (more, more[:1]):  # the first has no budget that small
        assert Tuning.check(settings(folder, tmp_path, policies=policies, budgets="16")).timed().total == 5
    monkeypatch.setattr(tune, "_seconds", lambda *_: [60.0, 60.0])
    with pytest.raises(SaccadeError, match=r"in --minutes 4.5 fit 0 texts.* 4 texts are needed, and 24\.0 minutes"):
        Tuning.check(settings(folder, tmp_path, minutes=4.5)).timed()
    # As many as judges need come before those that choose; more than are wanted only choose no more.
    many = replace(timed, wanted=0.95, order=tuple(range(200)))
    needed = texts_needed(0.95, TOLD)
    sizes = {total: len(replace(many, total=total).searching) for total in (needed + 2, needed + 9, needed + 99)}
    assert [*sizes.values()] == [2, 9, SEARCHING]
    assert len(replace(many, total=needed + 9).judging) == needed


def test_a_file_whose_texts_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    """Texts are asked equally often, and one text shows nothing."""
    for name, made, words in (
        ("ragged", {"texts": 2, "ragged": True}, "text 1 has 2"),
        ("one", {"texts": 1}, "are 1 texts"),
    ):
        task = make_task(folder, tmp_path / f"{name}.jsonl", **made)
        with refused(SaccadeError, words):
            Tuning.check(settings(folder, tmp_path / "out", task=str(task)))


def test_a_policy_that_its_server_has_refuted_is_not_tried(folder: Path, tmp_path: Path) -> None:
    drafted, wanted, z, told = 50, 0.3, 1.959963984540054, tmp_path / "served.json"
    # Wilson's interval holds the shares from which what was seen is at most z of their own deviations away.
    most = ceil(drafted * wanted - z * sqrt(drafted * wanted * (1 - wanted))) - 1

    def tuned(name: str, accepted: int, spec: str, **changes: Any) -> dict[str, Any]:
        counts = {"drafted": (drafted, 9), "accepted": (accepted, 9), "date": date(2026, 11, 29)}
        Acceptance(version=1, policy=f"{spec},rectify=4:verify", model="served", **counts).write(told)
        own = {"policies": ("exact_topk:dense_layers=1",), "agreement": wanted, "acceptance": (told,), **changes}
        return Tuning.check(settings(folder, tmp_path / name, **own)).run(nothing)

    spec = "exact_topk:budget=16,dense_layers=1"
    left, kept = tuned("out", most, spec), tuned("in", most + 1, spec)
    line = f"{spec}: {most} of {drafted} first drafts were accepted by served, as of 2026-11-29"
    assert left["left_out"] == [line] and f"left out: {line}" in front_notes(left)
    assert [(row["spec"], row["accepted"]) for row in left["rows"]] == [("exact_topk:budget=50,dense_layers=1", None)]
    assert kept["left_out"] == [] and [row["accepted"] for row in kept["rows"]] == [None, (most + 1) / drafted]
    assert "accepted, served" in front_columns(kept) and "accepted, served" not in front_columns(left)
    # Who is tried is judged as without it, and another policy's drafts say nothing.
    plain = tuned("plain", 0, "exact_topk:budget=16,dense_layers=0")
    assert [row | {"accepted": None} for row in kept["rows"]] == plain["rows"] and kept["chosen"] == plain["chosen"]
    other = "exact_topk:budget=16,dense_layers=0,rectify=4:verify"
    assert plain["left_out"] == [f"what its server says of {other}, which is no candidate"]
    with pytest.raises(SaccadeError, match=f"no candidate reads less .*; left out: {line}"):
        tuned("none", most, spec, budgets="16")
    with pytest.raises(SaccadeError, match=r"--acceptance .*served.json is valid only without --task"):
        tuned("task", most, spec, task="mine.jsonl", agreement=None, quality=0.5)


def test_tune_ends_with_one_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was found before stays in the recipe."""
    task, path = make_task(folder, tmp_path / "mine.jsonl", texts=4), tmp_path / "mine.json"
    earlier = Recipe(ModelSource.locate(folder).decoder(), Policy.from_spec("dense"), (3,), "heads:0+3.1")
    earlier.write(path)
    out = tmp_path / "out"
    own = settings(folder, out, task=str(task), policies=("streaming",), budgets="16,32", recipe=path)
    run_and_show(Tuning.check(own), front_table, tune_page, "report.html")
    said = capsys.readouterr().out
    assert f"report: {out / 'report.html'}\n" in said
    assert {path.suffix for path in out.rglob("*.*")} == {".html", ".json", ".jsonl"}
    assert tune_page(read_json(out / "tune.json")) == (out / "report.html").read_text()
    assert invoker(app)("report", out).stdout.splitlines()[:-1] == said.splitlines()[:-2]
    last = Recipe.read(path)
    assert (last.reselect, last.roles) == (earlier.reselect, earlier.roles) and last.found["tune"]
