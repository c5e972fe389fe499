"""Texts that are read together: what each says is what it says alone, and what stock's logits say in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from claims.designs import accumulated, continuation
from claims.designs.accumulated import Accumulated
from claims.designs.continuation import Continuation
from claims.designs.together import rows_together
from claims.judging.claim import Sample
from claims.judging.study import Study
from saccade.checkpoints.load import ModelSource

SPARSE = "tidal:budget=40,reselect=3,heads=query,sinks=4,window=8"
PLAIN = Continuation(("dense", SPARSE), prompt=130, decoded=70, texts=3, kinds=("code", "prose"), nearer=(60,))
SUFFIXES = Accumulated("resa:min_pages=1", (0.3, 1.0), (8, 40), (300,), passages=2)
ROUNDED = 2e-6
"""Measures keep six digits, of float32: half a unit on each side, and the sums' order."""


def together(count: int) -> Callable[..., int]:
    return lambda *_: count


@pytest.fixture
def study(model_folder: Path, tmp_path: Path) -> Callable[[str], Study]:
    def made(name: str) -> Study:
        (tmp_path / name).mkdir()
        return Study(str(model_folder), tmp_path / name, device="cpu")

    return made


def by_name(samples: list[Sample]) -> dict[tuple[str, str, str], float]:
    return {(one.text, one.arm, name): value for one in samples for name, value in one.values.items()}


def test_plain_texts(study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds behind two prompts; four of six at once, so that a batch holds both kinds."""
    found = []
    for rows in (1, 4):
        monkeypatch.setattr(continuation, "rows_together", together(rows))
        here, steps = study(f"{rows}"), list[str]()
        found.append(by_name([*PLAIN.run(here, steps.append)]))
        assert len(steps) == PLAIN.units(here) == 2 * 2 * (6 if rows == 1 else 2)
    alone, batched = found
    assert alone.keys() == batched.keys()
    assert {arm for _, arm, _ in alone} == {f"behind {at}, {spec}" for at in (130, 60) for spec in ("dense", SPARSE)}
    assert {text for text, _, _ in alone} == {f"{kind} {number}" for kind in PLAIN.kinds or () for number in range(3)}
    assert max(abs(alone[name] - batched[name]) for name in alone) <= ROUNDED

    model = ModelSource.locate(str(here.model)).weights(torch.device("cpu"), torch.float64)
    targets = dict[str, tuple[int, ...]]()
    for batch in PLAIN._batches(here):
        for name, text in zip(batch.names, batch.texts, strict=True):
            assert len(text) == batch.prompt + 70 + 1
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, batch.prompt : -1]
            losses = [-float(row.log_softmax(-1)[token]) for row, token in zip(logits, text[-70:], strict=True)]
            told = [alone[name, f"{batch.front}dense", f"loss{part}"] for part in ("", "@1", "@4")]
            # float32's logits are within 1e-5 of these.
            assert told == pytest.approx(
                [numpy.mean(losses), numpy.mean(losses[:18]), numpy.mean(losses[-17:])], abs=2e-5
            )
            assert targets.setdefault(name, text[-70:]) == text[-70:], "a shorter prompt moves no target"


def test_passages(study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (1, 3):
        monkeypatch.setattr(accumulated, "rows_together", together(rows))
        found.append(by_name([*SUFFIXES.run(study(f"{rows}"), lambda _: None)]))
    alone, batched = found
    assert alone.keys() == batched.keys()
    assert max(abs(alone[name] - batched[name]) for name in alone) <= ROUNDED
    for text in ("reference 0", "library 1"):
        # What attends to all diverges by rounding alone; what does not, does.
        assert all(abs(alone[text, f"1, {arm}", "divergence"]) <= ROUNDED for arm in ("decode-only", "every 40"))
        apart = [alone[text, f"0.3, {arm}", "divergence"] for arm in ("decode-only", "every 8", "every 40")]
        assert min(apart) > 100 * ROUNDED and len(set(apart)) == 3
        assert alone[text, "0.3, every 40", "growth"] == pytest.approx(apart[2] - apart[0])
        assert (text, "dense", "divergence") not in alone


def test_as_few_and_as_even_batches_as_may_be() -> None:
    gpu = torch.device("cuda")
    assert [rows_together(gpu, *told) for told in ((32, 8448), (24, 30_128), (3, 2**19), (5, 10))] == [16, 8, 1, 5]
    assert rows_together(torch.device("cpu"), 32, 10) == 1
