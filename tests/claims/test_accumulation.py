"""The accumulation experiment: its targets, which keys are dense before each of them, and how it counts."""

from collections.abc import Callable, Sequence
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
from commands import Invoke, told
from lab.packages import stretches
from saccade.adapters.hf.run import sparsify
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from walking import among, walk

Judged = tuple[dict[str, torch.Tensor], Accumulation]
LogitsOf = Callable[..., Judged]
LENGTH = 96
TEMPLATE = Policy.from_spec("quest:page=4,dense_layers=0")


@pytest.fixture(scope="module")
def texts() -> list[Passage]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 2000, (2, LENGTH + 1), generator=generator).tolist()
    return [Passage("noise", number, tuple(row)) for number, row in enumerate(tokens)]


def test_a_text_begins_as_the_tokenizer_has_it_however_it_is_cut(tokenizer: Any) -> None:
    """In front of what is cut from the left too, and no target moves."""
    tokenizers = tokenizer, starting.with_start(tokenizer)
    sizes: dict[str, Any] = {"count": 2, "shortest": 300, "longest": 400, "seed": 3}
    both = [held_out_passages(one, (REFERENCE, FACTS), **sizes) for one in tokenizers]
    for without, begun in zip(*both, strict=True):
        for length in (301, 401):
            assert begun.cut(length) == (5, *without.cut(length)[1:]) and len(begun.cut(length)) == length
    for stretch in zip(*(stretches(one, 200, 3, 20, 4096) for one in tokenizers), strict=True):
        assert stretch[1] == (5, *stretch[0][1:]) and len(stretch[1]) == 200


@pytest.fixture
def logits_of(monkeypatch: pytest.MonkeyPatch, model: Any, texts: list[Passage]) -> LogitsOf:
    """What the experiment judges under cases, by setting, and the experiment."""
    count = Accumulation._record

    def run(cases: list[Case], given: Sequence[Passage] = texts, sparse_only: int = 2, batch: int = 2) -> Judged:
        seen: dict[str, torch.Tensor] = {}
        units: list[str] = []

        def record(self: Accumulation, case: Case, batch: Any, logits: torch.Tensor, tokens: torch.Tensor) -> None:
            seen[case.setting] = logits
            count(self, case, batch, logits, tokens)

        monkeypatch.setattr(Accumulation, "_record", record)
        experiment = Accumulation(model, None, given, cases, sparse_only, batch)
        experiment.run(units.append)
        assert len(units) == experiment.units
        return seen, experiment

    return run


def cases_at(*kept: float, every: Sequence[int], sparse_only: bool = False) -> list[Case]:
    return list(cases_of(TEMPLATE, kept, every, LENGTH, sparse_only=sparse_only))


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


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("every", among([5, 40], [5]))
def test_a_suffix_is_rectify_token_by_token(logits_of: LogitsOf, model: Any, texts: list[Passage], every: int) -> None:
    # Without a period it is the same every time.
    cases = cases_at(0.2, every=(every,), sparse_only=every == 5)
    seen, _ = logits_of(cases)
    tokens = torch.tensor([passage.tokens for passage in texts])
    plain, rectified = (case.policy for case in cases[:2])
    assert plain is not None and rectified is not None and rectified.rectify is not None
    assert rectified.rectify.every == every
    close(seen[f"every {every}"], by_steps(model, rectified, tokens, LENGTH - max(every, TARGETS)))
    if every == 5:
        close(seen[SPARSE_ONLY], by_steps(model, plain, tokens, 0))


def test_decode_only_has_dense_keys_before_every_target(logits_of: LogitsOf, model: Any, texts: list[Passage]) -> None:
    cases = cases_at(0.3, every=(32,))
    seen, _ = logits_of(cases)
    tokens = torch.tensor([passage.tokens for passage in texts])
    plain = cases[0].policy
    assert plain is not None
    for target in (0, 7, TARGETS - 1):
        prompt = LENGTH - TARGETS + target
        close(seen[DECODE_ONLY][:, target : target + 1], by_steps(model, plain, tokens[:, : prompt + 2], prompt))
    # Sparse and dense differ, or this would show nothing.
    assert not torch.allclose(seen[DECODE_ONLY], seen[DENSE], atol=1e-2)


@walk
def test_no_case_sees_what_another_has_written(logits_of: LogitsOf) -> None:
    cases = cases_at(0.1, 0.3, every=(40,))
    every, experiment = logits_of(cases)
    together = {(row["kept"], row["setting"]): row["right_by_passage"] for row in experiment.rows()}
    assert len(together) == 1 + len(cases) == 5
    for case in cases:
        seen, alone = logits_of([case], batch=1)
        rows = {(row["kept"], row["setting"]): row["right_by_passage"] for row in alone.rows()}
        assert rows == {key: together[key] for key in rows} and len(rows) == 2
        assert seen[case.setting].shape == (1, TARGETS, 2048)
        if case.kept == 0.3:  # whose logits are the last ones of their setting, of the last passage here
            close(every[case.setting][1:], seen[case.setting])


def test_everything_kept_is_dense(logits_of: LogitsOf) -> None:
    seen, experiment = logits_of(cases_at(1.0, every=(16,), sparse_only=True))
    for setting in (DECODE_ONLY, "every 16", SPARSE_ONLY):
        close(seen[setting], seen[DENSE])
    assert all(row["share_attended"] == 1.0 for row in experiment.rows())


def test_rows_count_the_three_best(logits_of: LogitsOf, texts: list[Passage]) -> None:
    seen, experiment = logits_of(cases_at(0.1, every=(16,), sparse_only=True), sparse_only=1)
    rows = {row["setting"]: row for row in experiment.rows()}
    for setting in (DENSE, DECODE_ONLY, "every 16"):
        right = [
            sum(target in logits.topk(3).indices for target, logits in zip(p.tokens[-TARGETS:], given, strict=True))
            for p, given in zip(texts, seen[setting], strict=True)
        ]
        row = rows[setting]
        assert (row["right_by_passage"], row["right"], row["n"]) == (right, sum(right), 2 * TARGETS)
        assert row["interval"][0] <= row["accuracy"] <= row["interval"][1]
    assert rows[DENSE]["difference"] == 0
    assert (rows[SPARSE_ONLY]["passages"], rows[SPARSE_ONLY]["n"]) == (1, TARGETS)
    # Two passages say nothing about others.
    assert rows[DECODE_ONLY]["difference_interval"] is None
    assert 0 < rows[DECODE_ONLY]["share_attended"] < 0.2


def test_sources_are_counted_apart_and_together(logits_of: LogitsOf, texts: list[Passage]) -> None:
    mixed = [Passage("one" if number < 2 else "other", number, texts[number % 2].tokens) for number in range(6)]
    _, experiment = logits_of(cases_at(0.2, every=()), mixed, batch=6)
    rows = {(row["source"], row["setting"]): row for row in experiment.rows()}
    one, other, together = (rows[source, DECODE_ONLY] for source in ("one", "other", "all"))
    assert (one["passages"], other["passages"], together["passages"]) == (2, 4, 6)
    assert together["right"] == one["right"] + other["right"] == 3 * one["right"]
    assert one["difference_interval"] is other["difference_interval"] is None
    low, high = together["difference_interval"]
    assert low <= together["difference"] <= high


def test_a_kept_share_is_a_budget_or_a_ratio() -> None:
    tidal, *others = cases_of(Policy.from_spec("tidal:reselect=3"), (0.07,), (16, 8), 100, sparse_only=False)
    assert tidal.policy is not None
    # In decimals: as floats it is a little more than 7.
    assert (tidal.policy.budget, tidal.policy.rectify) == (7, None)
    assert [case.setting for case in others] == ["every 8", "every 16"]
    first, last = cases_of(Policy.from_spec("resa"), (0.05,), (64,), 4096, sparse_only=False)
    assert first.policy is not None and last.policy is not None
    assert (first.policy.to_dict()["options"]["ratio"], first.policy.rectify) == (0.05, None)
    assert last.policy.rectify is not None
    assert (last.policy.rectify.every, last.suffix, first.suffix) == (64, 64, 32)


def test_an_interval_of_resampled_means() -> None:
    low, high = resampled_mean([0.0] * 10 + [0.1] * 10)
    # The standard error is 0.05 / sqrt(20) = 0.0112.
    assert low == pytest.approx(0.05 - 1.96 * 0.0112, abs=0.004)
    assert high == pytest.approx(0.05 + 1.96 * 0.0112, abs=0.004)
    assert resampled_mean([0.25, 0.25]) == (0.25, 0.25)


def test_passages_end_alike_and_are_of_held_out_modules(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"count": 3, "shortest": 384, "seed": 5}
    longer = held_out_passages(tokenizer, (REFERENCE, FACTS), longest=600, **sizes)
    assert [len(passage.tokens) for passage in longer] == [601] * 6
    assert len({passage.tokens[-TARGETS:] for passage in longer}) == 6
    assert longer == held_out_passages(tokenizer, (REFERENCE, FACTS), longest=600, **sizes)
    other = held_out_passages(tokenizer, (REFERENCE,), longest=600, **{**sizes, "seed": 6})
    assert not {passage.tokens for passage in other} & {passage.tokens for passage in longer}

    def sources(*, held_out: bool, characters: int) -> str:
        assert held_out
        return "def nothing():\n    return None\n" * 100

    monkeypatch.setattr(passages, "library_sources", sources)
    (passage,) = held_out_passages(tokenizer, (LIBRARY,), count=1, shortest=64, longest=64, seed=0)
    assert "return None" in tokenizer.decode(passage.tokens)


def test_what_is_asked_for_lies_in_the_shortest_passage(tokenizer: Any) -> None:
    for passage in held_out_passages(tokenizer, (FACTS,), count=4, shortest=384, longest=900, seed=0):
        text = tokenizer.decode(passage.tokens[-385:])
        stated, _, asked = text.rpartition("\n\nQuestion:")
        key = asked.partition("code of the ")[2].partition("?")[0]
        value = asked.rpartition(" is ")[2]
        assert f"The code of the {key} is {value}" in stated and value.strip(".").isdigit()


def test_shares_are_read() -> None:
    """Each once; anything else is named in one line."""
    assert shares("--kept", "0.2,1,0.2") == (0.2, 1.0)
    for text in ("", "0", "1.5", "-1", "nan", "²", "16,x"):
        with pytest.raises(SaccadeError, match="shares above 0"):
            shares("--kept", text)


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
