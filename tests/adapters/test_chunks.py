"""Quest's bounds over chunks of text under a budget below the context: however one generates, the same tokens."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch

import saccade
from saccade.selection.chunks.bounds import ChunkBounds

from . import tiny
from .ways import WAYS

SPEC = "composed:scorer=page_bounds,chunking=text,page=4,dense_layers=1,budget=12"
SAME = ["by hand", "prompt lookup", "static cache", "by hand, static", "chunked prefill"]


class Letters:
    """A tokenizer whose token i is written as a letter, every third one followed by a delimiter."""

    def __len__(self) -> int:
        return tiny.VOCABULARY

    def batch_decode(self, tokens: list[list[int]], **options: Any) -> list[str]:
        return ["x" + (",. \n"[token // 3 % 4] if token % 3 == 0 else "") for (token,) in tokens]


@functools.cache
def letters() -> Letters:
    return Letters()


def tokens(way: str, spec: str = SPEC, tokenizer: Letters | None = None) -> tuple[torch.Tensor, tuple[str, ...]]:
    with saccade.sparsify(tiny.llama(), spec, tokenizer=tokenizer or letters()) as run:
        out = WAYS[way](tiny.llama())
        assert run.stats().share_attended < 0.9
        return out, run.notes


@functools.cache
def greedy() -> list[list[int]]:
    out, notes = tokens("greedy")
    assert notes == ()
    return out.tolist()


@pytest.mark.parametrize("way", SAME)
def test_ways_of_generating_agree(way: str) -> None:
    assert tokens(way)[0].tolist() == greedy()


def test_chunks_matter() -> None:
    """Else the test above would hold of any chunks."""
    others = [tokens("greedy", SPEC.replace("text", "fixed"))[0], WAYS["greedy"](tiny.llama())]
    assert all(other.tolist() != greedy() for other in others)


@pytest.mark.parametrize("rectify", ["none", "3"])
def test_a_left_padded_row_is_the_row_alone(rectify: str) -> None:
    spec, lengths = f"{SPEC},rectify={rectify},budget=24".replace("budget=12,", ""), [40, 30]
    with saccade.sparsify(tiny.llama(), spec, tokenizer=letters()):
        both = tiny.llama().generate(**tiny.padded(lengths), do_sample=False, max_new_tokens=12)
        for row, length in enumerate(lengths):
            ids = tiny.prompt(length, seed=row)
            alone = tiny.llama().generate(input_ids=ids, do_sample=False, max_new_tokens=12)
            assert alone[0].tolist() == both[row, -length - 12 :].tolist()


def test_without_a_tokenizer_chunks_are_pages_and_the_run_says_so() -> None:
    with saccade.sparsify(tiny.llama(), SPEC) as run:
        WAYS["greedy"](tiny.llama())
        index = run._hook.slot[0].state.indexes._indexes[1]
        assert isinstance(index, ChunkBounds)
        assert {stop - start for start, stop in pairwise(index.rows[0])} == {4}
        assert run.notes == ("composed: no tokenizer was given, so chunks have a fixed length",)
