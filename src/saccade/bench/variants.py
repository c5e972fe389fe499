"""What a benchmark lets decode in turns: the stock model, and models under a policy, on one memory of tokens."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..adapters.hf.cache import RoomyLayer, session_of
from ..adapters.hf.huge_pages import long_lived
from ..adapters.hf.run import Run, sparsify
from ..checkpoints.shape import shape_of
from ..decode.state import AttentionOperations
from ..machine import synchronize
from ..methods.policy import Policy
from ..plans.rectify import Phase, Rectify
from .check import checked
from .clock import Clock

STOCK, STOCK_AGAIN = "stock", "stock (last)"
"""As it comes; and once more, behind all others, where variants run one after another."""

DENSE = Policy.from_spec("dense")


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds that one call took, and its parts as far as they are known; `passes`: it also ran tokens again."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    passes: bool = False


class Memory:
    """Random keys and values of every layer, read by all variants: so that many of them fit into memory.

    Args:
        model: whose shape, dtype and device they have.
        context, batch: tokens per row, and rows.
        room: tokens that may be appended.
    """

    def __init__(self, model: PreTrainedModel, context: int, batch: int, room: int) -> None:
        shape = shape_of(model.config)
        generator = torch.Generator(model.device).manual_seed(0)
        size = (batch, shape.kv_heads, context + room, shape.head_dim)
        self.context, self.batch = context, batch
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._layers = [
            tuple(long_lived(size, like).normal_(generator=generator) for _ in range(2)) for _ in range(shape.layers)
        ]

    def cache(self) -> DynamicCache:
        """A stock cache that holds all tokens; appending to it does not change this memory."""
        cache = DynamicCache()
        if self.context:
            for keys, values in self._layers:
                layer = DynamicLayer()
                layer.update(keys[:, :, : self.context], values[:, :, : self.context])
                cache.layers.append(layer)
        return cache

    def shared_cache(self) -> DynamicCache:
        """A cache of ours-to-be on this very memory: appended tokens land behind the context."""
        cache = DynamicCache()
        cache.layers += [RoomyLayer(keys, values, self.context) for keys, values in self._layers]
        return cache


class Variant:
    """Stock transformers, decoding one token after another at a fixed context.

    Attributes:
        policy, runtime: as rows name them.
        plan: what is attended to, for counting bytes.
        phase: when the work repeats itself.
        clock: tells the parts of a step, where they can be told.
    """

    policy = STOCK
    runtime = "transformers"
    rectify: Rectify | None = None
    phase = Phase(None)
    clock: Clock | None = None

    def __init__(self, model: PreTrainedModel, memory: Memory, cache: DynamicCache) -> None:
        self.model, self.plan = model, DENSE.plan(shape_of(model.config))
        self.context, self.batch = memory.context, memory.batch
        self.cache = cache
        self.logits: Tensor | None = None
        self.steps: list[Step] = []
        self._token = torch.full((memory.batch, 1), 7, device=model.device)

    @torch.inference_mode()
    def turn(self, steps: int) -> None:
        """Decode `steps` timed tokens after an untimed one, which warms what others have used since."""
        self._decode(0)
        self.cache.crop(-1)
        for _ in range(0, steps, self.phase.period):
            self.steps += [self._decode(ahead) for ahead in range(self.phase.period)]
            self.cache.crop(-self.phase.period)

    def _decode(self, ahead: int) -> Step:
        position = torch.full((self.batch, 1), self.context + ahead, device=self.model.device)
        synchronize(self.model.device)
        if self.clock is not None:
            self.clock.read()
        passes, start = self.passes, time.perf_counter()
        output = self.model(self._token, past_key_values=self.cache, position_ids=position, use_cache=True)
        synchronize(self.model.device)
        seconds = time.perf_counter() - start
        if ahead == 0:
            self.logits = output.logits
        return Step(seconds, {} if self.clock is None else self.clock.read(), self.passes > passes)

    @property
    def passes(self) -> int:
        """Dense passes so far; none while the budget covers the row, whatever the phase says."""
        return 0

    def figures(self) -> dict[str, Any]:
        """What a row says of what was attended to, and of indexes."""
        return {"share_attended": 1.0, "index_bytes": 0, "build_seconds": 0.0}

    def close(self) -> None:
        """Let go of the cache; rows were read before."""
        self.cache = DynamicCache()


class Attached(Variant):
    """The model under a policy.

    Args:
        operations: what dense layers attend with, named as rows name the runtime; None: ours.
    """

    def __init__(
        self, model: PreTrainedModel, memory: Memory, policy: Policy, operations: AttentionOperations | None = None
    ) -> None:
        # The same weights under another tree of modules, which carries the policy.
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        super().__init__(copy.deepcopy(model, shared), memory, memory.shared_cache())
        self.policy, self.runtime = str(policy), "saccade" if operations is None else operations.name
        self.run: Run = sparsify(self.model, policy)
        self.plan, self.rectify, self.phase = self.run.plan, policy.rectify, policy.phase
        self._first(operations)

    @torch.inference_mode()
    def _first(self, operations: AttentionOperations | None) -> None:
        """Build the indexes; then one more step under the float64 check, after which steps are clocked."""
        with self.run.decoding():
            self._decode(0)
            self.cache.crop(-1)
            session = session_of(self.cache)
            assert session is not None, "the run has just decoded from this cache"
            if operations is not None:
                session.state.attention = operations
            with checked(session.state, f"{self.policy} on {self.runtime}"):
                self._decode(0)
            self.cache.crop(-1)
        if self.model.device.type == "cpu":
            self.clock = Clock(session.state)

    def turn(self, steps: int) -> None:
        with self.run.decoding():
            super().turn(steps)

    @property
    def passes(self) -> int:
        return 0 if self.rectify is None else self.run.stats().dense_passes

    def close(self) -> None:
        super().close()
        self.run.restore()

    def figures(self) -> dict[str, Any]:
        stats = self.run.stats()
        return {name: getattr(stats, name) for name in ("share_attended", "index_bytes", "build_seconds")}
