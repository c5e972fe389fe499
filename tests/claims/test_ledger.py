"""The ledger: the hash of criteria, which files are claims, what their arms keep, and that results are the tree's."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from synthetic import LESS, Given, claim, samples

from claims.judging import page, pictures
from claims.judging.claim import (
    LESS_IS_MORE,
    LYCHEE_CLUSTER,
    LYCHEE_DECODE,
    PAPERS,
    RESA,
    TIDAL,
    VERDICTS,
    Group,
    Listed,
)
from claims.judging.commits import Commit, criteria_commit
from claims.judging.discovery import found, one
from claims.judging.pictures import picture
from claims.judging.results import LEDGER, record, recorded, result, slug, stale
from claims.judging.running import Run
from claims.judging.study import Study
from claims.judging.unclaimed import UNCLAIMED
from claims.judging.verdicts import judge
from claims.less_is_more.c7_long_generation import FRAMED
from claims.less_is_more.c9_transfer import FRAME, RARE_HEADS, UNION
from saccade.errors import SaccadeError

CLAIMS = found()
COMMIT = Commit("0123456789abcdef", "2026-01-02T03:04:05+00:00")
SAMPLES = [*samples("a", *[0.9] * 4, *[0.8] * 4), *samples("b", *[0.5] * 4, *[0.3] * 4)]
WHERE = {"model": "made up", "device": "cpu"}


def made(listed: Listed, commit: Commit | None = COMMIT) -> dict[str, Any]:
    return result(listed, judge(listed.claim, SAMPLES), commit, "python -m claims C0", WHERE)


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    return Listed("C0", tmp_path / "c0_example.py", claim())


def test_results_are_those_of_the_criteria_in_the_tree() -> None:
    held = recorded()
    assert stale(CLAIMS, held) == []
    kept = [one for results in held.values() for one in results]
    names = sorted(f"{one['claim']}-{slug(one['on'])}.json" for one in kept)
    assert names == sorted(path.name for path in LEDGER.glob("*.json")) and {one["verdict"] for one in kept} <= {
        *VERDICTS
    }


PAPERS_HOLD = {TIDAL: (9, 14), LESS_IS_MORE: (9, 14), LYCHEE_DECODE: (13, 6), LYCHEE_CLUSTER: (12, 6), RESA: (9, 3)}
"""How many figures and tables a paper has, appendices included; our pages are not counted."""
HALVES = {(TIDAL, "figure"): {"2"}, (LESS_IS_MORE, "figure"): {"1", "5"}}
"""Those of two parts, each of which shows something else."""


def numbers(kind: str, text: str) -> set[str]:
    """Of figures or tables named in words: `figures 2 and 6`, `figure 5b`, `figures 1, 10 to 13`."""
    named = set()
    for listed in re.findall(rf"{kind}s? ((?:\d+[a-z]?(?:, (?=\d)| and | to |–)?)+)", text):
        for first, part, last in re.findall(r"(\d+)([a-z]?)(?:(?: to |–)(\d+))?", listed):
            named |= {f"{number}{part}" for number in range(int(first), int(last or first) + 1)}
    return named


def test_numbers_are_read() -> None:
    assert numbers("figure", "figures 1, 10 to 13, tables 5 and 6") == {"1", "10", "11", "12", "13"}
    assert numbers("table", "figure 5b, table 10") == {"10"}
    assert numbers("table", "figure 7, tables 9–11 and section A.4") == {"9", "10", "11"}
    assert numbers("figure", "figures 2a and 5b, tables 1, 3 and 7") == {"2a", "5b"}


def test_every_figure_and_table_has_a_claim_or_a_reason() -> None:
    missing = set()
    for paper, most in PAPERS_HOLD.items():
        places = [listed.claim.source.place for listed in CLAIMS.values() if listed.claim.source.paper == paper]
        text = "; ".join([*places, *UNCLAIMED[paper]])
        for kind, count in zip(("figure", "table"), most, strict=True):
            halved = HALVES.get((paper, kind), set())
            whole = {str(number) for number in range(1, count + 1)} - halved
            wanted = whole | {f"{number}{part}" for number in halved for part in "ab"}
            missing |= {(paper, kind, number) for number in wanted - numbers(kind, text)}
    assert missing == set() and {*UNCLAIMED} == {*PAPERS}


def test_a_change_of_criteria_is_found_by_a_hash_of_data_alone(listed: Listed) -> None:
    held = {"C0": [made(listed)]}
    assert stale({"C0": listed}, held) == []
    for changed in (
        replace(listed.claim, tests=(replace(LESS, bound=0.1),)),
        replace(listed.claim, tests=(replace(LESS, decides=False), LESS)),
        replace(listed.claim, tests=(replace(LESS, of=Group("a", "best")),)),
        replace(listed.claim, settings=Given(tuple(SAMPLES))),
        replace(listed.claim, premises=(LESS,)),
        replace(listed.claim, says="It is otherwise."),
    ):
        (complaint,) = stale({"C0": replace(listed, claim=changed)}, held)
        assert complaint == "C0 on made up: its criteria have changed since; run it again"
    assert stale({}, held) == ["C0: no file of this number"]
    assert stale({"C0": listed}, {"C0": [made(listed, None)]}) == ["C0 on made up: a draft"]
    assert claim().fingerprint == listed.claim.fingerprint == replace(listed.claim, says="It  is\nso.\n").fingerprint


def test_results_enter_the_ledger_and_drafts_do_not(listed: Listed, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    assert record(made(listed), listed, ledger).name == "C0-made_up.json"
    (entry,) = recorded(ledger)["C0"]
    assert (entry["commit"], entry["committed"], entry["n"]) == (COMMIT.name, COMMIT.date, 8)
    told = listed.claim.criteria()
    for part in ("tests", "premises"):
        assert all(test.items() <= found.items() for test, found in zip(told.pop(part), entry[part], strict=True))
    assert entry["criteria"] == told and not entry["draft"]
    with pytest.raises(SaccadeError, match="C0 is a draft"):
        record(made(listed, None), listed, ledger)
    with pytest.raises(SaccadeError, match=r"other criteria than those of c0_example\.py"):
        record(made(listed), replace(listed, claim=claim(says="No.")), ledger)
    assert len(list(ledger.iterdir())) == 1


def test_every_claim_is_one_sentence_with_a_source_and_policies(tmp_path: Path) -> None:
    wrong, study = [], Study(None, tmp_path)
    for number, listed in CLAIMS.items():
        own = listed.claim
        assert study.policies(arms := getattr(own.settings, "arms", ())) or not arms
        short = len(listed.file.read_text(encoding="utf-8").splitlines()) <= 120
        sentence = own.sentence.endswith(".") and ". " not in own.sentence
        sourced = own.source.paper in PAPERS and own.source.place
        if not (short and sentence and sourced and any(test.decides for test in own.tests)):
            wrong.append(number)
    assert wrong == []


def test_what_nobody_calibrated_is_no_arm(tmp_path: Path) -> None:
    """A guessed layer, whole layers in the place of heads, and each Nth layer, where the model has no recipe."""
    for arm in ("tidal:budget=64", "less_is_more:budget=64", "lychee_decode:budget=64", "lychee_decode:roles=every:4"):
        study = Study(None, tmp_path)
        study.__dict__["recipe"] = None
        with pytest.raises(SaccadeError, match=rf"arm {re.escape(arm)} is not valid: nobody has calibrated"):
            study.policies((arm,))
        assert study.policies(("tidal:reselect={layer}", "tidal:reselect=", "quest", "lychee_decode:roles=layers:0+7"))


def test_a_withdrawn_claim_keeps_its_row_and_is_not_run(listed: Listed, tmp_path: Path) -> None:
    own = replace(listed.claim, withdrawn="It measured something else.")
    assert own.criteria() == listed.claim.criteria(), "what was measured was measured by them"
    assert replace(own, protocol="otherwise").criteria() == own.criteria()
    gone = replace(listed, claim=own)
    assert page._rows(gone, [made(listed)])[0][2:] == ["**withdrawn**", "It measured something else.", ""]
    with pytest.raises(SaccadeError, match="C0 is withdrawn: It measured something else"):
        Run.check(gone, Study(None, tmp_path), draft=True)
    assert CLAIMS["C31"].claim.withdrawn and "C31" not in str(page.results_of(RESA, recorded()))


def test_a_row_says_how_the_paper_measured_what_it_reports() -> None:
    """Needles are asked inside a dense prompt there; others cite tables that we do not measure."""
    held = recorded()
    for number in ("C1", "C3a", "C6", "C22", "C25", "C28"):
        own = CLAIMS[number]
        assert own.claim.protocol is not None
        if number in held:
            assert f"; the paper measured {own.claim.protocol})" in page._rows(own, held[number])[0][1]
    assert {"C1", "C3a", "C6"} <= held.keys()


def test_claims_are_found_by_their_files() -> None:
    files = set(LEDGER.parents[2].glob("claims/*/c[0-9]*.py"))
    assert {listed.file for listed in CLAIMS.values()} == files
    assert [*CLAIMS][:3] == ["C1", "C2", "C3a"] and one("c3A").number == "C3a"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_criteria_that_are_not_committed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c0_example.py"
    file.write_text("CLAIM = 1\n")
    with pytest.raises(SaccadeError, match="git does not know"):
        criteria_commit(file)
    git(tmp_path, "init", "--quiet")
    with pytest.raises(SaccadeError, match=r"c0_example\.py differs from its last commit: .* --draft"):
        criteria_commit(file)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "criteria")
    commit = criteria_commit(file)
    assert commit.name == git(tmp_path, "rev-parse", "HEAD") and commit.date.endswith("+00:00")
    (tmp_path / "other.py").write_text("")
    assert criteria_commit(file) == commit
    with pytest.raises(SaccadeError, match=r"other\.py differs from its last commit"):
        criteria_commit(file, tmp_path / "other.py")
    file.write_text("CLAIM = 2\n")
    with pytest.raises(SaccadeError, match="differs from its last commit"):
        criteria_commit(file)


def test_the_page_tells_what_is_not_told(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    untold = replace(listed, number="C00", claim=claim(replace(LESS, bound=0.45)))
    monkeypatch.setattr(page, "found", lambda: {"C0": listed, "C00": untold, "C1": replace(listed, number="C1")})
    benchmark = {**made(listed), "environment": {"file": "x.json", "date": "2026-01-01T00:00:00+00:00"}}
    resting = {**made(untold), "date": "2026-02-03", "environment": {"file": "x.json", "timestamp": "2026-02-03T00:00"}}
    monkeypatch.setattr(page, "recorded", lambda: {"C0": [benchmark], "C00": [resting]})
    lines = page.paper_lines("ReSA")
    assert lines[2].startswith(
        "| [C0](results/claims/C0-made_up.json)<br>made up, measured 2026-01-01, before the criteria"
    )
    assert "| **holds** | right, a minus b: +0.450 (" in lines[2] and lines[2].endswith("wanted > +0.000: holds | 8 |")
    assert "made up, 2026-02-03, criteria" in lines[3] and "| **cannot be told** |" in lines[3]
    assert lines[4] == "| C1 | It is so. (figure 0) | not run |  |  |"
    assert lines[6].startswith("C00 on made up cannot be told: right, a minus b: 8 texts tell what lies")
    assert lines[-1] == "![Effects, intervals and bounds of ReSA's claims](images/claims_resa.svg)"
    assert page.pictured() == ["ReSA"]
    svg = page.paper_picture("ReSA")
    assert ElementTree.fromstring(svg).tag.endswith("svg") and svg == page.paper_picture("ReSA")


def test_a_picture_shows_bounds_beside_their_effects_and_what_papers_report(listed: Listed) -> None:
    """Bounds that differ, effects of one line and of two."""
    changes: tuple[dict[str, Any], ...] = ({}, {"reported": 0.3}, {"bound": 0.3}, {"decides": False})
    told = [replace(listed, claim=claim(LESS, replace(LESS, effect="beside", **change))) for change in changes]
    assert len({picture([made(one)]) for one in told}) == len(told)
    long = replace(LESS, effect="what takes more letters than a line of the picture has, by a good deal", bound=0.25)
    claimed = replace(listed, claim=replace(listed.claim, tests=(LESS, long, replace(LESS, bound=0.5))))
    axes = Figure().add_subplot()
    pictures._panel(axes, [made(claimed)] * 2)
    bounds = axes.collections[0].get_segments()
    assert [float(segment[0][0]) for segment in bounds] == [LESS.bound, 0.25, 0.5]
    for place, segment in zip(axes.get_yticks(), bounds, strict=True):
        assert float(segment[0][1]) < place < float(segment[1][1])


def test_what_a_verdict_is_worth_hangs_on_published_models() -> None:
    def worth(*told: tuple[str, str]) -> str:
        return page._worth([{"on": on, "verdict": verdict} for on, verdict in told])

    toys = [("bundled", "holds"), ("testbed/code/code_model", "holds")]
    assert worth(*toys) == worth() == "weak"
    assert worth(*toys, ("a", "cannot be told")) == "undecided"
    assert worth(*toys, ("a", "refuted")) == worth(("a", "refuted"), ("b", "cannot be told")) == "fair"
    assert worth(("a", "refuted"), ("b", "holds")) == worth(("a", "mixed"), ("b", "mixed")) == "fair"
    assert worth(*toys, ("a", "refuted"), ("b", "refuted"), ("c", "cannot be told")) == "strong"
    rows = [line.split("|")[3:5] for line in page.worth_lines()[2:]]
    assert [int(count) for count, _ in rows] == [len(names.split(",")) for _, names in rows]
    assert sum(int(count) for count, _ in rows) == 29, "C31 is withdrawn, C5, C12, C18 and C29 are timings"


LENGTH = 8192
WITH_A_WINDOW = {"C7": (FRAMED,), "C8": ("window=60",), "C9": (FRAME, "roles=select"), "C9b": (FRAME,)}
"""What an arm is called that stands for LessIsMore's frame in its tests."""


@pytest.mark.parametrize("number", WITH_A_WINDOW)
def test_arms_that_are_said_to_keep_the_same_frame_do(number: str, tmp_path: Path) -> None:
    claim, study = found()[number].claim, Study(None, tmp_path)
    pairs = {(test.of.arms, test.against.arms) for test in claim.tests if test.against is not None}
    compared = [pair for pair in pairs if any(name in arm for arm in pair for name in WITH_A_WINDOW[number])]
    assert compared
    for pair in compared:
        plans = [policy.plan(study.subject.shape) for policy in study.policies(pair).values()]
        assert {plan.selector and plan.selector.frame(LENGTH) for plan in plans} == {(4, 60)}


def test_without_a_window_both_keep_the_current_token_alone(tmp_path: Path) -> None:
    study = Study(None, tmp_path)
    plans = [policy.plan(study.subject.shape) for policy in study.policies((UNION, f"{RARE_HEADS}sinks=4")).values()]
    assert [plan.selector and plan.selector.frame(LENGTH) for plan in plans] == [(4, 1)] * 2
