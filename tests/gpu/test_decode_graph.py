"""Steps that replay a CUDA graph decode what the same steps decode one call after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

import saccade
from forcing import sparse_below_the_budget
from saccade.adapters.hf.graph import GraphedStep, forward, row_starts
from saccade.errors import AttachmentError, UnsupportedModelError

LAYERS, CAPACITY, NEW = 4, 512, 12

POLICIES = {
    "dense": "dense",
    "streaming": "streaming:budget=64",
    "quest": "quest:budget=64,page=16",
    "quest, query heads": "quest:budget=64,page=16,heads=query",
    "resa": "resa:page=16,min_pages=3,ratio=0.1,rectify=none",
    "tidal": "tidal:budget=64,reselect=3",
    "tidal, ratio": "tidal:rule=ratio,ratio=0.2,reselect=3",
    "lychee_decode, ratio": "lychee_decode:rule=ratio,ratio=0.2,roles=every:2",
    "tidal, frame": "tidal:budget=64,reselect=3,sinks=4,window=16",
    "less_is_more": "less_is_more:budget=64,reselect=3",
    "lychee_decode": "lychee_decode:budget=64,roles=every:2",
    "lychee_decode, pages": "lychee_decode:budget=64,page=16,roles=every:2",
    "exact_topk": "exact_topk:budget=64",
    "lychee_cluster": "lychee_cluster:budget=64",
    "lychee_cluster, small groups": "lychee_cluster:budget=64,form=paper,chunk_min=2,chunk_max=4,replant=8",
    "lychee_cluster, text": "lychee_cluster:budget=64,chunk_min=2,chunk_max=4",
    "token_clusters": "token_clusters:budget=64,group=128",
    "token_clusters, query heads": "token_clusters:budget=64,group=128,heads=query",
    "covering": "tidal:budget=400,reselect=3",
    "resa, rectified": "resa:page=16,min_pages=3,ratio=0.1,rectify=4",
    "tidal, rectified": "tidal:budget=64,reselect=3,rectify=5",
    "lychee_cluster, rectified": "lychee_cluster:budget=64,form=paper,chunk_min=2,chunk_max=4,replant=8,rectify=4",
    "token_clusters, rectified": "token_clusters:budget=64,buffer=8,rectify=4",
}
"""Of those that are rectified, two passes in `NEW` steps, the step behind a pass among them."""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=request.param, attn_implementation="sdpa")
    return made.eval()


def batches() -> dict[str, tuple[Tensor, Tensor | None]]:
    """Prompts `[B, T]` and their masks; lengths at, behind and before the edge of a page, and shorter than a set."""
    generator = torch.Generator().manual_seed(1)

    def ids(rows: int, length: int) -> Tensor:
        return torch.randint(2, 128, (rows, length), generator=generator).cuda()

    mask = torch.ones((3, 301), dtype=torch.int64)
    mask[1, :170], mask[2, :280] = 0, 0
    return {
        "one, 37": (ids(1, 37), None),
        "one, 250": (ids(1, 250), None),
        "three, 160": (ids(3, 160), None),
        "three, padded": (ids(3, 301), mask.cuda()),
    }


@contextmanager
def never_waiting() -> Iterator[None]:
    """A call that makes the host wait for the device fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prefilled(model: PreTrainedModel, ids: Tensor, mask: Tensor | None) -> tuple[StaticCache, Tensor]:
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    seen = torch.ones_like(ids) if mask is None else mask
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    output = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    return cache, output.logits[:, -1]


def eager(model: PreTrainedModel, spec: str, ids: Tensor, mask: Tensor | None) -> tuple[list[Tensor], Any]:
    """Greedy steps one call after the other; from the second on, none makes the host wait."""
    with saccade.sparsify(model, spec) as run:
        cache, logits = prefilled(model, ids, mask)
        first, steps = row_starts(mask, ids.shape[0]), [logits]
        upkeep, starts, past = run.upkeep(cache, first), first.cuda(), ids.shape[1]
        for step in range(NEW):
            token = steps[-1].argmax(-1, keepdim=True)
            with run.lengths_on_device(starts):
                if step == 0:
                    fed = upkeep.before(past, token)
                    steps.append(forward(model, cache, fed, starts))
                    continue
                with never_waiting():
                    fed = upkeep.before(past + step, token)
                    steps.append(forward(model, cache, fed, starts))
        return steps, run.stats()


def graphed(model: PreTrainedModel, spec: str, ids: Tensor, mask: Tensor | None) -> tuple[list[Tensor], Any]:
    with saccade.sparsify(model, spec) as run:
        cache, logits = prefilled(model, ids, mask)
        steps = [logits]
        graph = GraphedStep(run, cache, mask)
        assert graph.room == CAPACITY - ids.shape[1]
        assert int(cache.layers[0].cumulative_length) == ids.shape[1]
        with never_waiting():
            for _ in range(NEW):
                steps.append(graph.step(steps[-1].argmax(-1, keepdim=True)).clone())
        assert all(int(layer.cumulative_length) == ids.shape[1] + NEW for layer in cache.layers)
        return steps, run.stats()


def on_host(model: PreTrainedModel, spec: str, ids: Tensor, mask: Tensor | None, tokens: list[Tensor]) -> list[Tensor]:
    """The logits of calls whose lengths the host knows, fed the tokens given."""
    with sparse_below_the_budget(), saccade.sparsify(model, spec):
        cache, logits = prefilled(model, ids, mask)
        steps, seen = [logits], torch.ones_like(ids) if mask is None else mask
        for token in tokens:
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            given = None if mask is None else seen
            positions = seen.sum(-1, keepdim=True) - 1
            output = model(token, attention_mask=given, position_ids=positions, past_key_values=cache, use_cache=True)
            steps.append(output.logits[:, -1])
        return steps


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_replays_decode_what_calls_decode(model: PreTrainedModel, name: str) -> None:
    """Bit for bit, and nothing waits for the device; counts are the same too."""
    for batch, (ids, mask) in batches().items():
        expected, stats = eager(model, POLICIES[name], ids, mask)
        got, counted = graphed(model, POLICIES[name], ids, mask)
        for step, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(one, other), f"{batch}, step {step}: {(one - other).abs().max()}"
        passes = stats.dense_passes
        # What a budget covers is not run again: the shortest row is.
        assert passes == 2 * ("rectified" in name) or ids.shape[1] == 37, batch
        assert counted.dense_passes == passes, batch
        assert counted.rectifications == stats.rectifications, batch
        for layer, other in zip(counted.layers, stats.layers, strict=True):
            assert layer.steps == other.steps == NEW - passes, batch
            assert (layer.tokens, layer.share) == pytest.approx((other.tokens, other.share)), batch
        assert counted.index_bytes == stats.index_bytes, batch


@pytest.mark.parametrize("model", [torch.float32], ids=["fp32"], indirect=True)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_lengths_on_the_device_change_nothing(model: PreTrainedModel, name: str) -> None:
    """Grids follow the bound, so sums may be rounded otherwise; in float32 that is all, bfloat16 may choose anew."""
    for batch, (ids, mask) in batches().items():
        got, _ = graphed(model, POLICIES[name], ids, mask)
        tokens = [logits.argmax(-1, keepdim=True) for logits in got[:-1]]
        expected = on_host(model, POLICIES[name], ids, mask, tokens)
        for step, (one, other) in enumerate(zip(got, expected, strict=True)):
            error = (one - other).norm() / other.norm()
            assert error < 1e-3, f"{batch}, step {step}: {error}"
            assert torch.equal(one.argmax(-1), other.argmax(-1)), f"{batch}, step {step}"


@pytest.mark.parametrize("name", ["quest", "lychee_cluster", "resa, rectified", "lychee_cluster, rectified"])
@torch.no_grad()
def test_calls_and_replays_follow_each_other(model: PreTrainedModel, name: str) -> None:
    ids, _ = batches()["three, 160"]
    spec = POLICIES[name]
    expected, _ = eager(model, spec, ids, None)
    with saccade.sparsify(model, spec) as run:
        cache, logits = prefilled(model, ids, None)
        graph, steps = GraphedStep(run, cache), [logits]
        starts = row_starts(None, 3).cuda()
        for step in range(NEW):
            token = steps[-1].argmax(-1, keepdim=True)
            if step % 3 == 1:
                fed = run.upkeep(cache, row_starts(None, 3)).before(ids.shape[1] + step, token)
                with run.lengths_on_device(starts):
                    steps.append(forward(model, cache, fed, starts))
            else:
                steps.append(graph.step(token).clone())
    assert all(torch.equal(one, other) for one, other in zip(steps, expected, strict=True))


@torch.no_grad()
def test_a_full_cache_and_an_emptied_one_are_refused(model: PreTrainedModel) -> None:
    ids, _ = batches()["one, 37"]
    with saccade.sparsify(model, "dense") as run:
        cache = StaticCache(config=model.config, max_cache_len=38)
        model(ids, past_key_values=cache, use_cache=True)
        graph = GraphedStep(run, cache)
        token = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
        graph.step(token)
        with pytest.raises(UnsupportedModelError, match="full"):
            graph.step(token)
        with pytest.raises(UnsupportedModelError, match="full"):
            GraphedStep(run, cache)
    with saccade.sparsify(model, "dense") as run:
        cache, _ = prefilled(model, ids, None)
        graph = GraphedStep(run, cache)
        cache.reset()
        with pytest.raises(AttachmentError, match="emptied"):
            graph.step(token)
