"""Rows of length 0, which pad a captured batch, get empty sets from every rule, and the others what they get alone."""

import pytest
import torch

from saccade.selection.rules import Framed, RankUnion, Ratio, Threshold, TopK, TopP
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import Rule, WindowSelector
from saccade.types import KVView, Rows

WIDTH = 40
LENGTHS = [0, 17, 0, 40, 1]


def rows_of(lengths: list[int]) -> Rows:
    table = torch.zeros((len(lengths), 1), dtype=torch.int32)
    return Rows(table, torch.zeros(len(lengths), dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), WIDTH)


@pytest.mark.parametrize(
    ("rule", "unit"),
    [
        (TopK(8), 1),
        (TopK(16), 4),
        (RankUnion(budget=12, sinks=2, recent=0.25), 1),
        (Ratio(0.25, minimum=3, local=2), 4),
        (Threshold(0.01, buffer=16), 1),
        (TopP(0.8, buffer=16), 1),
        (Framed(TopK(16), 2, 5), 4),
        (Framed(TopP(0.8, buffer=16), 2, 5), 1),
        (Ratio(0.9, framed=True), 4),
    ],
)
def test_an_empty_row_has_an_empty_set(rule: Rule, unit: int) -> None:
    scores = torch.randn(len(LENGTHS), 4, WIDTH // unit, generator=torch.Generator().manual_seed(0))
    units = torch.tensor([-(-length // unit) for length in LENGTHS])
    # What follows a row is undefined.
    scores = scores.masked_fill(torch.arange(WIDTH // unit) >= units[:, None, None], torch.nan)
    selection = rule.choose(scores, rows_of(LENGTHS), unit, 1.0)
    for row, length in enumerate(LENGTHS):
        if length == 0:
            assert not selection.counts[row].any()
            assert bool((selection.ids[row] == -1).all())
        else:
            alone = rule.choose(scores[row : row + 1], rows_of([length]), unit, 1.0)
            assert torch.equal(selection.counts[row], alone.counts[0])
            assert torch.equal(selection.ids[row], alone.ids[0])


def test_a_window_of_an_empty_row_is_empty() -> None:
    page = torch.zeros(1, WIDTH, 1, 16)
    kv = KVView(page, page, rows_of(LENGTHS))
    selection = WindowSelector(budget=8, sinks=2).select(torch.zeros(len(LENGTHS), 1, 16), kv, None, None, 1.0)
    assert selection.counts[:, 0].tolist() == [0, 8, 0, 8, 1]
    assert bool((selection.ids[[0, 2]] == -1).all())


@pytest.mark.parametrize("page", [1, 16])
def test_stored_scores_are_looked_at_up_to_the_end_of_the_row(page: int) -> None:
    stored = torch.randn(len(LENGTHS), 2, WIDTH, generator=torch.Generator().manual_seed(0))
    behind = torch.arange(WIDTH) >= torch.tensor(LENGTHS)[:, None, None]
    kv = KVView(torch.zeros(1, WIDTH, 2, 16), torch.zeros(1, WIDTH, 2, 16), rows_of(LENGTHS))
    scorer, rule, chosen = ExactScorer("max", page), TopK(2 * page), []
    for filling in (-torch.inf, torch.nan):
        scores = scorer.score(torch.zeros(len(LENGTHS), 2, 16), kv, None, stored.masked_fill(behind, filling))
        chosen.append(rule.choose(scores, kv.rows, page, 1.0))
    assert torch.equal(chosen[0].ids, chosen[1].ids)
    assert torch.equal(chosen[0].counts, chosen[1].counts)
