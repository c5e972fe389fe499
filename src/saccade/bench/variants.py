"""What a benchmark lets decode in turns: the stock model, and models under a policy, on one memory of tokens."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..adapters.hf.cache import RoomyLayer, session_of
from ..adapters.hf.huge_pages import long_lived
from ..adapters.hf.run import Run, sparsify
from ..adapters.hf.support import cached, empty_cache
from ..checkpoints.shape import shape_of
from ..decode.state import AttentionOperations
from ..errors import SaccadeError
from ..eval.snapshot import Snapshot
from ..methods.policy import Policy
from ..plans.rectify import Phase, Rectify
from ..recipes.machine import synchronize
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
    """Random keys and values of all layers that keep every token, read by all variants: so that many of them fit.

    Layers with a window hold a full one of random keys and values, recurrent ones the states that a short prompt left.

    Args:
        model: whose shape, dtype and device they have.
        context, batch: tokens per row, and rows.
        room: tokens that may be appended.
    """

    def __init__(self, model: PreTrainedModel, context: int, batch: int, room: int) -> None:
        shape = shape_of(model.config)
        generator = torch.Generator(model.device).manual_seed(0)
        sizes = [(batch, shape.kv_heads, context + room, width) for width in (shape.head_dim, shape.value_width)]
        self.context, self.batch = context, batch
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._layers = {
            layer: tuple(long_lived(size, like).normal_(generator=generator) for size in sizes)
            for layer in shape.keeping
        }
        self._others = _others(model, context, batch, generator) if shape.kinds else DynamicCache()

    def cache(self) -> DynamicCache:
        """A stock cache that holds all tokens; appending to it does not change this memory."""
        return self._filled(self._stock) if self.context else copy.deepcopy(self._others)

    def shared_cache(self) -> DynamicCache:
        """A cache of ours-to-be on this very memory: appended tokens land behind the context."""
        return self._filled(lambda keys, values: RoomyLayer(keys, values, self.context))

    def _stock(self, keys: Tensor, values: Tensor) -> DynamicLayer:
        layer = DynamicLayer()
        layer.update(keys[:, :, : self.context], values[:, :, : self.context])
        return layer

    def _filled(self, made: Callable[[Tensor, Tensor], DynamicLayer]) -> DynamicCache:
        """Layers that keep every token, as `made`, among copies of the others."""
        cache = copy.deepcopy(self._others)
        for layer, held in self._layers.items():
            cache.layers[layer : layer + 1] = [made(*held)]
        return cache


@torch.inference_mode()
def _others(model: PreTrainedModel, context: int, batch: int, generator: torch.Generator) -> DynamicCache:
    """A model's own cache, whose layers without full attention hold what is as large as `context` tokens leave."""
    cache = empty_cache(model)
    if cache is None:
        raise SaccadeError(f"{model.config.model_type} makes a cache of its own class, which cannot be filled here")
    if context:
        model(torch.full((batch, min(context, 8)), 7, device=model.device), **cached(model, cache))
    for layer in cache.layers if context else ():
        if isinstance(layer, DynamicSlidingWindowLayer):
            length = min(context, layer.sliding_window - 1)
            held = (states for states in (layer.keys, layer.values) if states is not None)
            layer.keys, layer.values = (
                states.new_empty(*states.shape[:2], length, states.shape[-1]).normal_(generator=generator)
                for states in held
            )
            layer.cumulative_length = context
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
        self.cache, self._kept = cache, shape_of(model.config).keeping
        self._others = Snapshot.of(cache, self._kept)
        self.logits: Tensor | None = None
        self.steps: list[Step] = []
        self._token = torch.full((memory.batch, 1), 7, device=model.device)

    @torch.inference_mode()
    def turn(self, steps: int) -> None:
        """Decode `steps` timed tokens after an untimed one, which warms what others have used since."""
        self._decode(0)
        self._take_back(1)
        for _ in range(0, steps, self.phase.period):
            self.steps += [self._decode(ahead) for ahead in range(self.phase.period)]
            self._take_back(self.phase.period)

    def _take_back(self, tokens: int) -> None:
        """Let the cache hold what it held before the last `tokens`, which no crop brings back where layers forget."""
        layers: list[Any] = self.cache.layers
        for number in self._kept:
            layers[number].crop(-tokens)
        self._others.put_back(self.cache)

    def _decode(self, ahead: int) -> Step:
        position = torch.full((self.batch, 1), self.context + ahead, device=self.model.device)
        inputs = {"position_ids": position, **cached(self.model, self.cache)}
        synchronize(self.model.device)
        if self.clock is not None:
            self.clock.read()
        passes, start = self.passes, time.perf_counter()
        output = self.model(self._token, **inputs)
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
        self.run: Run = sparsify(self.model, policy.settled(shape_of(model.config)))
        self.plan, self.rectify, self.phase = self.run.plan, policy.rectify, policy.phase
        self._first(operations)

    @torch.inference_mode()
    def _first(self, operations: AttentionOperations | None) -> None:
        """Build the indexes; then one more step under the float64 check, after which steps are clocked."""
        with self.run.decoding():
            self._decode(0)
            self._take_back(1)
            session = session_of(self.cache)
            assert session is not None, "the run has just decoded from this cache"
            if operations is not None:
                session.state.attention = operations
            with checked(session.state, f"{self.policy} on {self.runtime}"):
                self._decode(0)
            self._take_back(1)
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
