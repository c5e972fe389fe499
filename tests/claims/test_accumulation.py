"""The accumulation experiment: its targets, which keys are dense before each of them, and how it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import starting
from claims.accumulation import passages
from claims.accumulation.accumulation import (
    DECODE_ONLY,
    DENSE,
    SPARSE_ONLY,
    TARGETS,
    Accumulation,
    Case,
    cases_of,
    resampled_mean,
)
from claims.accumulation.job import shares
from claims.accumulation.passages import FACTS, LIBRARY, REFERENCE, Passage, held_out_passages
from claims.designs.packages import stretches
from commands import Invoke, told
from saccade.adapters.hf.run import sparsify
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError, PolicyError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy
from walking import among, walk

LENGTH = 96
TEMPLATE = Policy.from_spec("quest:page=4,dense_layers=0")


@pytest.fixture(scope="module")
def plain() -> Any:
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="module")
def with_start(plain: Any) -> Any:
    return starting.with_start(plain)


@pytest.fixture(scope="module")
def texts() -> list[Passage]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 2000, (2, LENGTH + 1), generator=generator).tolist()
    return [Passage("noise", number, tuple(row)) for number, row in enumerate(tokens)]


def test_a_text_begins_as_the_tokenizer_has_it_however_it_is_cut(plain: Any, with_start: Any) -> None:
    """In front of what is cut from the left too, and no target moves."""
    sizes: dict[str, Any] = {"count": 2, "shortest": 300, "longest": 400, "seed": 3}
    both = [held_out_passages(tokenizer, (REFERENCE, FACTS), **sizes) for tokenizer in (plain, with_start)]
    for without, begun in zip(*both, strict=True):
        for length in (301, 401):
            assert begun.cut(length) == (5, *without.cut(length)[1:]) and len(begun.cut(length)) == length
    for stretch in zip(*(stretches(tokenizer, 200, 3, 20, 4096) for tokenizer in (plain, with_start)), strict=True):
        assert stretch[1] == (5, *stretch[0][1:]) and len(stretch[1]) == 200


def logits_of(
    monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage], cases: list[Case], **sizes: int
) -> tuple[dict[str, torch.Tensor], Accumulation]:
    """What the experiment judges, by setting."""
    seen: dict[str, torch.Tensor] = {}
    count = Accumulation._record

    def record(self: Accumulation, case: Case, batch: Any, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        seen[case.setting] = logits
        count(self, case, batch, logits, tokens)

    monkeypatch.setattr(Accumulation, "_record", record)
    experiment = Accumulation(model, None, texts, cases, **{"sparse_only": 2, "batch": 2, **sizes})
    units: list[str] = []
    experiment.run(units.append)
    assert len(units) == experiment.units
    return seen, experiment


def by_steps(model: Any, policy: Policy, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits behind the last targets' predecessors, decoded one by one behind a dense prompt; all tokens are fed."""
    cache, logits = DynamicCache(), list[torch.Tensor]()
    with torch.inference_mode(), sparsify(model, policy) as run:
        if prompt:
            model(tokens[:, :prompt], past_key_values=cache)
        with run.decoding():
            places = range(prompt, tokens.shape[1] - 1)
            logits += [model(tokens[:, place : place + 1], past_key_values=cache).logits for place in places]
    return torch.cat(logits, dim=1)[:, -TARGETS:]


@pytest.mark.parametrize("every", among([5, 31, 40], [5]))
def test_a_suffix_is_what_rectify_does_token_by_token(
    monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage], every: int
) -> None:
    # Without a period it is the same every time.
    cases = list(cases_of(TEMPLATE, (0.2,), (every,), LENGTH, sparse_only=every == 5))
    seen, _ = logits_of(monkeypatch, model, texts, cases)
    tokens = torch.tensor([passage.tokens for passage in texts])
    rectified = next(case.policy for case in cases if case.setting == f"every {every}")
    assert rectified is not None and rectified.rectify is not None and rectified.rectify.every == every
    step_by_step = by_steps(model, rectified, tokens, LENGTH - max(every, TARGETS))
    torch.testing.assert_close(seen[f"every {every}"], step_by_step, rtol=1e-3, atol=1e-3)
    plain = cases[0].policy
    assert plain is not None
    if every == 5:
        torch.testing.assert_close(seen[SPARSE_ONLY], by_steps(model, plain, tokens, 0), rtol=1e-3, atol=1e-3)


def test_decode_only_has_dense_keys_before_every_target(
    monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]
) -> None:
    cases = list(cases_of(TEMPLATE, (0.1, 0.3), (32,), LENGTH, sparse_only=False))
    seen, _ = logits_of(monkeypatch, model, texts, cases[2:])
    tokens = torch.tensor([passage.tokens for passage in texts])
    plain = cases[2].policy
    assert plain is not None
    for target in (0, 7, TARGETS - 1):
        prompt = LENGTH - TARGETS + target
        alone = by_steps(model, plain, tokens[:, : prompt + 2], prompt)
        torch.testing.assert_close(seen[DECODE_ONLY][:, target : target + 1], alone, rtol=1e-3, atol=1e-3)
    # Sparse and dense differ, or this would show nothing.
    assert not torch.allclose(seen[DECODE_ONLY], seen[DENSE], atol=1e-2)


@walk
def test_no_case_sees_what_another_has_written(
    monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]
) -> None:
    cases = list(cases_of(TEMPLATE, (0.1, 0.3), (40,), LENGTH, sparse_only=False))
    _, experiment = logits_of(monkeypatch, model, texts, cases)
    together = {(row["kept"], row["setting"]): row["right_by_passage"] for row in experiment.rows()}
    assert len(together) == 1 + len(cases) == 5
    for case in cases:
        seen, alone = logits_of(monkeypatch, model, texts, [case], batch=1)
        rows = {(row["kept"], row["setting"]): row["right_by_passage"] for row in alone.rows()}
        assert rows == {key: together[key] for key in rows}
        assert len(rows) == 2
        assert seen[case.setting].shape == (1, TARGETS, 2048)


def test_everything_kept_is_dense(monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]) -> None:
    cases = list(cases_of(TEMPLATE, (1.0,), (16,), LENGTH, sparse_only=True))
    seen, experiment = logits_of(monkeypatch, model, texts, cases)
    for setting in (DECODE_ONLY, "every 16", SPARSE_ONLY):
        torch.testing.assert_close(seen[setting], seen[DENSE], rtol=1e-3, atol=1e-3)
    assert all(row["share_attended"] == 1.0 for row in experiment.rows())


def test_rows_count_the_three_best(monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]) -> None:
    cases = list(cases_of(TEMPLATE, (0.1,), (16,), LENGTH, sparse_only=True))
    seen, experiment = logits_of(monkeypatch, model, texts, cases, sparse_only=1)
    rows = {row["setting"]: row for row in experiment.rows()}
    for setting in (DENSE, DECODE_ONLY, "every 16"):
        right = [
            sum(target in logits.topk(3).indices for target, logits in zip(p.tokens[-TARGETS:], given, strict=True))
            for p, given in zip(texts, seen[setting], strict=True)
        ]
        assert rows[setting]["right_by_passage"] == right
        assert rows[setting]["right"] == sum(right)
        assert rows[setting]["n"] == 2 * TARGETS
        assert rows[setting]["interval"][0] <= rows[setting]["accuracy"] <= rows[setting]["interval"][1]
    assert rows[DENSE]["difference"] == 0
    assert (rows[SPARSE_ONLY]["passages"], rows[SPARSE_ONLY]["n"]) == (1, TARGETS)
    # Two passages say nothing about others.
    assert rows[DECODE_ONLY]["difference_interval"] is None
    assert 0 < rows[DECODE_ONLY]["share_attended"] < 0.2


def test_sources_are_counted_apart_and_together(
    monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]
) -> None:
    mixed = [Passage("one" if number < 2 else "other", number, texts[number % 2].tokens) for number in range(6)]
    cases = list(cases_of(TEMPLATE, (0.2,), (), LENGTH, sparse_only=False))
    _, experiment = logits_of(monkeypatch, model, mixed, cases, batch=6)
    rows = {(row["source"], row["setting"]): row for row in experiment.rows()}
    one, other, together = (rows[source, DECODE_ONLY] for source in ("one", "other", "all"))
    assert (one["passages"], other["passages"], together["passages"]) == (2, 4, 6)
    assert together["right"] == one["right"] + other["right"] == 3 * one["right"]
    assert one["difference_interval"] is other["difference_interval"] is None
    low, high = together["difference_interval"]
    assert low <= together["difference"] <= high


def test_a_kept_share_is_a_budget_or_a_ratio() -> None:
    (tidal, _) = cases_of(Policy.from_spec("tidal:reselect=3"), (0.1,), (16,), 30, sparse_only=False)
    assert tidal.policy is not None
    assert (tidal.policy.budget, tidal.policy.rectify) == (3, None)
    first, last = cases_of(Policy.from_spec("resa"), (0.05,), (64,), 4096, sparse_only=False)
    assert first.policy is not None and last.policy is not None
    assert (first.policy.to_dict()["options"]["ratio"], first.policy.rectify) == (0.05, None)
    assert last.policy.rectify is not None
    assert (last.policy.rectify.every, last.suffix, first.suffix) == (64, 64, 32)


@pytest.mark.parametrize(
    ("spec", "says"), [("dense", "neither"), ("tidal:budget=64", "leave it out"), ("quest", "budget=3")]
)
def test_a_policy_without_a_share_is_refused(spec: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        list(cases_of(Policy.from_spec(spec), (0.1,), (16,), 30, sparse_only=False))


def test_an_interval_of_resampled_means() -> None:
    low, high = resampled_mean([0.0] * 10 + [0.1] * 10)
    # The standard error is 0.05 / sqrt(20) = 0.0112.
    assert low == pytest.approx(0.05 - 1.96 * 0.0112, abs=0.004)
    assert high == pytest.approx(0.05 + 1.96 * 0.0112, abs=0.004)
    assert resampled_mean([0.25, 0.25]) == (0.25, 0.25)


def test_passages_end_at_the_same_tokens(tokenizer: Any) -> None:
    sizes = {"count": 3, "shortest": 384, "seed": 5}
    longer = held_out_passages(tokenizer, (REFERENCE, FACTS), longest=600, **sizes)
    assert [len(passage.tokens) for passage in longer] == [601] * 6
    assert len({passage.tokens[-TARGETS:] for passage in longer}) == 6
    assert longer == held_out_passages(tokenizer, (REFERENCE, FACTS), longest=600, **sizes)
    other = held_out_passages(tokenizer, (REFERENCE,), longest=600, **{**sizes, "seed": 6})
    assert not {passage.tokens for passage in other} & {passage.tokens for passage in longer}


def test_what_is_asked_for_lies_in_the_shortest_passage(tokenizer: Any) -> None:
    for passage in held_out_passages(tokenizer, (FACTS,), count=4, shortest=384, longest=900, seed=0):
        text = tokenizer.decode(passage.tokens[-385:])
        stated, _, asked = text.rpartition("\n\nQuestion:")
        key = asked.partition("code of the ")[2].partition("?")[0]
        value = asked.rpartition(" is ")[2]
        assert f"The code of the {key} is {value}" in stated
        assert value.strip(".").isdigit()


def test_library_passages_are_of_held_out_modules(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sources(*, held_out: bool, characters: int) -> str:
        assert held_out
        return "def nothing():\n    return None\n" * 100

    monkeypatch.setattr(passages, "library_sources", sources)
    (passage,) = held_out_passages(tokenizer, (LIBRARY,), count=1, shortest=64, longest=64, seed=0)
    assert "return None" in tokenizer.decode(passage.tokens)


@pytest.mark.parametrize(
    ("sources", "lengths", "says"),
    [
        (("nowhere",), (64, 64), "reference, library, facts"),
        ((REFERENCE,), (64, 10**6), "has only"),
        ((FACTS,), (64, 64), "no room for facts"),
    ],
)
def test_impossible_passages_are_refused(
    tokenizer: Any, sources: tuple[str, ...], lengths: tuple[int, int], says: str
) -> None:
    with pytest.raises(DocumentError, match=says):
        held_out_passages(tokenizer, sources, count=1, shortest=lengths[0], longest=lengths[1], seed=0)


@pytest.mark.parametrize("text", ["", "0", "1.5", "-0.1", "nan", "inf", "0.1,x"])
def test_shares_are_above_0_and_at_most_1(text: str) -> None:
    with pytest.raises(SaccadeError, match="shares above 0"):
        shares("--kept", text)
    assert shares("--kept", "0.2,1,0.2") == (0.2, 1.0)


@pytest.mark.parametrize("text", ["", "0", "1.5", "-1", "nan", "²", "16,x"])
def test_numbers_are_whole(text: str) -> None:
    with pytest.raises(SaccadeError, match="whole numbers of at least 1"):
        whole_numbers("--every", text, at_least=1)
    assert whole_numbers("--every", "16, 8,16", at_least=1) == (16, 8)


SMALL = ("--lengths", "64,96", "--sources", "reference", "--passages", "2", "--sparse-only", "1", "--batch", "2")
QUEST = ("--policy", "quest:page=4", "--kept", "0.2", "--every", "16")


def test_a_run_gives_a_table_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "inner" / "results"
    result = invoke("accumulation", "--model", model_folder, *SMALL, *QUEST, "--output-dir", folder)
    results = told(result, folder / "results.json", folder / "accumulation.svg")
    assert set(results["environment"]) >= {"cpu", "threads", "dtype", "versions"}
    counts = {(row["length"], row["kept"], row["setting"]): row["n"] for row in results["rows"]}
    expected = {(length, None, "dense"): 64 for length in (64, 96)}
    for setting, n in (("decode-only", 64), ("every 16", 64), ("sparse-only", 32)):
        expected |= {(length, 0.2, setting): n for length in (64, 96)}
    assert counts == expected
    assert "reference: top-3 accuracy on the last 32 tokens of 1 or 2 passages" in result.stdout
    assert all(name in result.stdout for name in ("decode-only", "every 16", "sparse-only", "quest:page=4"))


@walk
def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(self: Accumulation, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Accumulation, "_from_the_start", impatient)
    result = invoke("accumulation", "--model", model_folder, *SMALL, *QUEST, "--output-dir", tmp_path)
    results = told(result, tmp_path / "results.json", tmp_path / "accumulation.svg", interrupted=True)
    assert {row["setting"] for row in results["rows"]} == {"dense", "decode-only", "every 16"}
