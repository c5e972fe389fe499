"""Several threads on the same attached models: what a call is belongs to its thread and its cache, not to the model."""

import asyncio
import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel, StaticCache

import saccade
from counting import used
from saccade.decode.counters import Counters
from saccade.decode.recall import RecallObserver
from saccade.decode.stats import Rectifications

from . import tiny
from .ways import ON_DEVICE, paired

THREADS, NEW = 2, 6

POLICIES = {
    "tidal": "tidal:reselect=3,dense_layers=1,budget=5",
    "quest": "quest:page=4,dense_layers=1,budget=12",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=9,rectify=3",
    "lychee_cluster": "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget=12",
    "verify": "resa:page=4,min_pages=1,ratio=0.1,rectify=3:verify",
}
"""Small sets, and both modes of rectification."""


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs give, each in a thread of its own; they start at once, and the first error is raised here."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(start, jobs))


generated = functools.partial(tiny.answered, new=NEW)


def paused(model: PreTrainedModel, job: Callable[[], Any], others: Callable[[], Any]) -> tuple[Any, Any]:
    """What `job` gives, in a thread held inside its first forward call, and what `others` give, which run meanwhile."""
    inside, go_on, held = threading.Event(), threading.Event(), list[int]()

    def wait(*inputs: Any) -> None:
        if threading.get_ident() in held and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    def hold() -> Any:
        held.append(threading.get_ident())
        return job()

    with model.model.layers[1].register_forward_pre_hook(wait), ThreadPoolExecutor(1) as threads:
        result = threads.submit(hold)
        try:
            assert inside.wait(60)
            meanwhile = others()
        finally:
            go_on.set()
        return result.result(), meanwhile


@pytest.mark.parametrize(("policy", "way"), paired(POLICIES, ["generate", "by hand", "fails"]))
def test_another_call_runs_in_the_middle_of_one(policy: str, way: str) -> None:
    """In the worst moment, chosen and not hoped for: in front of a layer."""
    model, first, second = tiny.fresh(), tiny.prompt(21), tiny.prompt(33, seed=4)

    def other() -> Any:
        if way == "fails":
            with pytest.raises(IndexError):
                model(torch.tensor([[tiny.VOCABULARY + 5]]))
            return None
        return generated(model, second) if way == "generate" else tiny.by_hand(model, second, NEW).tolist()

    with saccade.sparsify(model, POLICIES[policy]):
        alone = generated(model, first), other()
        assert paused(model, lambda: generated(model, first), other) == alone
        if way != "fails":
            assert paused(model, other, lambda: generated(model, first)) == alone[::-1]


def test_an_attached_drafter_runs_inside_of_an_attached_model() -> None:
    """One thread, two runs, one `generate` inside of the other; and in the middle of that, another thread's call."""
    main, drafter = tiny.fresh(), tiny.fresh()
    # Random weights are never sure of a token.
    drafter.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=3)
    with saccade.sparsify(main, POLICIES["tidal"]) as one, saccade.sparsify(drafter, POLICIES["quest"]) as two:
        alone = generated(main, tiny.prompt()), generated(drafter, tiny.prompt(25, seed=2))
        steps = one.stats().steps, two.stats().steps
        assisted = functools.partial(generated, main, tiny.prompt(), assistant_model=drafter)
        assert paused(drafter, assisted, lambda: generated(drafter, tiny.prompt(25, seed=2))) == alone
        assert one.stats().steps > steps[0] and two.stats().steps > 2 * steps[1]


def test_a_task_takes_along_what_was_said() -> None:
    """Two tasks of one thread, of which one decodes; its call runs in another thread, as servers do it."""
    model, ids = tiny.fresh(), tiny.prompt()

    async def call() -> int:
        with torch.no_grad():
            before = run.stats().steps
            await asyncio.to_thread(model, ids)
            return run.stats().steps - before

    async def main() -> tuple[int, int]:
        with run.decoding():
            decoding = asyncio.create_task(call())
        return await decoding, await call()

    with saccade.sparsify(model, "streaming:budget=9") as run:
        assert asyncio.run(main()) == (ids.shape[1], 0)


@ON_DEVICE
@torch.no_grad()
def test_lengths_are_on_the_device_for_one_thread() -> None:
    model, ids, starts = tiny.fresh(), tiny.prompt(), torch.zeros(1, dtype=torch.int32)
    with saccade.sparsify(model, POLICIES["quest"]) as run:
        alone = generated(model, ids)
        cache = StaticCache(config=model.config, max_cache_len=48)
        model(ids, past_key_values=cache)
        with run.lengths_on_device(starts):
            model(ids[:, :1], past_key_values=cache)
            assert together(lambda: generated(model, ids)) == [alone]
        assert int(cache.get_seq_length()) == ids.shape[1] + 1
    # A stock call puts its token where it belongs.
    model(ids[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == ids.shape[1] + 2


def test_no_count_is_lost() -> None:
    counters, done, many = Counters(2), Rectifications(), 2_000
    usage = used(1, [6], [[3]], overflowed=[[True]])
    other = used(0, [6])

    def count() -> None:
        for _ in range(many):
            counters.add([usage])
            done.add(passes=1, rewritten=2)

    def undo() -> None:
        for _ in range(many // 10):
            with counters.undone():
                counters.add([other])

    together(count, count, undo)
    assert counters.totals() == [(0.0,) * 4, (6.0 * many, float(many), 2.0 * many, 2.0 * many)]
    assert (done.passes, done.rewritten) == (2 * many, 4 * many)


def test_recall_step_by_step_under_threads() -> None:
    """The same records as one thread makes, in another order, while somebody looks at the numbers."""
    model, prompts = tiny.fresh(), [tiny.prompt(20 + seed, seed=seed) for seed in range(THREADS)]
    found = []
    for threaded in (False, True):
        recall = RecallObserver(4, keep_steps=True)
        with saccade.sparsify(model, POLICIES["quest"], observers=[recall]) as run:
            jobs = [lambda ids=ids: generated(model, ids) for ids in prompts]
            looking = [lambda run=run: [(run.stats(), time.sleep(1e-3)) for _ in range(100)]]
            together(*jobs, *looking) if threaded else [one() for one in jobs]
        records = torch.cat(recall.records(), dim=-1).nan_to_num(2.0)
        assert records.shape[0] == THREADS * (NEW - 1)
        found.append(sorted(records.flatten(1).tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
def test_layers_that_the_backward_pass_runs_again(elsewhere: bool) -> None:
    """Checkpointed layers run again after other calls; on an accelerator, in a thread of autograd's own."""
    model, ids = tiny.fresh(), tiny.prompt()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        loss = model(ids, use_cache=False).logits.square().sum()
        model(ids[:, :7], use_cache=False)
        together(loss.backward) if elsewhere else loss.backward()
        return model.get_input_embeddings().weight.grad.clone()

    expected = gradient()
    for layer in model.model.layers:
        stock = layer.forward
        layer.forward = lambda *args, stock=stock, **kwargs: checkpoint(stock, *args, use_reentrant=False, **kwargs)
    with saccade.sparsify(model, POLICIES["quest"]):
        torch.testing.assert_close(gradient(), expected)


def test_a_run_that_is_over_is_forgotten_by_every_thread() -> None:
    """Threads live on; what their last calls have left goes with the run."""
    model, over, checked = tiny.fresh(), threading.Event(), threading.Event()
    sessions: list[weakref.ref[Any]] = []

    def call() -> None:
        generated(model, tiny.prompt())
        with runs[0].decoding():
            cache = DynamicCache()
            model(tiny.prompt(), past_key_values=cache)
        sessions.append(weakref.ref(cache.layers[0].session))

    def live_on() -> None:
        call()
        over.set()
        assert checked.wait(60)

    runs = [run := saccade.sparsify(model, POLICIES["quest"])]
    thread = threading.Thread(target=live_on)
    thread.start()
    assert over.wait(60)
    call()
    run.restore()
    runs.clear()
    del run
    gc.collect()
    assert [session() for session in sessions] == [None, None]
    checked.set()
    thread.join()
