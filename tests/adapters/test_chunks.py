"""Indexes of text under a budget below the context: however one generates, the same tokens."""

import functools
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import saccade
from saccade.selection.clusters.mass_index import MassIndex

from . import tiny
from .tiny import CLUSTERS, LETTERS
from .ways import WAYS, offered

SAME = offered("by hand", "prompt lookup", "assisted", "static cache", "by hand, static", "chunked prefill")


def tokens(way: str, tokenizer: tiny.Letters | None = None) -> tuple[torch.Tensor, tuple[str, ...]]:
    with saccade.sparsify(tiny.llama(), CLUSTERS, tokenizer=tokenizer) as run:
        out = WAYS[way](tiny.llama())
        assert run.stats().share_attended < 0.9
        return out, run.notes


@functools.cache
def greedy() -> list[list[int]]:
    out, notes = tokens("greedy", LETTERS)
    assert notes == ()
    return out.tolist()


@pytest.mark.parametrize("way", SAME)
def test_ways_of_generating_agree(way: str) -> None:
    assert tokens(way, LETTERS)[0].tolist() == greedy()


@pytest.mark.parametrize("turn", [20, 45])
def test_a_turn_in_place_of_another_is_indexed_anew(turn: int) -> None:
    """What a prompt has replaced, decoding behind it finds, whether it ends below what was looked at or beyond."""
    model, first, other, fed = tiny.llama(), tiny.prompt(60), tiny.prompt(turn, seed=9), tiny.prompt(6, seed=3)

    def decode(cache: DynamicCache) -> torch.Tensor:
        return torch.cat([model(fed[:, at : at + 1], past_key_values=cache).logits for at in range(fed.shape[1])])

    with torch.no_grad(), saccade.sparsify(model, CLUSTERS, tokenizer=LETTERS) as run:
        cache, anew = DynamicCache(), DynamicCache()
        model(first, past_key_values=cache)
        decode(cache)
        cache.crop(30)
        model(other, past_key_values=cache)
        model(torch.cat((first[:, :30], other), dim=1), past_key_values=anew)
        assert (decode(cache) - decode(anew)).abs().max() < 1e-4
        assert run.stats().share_attended < 0.9


class Interrupting(TorchDispatchMode):
    """Ctrl-C instead of one of torch's operations, behind `left` others; -1: never."""

    left = -1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rectify", ["none", "3"])
@torch.no_grad()
def test_ctrl_c_anywhere_changes_nothing(rectify: str) -> None:
    """Also while text is taken in, a layer at a time: whoever was interrupted takes it in again."""
    model, caches, mode, behind = tiny.llama(), [DynamicCache(), DynamicCache()], Interrupting(), 0
    layers, spec = model.get_decoder().layers, CLUSTERS.replace("budget=16", f"budget=24,rectify={rectify}")
    begin = layers[0].register_forward_pre_hook(lambda *given: setattr(mode, "left", behind))
    end = layers[-1].register_forward_hook(lambda *given: setattr(mode, "left", -1))
    with saccade.sparsify(model, spec, tokenizer=LETTERS):
        for cache in caches:
            model(tiny.prompt(40), past_key_values=cache)
        for number, token in enumerate(tiny.prompt(6, seed=2)[0]):
            expected = model(token[None, None], past_key_values=caches[0]).logits
            behind, logits = number, None
            while logits is None:
                behind += 61
                with suppress(KeyboardInterrupt), mode:
                    logits = model(token[None, None], past_key_values=caches[1]).logits
            assert behind > 5 * 61
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    begin.remove()
    end.remove()


def test_chunks_matter() -> None:
    """Else the test above would hold of any chunks."""
    others = [tokens("greedy")[0], WAYS["greedy"](tiny.llama())]
    assert all(other.tolist() != greedy() for other in others)


def test_without_a_tokenizer_chunks_have_one_length_and_the_run_says_so() -> None:
    with saccade.sparsify(tiny.llama(), CLUSTERS) as run:
        cache = DynamicCache()
        tiny.by_hand(tiny.llama(), tiny.prompt(), 9, cache)
        index = cache.layers[0].session.state.indexes.index
        assert isinstance(index, MassIndex)
        edges = index.table.edges[0, : int(index.table.counts[0]) + 1].tolist()
        assert {stop - start for start, stop in pairwise(edges)} == {4}
        assert run.notes == ("lychee_cluster: no tokenizer was given, so chunks have a fixed length",)
