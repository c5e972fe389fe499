"""Whatever raises inside a call, or is done to a rectified cache: what a text goes on with is what it should hold."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import saccade

from . import tiny
from .rectified import SMALLEST, specs, twin
from .test_layer_kinds import hybrid
from .tiny import CLUSTERS, LETTERS, fresh, prompt, raising
from .ways import VERSION, needs_5

POLICIES = {
    **{name: specs(1000)[name] for name in ("quest", "less_is_more", "lychee_cluster")},
    **{f"{name}, rewritten": spec for name, spec in specs(3).items() if name in ("quest", "less_is_more")},
    "verified": specs(3, "verify")["quest"],
    "dense": "dense",
}
TOKENS = torch.tensor([[5], [9], [2], [11], [7], [3]])
Failing, CACHE = Callable[[Any, Any], None], "past_key_values"


def in_layer(number: int, part: str, error: type[BaseException] = ArithmeticError) -> Failing:
    def fail(model: Any, cache: Any) -> None:
        module = getattr(model.get_decoder().layers[number], part)
        with raising(module, error()), pytest.raises(error):
            model(prompt(1), **{CACHE: cache})

    return fail


def mask_with_holes(model: Any, cache: Any) -> None:
    mask = torch.ones((1, cache.get_seq_length() + 1), dtype=torch.long)
    mask[0, 3:9] = 0
    with pytest.raises(saccade.UnsupportedModelError, match="mask has holes"):
        model(prompt(1), attention_mask=mask, **{CACHE: cache})


def other_batch(model: Any, cache: Any) -> None:
    """Stock's own error, inside of the first layer; ours where nothing is to be appended."""
    with pytest.raises((RuntimeError, saccade.SaccadeError)):
        model(prompt(1, rows=3), **{CACHE: cache})


def a_prompt(model: Any, cache: Any) -> None:
    """Several tokens at once, in the last layer."""
    with raising(model.get_decoder().layers[-1].mlp, ArithmeticError()), pytest.raises(ArithmeticError):
        model(prompt(5), **{CACHE: cache})


def in_the_hook(model: Any, cache: Any) -> None:
    """Ahead of the first layer; where a dense pass begins, with one layer set back and the others not."""

    def partly(held: Any, slots: int) -> None:
        held.layers[0].end_at(slots)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.adapters.hf.cache.end_at", partly)
        patch.setattr("saccade.adapters.hf.session.Session._start", lambda *given: partly(cache, int(given[1].past)))
        with pytest.raises(KeyboardInterrupt):
            model(prompt(1), **{CACHE: cache})


FAILING: dict[str, Failing] = {
    "first layer": in_layer(0, "mlp"),
    "third layer": in_layer(2, "self_attn"),
    "last layer": in_layer(3, "mlp"),
    "interrupted": in_layer(2, "mlp", KeyboardInterrupt),
    **{one.__name__: one for one in (mask_with_holes, other_batch, a_prompt)},
}


def held(cache: Any) -> list[torch.Tensor]:
    length = cache.get_seq_length()
    return [part[:, :, :length].clone() for layer in cache.layers for part in (layer.keys, layer.values)]


@torch.no_grad()
def decoded(model: Any, cache: Any, fails: dict[int, Sequence[Failing]], grown: bool = True) -> torch.Tensor:
    """Logits of six given tokens behind a prompt; ahead of some of them calls fail."""
    at = {} if VERSION >= (5,) or grown else {"cache_position": torch.arange(30)}
    model(prompt(), **{CACHE: cache}, **at)
    logits = []
    for number, token in enumerate(TOKENS):
        for fail in fails.get(number, ()):
            before, length = held(cache), cache.get_seq_length()
            fail(model, cache)
            assert {int(layer.get_seq_length()) for layer in cache.layers} == {int(length)}
            assert all(torch.equal(*pair) for pair in zip(before, held(cache), strict=True))
        logits.append(model(token[None], **{CACHE: cache}).logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_that_fails_leaves_nothing_behind(policy: str) -> None:
    """In the first decoding step, and where a phase has gone on for some; each right behind another, too."""
    model, failing = tiny.llama(), [*FAILING.values(), *(() if policy == "verified" else (in_the_hook,))]
    with saccade.sparsify(model, POLICIES[policy]):
        undisturbed = decoded(model, DynamicCache(), {})
        for first, last in zip(failing[::2], [*failing[1::2], failing[0]], strict=False):
            again = decoded(model, DynamicCache(), {0: (first, last), 3: (last, first), 4: (first, last)})
            torch.testing.assert_close(again, undisturbed, rtol=0, atol=1e-5)


def windowed() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    return fresh("gemma3_text", sliding_window=8, head_dim=8, layer_types=kinds)


OTHERS = [
    *(("static", policy, failing) for policy in ("quest", "tidal") for failing in ("third layer", "a_prompt")),
    *(("static", "dense", "mask_with_holes"), ("windows", "streaming", "third layer")),
    *(("windows", "quest, rewritten", failing) for failing in ("mask_with_holes", "interrupted", "last layer")),
]


@pytest.mark.parametrize(("kind", "policy", "failing"), OTHERS)
def test_static_caches_and_windows_beside_full_attention_too(kind: str, policy: str, failing: str) -> None:
    """Layers of stock's own hold what they held, beyond the window's width."""
    model, answers = tiny.llama() if kind == "static" else windowed(), []
    spec, places = {**POLICIES, **SMALLEST}[policy], (2,) if kind == "static" else (0, 3, 4)
    for fails in ({}, dict.fromkeys(places, (FAILING[failing],))):
        config = model.config
        cache = StaticCache(config=config, max_cache_len=48) if kind == "static" else DynamicCache(config=config)
        with saccade.sparsify(model, spec):
            answers.append(decoded(model, cache, fails, grown=kind != "static"))
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["quest", "verified", "lychee_cluster"])
@torch.no_grad()
def test_a_first_call_that_fails_leaves_an_empty_cache(policy: str) -> None:
    """The next one may bring another batch."""
    model, cache = tiny.llama(), DynamicCache()
    with saccade.sparsify(model, POLICIES[policy]):
        with raising(model.model.layers[2].mlp, ArithmeticError()), pytest.raises(ArithmeticError):
            model(prompt(9, rows=3), **{CACHE: cache})
        assert cache.get_seq_length() == 0
        model(prompt(), **{CACHE: cache})
        assert {tuple(layer.keys.shape) for layer in cache.layers} == {(1, 2, 30, 8)}
        model(prompt(1), **{CACHE: cache})


@needs_5("cache of type Qwen3NextDynamicCache")
@torch.no_grad()
def test_what_cannot_be_put_back_is_refused_from_then_on() -> None:
    """Recurrent layers write into what they hold; a cache that was emptied begins anew."""
    model = hybrid("qwen3_next")
    with saccade.sparsify(model, "streaming:budget=8"):
        cache = DynamicCache(config=model.config) if VERSION >= (5,) else model(prompt(), use_cache=True)[CACHE]
        model(prompt(), **{CACHE: cache})
        with raising(model.model.layers[5].mlp, ArithmeticError()), pytest.raises(ArithmeticError):
            model(prompt(1), **{CACHE: cache})
        for _ in range(2):
            with pytest.raises(saccade.UnsupportedModelError, match="has left LinearAttentionLayer changed"):
                model(prompt(1), **{CACHE: cache})
        cache.reset()
        model(prompt(), **{CACHE: cache})
        assert cache.get_seq_length(1) == 30


@torch.no_grad()
def test_kernels_refuse_in_words_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KernelError says nothing to whoever has called a model."""
    model, cache = tiny.llama(), DynamicCache()
    with saccade.sparsify(model, POLICIES["quest"]):
        model(prompt(), **{CACHE: cache})

        def refuse(*given: Any, **named: Any) -> Any:
            raise saccade.errors.KernelError("tables do not fit")

        monkeypatch.setattr("saccade.adapters.hf.attention.attend", refuse)
        with pytest.raises(saccade.UnsupportedModelError, match="layer 0 cannot decode from this cache: tables do not"):
            model(prompt(1), **{CACHE: cache})
    assert cache.get_seq_length() == 30


EVERY = 3
GROWN_OVER = {"quest:page=4,dense_layers=1": 28, CLUSTERS.replace(",budget=16", ""): 24}
"""Bounds of keys and an index of text, with budgets that rows grow over in the course of a test."""
WAYS = {"token": 9, "several": 3, "turn": 2, "taken back": 2, "interrupted": 2, "by others": 1}


class Unclean:
    """Sees that an index has not taken in what is not clean, from slot `clean` on: every set holds all of it."""

    clean = sets = 0

    def observe(self, layer: int, span: Any, q: Any, kv: Any, selection: Any, scale: float) -> None:
        if selection is not None and self.clean:
            unclean = torch.arange(self.clean, int(kv.rows.seq_lens[0]))
            assert all(torch.isin(unclean, ids).all() for ids in selection.ids[0])
            self.sets += 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", GROWN_OVER)
@torch.no_grad()
def test_whatever_is_done_the_rule_is_the_same(policy: str, seed: int) -> None:
    """Which calls run tokens again and how many; what is clean is what dense attention leaves there."""
    numbers, model, cache, budget = random.Random(seed), tiny.llama(), DynamicCache(), GROWN_OVER[policy]
    ids, fed, passes, rewritten, exact = tiny.prompt(20, seed=seed), list[int](), 0, 0, True
    watching, text = Unclean(), "lychee" in policy
    hook = model.get_decoder().layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    spec = f"{policy},budget={budget},rectify={EVERY}"
    with saccade.sparsify(model, spec, tokenizer=LETTERS, observers=(watching,)) as run:
        model(ids, past_key_values=cache)
        clean = seen = 20
        for number in range(40):
            past, way = ids.shape[1], numbers.choices([*WAYS], [*WAYS.values()])[0]
            new = tiny.prompt({"several": numbers.randint(2, 3), "turn": 4, "by others": 2}.get(way, 1), seed=number)
            if way == "taken back":
                cache.crop(-2)
                ids, clean, seen = ids[:, :-2], min(clean, past - 2), min(seen, past - 2)
                continue
            if way == "by others":
                twin()(new, past_key_values=cache)
                ids, exact = torch.cat((ids, new), dim=1), exact and clean == past
                continue
            if seen < past:
                # What others have fed cannot be fed again: it counts as clean, with all below it.
                clean = past
            watching.clean = clean * text
            if way == "interrupted":
                in_layer(2, "mlp")(model, cache)
                continue
            with run.decoding() if way == "several" else nullcontext():
                logits = model(new, past_key_values=cache).logits
            ids = torch.cat((ids, new), dim=1)
            dense = way == "turn" or past - clean + new.shape[1] > EVERY
            again = past - clean if dense and past > budget else 0
            passes, rewritten = passes + (again > 0), rewritten + again
            clean, seen = ids.shape[1] if dense else clean, ids.shape[1]
            assert fed[-1] == new.shape[1] + again
            assert (run.stats().dense_passes, run.stats().rectifications) == (passes, rewritten)
            stock = twin()(ids)
            if exact and dense:
                torch.testing.assert_close(logits, stock.logits[:, past:], rtol=0, atol=1e-4)
            for layer, other in zip(cache.layers, stock.past_key_values.layers, strict=True) if exact else ():
                torch.testing.assert_close(layer.keys[:, :, :clean], other.keys[:, :, :clean], rtol=0, atol=1e-5)
        assert passes > 3 and watching.sets >= 20 * text
        watching.clean = 0
        ids = torch.cat((ids, tiny.prompt(5, seed=9)), dim=1)
        settings = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
        second = model.generate(ids, past_key_values=cache, **settings)
        assert not exact or second.tolist() == model.generate(ids, **settings).tolist()
    hook.remove()
