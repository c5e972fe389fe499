"""Indexes that are not ours, of a package that only knows our protocol: however one generates, the sets are theirs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import saccade
from own_index import MODULE, NAMES
from own_method import installed
from saccade.text.levels import break_codes

from . import tiny
from .test_static_step import Decoding, assert_same
from .tiny import LETTERS
from .ways import ON_DEVICE, WAYS

BUDGET, BUFFER = 16, 8
SPECS = [f"{name}:budget={BUDGET}{more}" for name in NAMES for more in ("", ",rectify=3")]


@pytest.fixture(autouse=True)
def _theirs(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, MODULE, POSITIVE=NAMES[0], STOPS=NAMES[1]):
        yield


class Naive:
    """What is chosen where only one token decodes at a time, row by row from the keys or the ids."""

    def __init__(self, reads_text: bool) -> None:
        self.reads_text, self.seen, self.run = reads_text, 0, Any

    def observe(self, layer: int, span: Any, q: Any, kv: Any, selection: Any, softmax: Any) -> None:
        if selection is None:
            return
        session = self.run._hook.latest.session  # type: ignore[attr-defined]
        levels = break_codes(LETTERS.batch_decode([[token] for token in range(tiny.VOCABULARY)]))
        for row, (start, length) in enumerate(kv.rows.bounds):
            stop = min(length - 1, session.final.boundary - start) // BUFFER * BUFFER if length > BUDGET else 0
            best = [*range(stop)]
            if self.reads_text:
                ids = session.state.history.ids(0, start + length)[row, start:].tolist()
                best.sort(key=lambda place, ids=ids: (not 1 <= levels[ids[place]] <= 3, -place))
            for head in range(kv.kv_heads):
                if not self.reads_text:
                    positive = (kv.k[row, start : start + stop, head] > 0).sum(-1).tolist()
                    best.sort(key=lambda place, positive=positive: (-positive[place], -place))
                expected = [*sorted(best[: BUDGET - (length - stop)]), *range(stop, length)]
                assert selection.ids[row, head, : len(expected)].tolist() == expected
                assert int(selection.counts[row, head]) == len(expected)
                self.seen += len(expected) < length


@pytest.mark.parametrize("spec", SPECS)
def test_every_set_is_that_of_a_naive_choice(spec: str) -> None:
    model, naive = tiny.llama(), Naive(NAMES[1] in spec)
    with saccade.sparsify(model, spec, tokenizer=LETTERS, observers=[naive]) as naive.run:
        WAYS["by hand, left-padded"](model)
        WAYS["several turns"](model)
        WAYS["beams"](model)
    assert naive.seen > 0, "some sets are smaller than their rows"


@pytest.mark.parametrize("spec", SPECS[::2])
def test_ways_of_generating_agree(spec: str) -> None:
    """Drafts of several tokens a call among them: a layer goes through all before the next sees the first."""
    ways = ("prompt lookup", "static cache", "by hand, static", "chunked prefill")
    with saccade.sparsify(tiny.llama(), spec, tokenizer=LETTERS) as run:
        found = {way: WAYS[way](tiny.llama()).tolist() for way in ("greedy", *ways)}
        assert run.stats().share_attended < 0.9
    assert found == dict.fromkeys(found, found["greedy"])


@ON_DEVICE
@pytest.mark.parametrize(("spec", "batch"), [*((spec, "padded") for spec in SPECS), (SPECS[0], "one")])
def test_lengths_on_the_device_change_nothing(spec: str, batch: str) -> None:
    """As a graph holds a step, calls on the host between two of them."""
    results = []
    for kinds in ("hhhhhhhhh", "dddhhdddd"):
        decoding = Decoding(tiny.llama(), spec, batch)
        for kind in kinds:
            (decoding.on_host if kind == "h" else decoding.on_device)(1)
        results.append(decoding.end())
    assert_same(*results)
