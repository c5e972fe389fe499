"""Policies at their smallest budgets under rectification, and the model that nothing was attached to."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

import saccade
from saccade.adapters.hf.window import RewindingWindow

from . import tiny

EVERY = 3
NEW = 9
SMALLEST = {
    "streaming": "streaming:budget=5",
    "quest": "quest:page=4,budget=4",
    "tidal": "tidal:reselect=3,dense_layers=1,budget=1",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=6",
    "exact_topk": "exact_topk:dense_layers=1,budget=1",
    "resa": "resa:page=4,min_pages=1,ratio=0.01",
    "lychee_decode": "lychee_decode:roles=every:2,budget=1",
    "lychee_cluster": "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget={cluster}",
}
"""Every policy at its smallest legal budget; `cluster`: sinks, a buffer of 1, a chunk, and what may be in none."""


ROUNDING = 2e5 * 2.0**-53
"""Some thousand sums of float64 numbers of order 1 and 10, in another order where shapes differ."""


def specs(every: int, mode: str = "overwrite") -> dict[str, str]:
    suffix = f",rectify={every}" + ("" if mode == "overwrite" else f":{mode}")
    return {name: spec.format(cluster=2 + 1 + 4 + every + 3) + suffix for name, spec in SMALLEST.items()}


@functools.cache
def twin() -> PreTrainedModel:
    """The same weights, never attached."""
    return tiny.fresh("llama")


@functools.cache
def exact_twin(model: Callable[..., PreTrainedModel] = tiny.fresh, name: str = "llama") -> PreTrainedModel:
    """A model that is never attached, in float64."""
    return model(name).double()


Numbers = tuple[tuple[int, ...], ...]


def numbers(rows: torch.Tensor) -> Numbers:
    """Rows by which what was computed of them is found again."""
    return tuple(map(tuple, rows.tolist()))


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def prefilled(exact: PreTrainedModel, ids: Numbers, positions: Numbers, visible: Numbers) -> list[Any]:
    """Layers of stock's cache that keep anything; between two passes what is clean stays the same."""
    held, (text, places, mask) = DynamicCache(), map(torch.tensor, (ids, positions, visible))
    exact(text, attention_mask=mask, position_ids=places, past_key_values=held)
    return held.layers


@contextmanager
def clean_slots_are_dense(
    run: saccade.Run, exact: PreTrainedModel, rounding: float = ROUNDING, window: int = 0
) -> Iterator[list[int]]:
    """After every call all layers hold, in clean slots, what stock makes of the same tokens; yields their counts."""
    checked = []

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        session, cache = run._hook.latest.session, kwargs.get(run._hook.kept)
        if cache is None:
            return
        length = int(cache.get_seq_length())
        clean = min(session.final.boundary, length)
        ids, positions = session.state.history.ids(0, clean), session.state.history.positions(0, clean)
        assert ids is not None and positions is not None
        # In slots of padding the first position is repeated.
        visible = torch.cat([positions[:, 1:] > positions[:, :-1], torch.ones_like(positions[:, :1]) > 0], dim=1)
        everything = prefilled(exact, *map(numbers, (ids, positions, visible.long())))
        # Those that share keep nothing, and are listed since transformers 5.24.
        keeping = (layer for layer in cache.layers if layer.keys is not None)
        for ours, theirs in zip(keeping, everything, strict=True):
            first = max(length - window + 1, 0) if isinstance(ours, RewindingWindow) else 0
            assert isinstance(ours, StaticLayer) or ours.keys.shape[2] == length - first
            real = visible[:, None, first:, None]
            for held, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                difference = (held[:, :, : clean - first] - wanted[:, :, first:]).masked_fill(~real, 0.0)
                largest = wanted.masked_fill(~visible[:, None, :, None], 0.0).abs().max()
                assert float(difference.abs().max()) <= rounding * float(largest)
        checked.append(clean)

    with run.model.model.register_forward_hook(check, with_kwargs=True):
        yield checked
