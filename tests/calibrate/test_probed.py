"""What the probe reads, and what is made of it: passages, sums, the deciding measure and its interval."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from searching import probe_settings
from transformers import AutoModelForCausalLM

from one_line import lacking, said
from saccade.adapters.hf.probe import KINDS, Probe, Told
from saccade.adapters.hf.run import attached
from saccade.calibrate import layers
from saccade.calibrate.layers import LayerSearch
from saccade.calibrate.passages import Texts
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.divergence import Divergence, record
from saccade.methods.policy import Policy
from saccade.recipes.recipe import Recipe

LENGTH, LEAST = 60, 40
PASSAGES = Texts.passages  # of which the conftest lets searches read five


def text(words: int, first: int = 0) -> str:
    return " ".join(f"word {number}" for number in range(first, first + words))


def test_passages_share_no_token(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(text(100))
    (tmp_path / "a.md").write_text(text(12, 500))
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "deep").mkdir()
    (tmp_path / ".index").write_bytes(b"\xff")
    (tmp_path / "deep" / "c.txt").write_text(text(60, 700))
    found = PASSAGES(Texts(tmp_path, LENGTH, LEAST), tokenizer, 100)
    lengths = [len(one.tokens) for one in found]
    assert min(lengths) >= LEAST and sum(size != LENGTH for size in lengths) == 1  # the shorter text, and no remainder
    said = [tokenizer.decode(one.tokens[one.start :]) for one in found]
    numbers = [number for one in said for number in re.findall(r"word (\d+) ", one)]
    assert len(found) > 3 and len(numbers) == len(set(numbers)) > 20


def test_texts_that_tell_nothing(tokenizer: Any, tmp_path: Path) -> None:
    refused = {b" \n": "is empty", b"few words": f"needs {LEAST}", b"\xff\xfe": "is not UTF-8"}
    path = tmp_path / "mine.txt"
    lines = []
    for content, words in refused.items():
        path.write_bytes(content)
        lines.append((said(DocumentError, PASSAGES, Texts(path, LENGTH, LEAST), tokenizer, 3), (words,)))
    (tmp_path / "empty").mkdir()
    lines.append((said(DocumentError, PASSAGES, Texts(tmp_path / "empty", LENGTH, LEAST), tokenizer, 3), ("holds no",)))
    assert lacking(lines) == []


def drawn(seed: int, keys: int) -> Told:
    rng = torch.Generator().manual_seed(seed)
    key = torch.zeros(20, dtype=torch.bool)
    key[:keys] = True
    loss, likelihood = torch.rand(2, 20, dtype=torch.float64, generator=rng)
    return Told(loss, likelihood, torch.rand(20, generator=rng) < 0.5, key[torch.randperm(20, generator=rng)])


def test_the_deciding_measure() -> None:
    """Per key token of all texts, natural plus repeated; from the tokens themselves."""
    told = [
        {kind: drawn(7 * text + place, (3 + text, 8)[place]) for place, kind in enumerate(KINDS)} for text in range(5)
    ]
    found = Divergence("spec", [record(one) for one in told])
    wanted = 0.0
    for kind in KINDS:
        losses = torch.cat([one[kind].divergence[one[kind].key] for one in told])
        equal = torch.cat([one[kind].equal[one[kind].key] for one in told]).double()
        wanted += float(losses.mean())
        assert found.mean("kl", key=True)[kind] == pytest.approx(float(losses.mean()), abs=1e-5)
        assert found.mean("equal", key=True)[kind] == pytest.approx(float(equal.mean()), abs=1e-5)
        every = torch.cat([one[kind].likelihood for one in told])
        assert found.mean("nll", key=False)[kind] == pytest.approx(float(every.mean()), abs=1e-5)
    assert found.merit == pytest.approx(wanted, abs=1e-5)
    assert found.keys == sum(3 + text for text in range(5)) + 5 * 8
    assert numpy.sign(numpy.subtract(found.interval(), found.merit)).tolist() == [-1, 1]


def test_the_interval_of_a_difference_is_that_of_texts() -> None:
    """Two policies that differ by the same on every text differ surely, however much texts differ."""
    rng = numpy.random.default_rng(0)
    losses = rng.uniform(1, 9, 12)

    def policy(more: float) -> Divergence:
        told = []
        for loss in losses:
            values = torch.full((4,), float(loss + more), dtype=torch.float64)
            one = Told(values, values, torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool))
            told.append(dict.fromkeys(KINDS, one))
        return Divergence("spec", [record(one) for one in told])

    better, worse = policy(0.0), policy(0.5)
    assert better.interval(worse) == pytest.approx((1.0, 1.0), abs=1e-5)
    means = [2 * rng.choice(losses, len(losses)).mean() for _ in range(2000)]
    assert better.interval() == pytest.approx(tuple(numpy.quantile(means, (0.025, 0.975))), abs=0.5)
    assert Divergence("spec", better.texts[:2]).interval() is None


def test_a_search_takes_the_least(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the probe says from the outside, once: the best of one step by steps in a row; further layers if they gain.

    Two of three texts are read together.
    """
    monkeypatch.setattr(layers, "FINALISTS", 2)
    monkeypatch.setattr(layers, "texts_that_fit", lambda model, tokens: 2)
    settings = probe_settings(folder, tmp_path, budgets="16", most=3, passages=3)
    search = LayerSearch.check(settings)
    results = search.run(str)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    steps = layers.WALK
    merits: dict[int, dict[tuple[int, ...], float]] = {1: {}, steps: {}}
    probes = [Probe(model, [one], attach=attached) for one in search.passages]
    for reselect in ((), (3,), (4,)):
        policy = Policy.create("tidal", {"reselect": reselect, "budget": 16})
        for walk, found in merits.items():
            told = [probe.measure(policy, walk=walk)[0] for probe in probes]
            of = [torch.cat([one[kind].divergence[one[kind].key] for one in told]) for kind in KINDS]
            found[reselect] = sum(float(losses.mean()) for losses in of if len(losses))
    rows = {tuple(row["reselect"]): row for row in results["rows"]}
    for reselect, merit in merits[1].items():
        assert rows[reselect]["merit"] == pytest.approx(merit, rel=1e-3)
    finalists = sorted(merits[1], key=lambda one: merits[1][one])[:2]
    assert [one for one in merits[1] if "walked" in rows[one]] == [one for one in merits[1] if one in finalists]
    for reselect in finalists:
        assert rows[reselect]["walked"]["merit"] == pytest.approx(merits[steps][reselect], rel=1e-3)
    taken = [step["to"] for step in results["further_layers"] if step["taken"]]
    assert results["chosen"] == [*(taken or [min(finalists, key=lambda one: merits[steps][one])])[-1]]
    assert list(Recipe.read(tmp_path / "saccade.json").reselect or ()) == results["chosen"]
    again: list[str] = []
    LayerSearch.check(settings).run(again.append)
    assert again == []


def test_texts_without_key_tokens_choose_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.adapters.hf.probe.KEY", 1e9)
    with pytest.raises(SaccadeError, match="no token needs a long context, so no layer can be told from another"):
        LayerSearch.check(probe_settings(folder, tmp_path, budgets="16")).run(str)
    assert not (tmp_path / "saccade.json").exists()
