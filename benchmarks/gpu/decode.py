"""End to end: ms per token of whole models with random weights, one CUDA graph a step, and the share of the ceiling."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from saccade.adapters.hf.graph import GraphedStep
from saccade.adapters.hf.run import sparsify
from saccade.checkpoints.presets import random_model
from saccade.checkpoints.shape import shape_of
from saccade.methods.policy import Policy
from saccade.plans.cost import cost_of
from saccade.types import ModelShape

from . import dense
from .caches import dense_oracle
from .environment import environment
from .timing import Captured, Deadline, arguments, bandwidth, elapsed, reason, summary, write

POLICIES = (
    "dense",
    "tidal:budget=4096,reselect=13",
    "less_is_more:budget=4096,reselect=13",
    "quest:budget=4096",
    "lychee_decode:budget=4096,roles=every:8",
    "lychee_cluster:budget=4096",
    "resa:rectify=none",
    "streaming:budget=4096",
)
SHAPES = ("llama-3.1-8b", "qwen3-8b")
EMPTY = 16
"""Tokens of a context that costs nothing to attend to; `ideal_ms` starts from its time."""

CELLS = ((EMPTY, 1), (EMPTY, 4), (131_072, 1), (131_072, 4), (32_768, 1), (32_768, 4))
"""Contexts and batches, in the order in which time may end."""

STEPS, ROOM = 24, 256
CHECKED, CAPACITY = 200, 8192
"""A context that every policy's set covers, in a cache that none does: there all decode what dense attention does."""


def main() -> None:
    parser = arguments(__doc__, 240)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--checked", type=int, default=CHECKED, help="tokens of a context that every set covers")
    parser.add_argument("--profile", action="store_true", help="kernels of every variant's step; always at 131,072 x 1")
    given = parser.parse_args()
    for spec in given.policies:
        if 3 * Policy.from_spec(spec).phase.period > ROOM:
            parser.error(f"{spec}: of so long a period no three fit; rectify at most every {ROOM // 3 - 1} steps")
    deadline = Deadline(given.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = bandwidth(device, 16 if given.smoke else 4096)
    results: dict[str, Any] = {"rows": [], "left_out": [], "checks": [], "memory": memory}
    results["environment"] = environment(given.smoke)
    shapes = given.shapes.split(",")
    for number, shape in enumerate(shapes):
        end = deadline.left * (1 - 1 / (len(shapes) - number))
        cells = CELLS
        if given.smoke:
            shape, cells = smoke_folder(given.file.parent), ((EMPTY, 1), (300, 2))
        try:
            measure_shape(shape, cells, given, memory, results, deadline, end, device)
        except Exception as error:  # the other shape's figures stay
            results["left_out"].append({"shape": shape, "reason": reason(error)})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write(given.file, results)
    if any(not check["passed"] for check in results["checks"]):
        raise SystemExit("a policy that covers the context does not decode what dense attention decodes")


def measure_shape(
    shape: str,
    cells: tuple[tuple[int, int], ...],
    given: Any,
    memory: dict[str, float],
    results: dict[str, Any],
    deadline: Deadline,
    end: float,
    device: torch.device,
) -> None:
    """All cells of a model that time allows; `end` seconds belong to the next shape."""
    dtype = torch.float32 if given.smoke else torch.bfloat16
    model = random_model(shape, positions=max(context for context, _ in cells) + ROOM, dtype=dtype, device=device)
    sizes = shape_of(model.config)
    storage = Storage(sizes, max((context + ROOM) * batch for context, batch in cells), dtype, device)
    policies = [spec.replace("4096", "128") if given.smoke else spec for spec in given.policies]
    passing = check(model, storage, policies, shape, results, given)
    empty: dict[int, float] = {}
    for context, batch in cells:
        if deadline.left - end < 6:
            results["left_out"].append({"shape": shape, "context": context, "batch": batch, "reason": "no time"})
            continue
        rows = measure_cell(model, storage, passing, shape, context, batch, given, results, device)
        if context == EMPTY:
            empty[batch] = min(row["ms_per_token"] for row in rows)
        complete(rows, empty.get(batch), memory)
        results["rows"] += rows
        write(given.file, results)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Storage:
    """One layer-by-layer memory of random keys and values that all caches of all contexts and batches are views of."""

    def __init__(self, sizes: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        generator = torch.Generator(device).manual_seed(0)
        shape = (sizes.layers, 2, tokens * sizes.kv_heads * sizes.head_dim)
        self._held = torch.empty(shape, dtype=dtype, device=device)
        for layer in self._held:
            layer.normal_(generator=generator)

    def cache(self, model: PreTrainedModel, context: int, batch: int, capacity: int | None = None) -> StaticCache:
        """A `StaticCache` of `context` tokens with room for more; what is behind them, all such caches share."""
        capacity = context + ROOM if capacity is None else capacity
        cache = StaticCache(config=model.config, max_cache_len=capacity)
        size = (batch, self.sizes.kv_heads, capacity, self.sizes.head_dim)
        count = batch * self.sizes.kv_heads * capacity * self.sizes.head_dim
        for layer, (keys, values) in zip(cache.layers, self._held, strict=True):
            layer.keys, layer.values = keys[:count].view(size), values[:count].view(size)
            layer.dtype, layer.device = self.dtype, self.device
            layer.batch_size, layer.num_heads = batch, self.sizes.kv_heads
            layer.k_head_dim = layer.v_head_dim = self.sizes.head_dim
            layer.cumulative_length = torch.full((), context, dtype=torch.int64, device=self.device)
            layer.is_initialized = True
        return cache


@dataclass
class Timed:
    """A decoder: `step` decodes one token of every row, gives logits `[B, V]`; `period` steps are timed together."""

    policy: str
    runtime: str
    step: Callable[[], Tensor]
    cost: Any
    period: int = 1

    def run(self) -> None:
        for _ in range(self.period):
            self.step()


class LibraryStep:
    """A step of a model without this package, captured like ours."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, token: Tensor, masked: bool) -> None:
        self._model, self._cache, self._token, self._masked = model, cache, token, masked
        lengths = [layer.cumulative_length for layer in cache.layers]
        before = [length.clone() for length in lengths]
        self._logits = self._forward()
        self._captured = Captured([self._keep], token.device)
        for length, old in zip(lengths, before, strict=True):
            length.copy_(old)

    def __call__(self) -> Tensor:
        self._captured.run()
        return self._logits

    def _keep(self) -> None:
        self._logits = self._forward()

    def _forward(self) -> Tensor:
        positions = self._cache.layers[0].cumulative_length.view(1, 1).expand(self._token.shape[0], 1)
        mask = None
        if not self._masked:
            mask = torch.ones((self._token.shape[0], 1, 1, 1), dtype=torch.bool, device=self._token.device)
        output = self._model(
            self._token, attention_mask=mask, position_ids=positions, past_key_values=self._cache, use_cache=True
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def ours(model: PreTrainedModel, cache: StaticCache, spec: str, token: Tensor) -> Callable[[], Tensor]:
    """A step under a policy; called eagerly where there are no graphs."""
    with sparsify(model, Policy.from_spec(spec).settled(shape_of(model.config))) as run:
        if token.is_cuda:
            graph = GraphedStep(run, cache)
            return lambda: graph.step(token)
        from saccade.adapters.hf.graph import forward

        starts = torch.zeros(token.shape[0], dtype=torch.int32)
        fed = run.upkeep(cache, starts).before(int(cache.layers[0].cumulative_length), token)
        with run.lengths_on_device(starts):
            logits = forward(model, cache, fed, starts)
    return lambda: logits


def library(
    model: PreTrainedModel, cache: StaticCache, attention: dense.Attention | None, length: int, token: Tensor
) -> Callable[[], Tensor]:
    """A dense step: stock sdpa, or an attention that gets the first `length` tokens of the cache as they are."""
    if attention is None:
        return LibraryStep(model, cache, token, True)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        return attention(query[:, :, 0], key[:, :, :length], value[:, :, :length])[:, None], None

    AttentionInterface.register("bench", attend)
    AttentionMaskInterface.register("bench", sdpa_mask)
    model.set_attn_implementation("bench")
    try:
        step = LibraryStep(model, cache, token, False)
        # Without graphs a later call would run whatever the model is set to by then.
        logits = step()
        return step if token.is_cuda else lambda: logits
    finally:
        model.set_attn_implementation("sdpa")


def best_attention(storage: Storage, cache: StaticCache, context: int, device: torch.device) -> tuple[str, Any]:
    """The fastest dense attention here, over the keys of several layers in turn."""
    caches = [(layer.keys[:, :, : context + 1], layer.values[:, :, : context + 1]) for layer in cache.layers[:6]]
    sizes = storage.sizes
    shape = (caches[0][0].shape[0], sizes.query_heads, sizes.head_dim)
    queries = [torch.randn(shape, dtype=storage.dtype, device=device) for _ in range(2)]
    found, _ = dense.runnable(
        device, queries[0], *caches[0], dense_oracle(queries[0], *caches[0], sizes.head_dim**-0.5)
    )
    times = {}
    for name, attention in found.items():
        captured = Captured(dense.calls(attention, queries, caches, len(caches)), device)
        times[name] = min(captured.milliseconds() for _ in range(5))
    name = min(times, key=lambda candidate: times[candidate])
    return name, found[name]


def allowed_error(storage: Storage) -> float:
    """As in `saccade bench decode`: two roundings per layer of the residual stream add up at worst linearly."""
    return 2 * storage.sizes.layers * torch.finfo(storage.dtype).eps / 2


@torch.inference_mode()
def check(
    model: PreTrainedModel, storage: Storage, policies: list[str], shape: str, results: dict[str, Any], given: Any
) -> list[str]:
    """The policies that decode what stock attention decodes where they cover the context."""
    token = torch.full((2, 1), 7, device=storage.device)
    context, capacity = (min(60, given.checked), 300) if given.smoke else (given.checked, CAPACITY)
    allowed = allowed_error(storage)
    expected = library(model, storage.cache(model, context, 2, capacity), None, 0, token)().float().clone()
    passing = []
    for spec in policies:
        entry: dict[str, Any] = {"shape": shape, "policy": spec, "context": context, "allowed": allowed}
        try:
            got = ours(model, storage.cache(model, context, 2, capacity), spec, token)().float()
        except Exception as error:  # a policy that cannot run is left out, with its reason
            results["left_out"].append({"shape": shape, "policy": spec, "reason": reason(error)})
            continue
        entry["error"] = float((got - expected).norm() / expected.norm())
        entry["passed"] = entry["error"] <= allowed
        results["checks"].append(entry)
        if entry["passed"]:
            passing.append(spec)
    return passing


@torch.inference_mode()
def measure_cell(
    model: PreTrainedModel,
    storage: Storage,
    policies: list[str],
    shape: str,
    context: int,
    batch: int,
    given: Any,
    results: dict[str, Any],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Every decoder at one context and batch, one step each in turn; medians."""
    token = torch.full((batch, 1), 7, device=device)
    where = {"shape": shape, "context": context, "batch": batch}
    sizes = shape_of(model.config)
    weights = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes

    def cost(spec: str) -> Any:
        policy = Policy.from_spec(spec)
        sized = {"context": context, "batch": batch, "kv_itemsize": storage.dtype.itemsize, "weight_bytes": weights}
        return cost_of(policy.plan(sizes), policy.rectify, sizes, **sized)

    makers: list[tuple[str, str, Callable[[], Callable[[], Tensor]]]] = []
    cache = storage.cache(model, context, batch)
    makers.append(
        ("dense", "transformers", lambda: library(model, storage.cache(model, context, batch), None, 0, token))
    )
    name, attention = best_attention(storage, cache, context, device)
    makers.append(
        ("dense", name, lambda: library(model, storage.cache(model, context, batch), attention, context + 1, token))
    )
    made = [spec for spec in policies if context > EMPTY or spec == "dense"]
    makers += [
        (spec, "saccade", lambda spec=spec: ours(model, storage.cache(model, context, batch), spec, token))
        for spec in made
    ]
    timed: list[Timed] = []
    expected: Tensor | None = None
    for policy, runtime, make in makers:
        named = {**where, "policy": policy, "runtime": runtime}
        step = attempt(make, named, results)
        if step is None:
            continue
        if policy == "dense":
            logits = step().float().clone()
            expected = logits if expected is None else expected
            error, allowed = float((logits - expected).norm() / expected.norm()), allowed_error(storage)
            if error > allowed:
                results["left_out"].append({**named, "reason": f"logits differ by {error:.1e}, allowed {allowed:.1e}"})
                continue
        # Rectified policies in whole periods, as many as there is room for: a dense pass is a step of its own length.
        timed.append(Timed(policy, runtime, step, cost(policy), Policy.from_spec(policy).phase.period))
    times: list[list[float]] = [[] for _ in timed]
    for number in range(3 if given.smoke else STEPS):
        for variant, taken in zip(timed, times, strict=True):
            if (number + 1) * variant.period > ROOM - 1:
                continue
            milliseconds = elapsed(variant.run, device) / variant.period
            if number >= 1:
                taken.append(milliseconds)
    rows = []
    for variant, taken in zip(timed, times, strict=True):
        figures = summary(taken)
        rows.append(
            {
                **where,
                "policy": variant.policy,
                "runtime": variant.runtime,
                "threads": None,
                "ms_per_token": figures["ms"],
                **figures,
                "bytes": variant.cost.total,
                "attention_bytes": variant.cost.total - variant.cost.weights.total,
            }
        )
        if device.type == "cuda" and (given.profile or (context == 131_072 and batch == 1)):
            rows[-1]["kernels"] = attempt(lambda step=variant.step: kernels_of(step), where, results)
    return rows


def attempt(make: Callable[[], Any], where: dict[str, Any], results: dict[str, Any]) -> Any:
    """What `make` gives; None and a note of the reason if it fails, which leaves the others' figures."""
    try:
        return make()
    except Exception as error:  # whatever a library raises
        results["left_out"].append({**where, "reason": reason(error)})
        return None


def kernels_of(step: Callable[[], Tensor]) -> dict[str, Any]:
    """Where a step's time goes: milliseconds and launches of the kernels that take the most."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        step()
        torch.cuda.synchronize()
    events = sorted(watched.key_averages(), key=lambda event: -event.self_device_time_total)
    found = {event.key[:90]: [round(event.self_device_time_total / 1e3, 4), event.count] for event in events[:25]}
    return {"launches": sum(event.count for event in events), "most": found}


def complete(rows: list[dict[str, Any]], empty_ms: float | None, memory: dict[str, float]) -> None:
    """Add what follows from all rows of a cell: the ideal, the share of it, the gain over the best dense decoder."""
    best = min((row for row in rows if row["policy"] == "dense"), key=lambda row: row["ms_per_token"])
    stock = next((row["ms_per_token"] for row in rows if row["runtime"] == "transformers"), None)
    for row in rows:
        row["best_dense"] = best["runtime"]
        row["speedup_over_best_dense"] = best["ms_per_token"] / row["ms_per_token"]
        row["speedup_over_stock"] = None if stock is None else stock / row["ms_per_token"]
        row["ideal_ms"] = None
        if empty_ms is not None:
            row["ideal_ms"] = empty_ms + row["attention_bytes"] / memory["read_gb_s"] / 1e6
            row["share_of_ceiling"] = row["ideal_ms"] / row["ms_per_token"]


def smoke_folder(folder: Path) -> str:
    """A tiny model's configuration, to try the script."""
    from transformers import LlamaConfig

    made = folder / "smoke"
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(made)
    return str(made)


if __name__ == "__main__":
    main()
