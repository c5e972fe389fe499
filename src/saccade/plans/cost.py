"""What a decoded token moves through memory, counted from a plan: the bytes that bound every speed-up.

Decoding is bound by memory traffic, so dense bytes over a policy's bytes is the most it can gain over a perfect dense
decoder, on any machine. `docs/cost.md` says what is counted.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from ..errors import PolicyError
from ..selection.costs import Bytes
from ..types import ModelShape, Role
from .plan import Plan
from .rectify import Rectify

PARTS = ("weights", "kv", "scores", "index", "rectification")


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one decoded token of every row of a batch.

    Attributes:
        weights: read once for the whole batch.
        kv: keys and values that decoding steps attend to, the new ones written, and the states of recurrent layers,
            which every step reads and writes.
        scores: float32 scores of units, written and read again to cut them.
        index: what a selector reads to make scores, and the upkeep of what it reads.
        rectification: the dense pass's share: the cache it reads, what it rewrites, the index of that.
        total, dense_total: read and written in all, under the policy and under dense attention.
        notes: what the figures assume beside the plan and the sizes.
    """

    weights: Bytes
    kv: Bytes
    scores: Bytes
    index: Bytes
    rectification: Bytes
    dense_total: float
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        parts: list[Bytes] = [getattr(self, name) for name in PARTS]
        return sum(part.read for part in parts) + sum(part.written for part in parts)

    @property
    def ceiling_over_dense(self) -> float:
        """The most that this can be faster than dense attention, end to end."""
        return self.dense_total / self.total


def cost_of(
    plan: Plan,
    rectify: Rectify | None,
    shape: ModelShape,
    *,
    context: int,
    batch: int,
    kv_itemsize: float,
    weight_bytes: float,
    state_bytes: float | None = None,
    acceptance: float = 1.0,
) -> Cost:
    """Bytes per decoded token of a plan on a model.

    Args:
        plan, rectify, shape: what runs, how its sparse steps are made good if they are, and the sizes it is bound to.
        context: tokens cached per row before the decoded one.
        batch: rows decoded together.
        kv_itemsize, weight_bytes: of a number in the cache, and of the weights that a step reads.
        state_bytes: of one row's states in recurrent layers; None: not known, which is said where there are such.
        acceptance: mean share of a draft that dense attention confirms, 0 to 1; of use to verifying rectification only.

    Raises:
        PolicyError: a value out of range, or a plan of another shape.
    """
    roles = plan.roles.layers
    if len(roles) != shape.layers or {len(roles[layer]) for layer in shape.full_layers} != {shape.kv_heads}:
        raise PolicyError(
            f"the plan has {len(roles)} layers of {len(roles[0]) if roles else 0} KV heads, "
            f"the model {shape.layers} of {shape.kv_heads}"
        )
    for name, value, least in (("context", context, 0), ("batch", batch, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PolicyError(f"{name}={value!r} is not valid: a whole number of at least {least}")
    if not (math.isfinite(kv_itemsize) and kv_itemsize > 0):
        raise PolicyError(f"kv_itemsize={kv_itemsize!r} is not valid: bytes per number, more than 0")
    for name, size in (("weight_bytes", weight_bytes), ("state_bytes", state_bytes)):
        if size is not None and not (math.isfinite(size) and size >= 0):
            raise PolicyError(f"{name}={size!r} is not valid: a finite number of at least 0")
    if not 0 <= acceptance <= 1:
        raise PolicyError(f"acceptance={acceptance!r} is not valid: a share from 0 to 1")
    length, selector = context + 1, plan.selector
    token, seen = shape.kv_heads * shape.pair * kv_itemsize, min(length, shape.window or 0)
    full, windowed, sharing = {*shape.full_layers}, {*shape.windowed}, {*shape.sources}
    cache, new = Bytes(read=len(full) * length * token), Bytes(written=len(full - sharing) * token)
    windows = Bytes(read=len(windowed) * seen * token, written=len(windowed - sharing) * token)
    others = windows + Bytes(read=state_bytes or 0, written=state_bytes or 0)
    dense_total = weight_bytes + batch * (cache + new + others).total
    known = full | windowed | (set() if state_bytes is None else {*shape.recurrent})
    missing = shape.layers - len(known)
    notes: tuple[str, ...] = (f"what {missing} layers of other kinds read is not counted",) if missing else ()
    if selector is None or selector.covers(length):
        if selector is not None:
            notes += (f"the budget holds all {length} tokens: every step is dense and nothing is rectified",)
        everything = (cache + new + others).times(batch)
        return Cost(Bytes(weight_bytes), everything, Bytes(), Bytes(), Bytes(), dense_total, notes)
    kv, scores, index = _sparse_step(plan, shape, length, kv_itemsize)
    notes += tuple(filter(None, (selector.assumption,)))
    if selector.heads == "query" and shape.group > 1:
        notes += ("sets of query heads are counted as if they had no token in common",)
    steps, chunks, weight_reads, rectification = 1.0, 0.0, 1.0, Bytes()
    if rectify is not None:
        every, gained = rectify.every, rectify.every + 1.0
        if rectify.mode == "verify":
            gained = acceptance * every + 1
            notes += (f"acceptance {acceptance:g}: of {every} drafts {acceptance * every:g} are taken to stand",)
        steps, chunks, weight_reads = every / gained, 1 / gained, (every + 1) / gained
        indexed = len(plan.refreshing) * shape.kv_heads
        upkeep = selector.upkeep(length, 1, every, shape.head_dim, kv_itemsize).times(indexed)
        rectification = (cache + new.times(every) + upkeep).times(chunks)
    return Cost(
        weights=Bytes(weight_bytes * weight_reads),
        kv=(kv.times(steps) + new.times(steps + chunks) + others).times(batch),
        scores=scores.times(steps * batch),
        index=index.times(steps * batch),
        rectification=rectification.times(batch),
        dense_total=dense_total,
        notes=notes,
    )


def cache_read(plan: Plan, rectify: Rectify | None, shape: ModelShape, context: int) -> float:
    """What a decoded token reads of the cache, index and dense passes included, over what dense attention reads."""
    policies = (plan, rectify), (replace(plan, selector=None), None)
    sizes = {"context": context, "batch": 1, "kv_itemsize": 2.0, "weight_bytes": 0.0}
    own, dense = (cost_of(one, how, shape, **sizes) for one, how in policies)  # type: ignore[arg-type]  # by name
    return (own.kv + own.index + own.rectification).read / dense.kv.read


def _sparse_step(plan: Plan, shape: ModelShape, length: int, itemsize: float) -> tuple[Bytes, Bytes, Bytes]:
    """Keys and values, scores, and index of one row's sparse step, all layers together."""
    selector, head_dim = plan.selector, shape.head_dim
    assert selector is not None, "without a selector no step is sparse"
    heads = Counter(role for roles in plan.roles.layers for role in roles)
    to_all = heads[Role.DENSE] + heads[Role.PUBLISH]
    to_set = heads[Role.SELECT] + heads[Role.REUSE]
    sets = shape.group if selector.heads == "query" else 1
    attended = to_all * length + to_set * min(sets * selector.size(length), length)
    # A publisher's scores come from dense attention, if that makes the selector's kind of score.
    searching = heads[Role.SELECT] + (heads[Role.PUBLISH] if selector.fused_pooling is None else 0)
    search = selector.search(length, head_dim, itemsize).times(searching)
    # A layer's index covers all its heads, whichever of them refresh.
    upkeep = selector.upkeep(length, 1, 0, head_dim, itemsize).times(len(plan.refreshing) * shape.kv_heads)
    scores = selector.scores(length, shape.group).times(heads[Role.SELECT] + heads[Role.PUBLISH])
    return Bytes(read=attended * shape.pair * itemsize), scores, search + upkeep
