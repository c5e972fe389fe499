"""Reading with layers that no crop brings back: what is asked leaves no trace in windows, chunks, recurrent states."""

from typing import Any

import pytest
import torch

import saccade
from adapters import tiny
from adapters.test_layer_kinds import HYBRIDS, REFUSED, WINDOW, hybrid, kinds
from saccade.eval.reader import Reader

TEXT = tiny.prompt(30)[0].tolist()  # several windows long
ONE, OTHER = [5, 7, 9, 11, 2], [5, 7, 3, 4, 6]
SHARED = 2
POLICIES = ["dense", "streaming:budget=9", "exact_topk:budget=9,dense_layers=1"]
EXPERTS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8}


def model_of(name: str) -> Any:
    """Of each kind of other layers; MiniMax keeps recurrent states in a cache of its own."""
    if name != "minimax":
        return hybrid(name)
    model = tiny.fresh("minimax", num_hidden_layers=6, layer_types=kinds("linear_attention"), **EXPERTS)
    model.config._experts_implementation = "eager"
    return model


KINDS = ("gemma3_text", "gemma3n_text", "llama4_text", "qwen3_next")
NAMES = [*(name for name in KINDS if name in HYBRIDS), "minimax"]
"""Windows, layers that share, chunks, recurrent states in layers, and in the cache itself."""
RECTIFIED = "quest:page=4,budget=8,dense_layers=1,rectify=3"
CASES = [(name, POLICIES[place % 3], 1 + 2 * (place % 2)) for place, name in enumerate(NAMES)]
CASES += [(name, POLICIES[(place + 1) % 3], 3 - 2 * (place % 2)) for place, name in enumerate(NAMES)]
CASES += [(name, RECTIFIED, 3) for name in NAMES if name not in ("qwen3_next", "minimax")]


@pytest.mark.skipif("qwen3_next" not in REFUSED, reason="this transformers keeps all caches in layers")
def test_a_cache_without_layers_is_refused() -> None:
    with pytest.raises(saccade.UnsupportedModelError, match=REFUSED["qwen3_next"]):
        Reader(hybrid("qwen3_next"), TEXT)


@pytest.mark.parametrize(("name", "policy", "rows"), CASES)
def test_what_is_asked_leaves_no_trace(name: str, policy: str, rows: int) -> None:
    """Each of the models with one row and several, under two policies; what can be rectified too."""
    model = model_of(name)

    def last(*asked: list[int]) -> torch.Tensor:
        """Logits of the last question to a fresh reader."""
        reader = Reader(model, TEXT)
        if rows > 1:
            reader.repeat(rows)
        with saccade.sparsify(model, policy) as run, run.decoding():
            for tokens in asked:
                found = torch.cat([reader.feed_rows([tokens] * rows, 0), reader.feed_rows([[3]] * rows, 0)], dim=1)
                assert reader.decoded == len(tokens) + 1
                reader.crop()
                assert reader.decoded == 0
        return found

    alone = last(OTHER)
    assert torch.equal(last(ONE, OTHER), alone) and torch.equal(last(OTHER, ONE, ONE, OTHER), alone)
    assert not torch.equal(last(ONE), alone)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_densely_is_what_stock_says(name: str) -> None:
    """In one pass without a cache, in float64; Qwen3-Next computes recurrent states in float32, by its cache's way."""
    model = model_of(name).double()
    reader = Reader(model, TEXT)
    with saccade.sparsify(model, "dense") as run, run.decoding():
        reader.feed(ONE)
        reader.crop()
        found = reader.feed_rows([OTHER], 0)[0]
    with torch.no_grad():
        expected = model(torch.tensor([[*TEXT, *OTHER]]), use_cache=False).logits[0, len(TEXT) :]
        if name == "qwen3_next":
            held = model(torch.tensor([TEXT]), use_cache=True).past_key_values
            expected = model(torch.tensor([OTHER]), past_key_values=held).logits[0]
    # Some hundred sums of numbers around 1, in the order of whoever adds them; attention itself is float32 in ours.
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 200 * 2.0**-24)


@pytest.mark.parametrize(("name", "policy"), [(name, POLICIES[place % 3]) for place, name in enumerate(NAMES)])
def test_a_marked_place_is_come_back_to(name: str, policy: str) -> None:
    model = model_of(name)
    reader = Reader(model, TEXT)
    rest: list[torch.Tensor] = []
    fresh_ones = [Reader(model, TEXT) for _ in range(2)]
    with saccade.sparsify(model, policy) as run, run.decoding():
        for tokens, fresh in zip((ONE, OTHER), fresh_ones, strict=True):
            fresh.feed(tokens[:SHARED])
            rest.append(fresh.feed_rows([tokens[SHARED:]], 0))
        for _ in range(2):
            reader.feed(ONE[:SHARED])
            reader.mark()
            for tokens, expected in zip((ONE, OTHER), rest, strict=True):
                assert torch.equal(reader.feed_rows([tokens[SHARED:]], 0), expected)
                reader.crop(SHARED)
            reader.crop()
        reader.feed(ONE)
        with pytest.raises(saccade.UnsupportedModelError, match=r"have forgotten .* 2 tokens behind the text"):
            reader.crop(SHARED)
        reader.crop()


def test_copies_are_of_what_layers_hold_and_not_of_the_text() -> None:
    """A window's keys are a view of the whole prompt's; a copy of that would be as large as the text."""
    reader = Reader(hybrid("gemma3_text"), tiny.prompt(90)[0].tolist())
    (place,) = reader._places.values()
    kept = [one for held in place.held for one in held.values() if isinstance(one, torch.Tensor) and one.dim() == 4]
    token = 2 * 8 * 4  # 2 heads of 8 numbers, float32
    assert [one.untyped_storage().nbytes() for one in kept] == [token * (WINDOW - 1)] * 4  # keys, values, 2 layers
