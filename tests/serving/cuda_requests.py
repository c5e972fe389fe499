"""What requests of a `CudaEngine` are fed and should be answered; by the engine alone, or densely in float64."""

from collections.abc import Sequence

import torch
from cuda_engine import KV_HEADS, LAYERS, QUERY_HEADS, SCALE, CudaEngine, Row
from torch import Tensor

from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.decode.attend import attend
from saccade.decode.counters import Counters
from saccade.decode.state import DecodeState
from saccade.types import KVView, Rows, Softmax

QKV = list[tuple[Tensor, Tensor, Tensor]]
PAGES = "quest:budget=64,page=16"
REUSED_PAGES = "composed:scorer=page_bounds,page=16,budget=64,roles=layers:2+6"
CLUSTERS = "lychee_cluster:budget=64"
MIXED_PAGES = "composed:scorer=page_bounds,page=16,budget=64,roles={roles}"


class Requests:
    """What each request has been fed: its keys and values in order, and what it should be answered."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._fed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._states: dict[int, DecodeState] = {}

    def run(self, rows: Sequence[Row], padding: int = 0) -> None:
        """One step on random numbers, every output compared; `padding` positions follow that belong to no row."""
        tokens = sum(row.new for row in rows)
        given, qkv = self._draw(tokens + padding)
        outputs = self._engine.step(rows, given)
        start = 0
        for row in rows:
            if row.new:
                own = slice(start, start + row.new)
                for out, expected in zip(outputs, self._expected(row, own, qkv), strict=True):
                    # Float32 over a few hundred tokens; one token more or less moves a result by about 1e-2.
                    assert (out[own] - expected).abs().max() < 1e-5
            start += row.new

    def run_mixed(self) -> None:
        """Prompts in chunks beside decoding rows, one opted out; then decoding alone, in another order, padded."""
        self._engine.requests.rows[3] = RequestRow(sparse=False)
        self.run([Row(0, 150, 150, True), Row(3, 100, 100, True)])
        self.run([Row(0, 151), Row(1, 65, 65, True), Row(3, 101)])
        self.run([Row(1, 130, 65, True), Row(3, 102), Row(0, 152)])
        self.run([Row(1, 131), Row(0, 153)], padding=3)
        self.run([Row(0, 154), Row(1, 132), Row(2, 1, 1, True)])
        # Rows without tokens pad a batch.
        self.run([Row(1, 133), Row(0, 155), Row(2, 0, 0), Row(3, 0, 0)], padding=2)

    def _draw(self, tokens: int) -> tuple[QKV, QKV]:
        """What layers are given, and what it is by the time that it is read."""
        drawn = self._engine.random_qkv(tokens)
        return drawn, drawn

    def _expected(self, row: Row, own: slice, qkv: QKV) -> list[Tensor]:
        new = [(k[own], v[own]) for _, k, v in qkv]
        held = self._fed.get(row.slot) or [(k[:0], v[:0]) for k, v in new]
        self._fed[row.slot] = [
            (torch.cat((k[: row.length - row.new], fresh_k)), torch.cat((v[: row.length - row.new], fresh_v)))
            for (k, v), (fresh_k, fresh_v) in zip(held, new, strict=True)
        ]
        queries = [q[own] for q, _, _ in qkv]
        request = self._engine.requests.rows[row.slot]
        sparse = row.new == 1 and not row.prefilling and request.sparse
        return self._selected(row, queries) if sparse else self._dense(row, queries)

    def _selected(self, row: Row, queries: list[Tensor]) -> list[Tensor]:
        """By the engine alone, on a cache that is one page."""
        plan = self._engine.serving.plan
        state = self._states.setdefault(row.slot, DecodeState(plan, Counters(LAYERS), exhaustive_is_dense=False))
        state.begin(row.length - 1)
        rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [row.length])
        caches = self._fed[row.slot]
        return [
            attend(state, number, q, KVView(k[None], v[None], rows), Softmax(SCALE))
            for number, (q, (k, v)) in enumerate(zip(queries, caches, strict=True))
        ]

    def _dense(self, row: Row, queries: list[Tensor]) -> list[Tensor]:
        hidden = torch.arange(row.length) > torch.arange(row.length - row.new, row.length)[:, None]
        outputs = []
        for q, (k, v) in zip(queries, self._fed[row.slot], strict=True):
            keys, values = (part.double().repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * SCALE
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values).float())
        return outputs
