"""An observer that recomputes, from the very cache a layer attends to, which positions the policy must attend to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import saccade
from methods import oracles
from methods.cases import ORACLES
from methods.harness import expand
from saccade.plans.roles import HeadSpan
from saccade.types import KVView, Rows, Selection, Softmax


class OracleObserver:
    """Fails at the first set that differs from the oracle's. It holds nothing that a cache could have carried along."""

    def __init__(self, spec: str) -> None:
        policy = saccade.Policy.from_spec(spec)
        self.name = policy.name
        # What these tests leave at its default has tests of its own: other rules, rectification, chunks of text.
        left = {"rectify", "rule", "top_p", "threshold", "ratio", "chunking", "chunk_min", "chunk_max"}
        self.options = policy.options.model_dump(exclude=left)
        self.seen: dict[tuple[int, tuple[int, ...]], list[list[list[int]]]] = {}
        # The selecting layer's q and k per step and row; holding the rows keeps their ids theirs.
        self._source: dict[tuple[int, int], tuple[Rows, np.ndarray, np.ndarray]] = {}

    def __deepcopy__(self, memo: Any) -> OracleObserver:
        return self

    def observe(
        self, layer: int, span: HeadSpan, q: torch.Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        lengths = kv.rows.seq_lens.tolist()
        actual = [
            [_positions(selection, row, head, q.shape[1], length) for head in range(q.shape[1])]
            for row, length in enumerate(lengths)
        ]
        self.seen[layer, tuple(lengths)] = actual
        for row, length in enumerate(lengths):
            keys, queries = _row(kv, row, length), q[row].double().numpy()
            expected = self._expected(layer, kv.rows, row, queries, keys)
            assert actual[row] == expected, f"layer {layer}, row {row}, {length} tokens"

    def _expected(self, layer: int, rows: Rows, row: int, q: np.ndarray, k: np.ndarray) -> list[list[int]]:
        """Run the policy's oracle over this layer, with the last selecting layer's q and k where it reuses."""
        # A frame that nobody asked for is none.
        o = {
            name: value for name, value in self.options.items() if value is not None or name not in ("sinks", "window")
        }
        if self.name == "dense":
            return oracles.everything(q, k)
        dense_layers = o.pop("dense_layers")
        if layer < dense_layers:
            return oracles.everything(q, k)
        if self.name in ("tidal", "less_is_more"):
            reselect = o.pop("reselect")
            if layer == dense_layers or layer in reselect:
                self._source[id(rows), row] = (rows, q, k)
                return oracles.everything(q, k)
            _, q, k = self._source[id(rows), row]
            # One selecting layer, and this one that reuses what it chose.
            return ORACLES[self.name]([q, q], [k, k], [], dense_layers=0, reselect=[], **o).sets[1]
        return ORACLES[self.name]([q], [k], [], dense_layers=0, **o).sets[0]


def _positions(selection: Selection | None, row: int, head: int, heads: int, length: int) -> list[int]:
    return list(range(length)) if selection is None else expand(selection, row, head, heads, length)


def _row(kv: KVView, row: int, length: int) -> np.ndarray:
    """Keys ``[Hkv, T, d]`` of one row in logical order."""
    slots = int(kv.rows.row_start[row]) + torch.arange(length)
    pages = kv.rows.page_table[row].long()[slots // kv.page]
    return kv.k[pages, slots % kv.page].transpose(0, 1).double().numpy()
