"""Copies of an attached model, models that share parts with one, and caches that their users have let go."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
from transformers import DynamicCache, LlamaForCausalLM

import saccade

from .tiny import fresh, said

MODES = {
    "plain": "quest:page=4,budget=8",
    "text": "lychee_cluster:chunk_min=2,chunk_max=4,budget=24",
    "published": "less_is_more:reselect=3,dense_layers=1,budget=12",
    "rewritten": "exact_topk:budget=8,rectify=3",
    "verified": "exact_topk:budget=8,rectify=3:verify",
    "dense": "dense",
}


def unpickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@functools.cache
def expected(mode: str, seed: int) -> list[int]:
    model = fresh(seed=seed)
    with saccade.sparsify(model, MODES[mode]):
        return said(model)


@functools.cache
def stock(seed: int) -> list[int]:
    return said(fresh(seed=seed))


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_has_weights_steps_and_an_end_of_its_own(mode: str) -> None:
    """It is attached to itself: it goes on when the original is restored, and says what its own weights say."""
    model, other = fresh(seed=0), fresh(seed=5)
    with saccade.sparsify(model, MODES[mode]) as run:
        said(model)
        steps = run.stats().steps
        twins = [copied(model) for copied in (copy.deepcopy, unpickled)]
        for twin in twins:
            twin.load_state_dict(other.state_dict())
            assert said(twin) == expected(mode, 5)
        assert run.stats().steps == steps
        assert said(model) == expected(mode, 0)
    for twin in twins:
        assert said(twin) == expected(mode, 5)
        own = vars(twin)["_saccade_run"]
        assert own.model is twin and own.stats().steps > 0
        with pytest.raises(saccade.AttachmentError, match="or copy before"):
            saccade.sparsify(twin, "dense")
        own.restore()
        assert said(twin) == stock(5)
    assert said(model) == stock(0)


def with_shared_decoder() -> Any:
    model = fresh()
    other = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    other.model, other.lm_head = model.model, model.lm_head
    return model, other


def with_shared_layer() -> Any:
    model, other = fresh(), fresh(seed=3)
    other.model.layers[2].self_attn = model.model.layers[2].self_attn
    return model, other


def with_shared_configuration() -> Any:
    return (model := fresh()), LlamaForCausalLM(model.config).eval()


@pytest.mark.parametrize("sharing", [with_shared_decoder, with_shared_layer, with_shared_configuration])
@pytest.mark.parametrize("mode", ["plain", "verified"])
def test_who_shares_parts_with_an_attached_model_is_refused(mode: str, sharing: Any) -> None:
    """Attached second it changes nothing; called it says the same each time, whatever the first has just done."""
    model, other = sharing()
    before = said(model), said(other)
    run = saccade.sparsify(model, MODES[mode])
    with pytest.raises(saccade.AttachmentError, match="shares layers or its configuration"):
        saccade.sparsify(other, "dense")
    if sharing is not with_shared_decoder:
        for _ in range(2):
            with pytest.raises(saccade.AttachmentError, match="its model is not attached"):
                said(other)
            said(model)
    run.restore()
    assert (said(model), said(other)) == before
    if sharing is with_shared_layer:
        # It asks the other's configuration which attention is meant: seen by what it does, at the first step.
        with (
            saccade.sparsify(other, MODES[mode]),
            pytest.raises(saccade.UnsupportedModelError, match="layer 2 did not"),
        ):
            said(other)
    else:
        with saccade.sparsify(other, MODES[mode]):
            said(other)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_keeps_no_cache_alive(mode: str) -> None:
    """Nor what it knows of it: what is to be told of it later are three numbers. Attached, and when it is over."""
    for ended in (False, True):
        run, cache = saccade.sparsify(fresh(), MODES[mode]), DynamicCache()
        said(run.model, past_key_values=cache)
        bytes_held = run.stats().index_bytes
        alive = [weakref.ref(one) for layer in cache.layers for one in (layer.buffers[0], layer.session)]
        if ended:
            run.restore()
        del cache
        gc.collect()
        assert not any(one() is not None for one in alive)
        assert run.stats().index_bytes == bytes_held
        assert (bytes_held > 0) == (mode in ("plain", "text"))
