"""Copies of an attached model, and of the KV cache: there is one, appended in place, that its user can let go."""

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Cache, DynamicCache, LlamaForCausalLM, PreTrainedModel

import saccade
from saccade.adapters.hf.cache import MINIMUM_GROWTH

from . import tiny
from .tiny import fresh, said

MODES = {
    "plain": "quest:page=4,budget=8",
    "text": "lychee_cluster:chunk_min=2,chunk_max=4,budget=24",
    "published": "less_is_more:reselect=3,dense_layers=1,budget=12",
    "rewritten": "exact_topk:budget=8,rectify=3",
    "verified": "exact_topk:budget=8,rectify=3:verify",
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


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "published"])
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


LENGTH, LAYERS = 800, 6


class PeakMemory(TorchDispatchMode):
    """Bytes of tensor storage alive at once among those made inside, at their highest."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@functools.cache
def model() -> PreTrainedModel:
    """Shapes in the proportions of a real model: the cache outweighs the scores of one layer."""
    return tiny.fresh(num_hidden_layers=LAYERS, head_dim=64, max_position_embeddings=2 * LENGTH)


@functools.cache
@torch.no_grad()
def held_and_peak(spec: str) -> tuple[int, int]:
    """Bytes of cache and indexes after some steps from `LENGTH` tokens on, and the peak while those steps ran."""
    ids = tiny.prompt(LENGTH)
    memory = PeakMemory()
    with saccade.sparsify(model(), spec) as run:
        with memory:
            cache = model()(ids, use_cache=True, logits_to_keep=1).past_key_values
            model()(ids[:, : MINIMUM_GROWTH - 6], past_key_values=cache, logits_to_keep=1)
            memory.peak = memory.now
            # Indexes are built in the first step; the buffers are full and grow in the seventh.
            for _ in range(10):
                model()(ids[:, :1], past_key_values=cache)
        return storage_bytes(cache) + run.stats().index_bytes, memory.peak


def storage_bytes(cache: Cache) -> int:
    storages = {}
    for layer in cache.layers:
        for tensor in tree_iter([layer.keys, layer.values, *vars(layer).values()]):
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


SPECS = (
    "quest:dense_layers=0,budget=64",
    "tidal:budget=64,reselect=4,rectify=4",
    "tidal:budget=64,reselect=4,rectify=4:verify",
    "less_is_more:budget=64,reselect=4",
    "lychee_cluster:budget=64",
)


@pytest.mark.parametrize("spec", SPECS)
def test_little_more_than_dense(spec: str) -> None:
    """At the default page of 16 tokens, bounds are a sixteenth of the keys and values; rewriting happens in place."""
    (held, peak), (dense_held, dense_peak) = held_and_peak(spec), held_and_peak("dense")
    assert held <= 1.1 * dense_held
    assert peak <= 1.1 * dense_peak
    # And the dense run itself holds one copy with bounded room to grow.
    assert dense_held <= 1.3 * 2 * LAYERS * 2 * 64 * 4 * (LENGTH + MINIMUM_GROWTH + 4)


@pytest.mark.parametrize("policy", ["dense", "quest"])
@torch.no_grad()
def test_appends_do_not_copy(policy: str) -> None:
    """Keys and values are views of one growing buffer per layer; nothing else holds them."""
    with saccade.sparsify(tiny.llama(), tiny.spec(policy, 16)):
        cache = tiny.llama()(tiny.prompt(100), use_cache=True).past_key_values
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        bytes_held = storage_bytes(cache)
        for step in range(12):
            tiny.llama()(tiny.prompt(1), past_key_values=cache)
            assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
            assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (1, 2, 101 + step, 8)
        assert storage_bytes(cache) == bytes_held
        cache.crop(-8)
        tiny.llama()(tiny.prompt(1), past_key_values=cache)
        assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


@torch.no_grad()
def test_adopting_a_plain_cache_copies_nothing() -> None:
    """Its first append makes room once; what it held is freed layer by layer."""
    model = tiny.llama()
    cache = model(tiny.prompt(50), use_cache=True).past_key_values
    storages = [weakref.ref(layer.keys.untyped_storage()) for layer in cache.layers]
    with saccade.sparsify(model, tiny.spec("quest", 8)):
        model(tiny.prompt(1), past_key_values=cache)
        assert all(storage() is None for storage in storages)
