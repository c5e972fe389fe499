"""Every policy, step by step, against its float64 oracle: sets exactly, outputs within the dtype's error budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.rules import RankUnion
from saccade.types import ModelShape

from . import oracles
from .harness import Decoder, check_outputs
from .layouts import Batch

LAYERS = 6

# Per case: policy, options of both sides, smallest legal budget.
CASES = {
    "dense": ("dense", {}, None),
    "streaming": ("streaming", {}, 5),
    "streaming-few-sinks": ("streaming", {"sinks": 0, "dense_layers": 1}, 1),
    "quest-kv": ("quest", {"page": 4}, 4),
    "quest-query": ("quest", {"page": 4, "heads": "query", "dense_layers": 0}, 4),
    "tidal-kv": ("tidal", {"reselect": [4]}, 1),
    "tidal-query": ("tidal", {"reselect": [3, 5], "heads": "query"}, 1),
    "tidal-once": ("tidal", {"reselect": [], "dense_layers": 0}, 1),
    "less_is_more": ("less_is_more", {"reselect": [4]}, 6),
    "less_is_more-no-window": ("less_is_more", {"reselect": [3], "recent": 0.0, "sinks": 2}, 4),
    "less_is_more-all-window": ("less_is_more", {"reselect": [], "recent": 1.0}, 6),
    "less_is_more-share": ("less_is_more", {"reselect": [2], "recent": 0.58, "sinks": 0, "dense_layers": 1}, 2),
}
ORACLES = {
    "dense": oracles.dense,
    "streaming": oracles.streaming,
    "quest": oracles.quest,
    "tidal": oracles.tidal,
    "less_is_more": oracles.less_is_more,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    """A batch, its layout and how the budget compares with its lengths."""
    edge = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48])
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "lengths": draw(st.lists(edge | st.integers(1, 60), min_size=1, max_size=3)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 4, 8])),
        "content": draw(st.sampled_from(["spread", "clustered", "constant"])),
        "layout": draw(st.sampled_from(["padded", "paged"])),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "shortcut": draw(st.booleans()),
        "spare": draw(st.sampled_from([0, 1, 3, 7, 12, 100]) | st.integers(0, 40)),
    }


def bound(case: str, situation: dict) -> tuple[Decoder, Batch, dict]:
    name, options, smallest = CASES[case]
    options = options if smallest is None else {**options, "budget": smallest + situation["spare"]}
    rng = np.random.default_rng(situation["seed"])
    sizes = {key: situation[key] for key in ("kv_heads", "group", "content")}
    batch = Batch.random(rng, situation["lengths"], layers=LAYERS, **sizes)
    shape = ModelShape(LAYERS, batch.kv_heads * batch.group, batch.kv_heads, batch.dim)
    plan = saccade.policy(name, **options).plan(shape)
    return Decoder(plan, shortcut=situation["shortcut"]), batch, options


def check_step(case: str, decoder: Decoder, batch: Batch, options: dict, situation: dict) -> list[oracles.Sets]:
    """One decode step of all rows against the oracle."""
    dtype = DTYPES[situation["dtype"]]
    batch.step()
    sets, outputs = decoder.step(batch, situation["layout"], dtype)
    expected = [ORACLES[CASES[case][0]](q, k, **options) for q, k in zip(batch.q, batch.k, strict=True)]
    assert sets == expected
    for length, row in zip(batch.lengths, sets, strict=True):
        assert all(s[-1] == length - 1 for layer in row for s in layer), "the current token is attended"
    check_outputs(batch, sets, outputs, dtype)
    return sets


@pytest.mark.parametrize("case", CASES)
@given(situation=situations())
@settings(max_examples=12, deadline=None)
def test_steps_in_sequence_match_the_oracle(case: str, situation: dict) -> None:
    decoder, batch, options = bound(case, situation)
    for _ in range(3):
        check_step(case, decoder, batch, options, situation)


@pytest.mark.parametrize(
    ("budget", "recent", "reserved"), [(50, 0.58, 29), (100, 0.29, 29), (2048, 0.25, 512), (6, 0.0, 5)]
)
def test_recency_share_is_a_decimal_number(budget: int, recent: float, reserved: int) -> None:
    """0.58 * 50 is 28.999999999999996 in binary, and 29 to whoever writes it."""
    rule = RankUnion(budget=budget, sinks=4, recent=recent)
    assert (rule.reserved, rule.window, rule.chosen) == (reserved, reserved - 4, budget - reserved)


@pytest.mark.parametrize("case", ["quest-kv", "quest-query", "tidal-kv", "less_is_more", "streaming"])
@given(situation=situations(), cut=st.integers(1, 6), data=st.data())
@settings(max_examples=8, deadline=None)
def test_index_survives_rewritten_tokens_and_moved_rows(
    case: str, situation: dict, cut: int, data: st.DataObject
) -> None:
    """Crop and decode other tokens (assisted decoding), then reorder rows (beams): no bound of a former key is left."""
    situation = {**situation, "lengths": [length + 6 for length in situation["lengths"]], "layout": "padded"}
    decoder, batch, options = bound(case, situation)
    for _ in range(2):
        check_step(case, decoder, batch, options, situation)

    batch.crop(cut)
    decoder.state.begin(max(batch.lengths) + 2)  # `Batch._padded` leaves two slots before the longest row
    for _ in range(2):
        check_step(case, decoder, batch, options, situation)

    rows = data.draw(st.lists(st.integers(0, len(batch.k) - 1), min_size=1, max_size=4))
    longest = batch.lengths.index(max(batch.lengths))
    rows.append(longest)  # buffers do not shrink when rows leave
    batch.select(rows)
    for layer in range(LAYERS):
        decoder.state.permute(layer, torch.tensor(rows))
    for _ in range(2):
        check_step(case, decoder, batch, options, situation)


@pytest.mark.parametrize("case", CASES)
@given(situation=situations())
@settings(max_examples=6, deadline=None)
def test_a_row_alone_is_the_row_in_its_batch(case: str, situation: dict) -> None:
    """Neighbours, padding and layout do not reach a row's sets."""
    decoder, batch, options = bound(case, situation)
    sets = check_step(case, decoder, batch, options, situation)
    other = "paged" if situation["layout"] == "padded" else "padded"
    for row in range(len(batch.k)):
        alone, lonely, _ = bound(case, {**situation, "lengths": situation["lengths"][row : row + 1]})
        lonely.k, lonely.v, lonely.q = batch.k[row : row + 1], batch.v[row : row + 1], batch.q[row : row + 1]
        assert alone.step(lonely, other, DTYPES[situation["dtype"]])[0] == sets[row : row + 1]
