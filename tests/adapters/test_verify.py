"""Verification inside plain generation: what was drafted sparsely is decided about densely; what interrupts a pass."""

import functools
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import saccade
from forcing import sparse_below_the_budget

from . import tiny
from .rectified import specs, twin
from .ways import STATIC_RECTIFIED, WAYS, generate, offered

LONG = 16


@functools.cache
def dense_greedy(rows: tuple[int, ...] = ()) -> list[list[int]]:
    model = twin()
    inputs = tiny.padded(list(rows)) if rows else {"input_ids": tiny.prompt()}
    return generate(model, **inputs, max_new_tokens=LONG).tolist()


STATIC = {"cache_implementation": "static"}
"""Which ends where the text does."""
KINDS = [(policy, dict[str, Any]()) for policy in ("tidal", "quest", "resa", "lychee_cluster")]


@pytest.mark.parametrize(("policy", "options"), [*KINDS, pytest.param("quest", STATIC, marks=STATIC_RECTIFIED)])
def test_verified_greedy_is_dense_greedy(policy: str, options: dict[str, Any]) -> None:
    """Of every kind; tests/acceptance/check_verify.py asks each policy."""
    # Of one page alone no draft stands.
    spec = specs(4, "verify")[policy].replace("min_pages=1", "min_pages=3")
    with saccade.sparsify(tiny.llama(), spec) as run:
        tokens = generate(tiny.llama(), max_new_tokens=LONG, **options)
        done = run.stats()
    assert tokens.tolist() == dense_greedy()
    assert 0 < done.accepted < done.drafted <= 4 * done.dense_passes
    # Every token but the first comes from a dense pass or from a draft that stood.
    assert done.dense_passes + done.accepted == LONG - 1
    assert done.acceptance_rate == pytest.approx(done.accepted / done.drafted)
    assert done.tokens_per_dense_pass == pytest.approx((LONG - 1) / done.dense_passes)


@pytest.mark.parametrize(
    ("policy", "rows"), [("quest", (30, 7, 19)), ("lychee_cluster", (30, 7, 19)), ("tidal", (30,))]
)
def test_verified_sampling_is_stock_sampling(policy: str, rows: tuple[int, ...]) -> None:
    asked: dict[str, Any] = {"max_new_tokens": LONG, "do_sample": True, "temperature": 0.7, "top_k": 5}
    options = {**tiny.padded(list(rows)), **asked}

    def sampled(model: PreTrainedModel) -> list[list[int]]:
        torch.manual_seed(0)
        return model.generate(**options).tolist()  # type: ignore[no-any-return]

    with saccade.sparsify(tiny.llama(), specs(4, "verify")[policy]) as run:
        ours = sampled(tiny.llama())
        assert run.stats().drafted > 0
    assert ours == sampled(twin())


@pytest.mark.parametrize("options", [{}, pytest.param(STATIC, marks=STATIC_RECTIFIED)])
@pytest.mark.parametrize("mode", ["overwrite", "verify"])
def test_rows_may_end_at_different_times(mode: str, options: dict[str, Any]) -> None:
    batch, plain = tiny.padded([30, 7, 19]), [row[30:] for row in dense_greedy((30, 7, 19))]

    def ends_of(pair: tuple[int, ...]) -> list[int]:
        """Where each row meets one of two tokens first."""
        return sorted(next((at for at, token in enumerate(row) if token in pair), LONG) for row in plain)

    # Two tokens that end the rows one after the other, the last one perhaps never, and none of them at once.
    pairs = itertools.combinations(sorted({token for row in plain for token in row}), 2)
    tokens = next(pair for pair in pairs if 2 < (at := ends_of(pair))[0] < at[1] < at[2])
    ends = {"eos_token_id": [*tokens], "pad_token_id": 0, "max_new_tokens": LONG, **options}
    expected = generate(twin(), **batch, **ends)
    policy = specs(4, mode)["quest"] if mode == "verify" else "quest:page=4,budget=200,rectify=3"
    with sparse_below_the_budget(), saccade.sparsify(tiny.llama(), policy) as run:
        assert generate(tiny.llama(), **batch, **ends).tolist() == expected.tolist()
        done = run.stats()
    assert done.dense_passes > 0
    if mode == "verify":
        # An ended row's padding is no rejection: else one dense pass per token would follow.
        assert done.accepted > 0


def test_verify_by_hand_and_over_turns() -> None:
    with saccade.sparsify(tiny.llama(), specs(4, "verify")["quest"]):
        by_hand = tiny.by_hand(tiny.llama(), tiny.prompt(), LONG)
        turns = {way: WAYS[way](tiny.llama()) for way in offered("several turns", "new turn alone")}
    assert by_hand.tolist() == dense_greedy()
    assert all(tokens.tolist() == WAYS[way](twin()).tolist() for way, tokens in turns.items())


@torch.no_grad()
def test_a_cropped_cache_forgets_its_drafts() -> None:
    """What the user takes back and replaces must not meet the logits of the old draft."""
    model = tiny.llama()
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        cache = DynamicCache()
        token = model(tiny.prompt(), past_key_values=cache).logits[:, -1:].argmax(-1)
        following = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        cache.crop(-1)
        other = (token + 1) % 60 + 1
        model(other, past_key_values=cache)
        logits = model(following, past_key_values=cache).logits
    expected = twin()(torch.cat((tiny.prompt(), other, following), dim=1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "cannot follow beams"),
        ({"generation_config": GenerationConfig(max_new_tokens=5)}, "cannot follow beams"),
        ({"prompt_lookup_num_tokens": 3}, "drafts by itself; prompt_lookup_num_tokens"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is not available"),
    ],
    ids=str,
)
def test_verify_refuses_before_any_work(options: dict[str, Any], message: str) -> None:
    """A configuration is looked at behind another: this model's own asks for beams."""
    model, calls = tiny.fresh(), list[int]()
    model.generation_config.num_beams = 2 if "generation_config" in options else 1
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        model.get_decoder().register_forward_pre_hook(lambda m, a: calls.append(1))
        with pytest.raises(saccade.UnsupportedModelError, match=message):
            model.generate(tiny.prompt(), **options)
    assert not calls


@torch.no_grad()
def test_decoded_embeddings_are_refused() -> None:
    """Also as a new turn behind sparse steps, which would have to be run again together with it."""
    model = tiny.llama()
    embedded = model.get_input_embeddings()(tiny.prompt(8))
    with saccade.sparsify(model, specs(4)["quest"]):
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        with pytest.raises(saccade.UnsupportedModelError, match="needs input_ids"):
            model(inputs_embeds=embedded[:, :1], past_key_values=cache)
        model(tiny.prompt(1), past_key_values=cache)
        with pytest.raises(saccade.UnsupportedModelError, match="needs input_ids"):
            model(inputs_embeds=embedded, past_key_values=cache)


@pytest.mark.parametrize(
    "options",
    [{"inputs_embeds": True}, {"output_hidden_states": True}, {"return_dict": False}, {"labels": True}],
    ids=str,
)
@torch.no_grad()
def test_calls_that_want_more_than_logits_are_dense(options: dict[str, Any]) -> None:
    """Drafts hold logits only, so such a call is run as the stock model would run it."""
    model, token = tiny.llama(), tiny.prompt(1, seed=3)
    given: dict[str, Any] = {"input_ids": token, **options}
    if "inputs_embeds" in options:
        given = {"inputs_embeds": model.get_input_embeddings()(token)}
    if "labels" in options:
        given["labels"] = token
    with saccade.sparsify(model, specs(4, "verify")["quest"]) as run:
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        ours = model(**given, past_key_values=cache)
        assert run.stats().drafted == 0
    expected = twin()(torch.cat((tiny.prompt(), token), dim=1), output_hidden_states=True)
    logits = ours[0] if isinstance(ours, tuple) else ours.logits
    torch.testing.assert_close(logits, expected.logits[:, -1:], rtol=0, atol=1e-4)
    if "output_hidden_states" in options:
        torch.testing.assert_close(ours.hidden_states[-1], expected.hidden_states[-1][:, -1:], rtol=0, atol=1e-4)


def interrupt(model: PreTrainedModel, layer: int, after: int) -> Any:
    """A hook that raises in the given layer, the `after`-th time it is reached."""
    calls = iter(range(after + 1))

    def stop(module: Any, args: Any) -> None:
        if next(calls, None) == after:
            raise KeyboardInterrupt

    return model.get_decoder().layers[layer].register_forward_pre_hook(stop)


@pytest.mark.parametrize(("layer", "after"), [(0, 4), (2, 2)])
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
    plain = generate(twin(), **batch, max_new_tokens=8)[:, -8:]
    configs = model.generation_config, twin().generation_config
    try:
        with saccade.sparsify(model, specs(4, "verify")["quest"]):
            for token in plain[:, 3].tolist():
                for config in configs:
                    config.eos_token_id = token
                options = {**batch, "max_new_tokens": 8, "eos_token_id": None}
                assert generate(model, **options)[:, -8:].tolist() == plain.tolist()
    finally:
        for config in configs:
            config.eos_token_id = None


def test_nothing_is_drafted_beyond_the_end() -> None:
    """The first token is the prompt's, the second is fed, and one is left to draft."""
    for asked in ({"max_new_tokens": 3}, {"max_length": 33, "max_new_tokens": None}):
        with saccade.sparsify(tiny.llama(), "quest:page=4,budget=4,dense_layers=0,rectify=32:verify") as run:
            generate(tiny.llama(), **asked)
            assert run.stats().drafted == 1, asked
