"""What a forward call is, as its caller has said: prompt or decoding, on which text, in which open block."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

import saccade
from saccade.adapters.hf.call import Call, Caller

from . import tiny
from .tiny import prompt
from .ways import paired

POLICIES = [
    "quest:page=4,budget=8",
    "less_is_more:reselect=3,dense_layers=1,budget=12",
    "exact_topk:budget=8,rectify=3",
]
VERIFIED = "exact_topk:budget=8,rectify=3:verify"
OPEN = "stays open around a yield of 'stream'"


class Asking(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]  # transformers leaves them untyped
    """Asks the model about a text of its own at every token: prompt, two steps, and the text as a whole."""

    def __init__(self, model: Any, *, stops: bool) -> None:
        self.model, self.stops, self.seen = model, stops, list[torch.Tensor]()

    @torch.no_grad()
    def ask(self) -> torch.Tensor:
        cache, ids = DynamicCache(), prompt(60, seed=4)
        prefilled = self.model(ids, past_key_values=cache).logits[0, -1]
        steps = [self.model(prompt(1, seed=seed), past_key_values=cache).logits[0, -1] for seed in (1, 2)]
        return torch.stack([prefilled, *steps, self.model(ids).logits[0, -1]])

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.seen.append(self.ask())
        return torch.zeros(len(input_ids), dtype=torch.bool) if self.stops else scores


@pytest.mark.parametrize(("policy", "by"), paired([*POLICIES, VERIFIED], ["stopping_criteria", "logits_processor"]))
def test_a_text_inside_of_generate_is_read_as_outside_of_it(policy: str, by: str) -> None:
    model = tiny.llama()
    with saccade.sparsify(model, policy) as run:
        asking = Asking(model, stops=by == "stopping_criteria")
        outside, steps = asking.ask(), run.stats().steps
        exact = Asking(deepcopy(model).double(), stops=True).ask()
        plain = model.generate(prompt(), max_new_tokens=5, do_sample=False).tolist()
        own = run.stats().steps - steps
        assert model.generate(prompt(), max_new_tokens=5, do_sample=False, **{by: [asking]}).tolist() == plain
        if policy != VERIFIED:  # which drafts less behind a text that stops sooner
            assert run.stats().steps == 2 * own + steps * (1 + len(asking.seen))
    assert len(asking.seen) == 5
    # Either side may be as far from float64 as the other one is.
    error = float((outside - exact).abs().max())
    assert error < 1e-4, "200 units in the last place of logits near 5, which another set would move by 1"
    for seen in asking.seen:
        torch.testing.assert_close(seen, outside, rtol=0, atol=2 * error)


def pairs(model: Any, cache: Any, start: int) -> torch.Tensor:
    """Logits of two tokens at once: sparse inside of a block, a prompt outside of it."""
    with torch.no_grad():
        return model(torch.tensor([[5 + start, 9]]), past_key_values=cache).logits[0]


def filled(model: Any) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(prompt(50), past_key_values=cache)
    return cache


def test_a_block_around_a_yield_is_refused() -> None:
    """Wherever the generator runs on, and for whoever calls the model in between."""
    model = tiny.llama()

    def stream(run: Any) -> Iterator[torch.Tensor]:
        cache = filled(model)
        with run.decoding():
            for number in range(3):
                yield pairs(model, cache, number)

    with saccade.sparsify(model, POLICIES[0]) as run:
        assert len(list(stream(run))) == 3  # nobody has called the model elsewhere
        generator = stream(run)
        contextvars.copy_context().run(next, generator)
        with pytest.raises(saccade.AttachmentError, match=OPEN):
            contextvars.copy_context().run(next, generator)
        generator = stream(run)
        next(generator)
        with pytest.raises(saccade.AttachmentError, match=OPEN):
            model(prompt(60))
        generator.close()
        filled(model)


def test_a_block_that_is_closed_before_the_yield_holds() -> None:
    """In one context or in several, with somebody's prompt in between; also through context managers of their own."""
    model = tiny.llama()

    @contextlib.contextmanager
    def wrapped(run: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.decoding())
            yield

    def stream(run: Any, block: Any) -> Iterator[torch.Tensor]:
        cache = filled(model)
        for number in range(3):
            with block(run):
                logits = pairs(model, cache, number)
            yield logits

    with saccade.sparsify(model, POLICIES[0]) as run:
        cache = filled(model)
        with run.decoding():
            expected = [pairs(model, cache, number) for number in range(3)]
        assert run.stats().steps + run.stats().dense_passes == 6
        for block in (lambda run: run.decoding(), wrapped):
            generator, got = stream(run, block), []
            with torch.no_grad():
                for _ in range(3):
                    got.append(contextvars.copy_context().run(next, generator))
                    alone = model(prompt(60)).logits
            assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        with torch.no_grad():
            assert torch.equal(alone, model(prompt(60)).logits)
        cache = filled(model)
        with wrapped(run):
            assert torch.equal(pairs(model, cache, 0), expected[0])


def test_an_asynchronous_generator() -> None:
    """A server's stream: another task's prompt is refused while the block is open, and nobody's once it is closed."""
    model = tiny.llama()

    async def stream(run: Any) -> AsyncIterator[torch.Tensor]:
        cache = filled(model)
        with run.decoding():
            yield pairs(model, cache, 0)

    async def serve(run: Any) -> None:
        generator = stream(run)
        await anext(generator)
        with pytest.raises(saccade.AttachmentError, match=OPEN):
            model(prompt(60))
        await generator.aclose()
        model(prompt(60))

    with saccade.sparsify(model, POLICIES[0]) as run:
        asyncio.run(serve(run))


@pytest.mark.parametrize(
    ("known", "past", "queries", "prompt"),
    [
        ({}, 0, 7, 7),
        ({}, 0, 1, 1),
        ({}, 7, 1, 0),
        ({}, 7, 3, 3),
        ({"decoding": True}, 0, 7, 0),
        ({"decoding": True}, 7, 3, 0),
        ({"prompt": 7}, 0, 4, 4),
        ({"prompt": 7}, 4, 3, 3),
        ({"prompt": 7}, 6, 1, 1),
        ({"prompt": 7}, 4, 5, 3),
        ({"prompt": 7}, 7, 3, 0),
        ({"prompt": 7, "decoding": True}, 0, 7, 0),
        ({"prompt": 7, "decoding": True}, 6, 1, 0),
        ({"prompt": 7, "purpose": "draft"}, 7, 1, 0),
        ({"prompt": 7, "purpose": "dense"}, 7, 1, 1),
        ({"prompt": 7, "purpose": "check"}, 7, 5, 5),
    ],
)
def test_positions_are_prompt_or_decode(known: dict[str, Any], past: int, queries: int, prompt: int) -> None:
    again = known.get("purpose") == "check"
    assert Caller(**known).call(past, queries) == Call(past, queries, prompt, again=again)
