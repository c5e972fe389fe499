"""Rectification that was interrupted, of other runs on the same cache, asked for in other ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import saccade
from forcing import sparse_below_the_budget

from . import tiny
from .rectified import specs, twin
from .ways import ENDLESS, generate


def interrupt(model: PreTrainedModel, layer: int, after: int) -> Any:
    """A hook that raises in the given layer, the `after`-th time it is reached."""
    calls = iter(range(after + 1))

    def stop(module: Any, args: Any) -> None:
        if next(calls, None) == after:
            raise KeyboardInterrupt

    return model.get_decoder().layers[layer].register_forward_pre_hook(stop)


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_an_interrupted_draft_leaves_the_cache_as_it_was(layer: int, after: int) -> None:
    model, tokens = tiny.llama(), tiny.prompt(4, seed=3)
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        hook = interrupt(model, layer, after)
        with pytest.raises(KeyboardInterrupt):
            model(tokens[:, :1], past_key_values=cache)
        hook.remove()
        assert {int(held.get_seq_length()) for held in cache.layers} == {30}
        logits = [model(token[None, None], past_key_values=cache).logits for token in tokens[0]]
    expected = twin()(torch.cat((tiny.prompt(), tokens), dim=1)).logits[:, -4:]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-4)


def test_another_run_on_the_same_cache_makes_good_what_the_first_left() -> None:
    """Two `with` blocks, a turn each; what the first decoded is clean in the end."""
    model, cache = tiny.llama(), DynamicCache()
    with saccade.sparsify(model, "streaming:budget=12,rectify=32"):
        first = generate(model, max_new_tokens=12, past_key_values=cache)
    ids = torch.cat((first, tiny.prompt(7, seed=5)), dim=1)
    with saccade.sparsify(model, "quest:page=4,budget=4,rectify=32") as run:
        generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, past_key_values=cache)
        assert run.stats().rectifications == 11
    with torch.no_grad():
        expected = twin()(ids).past_key_values
    for ours, stock in zip(cache.layers, expected.layers, strict=True):
        assert (ours.keys - stock.keys).abs().max() <= 1e-5 and (ours.values - stock.values).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["overwrite", "verify"])
def test_by_hand_without_positions_then_generate(mode: str) -> None:
    model = tiny.llama()

    def mixed(model: PreTrainedModel) -> torch.Tensor:
        cache = DynamicCache()
        with torch.no_grad():
            ids = tiny.by_hand(model, tiny.prompt(), 3, cache)
        return generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)

    spec = "quest:page=4,budget=200,rectify=4" if mode == "overwrite" else specs(4, mode)["quest"]
    with sparse_below_the_budget(), saccade.sparsify(model, spec):
        assert mixed(model).tolist() == mixed(twin()).tolist()


@torch.no_grad()
def test_a_draft_seen_from_elsewhere_does_not_stand() -> None:
    """Another position, or a mask that hides more: the logits that wait were made for other inputs."""
    model = tiny.llama()
    given = {"input_ids": tiny.prompt(), "attention_mask": torch.ones(1, 30, dtype=torch.long)}
    for name in ("position_ids", "attention_mask"):
        with saccade.sparsify(model, specs(4, "verify")["quest"]) as run:
            cache = model(**given, use_cache=True).past_key_values
            token = torch.tensor([[7]])
            options = {"attention_mask": torch.ones(1, 31, dtype=torch.long), "position_ids": torch.tensor([[30]])}
            follower = model(token, past_key_values=cache, **options).logits.argmax(-1)
            changed = {"attention_mask": torch.ones(1, 32, dtype=torch.long), "position_ids": torch.tensor([[31]])}
            if name == "position_ids":
                changed[name] = torch.tensor([[60]])
            else:
                changed[name][:, :5] = 0
            before = run.stats().accepted
            model(follower, past_key_values=cache, **changed)
            assert run.stats().accepted == before


def test_ends_are_resolved_as_transformers_does() -> None:
    """`eos_token_id=None` switches the model's own off; a row that goes on behind it is no ended row."""
    model, batch = tiny.llama(), tiny.padded([30, 7, 19])
    plain = generate(twin(), **batch, max_new_tokens=20)[:, -20:]
    configs = model.generation_config, twin().generation_config
    try:
        with saccade.sparsify(model, specs(4, "verify")["quest"]):
            for token in plain.unique().tolist()[::4]:
                for config in configs:
                    config.eos_token_id = token
                options = {**batch, "max_new_tokens": 20, "eos_token_id": None}
                assert generate(model, **options)[:, -20:].tolist() == plain.tolist()
    finally:
        for config in configs:
            config.eos_token_id = None


def test_nothing_is_drafted_beyond_the_end() -> None:
    with saccade.sparsify(tiny.llama(), "quest:page=4,budget=4,dense_layers=0,rectify=32:verify") as run:
        generate(tiny.llama(), max_new_tokens=8)
        assert run.stats().drafted <= 6 * run.stats().dense_passes


@pytest.mark.parametrize(
    "policy", ["lychee_cluster:sinks=1,chunk_min=2,chunk_max=4,dense_layers=1,budget=12,rectify=3"]
)
def test_several_tokens_at_once_never_overrun_the_budget(policy: str) -> None:
    """An index holds back what is unclean; a call of more tokens than that is dense."""
    most: list[int] = []

    class Widest:
        def observe(self, layer: int, span: Any, q: Any, kv: Any, selection: Any, softmax: Any) -> None:
            if selection is not None:
                most.append(int(selection.tokens(kv.rows.seq_lens).max()))

    with saccade.sparsify(tiny.llama(), policy, observers=(Widest(),)):
        generate(tiny.llama(), max_new_tokens=20, prompt_lookup_num_tokens=10, max_matching_ngram_size=1, **ENDLESS)
    assert most and max(most) <= 12
