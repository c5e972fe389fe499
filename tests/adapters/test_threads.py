"""Several threads on the same attached models: what a call is belongs to its thread and its cache, not to the model."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from .ways import ON_DEVICE, VERSION

THREADS, CALLS, NEW = 2, 20, 6

POLICIES = {
    "tidal": "tidal:reselect=3,dense_layers=1,budget=5",
    "quest": "quest:page=4,dense_layers=1,budget=12",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=9,rectify=3",
    "lychee_cluster": "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget=12",
    "verify": "resa:page=4,min_pages=1,ratio=0.1,rectify=3:verify",
}
"""Small sets, and both modes of rectification."""

Job = Callable[[], list[list[int]]]


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs give, each in a thread of its own; they start at once, and the first error is raised here."""
    barrier, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def work(number: int) -> None:
        try:
            barrier.wait()
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def generated(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    mask = torch.ones_like(ids)
    return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options).tolist()


@torch.no_grad()
def fed(model: PreTrainedModel, run: saccade.Run, ids: torch.Tensor) -> list[list[int]]:
    """Choices behind every token of a second part, which decodes in one call."""
    cache = model(ids[:, :-3], use_cache=True).past_key_values
    with run.decoding():
        return model(ids[:, -3:], past_key_values=cache).logits.argmax(-1).tolist()


def job(model: PreTrainedModel, run: saccade.Run, number: int) -> Job:
    """A call of its own: another prompt each, in the ways that people call models."""
    ids = tiny.prompt(20 + number % 13, seed=number)
    rows = tiny.prompt(18 + number % 5, rows=2, seed=number)
    grows = VERSION < (5,) and run.policy.rectify is not None  # a static cache is refused there

    def held() -> Any:
        return DynamicCache() if grows else StaticCache(config=model.config, max_cache_len=48)

    verifies = "verify" in str(run.policy)
    ways: list[Job] = [
        lambda: generated(model, ids),
        lambda: tiny.by_hand(model, ids, NEW).tolist(),
        lambda: generated(model, rows) if verifies else generated(model, rows, num_beams=2),
        lambda: fed(model, run, ids),
        lambda: tiny.by_hand(model, rows, NEW, held()).tolist(),
    ]
    return ways[number // len(POLICIES) % len(ways)]


# --- the tokens of each call alone -------------------------------------------------------------------------------


def test_threads_give_the_tokens_of_their_calls_alone() -> None:
    """Two threads, twenty calls each, over five attached models; nothing that was counted is lost either."""
    models = [tiny.fresh(seed=seed) for seed in range(len(POLICIES))]
    with ExitStack() as stack:
        runs = [
            stack.enter_context(saccade.sparsify(model, spec, recall=True))
            for model, spec in zip(models, POLICIES.values(), strict=True)
        ]
        jobs = [job(models[number % len(models)], runs[number % len(runs)], number) for number in range(CALLS)]
        alone = [one() for one in jobs]
        before = [run.stats() for run in runs]
        notes, over = [run.notes for run in runs], 0

        def thread(start: int) -> list[list[list[int]]]:
            nonlocal over
            # The same models at the same time, never the same call.
            order = [(start * len(POLICIES) + number) % CALLS for number in range(CALLS)]
            try:
                results = {number: jobs[number]() for number in order}
            finally:
                over += 1
            return [results[number] for number in range(CALLS)]

        def read() -> int:
            """Somebody who looks at the numbers all the while."""
            looks = 0
            while over < THREADS:
                assert [run.notes for run in runs] == notes
                assert all(run.stats().steps >= once.steps for run, once in zip(runs, before, strict=True))
                looks += 1
                time.sleep(1e-3)  # else it takes the turns of those that it looks at
            return looks

        *threads, looks = together(*(lambda start=start: thread(start) for start in range(THREADS)), read)
        assert looks
        for number in range(CALLS):
            for tokens in threads:
                assert tokens[number] == alone[number], f"call {number}"
        for run, once in zip(runs, before, strict=True):
            stats = run.stats()
            for name in ("dense_passes", "rectifications", "drafted", "accepted"):
                assert getattr(stats, name) == (THREADS + 1) * getattr(once, name), name
            for layer, first in zip(stats.layers, once.layers, strict=True):
                assert first.steps and layer.steps == (THREADS + 1) * first.steps
                for name in ("tokens", "share", "recall", "token_recall"):
                    assert getattr(layer, name) == pytest.approx(getattr(first, name)), name


class Paused:
    """Holds the calling thread inside its first forward call, in front of layer 1, until `others` have run."""

    def __init__(self, model: PreTrainedModel, others: Callable[[], Any]) -> None:
        self.inside, self.go_on, self.others, self.held = threading.Event(), threading.Event(), others, None
        self.handle = model.model.layers[1].register_forward_pre_hook(self.wait)

    def wait(self, *inputs: Any) -> None:
        if threading.current_thread() is self.held and not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(60)

    def run(self, job: Callable[[], Any]) -> tuple[Any, Any]:
        """What `job` gives, in a thread that is held, and what `others` give, which run meanwhile."""
        result: list[Any] = []
        self.held = threading.Thread(target=lambda: result.append(job()))
        self.held.start()
        try:
            assert self.inside.wait(60)
            meanwhile = self.others()
        finally:
            self.go_on.set()
            self.held.join()
            self.handle.remove()
        return result[0], meanwhile


@pytest.mark.parametrize("way", ["generate", "by hand", "fails"])
@pytest.mark.parametrize("policy", POLICIES)
def test_another_call_runs_in_the_middle_of_one(policy: str, way: str) -> None:
    """As above, with the worst moment chosen instead of hoped for."""
    model, first, second = tiny.fresh(), tiny.prompt(21), tiny.prompt(33, seed=4)

    def other() -> Any:
        if way == "fails":
            with pytest.raises(IndexError):
                model(torch.tensor([[tiny.VOCABULARY + 5]]))
            return None
        return generated(model, second) if way == "generate" else tiny.by_hand(model, second, NEW).tolist()

    with saccade.sparsify(model, POLICIES[policy]):
        alone = generated(model, first), other()
        assert Paused(model, other).run(lambda: generated(model, first)) == alone
        if way != "fails":
            assert Paused(model, lambda: generated(model, first)).run(other) == alone[::-1]


def test_an_attached_drafter_runs_inside_of_an_attached_model() -> None:
    """One thread, two runs, one `generate` inside of the other; and in the middle of that, another thread's call."""
    main, drafter = tiny.fresh(), tiny.fresh()
    # Random weights are never sure of a token.
    drafter.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=3)
    with saccade.sparsify(main, POLICIES["tidal"]) as one, saccade.sparsify(drafter, POLICIES["quest"]) as two:
        alone = generated(main, tiny.prompt()), generated(drafter, tiny.prompt(25, seed=2))
        steps = one.stats().steps, two.stats().steps
        paused = Paused(drafter, lambda: generated(drafter, tiny.prompt(25, seed=2)))
        assert paused.run(lambda: generated(main, tiny.prompt(), assistant_model=drafter)) == alone
        assert one.stats().steps > steps[0] and two.stats().steps > 2 * steps[1]


# --- what a caller has said holds for itself ---------------------------------------------------------------------


@torch.no_grad()
def test_decoding_is_said_by_one_thread_for_itself() -> None:
    model, ids = tiny.fresh(), tiny.prompt()
    with saccade.sparsify(model, POLICIES["quest"]) as run:
        prompt = model(ids).logits
        with run.decoding():
            assert torch.equal(together(lambda: model(ids).logits)[0], prompt)
            assert run.stats().steps == 0
        Paused(model, lambda: model(ids)).run(lambda: generated(model, ids))
        assert run.stats().steps == NEW - 1


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


# --- what is counted ---------------------------------------------------------------------------------------------


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
    """The same records as one thread makes, in another order."""
    model, prompts = tiny.fresh(), [tiny.prompt(20 + seed, seed=seed) for seed in range(THREADS)]
    found = []
    for threaded in (False, True):
        recall = RecallObserver(4, keep_steps=True)
        with saccade.sparsify(model, POLICIES["quest"], observers=[recall]):
            jobs = [lambda ids=ids: generated(model, ids) for ids in prompts]
            together(*jobs) if threaded else [one() for one in jobs]
        records = torch.cat(recall.records(), dim=-1).nan_to_num(2.0)
        assert records.shape[0] == THREADS * (NEW - 1)
        found.append(sorted(records.flatten(1).tolist()))
    assert found[0] == found[1]


# --- copies, gradients, memory -----------------------------------------------------------------------------------


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

    run = saccade.sparsify(model, POLICIES["quest"])
    runs = [run]
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
