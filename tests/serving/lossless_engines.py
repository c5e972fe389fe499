"""Run by lossless_runs.py in a process of its own: engines on model runner V2, asked one after the other.

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
from loads import Heard, hear, turns
from planted import chosen_as_planted
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.lossless import ADAPTIVE, speculation
from saccade.adapters.vllm.metrics import metric
from saccade.adapters.vllm.scheduler.draft_length import DraftLength
from saccade.adapters.vllm.worker import dense_step
from saccade.adapters.vllm.worker.sparse import SparseRows
from saccade.adapters.vllm.worker.speculator import SelfSpeculator
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.checkpoints.bundled import model_path
from saccade.methods.policy import Policy


@dataclass(frozen=True)
class Asked:
    """An engine, and which loads it is asked.

    Attributes:
        policy: without `rectify`.
        drafts: k.
        loads: names of loads, with what disturbs them behind a colon: `whole`, `small:random`.
        settings: of the engine.
        ahead: whether steps are scheduled before the one ahead of them is done.
        lengths: how many tokens the cycles draft, over and over; none: always k.
        sampled: vLLM's `draft_sample_method`.
    """

    policy: str
    drafts: int = 4
    loads: tuple[str, ...] = ("whole",)
    settings: dict[str, Any] = field(default_factory=dict)
    ahead: bool = False
    lengths: tuple[int, ...] = ()
    sampled: str = "probabilistic"

    @property
    def spec(self) -> str:
        return f"{self.policy},rectify={self.drafts}:verify"


@dataclass
class Steps:
    """What an engine did.

    Attributes:
        scheduled: steps that had tokens to compute; preempted: requests that lost their cache.
        dense: steps of the target; sparse: those of drafts, in whose rows that select stand `selecting` tokens, and
            in others `covered` ones.
        cycles: proposals that drafted.
        drafted, accepted: as the rejection sampler has left it; counted: as `/metrics` has it.
        ahead: most steps that were scheduled and not done.
        beyond: proposals of rows whose drafts would pass the model's length.
        lengths: how many tokens each cycle has drafted; learned: as `counted`, by the scheduler.
        planted: sets of drafts that are those of an index planted at once; no others are found.
    """

    scheduled: int = 0
    preempted: int = 0
    dense: int = 0
    sparse: int = 0
    selecting: int = 0
    covered: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    counted: tuple[float, float] = (0, 0)
    ahead: int = 0
    beyond: int = 0
    lengths: list[int] = field(default_factory=list)
    learned: tuple[int, int] = 0, 0
    planted: int = 0


VERIFIED = ("drafted_tokens", "accepted_tokens")


@contextmanager
def watched(engine: LLM, asked: Asked, steps: Steps) -> Iterator[None]:
    """Count what the engine does inside."""
    scheduler, worker = core(engine).scheduler, runner(engine)
    with ExitStack() as stack:

        def watch(owner: Any, name: str, then: Callable[..., None]) -> None:
            stock = getattr(owner, name)

            def both(*given: Any, **more: Any) -> Any:
                answer = stock(*given, **more)
                then(answer, *given)
                return answer

            stack.enter_context(patch.object(owner, name, both))

        def scheduled(output: Any, *_: Any) -> None:
            steps.scheduled += output.total_num_scheduled_tokens > 0
            in_flight[0] += 1
            steps.ahead = max(steps.ahead, in_flight[0])

        def done(*_: Any) -> None:
            in_flight[0] -= 1

        def chosen(found: list[int], rows: Any, batch: Any) -> None:
            assert batch.announced and all(batch.decoding), "a draft that is dense for no reason"
            steps.sparse += 1
            steps.selecting += len(found)
            steps.covered += len(batch.lengths) - len(found)

        def proposed(_: Any, batch: Any, *given: Any, **more: Any) -> None:
            rejected = given[5] if len(given) > 5 else more["num_rejected"]
            steps.drafted += batch.num_draft_tokens
            steps.accepted += batch.num_draft_tokens - int(rejected.sum())
            ended = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
            steps.cycles += bool(ended.any())
            places = worker.req_states.num_computed_tokens.gpu[batch.idx_mapping]
            steps.beyond += int((places + asked.drafts > worker.max_model_len).sum())
            steps.lengths += [steps.sparse - sum(steps.lengths)] if ended.any() else []

        def learned(_: Any, policy: Any, drafted: int, accepted: int) -> None:
            steps.learned = steps.learned[0] + drafted, steps.learned[1] + accepted

        def count(name: str) -> Callable[..., None]:
            return lambda *_: setattr(steps, name, getattr(steps, name) + 1)

        in_flight = [0]
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
        steps.counted = tuple(now - then for now, then in zip(figures(asked), before, strict=True))  # type: ignore[assignment]


def figures(asked: Asked) -> tuple[float, ...]:
    """Drafted and accepted tokens on `/metrics`."""
    policy = str(Policy.from_spec(asked.spec))
    places = [str(place) for place in range(asked.drafts)]
    counts = [[metric(name, policy, place)._value.get() for place in places] for name in VERIFIED]
    return tuple(map(sum, counts))


@contextmanager
def disturbed(how: str, engine: LLM) -> Iterator[None]:
    """Propose something else than what was drafted, or spoil what drafts have written, as nobody may notice."""
    stock = SelfSpeculator.propose

    def propose(speculator: Any, batch: Any, *given: Any, **more: Any) -> Any:
        drafts = stock(speculator, batch, *given, **more).clone()
        if how == "foreign":
            drafts = drafts.roll(1, dims=0)
        else:
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


@contextmanager
def everything_covered() -> Iterator[None]:
    """Let drafts be dense: no row selects."""
    with patch.object(SparseRows, "covers", lambda rows, length: True):
        yield


def started(engines: Engines, asked: Asked) -> LLM:
    settings: dict[str, Any] = {"max_num_batched_tokens": 128, "enable_prefix_caching": True, "max_num_seqs": 6}
    settings |= {"max_model_len": 512, "async_scheduling": False, **asked.settings}
    settings |= {"scheduler_cls": ADAPTIVE} if asked.lengths else {}
    told = speculation(str(model_path()), asked.drafts, fixed=not asked.lengths)
    settings["speculative_config"] = {**told, "draft_sample_method": asked.sampled}
    return engines.sparse(asked.spec, **settings)


def answered(engine: LLM, asked: Asked, name: str) -> tuple[dict[str, Heard], Steps]:
    kind, _, how = name.partition(":")
    steps = Steps()
    around = everything_covered() if how == "covered" else disturbed(how, engine) if how else ExitStack()
    with around, watched(engine, asked, steps):
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
    steps, (ids,) = Steps(), prompts(200, start=30000)
    settings = [SamplingParams(temperature=1, ignore_eos=True, max_tokens=4, seed=10**6 + one) for one in range(count)]
    with watched(engine, asked, steps):
        answers = engine.generate([TokensPrompt(prompt_token_ids=ids)] * count, settings, use_tqdm=False)
    return {"drawn": [list(one.outputs[0].token_ids) for one in answers], "steps": asdict(steps)}


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
                told |= {"steps": asdict(steps), "runner": type(runner(engine)).__module__}
            found.append(told)
        del engine
        engines.close()
    return found


if __name__ == "__main__":
    with runner_v2.drawn_again():
        sys.stdout.write("\nFOUND " + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
