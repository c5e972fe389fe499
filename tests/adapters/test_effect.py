"""The policy is what runs: new tokens are counted by what layers did, and nothing is answered densely in silence."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import saccade
from saccade.adapters.hf.call import Call, Caller, named
from saccade.adapters.hf.effect import Text, require_shape
from saccade.checkpoints.versions import cache_argument

from .tiny import by_hand, fresh, prompt
from .ways import NEW, VERSION, WAYS, paired

SMALL = {
    "window": "streaming:budget=12",
    "published": "tidal:budget=8,reselect=3",
    "pages": "quest:budget=16,page=4",
    "dense": "dense",
}


@pytest.fixture
def model() -> Any:
    return fresh()


def generate(model: Any, **inputs: Any) -> Any:
    return model.generate(**{"max_new_tokens": NEW, "do_sample": False, **inputs})


def whole(model: Any) -> Any:
    return generate(model, input_ids=prompt())


def second_turn(model: Any, cut: int = 1) -> Any:
    """Nine tokens of the second turn; those of the first are counted too."""
    cache, ids = DynamicCache(), prompt()
    generate(model, input_ids=ids[:, :-cut], past_key_values=cache, max_new_tokens=1)
    return generate(model, input_ids=ids, past_key_values=cache)


def compressed(model: Any) -> Any:
    """The cache holds fewer tokens than the mask tells, as eviction leaves it (transformers#47597)."""
    cache, ids = DynamicCache(), prompt(40)
    with torch.no_grad():
        full = model(ids[:, :-1], past_key_values=DynamicCache()).past_key_values
    for number, layer in enumerate(full.layers):
        cache.update(layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous(), number)
    return generate(model, input_ids=ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache)


COUNTED: dict[str, Callable[[Any], Any]] = {
    **{"whole": whole, "second turn": second_turn, "compressed": compressed},
    # The first token is transformers' own.
    "no input": generate,
    "one token": lambda model: generate(model, input_ids=prompt(1)),
    "new turn": lambda model: second_turn(model, cut=11),
    "one by one": lambda model: generate(model, input_ids=prompt(), prefill_chunk_size=1),
    **{way: WAYS[way] for way in ("left-padded", "chunked prefill", "static cache", "embeddings", "beams")},
    "as a dictionary": lambda model: generate(model, input_ids=prompt(), return_dict_in_generate=True),
}
if VERSION < (5,):
    # Stock itself ends with an error there.
    del COUNTED["compressed"]


@pytest.mark.parametrize(("policy", "way"), paired(SMALL, COUNTED))
def test_every_new_token_but_the_first_is_a_counted_step(model: Any, policy: str, way: str) -> None:
    with saccade.sparsify(model, SMALL[policy]) as run:
        COUNTED[way](model)
        steps = {layer.steps for layer in run.stats().layers}
    assert steps == {NEW - 1}


def test_inputs_by_position_or_by_a_former_name_are_those_by_name(model: Any) -> None:
    cache = DynamicCache()
    assert named(["ids", "cache"], "cache", [1], {"past_key_values": cache}) == {"ids": 1, "cache": cache}
    with saccade.sparsify(model, SMALL["window"]) as run, torch.no_grad():
        model.model(prompt(), None, None, cache)
        model.model(prompt(1), past_key_values=cache)
        assert run.stats().steps == 1
    assert cache.get_seq_length() == 31


def test_a_whole_call_may_be_a_checkpoint(model: Any) -> None:
    inputs = model.get_input_embeddings()(prompt()).detach().requires_grad_()
    with saccade.sparsify(model, SMALL["window"]):
        made = checkpoint(lambda x: model(inputs_embeds=x, use_cache=False)[0], inputs, use_reentrant=False)
        made.sum().backward()
    assert inputs.grad is not None


def test_layers_that_are_called_around_the_hook_are_refused(model: Any) -> None:
    cache = DynamicCache()
    with saccade.sparsify(model, SMALL["window"]), torch.no_grad():
        model.model(prompt(), past_key_values=cache)
        model.model(prompt(31))
        with pytest.raises(saccade.AttachmentError, match="call no part of it alone"):
            model.model.forward(prompt(1), **{cache_argument(model.model): cache})


def test_a_cache_under_another_name_is_refused_before_any_work(model: Any) -> None:
    cache = DynamicCache()
    with saccade.sparsify(model, SMALL["window"]), torch.no_grad():
        model(prompt(), past_key_values=cache)
        with pytest.raises(saccade.UnsupportedModelError, match=r"^the policy would not run: .*'held'.*transformers"):
            model.model(prompt(1), held=cache)
    assert cache.get_seq_length() == 30


def empty(model: Any, kind: type) -> Any:
    return StaticCache(config=model.config, max_cache_len=50) if kind is StaticCache else DynamicCache()


def hidden_cache(model: Any) -> None:
    """The decoder decodes from a cache of its own that no argument brings."""
    stock, name, hidden = model.model.forward, cache_argument(model), {}

    def forward(**inputs: Any) -> Any:
        cache = hidden.setdefault("cache", empty(model, type(inputs[name])))
        output = stock(**{**inputs, name: cache})
        output[name] = inputs[name]
        return output

    model.model.forward = forward


def replaced_attention(model: Any, layers: slice = slice(None)) -> None:
    """Attention modules with code of their own, as Unsloth and SelfExtend leave them."""
    for layer in model.model.layers[layers]:
        stock = layer.self_attn.forward

        def forward(self: Any, *args: Any, stock: Any = stock, **inputs: Any) -> Any:
            held = self.config._attn_implementation
            self.config._attn_implementation = "sdpa"
            try:
                return stock(*args, **inputs)
            finally:
                self.config._attn_implementation = held

        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)


def other_function(model: Any) -> None:
    """Somebody registers another function under our name."""
    AttentionInterface.register("saccade", lambda *args, **inputs: sdpa_attention_forward(*args, **inputs))


def left_out(model: Any) -> None:
    model.config.num_hidden_layers = 2


TAMPERED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hidden cache": (hidden_cache, "layers 0, 1, 2, 3 stored no keys"),
    "replaced attention": (replaced_attention, "layers 0, 1, 2, 3 did not call the attention 'saccade'"),
    "one replaced layer": (lambda model: replaced_attention(model, slice(2, 3)), "layer 2 did not call the attention"),
    "another function": (other_function, "layers 0, 1, 2, 3 did not call the attention 'saccade'"),
    "layers left out": (left_out, "layers 2, 3 did not call"),
}


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    from saccade.adapters.hf import attention

    attention.register()


@pytest.mark.parametrize(("how", "kind"), paired(TAMPERED, [DynamicCache, StaticCache]))
@pytest.mark.usefixtures("registered")
def test_what_takes_the_policy_off_is_an_error_at_that_step(model: Any, kind: type, how: str) -> None:
    tamper, told = TAMPERED[how]
    with saccade.sparsify(model, SMALL["window"]) as run:
        tamper(model)
        with pytest.raises(saccade.UnsupportedModelError) as raised:
            by_hand(model, prompt(), NEW, empty(model, kind))
        assert run.stats().steps == 0
    line = str(raised.value)
    assert told in line and "\n" not in line


def test_a_new_token_taken_for_prompt_is_an_error_at_that_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hook believes: `generate` reads no more than its input."""
    monkeypatch.setattr(Caller, "call", lambda caller, past, queries, cache: Call(past, queries, queries))
    with saccade.sparsify(model, SMALL["window"]) as run:
        with pytest.raises(saccade.UnsupportedModelError, match="a new token of generate was taken for a part of its"):
            whole(model)
        assert run.stats().steps == 0


def test_a_text_of_which_too_few_tokens_were_decoded() -> None:
    with pytest.raises(saccade.UnsupportedModelError, match="a new token of generate was taken"):
        Text(unread=0).feed(1, 0)
    with pytest.raises(saccade.UnsupportedModelError, match="layer 2 sees 1 queries on 9 keys, the call 1 tokens"):
        require_shape(2, (1, 9), 7, 1, fixed=False)
    text = Text(unread=7)
    text.feed(7, 0)
    text.feed(3, 2)
    text.end(3)
    with pytest.raises(saccade.UnsupportedModelError, match="generate made 4 tokens and decoded 2 under the policy"):
        text.end(4)
