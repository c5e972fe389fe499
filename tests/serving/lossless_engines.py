"""Run by loads.py in a process of its own: engines on model runner V2, asked one after the other.

Its argument is JSON, a list of what `Asked` holds; it prints what each was answered and what its steps were.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any
from unittest.mock import patch

import runner_v2

# isort: split
from engines import Engines, core, prompts, runner
from loads import SETTINGS, Heard, hear, turns
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.lossless import ADAPTIVE, speculation
from saccade.adapters.vllm.metrics import metric
from saccade.adapters.vllm.scheduler.draft_length import DraftLength
from saccade.adapters.vllm.worker import dense_step
from saccade.adapters.vllm.worker.fed import RequestFeed
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.sparse import SparseRows
from saccade.adapters.vllm.worker.speculator import SelfSpeculator
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.checkpoints.bundled import model_path
from saccade.methods.policy import Policy
from saccade.selection.index import KeySizes, Views
from saccade.types import Intake


@dataclass(frozen=True)
class Asked:
    """An engine and its loads.

    `policy` comes without `rectify`. A load's name may have what disturbs it behind a colon: `small:foreign`. Steps are
    scheduled `ahead` of the one before them; cycles draft `lengths` tokens, over and over, or always `drafts`.
    """

    policy: str
    drafts: int = 4
    loads: tuple[str, ...] = ("whole",)
    settings: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False
    lengths: tuple[int, ...] = ()
    sampled: str = "probabilistic"
    """vLLM's `draft_sample_method`."""

    @property
    def spec(self) -> str:
        return f"{self.policy},rectify={self.drafts}:verify"


Steps = dict[str, Any]
"""What an engine did: `COUNTED`, pairs of drafted and accepted tokens, and `lengths` of cycles.

Steps are `scheduled` if they have tokens to compute, `flying` until they are done, `ahead` the most of these; `dense`
are the target's, `sparse` those of drafts, in whose rows that select stand `selecting` tokens, in others `covered`.
In `cycles` something is drafted, `beyond` it would pass the model's length. Requests that lose their cache are
`preempted`, sets of drafts that are those of an index planted at once `planted`; no others are found.
"""
COUNTED = "scheduled flying ahead dense sparse selecting covered cycles drafted accepted beyond preempted planted"


def no_steps() -> Steps:
    """`counted` is what `/metrics` has of drafts, `learned` what the scheduler has."""
    return {**dict.fromkeys(COUNTED.split(), 0), "lengths": [], "counted": [0.0, 0.0], "learned": [0, 0]}


@contextmanager
def watched(engine: LLM, asked: Asked, steps: Steps) -> Iterator[None]:
    scheduler, worker = core(engine).scheduler, runner(engine)
    with ExitStack() as stack:

        def watch(owner: Any, name: str, then: Callable[..., None]) -> None:
            stock = getattr(owner, name)

            def both(*given: Any, **more: Any) -> Any:
                answer = stock(*given, **more)
                then(answer, *given)
                return answer

            stack.enter_context(patch.object(owner, name, both))

        def count(name: str) -> Callable[..., None]:
            return lambda *_: steps.update({name: steps[name] + 1})

        def scheduled(output: Any, *_: Any) -> None:
            steps["scheduled"] += output.total_num_scheduled_tokens > 0
            steps["flying"] += 1
            steps["ahead"] = max(steps["ahead"], steps["flying"])

        def done(*_: Any) -> None:
            steps["flying"] -= 1

        def chosen(found: list[int], rows: Any, batch: Any) -> None:
            assert batch.announced and all(batch.decoding), "a draft that is dense for no reason"
            steps["sparse"] += 1
            steps["selecting"] += len(found)
            steps["covered"] += len(batch.lengths) - len(found)

        def proposed(_: Any, batch: Any, *given: Any, **more: Any) -> None:
            rejected = given[5] if len(given) > 5 else more["num_rejected"]
            steps["drafted"] += batch.num_draft_tokens
            steps["accepted"] += batch.num_draft_tokens - int(rejected.sum())
            if (batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np).any():
                steps["cycles"] += 1
                steps["lengths"].append(steps["sparse"] - sum(steps["lengths"]))
            places = worker.req_states.num_computed_tokens.gpu[batch.idx_mapping]
            steps["beyond"] += int((places + asked.drafts > worker.max_model_len).sum())

        def learned(_: Any, policy: Any, *verified: int) -> None:
            steps["learned"] = [*map(sum, zip(steps["learned"], verified, strict=True))]

        watch(scheduler, "schedule", scheduled)
        watch(scheduler, "update_from_output", done)
        watch(scheduler, "_preempt_request", count("preempted"))
        watch(dense_step, "prepare", count("dense"))
        watch(SparseRows, "choose", chosen)
        watch(worker.speculator, "propose", proposed)
        watch(DraftLength, "stood", learned)
        if serving_of(worker.vllm_config).plan.owns_index:
            stack.enter_context(chosen_as_planted(worker, asked.drafts, count("planted")))
        if asked.lengths:
            told = cycle(asked.lengths)
            stack.enter_context(patch.object(DraftLength, "next", lambda *_: next(told)))
        before = figures(asked)
        yield
        steps["counted"] = [now - then for now, then in zip(figures(asked), before, strict=True)]


def figures(asked: Asked) -> tuple[float, ...]:
    policy, places = str(Policy.from_spec(asked.spec)), [*map(str, range(asked.drafts))]
    return tuple(
        sum(metric(f"{what}_tokens", policy, place)._value.get() for place in places)
        for what in ("drafted", "accepted")
    )


@contextmanager
def chosen_as_planted(worker: Any, drafts: int, seen: Callable[[], None]) -> Iterator[None]:
    """Compare each draft's set, chosen through the index that all requests share, with one of its row planted at once.

    In the first layer, over tokens of vLLM's own count of verified ones: which of the last two cycles stand for sure
    decides how many of them. `seen` is called for each set.
    """
    serving, ids = serving_of(worker.vllm_config), worker.req_states.all_token_ids
    plan, tables = serving.plan, worker.block_tables.block_tables[0].gpu
    kind, layer = type(plan.selector), min(plan.refreshing)
    stock = kind.select

    def alone(selector: Any, q: Any, kv: Any, place: int, stop: int, scale: float) -> list[list[int]]:
        text = RequestFeed(serving.levels, lambda: ids.gpu)
        text.here[0] = RequestRow(), place
        index = plan.new_slots(KeySizes.of(kv), 1, longest=4096, text=text)
        if stop:
            index.take_in([Intake(0, 0, 0, stop)], Views((layer,), lambda _: {layer: kv}))
        return sets(stock(selector, q, kv, index.layers[layer], None, scale))[0]

    def select(selector: Any, q: Any, kv: Any, index: Any, scores: Any, scale: float) -> Any:
        found = stock(selector, q, kv, index, scores, scale)
        if index is not index.owner.layers[layer]:
            return found
        for row, ours in enumerate(sets(found)):
            one, length = kv.picked([row]), int(kv.rows.seq_lens[row])
            blocks = one.rows.page_table[0, : -(-length // kv.page)]
            (place,) = (tables[:, : len(blocks)] == blocks).all(1).nonzero()[:, 0].tolist()
            verified = int(worker.req_states.num_computed_tokens.gpu[place])
            assert verified < length <= verified + drafts, "a draft that follows nothing"
            stops = {selector.stop(sure + 3 * drafts, sure) for sure in range(verified - 2 * drafts, verified + 1)}
            told = f"{length} tokens, of which {verified} are verified"
            assert any(ours == alone(selector, q[row : row + 1], one, place, stop, scale) for stop in stops), told
            assert length - 1 in ours[0] and len(ours[0]) == selector.budget
            seen()
        return found

    with patch.object(kind, "select", select):
        yield


def sets(chosen: Any) -> list[list[list[int]]]:
    """Of every row and head, in order."""
    rows = zip(chosen.ids.tolist(), chosen.counts.tolist(), strict=True)
    return [[sorted(ids[:count]) for ids, count in zip(*row, strict=True)] for row in rows]


@contextmanager
def disturbed(how: str, engine: LLM) -> Iterator[None]:
    """Let drafts be dense, propose others', or spoil what they have written, as nobody may notice."""
    if not how:
        yield
        return
    if how == "covered":
        with patch.object(SparseRows, "covers", lambda rows, length: True):
            yield
        return
    stock = SelfSpeculator.propose

    def propose(speculator: Any, batch: Any, *given: Any, **more: Any) -> Any:
        drafts = stock(speculator, batch, *given, **more).clone()
        if how == "foreign":
            return drafts.roll(1, dims=0)
        spoil(engine, batch, drafts.shape[1])
        return drafts

    with patch.object(SelfSpeculator, "propose", propose):
        yield


def spoil(engine: LLM, batch: Any, drafts: int) -> None:
    """Overwrite keys and values of all drafts by 300: vLLM's kernel reads beyond a row's end, where NaN would stay."""
    worker, limit = runner(engine), runner(engine).max_model_len
    for row, slot in enumerate(batch.idx_mapping.tolist()):
        reached = batch.num_computed_prefill_tokens_np[row] + batch.num_scheduled_tokens[row]
        if reached < batch.prefill_len_np[row]:
            continue
        first = int(worker.req_states.num_computed_tokens.gpu[slot])
        blocks = worker.block_tables.block_tables[0].gpu[slot]
        for cache in worker.kv_caches:
            _, heads, block, width = cache.shape
            for position in range(first, min(first + drafts, limit)):
                held, place = cache[int(blocks[position // block])], position % block
                held.view(heads, width, block)[:, : width // 2, place] = 300
                held.view(heads, 2, block, width // 2)[:, 1, place] = 300


def started(engines: Engines, asked: Asked) -> LLM:
    settings = {**SETTINGS, "async_scheduling": False, **asked.settings}
    settings |= {"scheduler_cls": ADAPTIVE} if asked.lengths else {}
    told = speculation(str(model_path()), asked.drafts, fixed=not asked.lengths)
    settings["speculative_config"] = {**told, "draft_sample_method": asked.sampled}
    return engines.sparse(asked.spec, **settings)


def answered(engine: LLM, asked: Asked, name: str) -> tuple[dict[str, Heard], Steps]:
    kind, _, how = name.partition(":")
    steps = no_steps()
    with disturbed(how, engine), watched(engine, asked, steps):
        heard = turns(engine) if kind == "turns" else hear(engine, kind)
    assert core(engine).scheduler.kv_cache_manager.usage == 0, "blocks are left behind"
    return heard, steps


def kept(engine: LLM) -> dict[str, float]:
    """How far the blocks of an answer are from those of the same text as a prompt: the largest differences."""
    worker, seen, (ids,) = runner(engine), list[list[int]](), prompts(120, start=20000)
    stock = SelfSpeculator.propose

    def propose(speculator: Any, batch: Any, *given: Any, **more: Any) -> Any:
        seen.append(worker.block_tables.block_tables[0].gpu[int(batch.idx_mapping[0])].tolist())
        return stock(speculator, batch, *given, **more)

    def ask(prompt: list[int], salt: str, count: int) -> Any:
        settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
        given = TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
        return engine.generate([given], settings, use_tqdm=False)[0]

    text = ids + list(ask(ids, "kept", 46).outputs[0].token_ids)
    with patch.object(SelfSpeculator, "propose", propose):
        full = ask(text, "kept", 1).num_cached_tokens // 32
        found = seen[-1][:full]
        assert ask(text, "fresh", 1).num_cached_tokens == 0
        fresh = seen[-1][:full]
    assert not {*found} & {*fresh}
    bounds = serving_of(worker.vllm_config).indexes.layers.values()
    pairs = [(cache[found], cache[fresh]) for cache in worker.kv_caches]
    sides = [(side[found], side[fresh]) for one in bounds for side in (one.lower, one.upper)]
    return {
        "blocks": full,
        "layers": len(pairs),
        "bounded": len(bounds),
        "scale": max(float(one.abs().max()) for _, one in pairs),
        "keys and values": max(float((one - other).abs().max()) for one, other in pairs),
        "bounds": max(float((one - other).abs().max()) for one, other in sides),
    }


def drawn(engine: LLM, asked: Asked, count: int) -> dict[str, Any]:
    """Short answers of one prompt, sampled with seeds, and what became of their drafts."""
    steps, (ids,) = no_steps(), prompts(200, start=30000)
    settings = [SamplingParams(temperature=1, ignore_eos=True, max_tokens=4, seed=10**6 + one) for one in range(count)]
    with watched(engine, asked, steps):
        answers = engine.generate([TokensPrompt(prompt_token_ids=ids)] * count, settings, use_tqdm=False)
    return {"drawn": [list(one.outputs[0].token_ids) for one in answers], "steps": steps}


def main(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    engines, found = Engines(), []
    gc.freeze()  # each end of an engine looks for garbage among all that is not
    for asked in (Asked(**one) for one in given):
        with runner_v2.scheduled_ahead() if asked.ahead else ExitStack():
            engine = started(engines, asked)
        for name in asked.loads:
            told: dict[str, Any] = {"policy": asked.policy, "drafts": asked.drafts, "load": name}
            if name == "kept":
                told["kept"] = kept(engine)
            elif name.startswith("drawn"):
                told |= drawn(engine, asked, int(name.partition(":")[2]))
            else:
                heard, steps = answered(engine, asked, name)
                told["heard"] = {one: asdict(what) for one, what in heard.items()}
                told |= {"steps": steps, "runner": type(runner(engine)).__module__}
            found.append(told)
        del engine
        engines.close()
    return found


if __name__ == "__main__":
    with runner_v2.drawn_again():
        sys.stdout.write("\nFOUND " + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
