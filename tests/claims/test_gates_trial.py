"""`python -m claims gates` and `roles` on a tiny random model, the rule that chooses, and designs that follow it."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from claims import stored
from claims.__main__ import app
from claims.designs.packages import PackageProblems
from claims.designs.retrieving import Retrieving, cut
from claims.designs.trained import Trained
from claims.designs.trial import PUBLISHED_FILE, PUBLISHED_STANDS, STANDS
from claims.gates import choice as choice_module
from claims.gates import job as job_module
from claims.gates import page
from claims.gates.choice import CHOICE, PUBLISHED, Choice
from claims.gates.variants import DIRECT_SHARE, DIRECTS, VARIANTS
from claims.judging.claim import Claim
from claims.judging.discovery import found
from claims.judging.results import slug
from claims.judging.study import Study
from claims.judging.verdicts import judge
from commands import LAYERS, Fails, Invoke, first_alone, invoker, told
from saccade.calibrate import problems as problems_module
from saccade.calibrate.target import Target
from saccade.errors import SaccadeError
from saccade.report.drawing import as_svg
from saccade.types import ModelShape
from walking import walk

SMALL = "--target-heads 4 --steps 6 --seeds 1 --lengths 128,140 --asked 2 --every 3 --rate 0.3 --device cpu".split()
FOUR = ("--variants", "letter,share,direct,code")
MADE_UP = Choice(target_heads=4, seeds=3, steps=9, budgets=(16,))


@pytest.fixture(scope="module", autouse=True)
def small_library() -> Iterator[None]:
    """Every source of problems counts its tokens anew, and every command draws; and shorter turns of trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems_module, "CHARACTERS", 60_000)
        patch.setattr("claims.gates.picture.as_svg", first_alone(as_svg))
        patch.setattr("claims.gates.together.BLOCK", 4)
        yield


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gates.json").read_text())
    return found


@pytest.fixture(scope="module")
def train(model_folder: Path) -> Invoke:
    run = invoker(app)
    return lambda folder, *more: run("gates", "--model", model_folder, *SMALL, *more, "--output-dir", folder)


@pytest.fixture(scope="module")
def trained(train: Invoke, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    result = train(folder, *FOUR)
    assert result.exit_code == 0, result.output
    return folder


def test_a_trial_gives_traces(train: Invoke, trained: Path) -> None:
    results = read(trained)
    assert results["complete"] and results["target"] == 2
    names = ("letter", "direct", "share", "code")
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [(name, 0) for name in names]
    for run in results["runs"]:
        assert run["step"] == 6 and len(run["values"]) == LAYERS - 1
        assert run["trace"]["step"] == [0, 1, 3, 6]
        assert run["trace"]["expected_l0"][-1] == pytest.approx(run["expected_l0"], rel=1e-5)
        assert (run["start"] > 0) == (run["variant"] != "direct")
    assert ElementTree.fromstring((trained / "gates.svg").read_text()).tag.endswith("svg")
    log = trained / "training" / "share-0" / "steps.jsonl"
    before = log.read_bytes()
    assert train(trained, *FOUR).exit_code == 0  # finished: nothing is trained again
    assert log.read_bytes() == before


def test_roles_of_a_trial_are_asked_once(
    invoke: Invoke, model_folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(trained / "gates.json", tmp_path)
    asked = {"context": 256, "texts": 2, "asked": 2, "budgets": (16,), "behind": 900}
    small = Choice((), near=99.0, target_heads=4, seeds=1, steps=6, **asked)
    monkeypatch.setattr(choice_module, "PUBLISHED", small)
    ask = ("--model", model_folder, "--device", "cpu", "--output-dir", tmp_path / "roles")
    result = invoke("roles", tmp_path / "gates.json", *ask)
    assert result.exit_code == 0, result.output
    answers = read(tmp_path)["answers"]
    assert {(row["variant"], row["seed"], row["roles"]) for row in answers["rows"]} == {
        (name, 0, roles) for name in ("letter", "share", "direct", "code") for roles in ("threshold", "exact")
    }
    for row in answers["rows"]:
        assert len(row["right"]) == len(answers["dense"]) == 2
        assert row["heads"] == 4 or row["roles"] == "threshold"
    assert "stands for HardKuma: letter" in result.stdout
    monkeypatch.setattr(choice_module, "PUBLISHED", replace(small, near=-1.0))
    told = invoke("roles", tmp_path / "gates.json", *ask).stdout  # nothing is asked again
    assert "stands for HardKuma: none, no seeds open 2 gates within -1" in told
    small.refuse_others(read(tmp_path))
    for name in ("--budgets", "--texts", "--seed"):
        assert invoke("roles", tmp_path / "gates.json", *ask, name, "8").exit_code == 2


@walk
def test_processes_change_nothing(train: Invoke, tmp_path: Path) -> None:
    """Two, each of one variant by two seeds, and one for both; none of this module's library, but all of it."""
    small = ("--steps", "4", "--seeds", "2", "--workers", "2", "--variants", "letter,direct")
    found = []
    for together in ("1", "2"):
        result = train(tmp_path / together, *small, "--together", together)
        assert result.exit_code == 0, result.output
        found.append(read(tmp_path / together)["runs"])
    assert found[0] == found[1] and len(found[0]) == 4


def test_what_was_trained_before_stays_in_the_file(train: Invoke, trained: Path, tmp_path: Path) -> None:
    whole = read(trained)
    environment = whole["environment"] | {"date": "2026-11-01T00:00:00+00:00"}
    before = [run for run in whole["runs"] if run["variant"] == "direct"]
    (tmp_path / "gates.json").write_text(json.dumps({**whole, "runs": before, "environment": environment}))
    shutil.copytree(trained / "training" / "letter-0", tmp_path / "training" / "letter-0")  # trained already
    assert train(tmp_path, "--variants", "letter").exit_code == 0
    found = read(tmp_path)
    assert found["complete"]
    assert [run.pop("environment", {}).get("threads") for run in found["runs"]] == [None, 1]
    assert found["runs"] == [run for run in whole["runs"] if run["variant"] in ("letter", "direct")]
    assert found["environment"]["date"] == environment["date"], "the file is as old as its oldest run"
    (tmp_path / "gates.json").write_text(json.dumps({**whole, "model": "another"}))
    assert "holds gates trained with model 'another', not" in train(tmp_path, "--variants", "letter").stderr


@walk
def test_what_is_cut_off_goes_on(train: Invoke, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends where a run did that trained others too."""
    share = ("--variants", "share")
    assert train(tmp_path, *share, "--minutes", "1e-9").exit_code == 0 and read(tmp_path)["runs"] == []

    def stop(self: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "_KEEP", 0.0)
        first, results = iter([stop]), job_module.Trial.results
        patch.setattr(job_module.Trial, "results", lambda self: next(first, results)(self))
        result = train(tmp_path, *share)
    # A record behind the fourth step comes later.
    results = told(result, tmp_path / "gates.json", tmp_path / "gates.svg", interrupted=True)
    assert [run["step"] for run in results["runs"]] == [3]
    assert train(tmp_path, *share).exit_code == 0
    assert read(tmp_path)["runs"] == [run for run in read(trained)["runs"] if run["variant"] == "share"]


def test_what_needs_no_text_is_left_out(train: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Target] = []
    monkeypatch.setattr(Target, "without_known", lambda target, _: left.append(target) or target)
    (tmp_path / "task.jsonl").write_text('{"context": "Text. " , "question": "What?", "answer": "one"}')
    file = ("--variants", "letter", "--steps", "1", "--task", tmp_path / "task.jsonl")
    assert train(tmp_path, *file, "--drop-known").exit_code == 0
    assert len(left) == 1 and read(tmp_path)["drop_known"] is True
    assert "drop_known True, not None" in train(tmp_path, *file, "--variants", "share").output


def test_files_that_hold_no_gates_of_the_model_are_refused(fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    ask = ("--model", model_folder, "--output-dir", tmp_path / "roles")
    assert "is not there; `python -m claims gates` makes it" in fails("roles", tmp_path / "absent.json", *ask)
    (tmp_path / "gates.json").write_text("{}")
    assert "holds no trained gates" in fails("roles", tmp_path / "gates.json", *ask)
    (tmp_path / "gates.json").write_text(json.dumps(made_up() | {"weights": "0" * 16, "model": "other"}))
    assert "holds gates of other, another model's" in fails("roles", tmp_path / "gates.json", *ask)


def made_up(**changes: tuple[int, float]) -> dict[str, Any]:
    """A trial of all variants, three seeds; `changes`: number of open gates, two wanted, and right answers of theirs.

    Other roles and expected numbers say the contrary.
    """
    known = {**dict.fromkeys(VARIANTS, (5, 0.5)), "direct": (4, 0.9), **changes}
    if DIRECT_SHARE not in changes:
        del known[DIRECT_SHARE]
    runs, rows = [], []
    for name, (number, right) in known.items():
        for seed in range(3):
            values = [[0.95, 0.05]] * (LAYERS - 1) if name not in DIRECTS else [[0.5, 0.4]] * (LAYERS - 1)
            about = {"variant": name, "seed": seed, "step": 9}
            trace = {"step": [0, 9], "loss": [None, 3.0], "expected_l0": [7.0, number], "multiplier": [0.0, 1.0]}
            runs.append({**about, "scale": VARIANTS[name].scale, "kind": VARIANTS[name].kind, "start": 4.0,
                         "expected_l0": 7.0 - number, "values": values, "trace": trace, "open": number,
                         "grey": float(name in DIRECTS)})  # fmt: skip
            own, other = ("exact", "threshold") if name in DIRECTS else ("threshold", "exact")
            rows.append({**about, "roles": own, "budget": 16, "right": [right, right]})
            rows.append({**about, "roles": other, "budget": 16, "right": [1.5 - right] * 2})
    about = {"target_heads": 4, "seeds": 3, "steps": 9, "target": 2, "layers": [*range(1, LAYERS)], "kv_heads": 2}
    about |= {"lengths": [128, 140], "task": "kv", "dtype": "float32"}
    where = {"model": "tiny", "device": "a device", "dtype": "float32", "versions": {"torch": "2"}}
    where["date"], answers = "2026-01-01T", {**MADE_UP.asking(), "rows": rows}
    return {**about, "complete": False, "runs": runs, "answers": answers, "environment": where}


def test_a_variant_stands_for_hardkuma_if_it_reaches_the_number_and_keeps_the_answers() -> None:
    """By its own heads, those above one half."""
    equals = dict.fromkeys(("share", "multiplier", "loss", "code"), (2, 0.9))
    told: list[tuple[str | None, dict[str, tuple[int, float]]]] = [
        (None, {}),
        (None, {"letter": (4, 1.0)}),  # the paper's own is no exception
        ("letter", {"letter": (3, 0.1)}),
        ("loss", {"loss": (3, 0.89)}),
        ("letter", {"loss": (3, 0.88), "letter": (1, 0.1)}),  # 0.98 of 0.9 is 0.882
        (None, {"loss": (4, 1.0)}),
        ("share", {"loss": (2, 0.9), "share": (1, 0.91), "letter": (2, 1.0)}),
        ("loss", equals),
        ("code", {"code": (2, 0.9)}),
    ]
    assert [CHOICE.chosen(made_up(**changes)) for _, changes in told] == [wanted for wanted, _ in told]


def test_a_seed_that_was_not_trained_to_the_end_does_not_count() -> None:
    trial = made_up(loss=(2, 0.9), letter=(2, 0.9))
    next(run for run in trial["runs"] if run["variant"] == "loss")["step"] = 8
    assert CHOICE.chosen(trial) == "letter"
    next(run for run in trial["runs"] if run["variant"] == "letter")["step"] = 8
    assert CHOICE.chosen(trial) is None
    del trial["answers"]
    with pytest.raises(SaccadeError, match="no answers of direct gates"):
        CHOICE.chosen(trial)


def test_claims_rest_on_one_trial_and_one_choice_which_are_criteria() -> None:
    MADE_UP.refuse_others(made_up())
    with pytest.raises(SaccadeError, match="target_heads 4 is not valid of a trial that claims rest on: 16"):
        CHOICE.refuse_others(made_up())
    trial = made_up()
    trial["answers"]["budgets"] = [16, 64]
    with pytest.raises(SaccadeError, match=r"budgets \[16, 64\] is not valid .*: \[16\]"):
        MADE_UP.refuse_others(trial)
    del trial["answers"]["behind"], trial["answers"]["budgets"]
    with pytest.raises(SaccadeError, match="budgets None"):
        MADE_UP.refuse_others(trial)
    for claim in gate_claims():
        own = claim.settings
        assert isinstance(own, Retrieving | Trained)
        for other in (replace(CHOICE, near=2.0), replace(CHOICE, scaled=("loss",)), replace(CHOICE, texts=12)):
            assert replace(claim, settings=replace(own, choice=other)).fingerprint != claim.fingerprint
        beside = [test for test in claim.tests if test.of.arms.startswith("letter")]
        assert beside and not any(test.decides for test in beside)


def gate_claims() -> list[Claim]:
    claims = [listed.claim for listed in found().values() if isinstance(listed.claim.settings, Retrieving | Trained)]
    assert len(claims) == 3
    return claims


def stretches(tokenizer: Any, own: Choice | Retrieving) -> list[range]:
    """Tokens of packages that texts are cut from."""
    lengths, behind = ((own.context, own.context), own.behind) if isinstance(own, Choice) else (own.lengths, 0)
    problems = PackageProblems(tokenizer, "kv", lengths, own.texts, own.asked, own.seed, 10_000, behind=behind)
    told: list[range] = []
    with pytest.MonkeyPatch.context() as patch:
        cut = problems.corpus.stretch

        def stretch(begin: int, length: int) -> str:
            told.append(range(begin, begin + length))
            return cut(begin, length)

        patch.setattr(problems.corpus, "stretch", stretch)
        for number in range(len(problems)):
            _ = problems[number]
    assert problems.lengths[0] > max(map(len, told)) > 0
    return told


@walk
def test_no_text_that_judges_has_chosen(tokenizer: Any) -> None:
    """By tokens of the packages' sources, with room for a model whose texts reach twice as far."""
    chose = stretches(tokenizer, CHOICE)
    assert stretches(tokenizer, PUBLISHED) == chose
    for claim in gate_claims():
        for own in (claim, claim.published):
            if own is None or not isinstance(own.settings, Retrieving):
                continue
            judged = stretches(tokenizer, own.settings)
            assert (len(chose), len(judged)) == (24, 24 if own is claim else 40)
            assert 2 * max(one.stop for one in judged) < CHOICE.behind <= min(one.start for one in chose)
    every = Counter(token for own in chose for token in own)
    assert set(every.values()) == {1}


def test_the_page_tells_where_seeds_have_ended_and_what_answers_roles_keep() -> None:
    results = made_up(share=(2, 0.9))
    results["runs"][-7]["step"] = 7
    lines = page.section(results)
    assert lines[0].startswith(
        "| gates | scale | expected open | undecided | above one half | right, those above one half,"
    )
    assert "| hardkuma | share | 5.0 | 0% | 2 | 0.900 | 0.600 |" in lines
    assert "| direct | letter | 3.0 | 100% | 4 | 0.600 | 0.900 |" in lines
    assert "wanted open beside the first layer's 2, 9 steps, share cut off at 7 to 9, 3 seeds" in lines[-3]
    assert "a device" in lines[-3]
    assert "--variants letter,loss,direct,share,multiplier,code &&" in lines[-3]
    without = {name: value for name, value in made_up().items() if name != "answers"}
    assert "| hardkuma | letter | 2.0 | 0% | 5 |" in page.section(without)


@pytest.fixture
def study(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    study = Study(str(model_folder), tmp_path / "study", "cpu", criteria="0", draft=True)
    study.folder.mkdir()
    hold(study, tmp_path, made_up(share=(2, 0.9)))
    return study


def hold(study: Study, folder: Path, content: dict[str, Any], name: str = "gates.json") -> None:
    (folder / name).write_text(json.dumps(content | {"weights": study.subject.shape.weights}))


def test_heads_are_the_texts_of_trained_gates(study: Study) -> None:
    samples = Trained("gates.json", MADE_UP).run(study, lambda _: None)
    values = {(one.arm, one.text): one.values for one in samples}
    assert values["direct", "layer 1, head 0"] == {"grey": 1.0, "open": 0.0}
    assert values["hardkuma", "layer 4, head 0"] == {"grey": 0.0, "open": 1.0, "open@near": 1.0}
    assert {arm for arm, _ in values} == {*VARIANTS, "hardkuma"} - {DIRECT_SHARE}
    conditions = Trained("gates.json", MADE_UP).conditions(study)
    assert conditions["model"] == study.model and f"--model {study.model} --dtype float32" in conditions["measured_by"]
    with pytest.raises(SaccadeError, match="target_heads 4 is not valid"):
        Trained("gates.json").run(study, lambda _: None)


def test_roles_of_any_number_of_heads_are_asked_beside_other_policies(study: Study) -> None:
    others = ("tidal:budget=16,reselect=3",)
    design = Retrieving("gates.json", (4, 6), (16, 32), others, (200, 200), texts=2, asked=2, choice=MADE_UP)
    told: list[str] = []
    samples = design.run(study, told.append)
    # Seeds have the same roles here, which are asked once; two kinds of gates agree where ranks do.
    assert len(told) == design.units(study)
    arms = {one.arm for one in samples}
    assert {f"hardkuma {count}, seed {seed}, budget {budget}" for count in (4, 6) for seed in range(3)
            for budget in (16, 32)} < arms  # fmt: skip
    assert {"direct 4, seed 0, budget 16", "letter 6, seed 2, budget 32", *others} < arms
    assert len(samples) == 2 * len(arms) and design.conditions(study)["file"] == "gates.json"


def test_where_no_gates_stand_for_the_papers_what_stands_beside_has_its_figures(study: Study, tmp_path: Path) -> None:
    hold(study, tmp_path, made_up())
    far = judge(found()["C13"].claim, Trained("gates.json", MADE_UP).run(study, lambda _: None))
    assert [one.verdict for one in far.premises] == ["refuted"] and far.verdict == "cannot be told"
    assert far.power.startswith("whether HardKuma gates of a variant open as many heads as wanted, within one,")
    assert all((one.effect.value is None) == one.test.decides for one in far.outcomes)
    design = Retrieving("gates.json", (4,), (16,), (), (200, 200), texts=2, asked=2, choice=MADE_UP)
    values = {one.arm: one.values for one in design.run(study, lambda _: None)}
    told = [values[f"{gates} 4, seed 0, budget 16"]["right"] for gates in ("hardkuma", "letter", "direct")]
    assert [*map(isnan, told)] == [True, False, False]
    assert all(STANDS in listed.premises for listed in gate_claims())


def test_other_models_have_files_variants_and_criteria_of_their_own(study: Study, tmp_path: Path) -> None:
    """Counts are said as the paper means them; of gates that do not stand none is asked."""
    choice = replace(PUBLISHED, target_heads="2 layers", steps=9, budgets=(16,))
    name = f"gates_{slug(str(study.model))}.json"
    with pytest.raises(SaccadeError, match=f"{name} is not in docs/results; `python -m claims gates --model"):
        Trained(PUBLISHED_FILE, choice).run(study, lambda _: None)
    design = Retrieving(PUBLISHED_FILE, ("2 layers", "1/2"), (16,), (), (200, 200), texts=2, asked=2, choice=choice)
    judged = {}
    for open_gates in (4, 5):
        content = made_up(share=(open_gates, 0.9), **{DIRECT_SHARE: (4, 0.9)})
        content["runs"] = [run for run in content["runs"] if run["variant"] in ("share", DIRECT_SHARE)]
        for run in content["runs"][3:]:
            run["values"] = [[0.05, 0.95]] * (LAYERS - 1)
        content["answers"] |= choice.asking()
        hold(study, tmp_path, content, name)
        samples, told = design.run(study, lambda _: None), Trained(PUBLISHED_FILE, choice)
        assert {one.arm for one in samples} == {
            f"{gates} {count}, seed {seed}, budget 16"
            for gates in ("hardkuma", "direct") for count in ("2 layers", "1/2") for seed in range(3)
        }  # fmt: skip
        assert [isnan(one.values["right"]) for one in samples[:2]] == [open_gates == 5] * 2
        assert design.units(study) == (8 if open_gates == 4 else 4)
        claim = found()["C13"].on(study.model).claim
        judged[open_gates] = judge(claim, told.run(study, lambda _: None))
        assert told.conditions(study)["measured_by"].endswith(f"docs/results/{name}")
    assert [judged[number].premises[0].verdict for number in judged] == ["holds", "refuted"]
    assert judged[4].outcomes[0].effect.value == 0.0 and judged[5].outcomes[0].effect.value is None
    for bundled in gate_claims():
        assert bundled.published is not None and bundled.published.premises == (PUBLISHED_STANDS,)
        assert bundled.published.fingerprint != bundled.fingerprint
        assert replace(bundled, published=None).fingerprint == bundled.fingerprint


def test_the_best_gates_are_cut_to_a_number_of_heads() -> None:
    shape = ModelShape(3, 4, 2, 8, "llama", "")
    values = [[0.1, 0.9], [0.8, 0.2]]
    assert (cut(values, 2, shape), cut(values, 3, shape), cut(values, 4, shape)) == (
        "heads:0", "heads:0+1.1", "heads:0+1.1+2.0",
    )  # fmt: skip
    with pytest.raises(SaccadeError, match="7 heads that retrieve are not valid"):
        cut(values, 7, shape)
