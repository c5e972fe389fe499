"""`python -m claims` from end to end on a tiny random model: the list, a run, going on after an interruption."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import correlation, fmean
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
import torch
from synthetic import claim

from claims import stored
from claims.designs.accumulated import Accumulated
from claims.designs.continuation import Continuation
from claims.designs.generation import Generation
from claims.designs.indexing import Indexing
from claims.designs.measured import Measured
from claims.designs.ordering import Ordering, _parts
from claims.designs.overlap import Overlap, _range
from claims.designs.questions import Questions
from claims.judging import discovery, results, running
from claims.judging.claim import Design, Group, Listed, Test
from claims.judging.commits import Commit
from claims.judging.effects import limits
from commands import Fails, Invoke
from saccade.calibrate.ledger import Ledger
from saccade.eval.reader import Reader
from walking import among, walk

ARMS = ("dense", "tidal:budget=64,heads=query,reselect={layer}", "streaming:budget=64")
QUESTIONS = Questions(ARMS, lengths=(300, 300), texts=6, asked=2, recall=True)
SHORT = Questions(("dense", "streaming:budget=48"), lengths=(128, 128), texts=6, asked=1)
READ = Test(
    "share of the cache, streaming minus dense", "share", Group("streaming*"), Group("dense"), direction="below"
)
RECALL = Test("token recall", "token", Group("tidal*", "best"), decides=False)
PLAIN = "tidal:budget=64,reselect=2,heads=query"
CONTINUATION = Continuation(("dense", PLAIN, f"{PLAIN},rectify=8"), prompt=100, decoded=80, texts=6)
WORSE = Test("loss, tidal minus dense", "loss@4", Group("tidal*query"), Group("dense"))
MASS = Test("attention recall", "attention@1", Group("tidal*query"), decides=False)
ACCUMULATED = Accumulated(
    "resa:min_pages=1", (0.5,), (8,), (300, 400), sources=("reference",), passages=6, sparse_only=True
)
GENERATION = Generation(("dense", "streaming:budget=64"), length=300, texts=6, asked=2, longest=6)
LONGER = Test("tokens, streaming over dense", "tokens", Group("streaming*"), Group("dense"), kind="ratio")
OVERLAP = Overlap(length=100, decoded=2, texts=6)
SAME = Test("range", "range", Group("layer 3"), direction="below", bound=1.0)
INDEXING = Indexing(("lychee_cluster:budget=80",), prompt=100, decoded=40, texts=6)
WATCHED = replace(INDEXING, decoded=24, window=8)
BUILT = Test("build", "build", Group("*"), direction="below", bound=1.0)
HIT = Test("hit", "hit@4", Group("*"), bound=0.0)
GAP = Test("gap", "gap", Group("400, 0.5, sparse-only"), Group("300, 0.5, every 8"))
ORDERING = Ordering("kv", ("tidal",), budget=64, length=820, texts=6, asked=2, passages=1)
CHOSEN = Test("right answers", "right", Group("tidal, chosen"), direction="below")
Claimed = Callable[..., None]


def listed_as(file: Path, settings: Design, *tests: Test, number: str = "C0") -> Listed:
    return Listed(number, file, replace(claim(), settings=settings, tests=tests))


@pytest.fixture
def claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Claimed:

    def make(*told: Any) -> None:
        monkeypatch.setattr(discovery, "found", lambda: {"C0": listed_as(tmp_path / "c0_example.py", *told)})

    return make


@pytest.fixture(autouse=True)
def only(claimed: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One claim, criteria that are committed, and a ledger of its own."""
    claimed(QUESTIONS, READ, RECALL)
    monkeypatch.setattr(running, "criteria_commit", lambda *_: Commit("abc", "2026-01-01T00:00:00+00:00"))


def run(invoke: Invoke, model: Path, folder: Path, *more: object) -> tuple[Any, dict[str, Any]]:
    done = invoke("c0", "--model", model, "--output-dir", folder, *more)
    path = folder / "result.json"
    return done, json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def ran(invoke: Invoke, model_folder: Path, tmp_path: Path, kept: Path) -> Path:
    """A copy of the claim's finished run, which whoever asks first has made."""
    if not kept.exists():
        done, _ = run(invoke, model_folder, kept)
        assert done.exit_code == 0, done.output
        (kept.parent / "said").write_text(done.stdout)
    return shutil.copytree(kept, tmp_path / "run")


def test_the_list_tells_what_was_not_run(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("claims.judging.results.recorded", dict)
    told = invoke()
    assert told.exit_code == 0, told.output
    assert "1 claims" in told.stdout and "It is so." in told.stdout and "not run" in told.stdout
    known = {"C0": [{"verdict": "mixed", "n": 7, "on": "bundled", "date": "2026-01-02"}]}
    monkeypatch.setattr("claims.judging.results.recorded", lambda: known)
    assert {"mixed", "7", "bundled", "2026-01-02"} <= set(invoke().stdout.split())


def test_a_run_gives_verdict_picture_and_samples(model_folder: Path, ran: Path, kept: Path) -> None:
    found = json.loads((ran / "result.json").read_text())
    assert found["verdict"] == "holds" and found["n"] == 6 and "verdict: holds" in (kept.parent / "said").read_text()
    assert (found["commit"], found["draft"], found["on"]) == ("abc", False, str(model_folder))
    # Streaming attends to 64 of some 300 tokens.
    assert -0.9 < found["tests"][0]["value"] < -0.6 and 0 < found["tests"][1]["value"] <= 1
    assert found["environment"]["model"] == str(model_folder)
    assert ElementTree.fromstring((ran / "picture.svg").read_text()).tag.endswith("svg")
    # A header, and six texts under dense, streaming and two layers above the third.
    assert len((ran / "samples.jsonl").read_text().splitlines()) == 1 + 6 * 4


@pytest.mark.parametrize(
    ("settings", "tests"),
    among(
        [(SHORT, (READ,)), (CONTINUATION, (WORSE, MASS)), (ACCUMULATED, (GAP,)), (GENERATION, (LONGER,))],
        [(SHORT, (READ,))],
    ),
)
def test_an_interrupted_run_goes_on(
    invoke: Invoke, model_folder: Path, tmp_path: Path, claimed: Claimed, settings: Design, tests: tuple[Test, ...]
) -> None:
    claimed(settings, *tests)
    add, samples = Ledger.add, tmp_path / "run" / "samples.jsonl"

    def impatient(self: Ledger, record: dict[str, Any]) -> None:
        add(self, record)
        if len(self.records) == 2:
            raise KeyboardInterrupt

    def interrupted() -> tuple[Any, dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Ledger, "add", impatient)
            return run(invoke, model_folder, tmp_path / "run")

    done, found = interrupted()
    assert done.exit_code == 130 and "the same command goes on" in done.stdout and not found
    first = samples.read_text()
    done, found = run(invoke, model_folder, tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert samples.read_text().startswith(first)
    _, whole = run(invoke, model_folder, tmp_path / "whole")
    assert [test["value"] for test in found["tests"]] == [test["value"] for test in whole["tests"]]
    # Nothing is measured again.
    finished = samples.read_text()
    assert interrupted()[0].exit_code == 0 and samples.read_text() == finished


@pytest.mark.parametrize(
    ("settings", "test"),
    among([(OVERLAP, SAME), (INDEXING, BUILT), (WATCHED, HIT), (ORDERING, CHOSEN)], [(OVERLAP, SAME), (WATCHED, HIT)]),
)
def test_further_designs_measure_shares(
    invoke: Invoke, model_folder: Path, tmp_path: Path, claimed: Claimed, settings: Design, test: Test
) -> None:
    """Between the limits by which texts that say the same are judged."""
    claimed(settings, test)
    done, found = run(invoke, model_folder, tmp_path / "run")
    assert done.exit_code == 0, done.output
    within = limits(test.measure)
    assert within is not None
    assert within[0] <= found["tests"][0]["value"] <= within[1] and found["n"] == 6


def test_answers_end_where_the_model_ends_them(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: Claimed
) -> None:
    """A model that says three words, a full stop, another word and its end, whatever it is asked."""
    measures = {"tokens": 6.0, "ended": 1.0, "answer": 4.0, "right": 0.0}
    replay = iter([7, 8, 9, 14, 7, 0] * 6 * 2 * 2)
    monkeypatch.setattr(
        Reader, "feed", lambda *_: torch.nn.functional.one_hot(torch.tensor(next(replay)), 2048).float()
    )
    claimed(GENERATION, *(Test(name, name, Group("dense"), decides=name == "tokens") for name in measures))
    done, found = run(invoke, model_folder, tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert {test["effect"]: test["value"] for test in found["tests"]} == measures


def test_heads_are_chosen_by_other_steps_than_they_are_judged_by() -> None:
    """Even steps: both tokens of head 0 are shared, none of head 1. Odd ones: one of head 0, both of head 1."""
    ids = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    above = torch.tensor([[[2, 1], [8, 5]], [[2, 7], [4, 3]]])
    assert _range(ids, above) == -0.5
    assert _range(ids[::2].repeat(2, 1, 1), above[::2].repeat(2, 1, 1)) == 1.0


def test_a_text_adds_what_the_rank_correlation_loses_without_it() -> None:
    right = numpy.array([[9, 8, 12, 7], [3, 6, 5, 1], [4, 2, 3, 6], [0, 1, 0, 3], [5, 0, 1, 0]])
    merits = [-2.0, -5.0, -1.0, -9.0, -9.0]

    def agreement(*texts: int) -> float:
        ranks = lambda held: [sum((x < y) + (x == y) / 2 for x in held) for y in held]  # noqa: E731
        return correlation(ranks(merits), ranks(right[:, texts].sum(1).tolist()))

    without = [agreement(1, 2, 3), agreement(0, 2, 3), agreement(0, 1, 3), agreement(0, 1, 2)]
    wanted = [agreement(0, 1, 2, 3) + 3 * (fmean(without) - left) for left in without]
    assert _parts(merits, right / 12) == pytest.approx(wanted, abs=1e-12)


@walk
def test_criteria_are_those_of_the_commit_that_samples_began_in(
    invoke: Invoke, model_folder: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged again in a later state of the tree, they name the earlier one; anew they name the later one."""
    monkeypatch.setattr(running, "criteria_commit", lambda *_: Commit("later", "2026-02-02T00:00:00+00:00"))
    _, found = run(invoke, model_folder, ran)
    assert (found["commit"], found["committed"]) == ("abc", "2026-01-01T00:00:00+00:00")
    (ran / "samples.jsonl").unlink()
    _, found = run(invoke, model_folder, ran)
    assert found["commit"] == "later"


def test_another_run_s_folder_is_refused(invoke: Invoke, model_folder: Path, ran: Path, claimed: Claimed) -> None:
    done, _ = run(invoke, model_folder, ran, "--draft")
    assert done.exit_code == 2 and "holds a run with draft=False, this one has True" in done.stderr
    # Judging what one has seen by new criteria is what must not be.
    claimed(QUESTIONS, replace(READ, bound=-0.5))
    done, _ = run(invoke, model_folder, ran)
    assert done.exit_code == 2 and "holds a run with criteria=" in done.stderr


def test_a_run_is_recorded_where_it_is_asked_for(
    invoke: Invoke, model_folder: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: Claimed
) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(results, "record", lambda found, _: recorded.append(found["verdict"]))
    run(invoke, model_folder, ran)
    assert recorded == []
    run(invoke, model_folder, ran, "--record")
    assert recorded == ["holds"]
    claimed(SHORT, READ)
    done, found = run(invoke, model_folder, tmp_path / "draft", "--draft")
    assert found["draft"] and found["commit"] is None and "holds (a draft)" in done.stdout
    done, _ = run(invoke, model_folder, tmp_path / "draft", "--draft", "--record")
    assert done.exit_code == 2 and "exclude each other" in done.stderr


@walk
def test_all_go_on_after_one_that_cannot_be_run(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    absent, file = Measured("absent.json", "saccade bench", "passes"), tmp_path / "c0_example.py"
    every = {"C1": listed_as(file, absent, READ, number="C1"), "C0": listed_as(file, QUESTIONS, READ)}
    monkeypatch.setattr(discovery, "found", lambda: every)
    done = invoke("--all", "--model", model_folder, "--device", "cpu", "--workers", "1")
    assert done.exit_code == 0, done.output
    assert "C1: absent.json is not in docs/results; `saccade bench` makes it" in done.stdout
    assert (tmp_path / "results" / "claims" / "C0" / "result.json").is_file()


@walk
def test_all_may_run_side_by_side(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true claims that are judged by a file alone; what processes of their own find is what this one does."""
    monkeypatch.undo()
    measured = {number: one for number, one in discovery.found().items() if isinstance(one.claim.settings, Measured)}
    monkeypatch.setattr(discovery, "found", lambda: measured)
    told = {}
    for workers in ("1", "2"):
        (tmp_path / workers).mkdir()
        monkeypatch.chdir(tmp_path / workers)
        done = invoke("--all", "--workers", workers)
        assert done.exit_code == 0, done.output
        told[workers] = sorted(done.stdout.splitlines())
    assert len(measured) > 1 and told["1"] == told["2"]


def test_a_file_is_judged(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: Claimed) -> None:
    def row(variant: str, context: int, ms: float) -> dict[str, Any]:
        times = {"ms": ms, "ms_fast": 0.9 * ms, "ms_slow": 1.1 * ms, "speedup_over_best_dense": 8 / ms}
        return {"group": "hybrid", "variant": variant, "context": context, "batch": 1, **times}

    def refusal(*given: str) -> str:
        done = invoke("C0", *given, "--output-dir", tmp_path / "other")
        assert done.exit_code == 2
        return str(done.stderr)

    rows = [row("4 of 8 heads sparse", 16, 8), row("8 of 8 heads sparse", 16, 1), row("8 of 8 heads sparse", 32, 2)]
    where = {"device": "a GPU", "date": "2026-01-01T00:00:00+00:00"}
    (tmp_path / "file.json").write_text(json.dumps({"rows": rows, "environment": where}))
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    faster = Test("8 of 8", "speedup", Group("hybrid: 8 of 8*"), bound=7.0)
    file = Measured("file.json", "python -m benchmarks.gpu.kernels", "kernels")
    claimed(file, faster)
    done = invoke("C0", "--output-dir", tmp_path / "run")
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (found["verdict"], found["on"], found["n"]) == ("mixed", "a GPU", 2), done.output
    assert found["tests"][0]["points"][0][1] == 8 and found["environment"]["file"] == "file.json"
    assert "is judged by docs/results/file.json alone" in refusal("--model", "X")
    claimed(replace(file, rules=(1,)), faster)
    assert "file.json was made by other rules; make it again: python -m b" in refusal()


def test_bad_input_is_one_line_before_any_work(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no claim 'C99'; there are C0" in fails("C99")
    assert "'quantum'" in fails("c0", "--device", "quantum") and "nonsense" in fails("nonsense")
    for given in ("--record", "--workers 2", "--model X", "--device cpu C0"):
        assert "stand behind the claim's number, or beside --all" in fails(*given.split())
