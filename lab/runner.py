"""One policy's model, cache and place in a text that is decoded with its own tokens."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from saccade.adapters.hf.cache import session_of
from saccade.adapters.hf.run import Run
from saccade.bench.rows import quartiles
from saccade.checkpoints.shape import shape_of
from saccade.checkpoints.traffic import weights_read
from saccade.plans.cost import cost_of
from saccade.plans.plan import Plan
from saccade.recipes.machine import synchronize

_TOGETHER = 32  # tokens of a call when nothing is timed


class Runner:
    """One policy's model, cache and place in the text."""

    def __init__(self, model: Any, run: Run, tokens: Sequence[int], prompt: int) -> None:
        self.model = model
        self.run = run
        self.label = str(run.policy)
        self.cache: Any = DynamicCache()
        self._tokens = torch.tensor([tokens], device=model.device)
        self._prompt = prompt
        self._done = 0

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompt densely."""
        self.model(self._tokens[:, : self._prompt], past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def block(self, count: int) -> dict[str, Any]:
        """Decode `count` tokens one by one, each timed; dense passes over earlier steps apart."""
        phase = self.run.policy.phase
        steps, passes = list[float](), list[float]()
        indexed = -self._index_seconds()
        with self.run.decoding():
            for _ in range(count):
                position = self._prompt + self._done
                token = self._tokens[:, position : position + 1]
                synchronize(token.device)
                start = time.perf_counter()
                self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
                synchronize(token.device)
                elapsed = time.perf_counter() - start
                (passes if phase.dense_at(self._done) else steps).append(elapsed)
                self._done += 1
        indexed += self._index_seconds()
        stats = self.run.stats()
        fast, median, slow = quartiles(steps)
        used, reserved = self.kv_bytes()
        return {
            "policy": self.label,
            "step": self._done,
            "context": self._prompt + self._done,
            "ms": median,
            "ms_fast": fast,
            "ms_slow": slow,
            "ms_pass": 1e3 * statistics.median(passes) if passes else None,
            "passes": len(passes),
            "index_time_share": indexed / (sum(steps) + sum(passes)),
            "kv_bytes": used,
            "kv_reserved_bytes": reserved,
            "index_bytes": stats.index_bytes,
            "expected_bytes": _expected(self.run.plan, self._prompt + self._done, self.model),
        }

    @torch.inference_mode()
    def feed(self, count: int) -> None:
        """Decode `count` tokens, several to a call but no more than go without a dense pass among them."""
        phase = self.run.policy.phase
        while count:
            size = next(phase.pieces(self._done, min(count, _TOGETHER)))
            position = self._prompt + self._done
            tokens = self._tokens[:, position : position + size]
            self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self._done += size
            count -= size

    def _index_seconds(self) -> float:
        """Time that updates of the indexes have taken so far, their first build left out."""
        session = session_of(self.cache)
        return 0.0 if session is None else session.state.indexes.later_seconds

    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of the cached keys and values, and of the buffers that hold them."""
        used = reserved = 0
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    used += tensor.nelement() * tensor.element_size()
                    reserved += tensor.untyped_storage().nbytes()
        return used, reserved


def _expected(plan: Plan, context: int, model: Any) -> float:
    """Bytes that a sparse step must move, by the cost model."""
    shape, size = shape_of(model.config), model.dtype.itemsize
    weights = weights_read(model) * size
    return cost_of(plan, None, shape, context=context, batch=1, kv_itemsize=size, weight_bytes=weights).total
