"""`python -m benchmarks drafts` and `python -m claims reasoning`: what is counted of engines that answer by script."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
from engines import tokenizer

from benchmarks import drafts
from benchmarks.drafts import AGAIN, PLAIN, TRIED, Drafts, DraftsSettings, drafts_table
from claims.designs import readings
from claims.designs.readings import drafts as read
from claims.judging.discovery import found
from claims.judging.study import Study
from claims.judging.verdicts import judge
from claims.reasoning import job
from claims.reasoning.command import BUDGETS, POLICIES, SEED
from claims.reasoning.job import MOST, RULES, Reasoning, reasoning_table
from claims.reasoning.problems import Problem, problems_of
from lab import kinds
from saccade.checkpoints.bundled import model_path
from saccade.errors import SaccadeError

SERVED = "quest:budget=64,rectify=4:verify"
ALWAYS = f"{SERVED}, always"
STOCK_SECONDS, SLOW = 0.5, 7.0


def settings(**other: Any) -> DraftsSettings:
    told = {"model": str(model_path()), "policy": "quest", "budgets": "64", "drafts": 4, "context": 1024, "texts": 3}
    return DraftsSettings(**{**told, "new_tokens": 32, "batches": "2", "seed": 0, **other})


class Scripted:
    """As much of vLLM's `LLM` as is asked. Row i has nothing for i steps, then a token, then what `gains` says.

    A step takes `SLOW` seconds while a row is new, `STOCK_SECONDS` then. Row 0 ends at `ends` tokens.
    """

    def __init__(self, now: list[float], *gains: int, shift: int = 0, ends: int = 10**6, room: int = 10**6) -> None:
        self.now, self.gains, self.shift, self.ends = now, gains, shift, ends
        self.llm_engine = self.engine_core = self
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=room, block_size=1))
        self.rows: dict[str, Any] = {}
        self.closed = 0

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert len(prompt["prompt_token_ids"]) <= 1024 and name not in self.rows
        self.rows[name] = SimpleNamespace(params=params, length=0, waits=int(name), gains=cycle(self.gains))

    def has_unfinished_requests(self) -> bool:
        return bool(self.rows)

    def step(self) -> list[Any]:
        self.now[0] += SLOW if any(row.length < TRIED / 4 for row in self.rows.values()) else STOCK_SECONDS
        outputs = []
        for name, row in list(self.rows.items()):
            if row.waits:
                row.waits -= 1
                continue
            gained = next(row.gains) if row.length else 1
            most = min(row.params.max_tokens, self.ends if name == "0" else 10**6)
            row.length = min(row.length + gained, most)
            if finished := row.length == most:
                del self.rows[name]
            answer = SimpleNamespace(token_ids=[token + self.shift for token in range(row.length)])
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=finished))
        return outputs

    def shutdown(self) -> None:
        self.closed += 1


@cache
def texts_of(*sizes: int) -> dict[str, list[list[int]]]:
    """Making them is all that takes long here."""
    return kinds.texts_by_kind(tokenizer(), *sizes)


def job_of(monkeypatch: pytest.MonkeyPatch, now: list[float], engines: dict[str, Scripted], **other: Any) -> Drafts:
    monkeypatch.setattr(drafts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(drafts, "texts_by_kind", lambda _, *sizes: texts_of(*sizes))
    monkeypatch.setattr(Drafts, "_engine", lambda _, name: engines.setdefault(name, Scripted(now, 1)))
    return Drafts.check(settings(**other))


def ran(monkeypatch: pytest.MonkeyPatch, now: list[float], **engines: Scripted) -> dict[Any, Any]:
    job, told = job_of(monkeypatch, now, engines), list[tuple[str, int]]()
    results = job.run(lambda name, found: told.append((name, len(found["rows"]))))
    assert told == [(name, 5 * number) for number, name in enumerate(job.engines, 1)], "told engine by engine"
    assert [*job.engines] == ["stock", SERVED, ALWAYS, AGAIN] and job.units == 4
    assert all(engine.closed == 1 for engine in engines.values())
    assert len(drafts_table(results).rows) == len(results["rows"]) == 20, "the bundled tokenizer has no chats"
    return {(row["engine"], row["kind"], row["temperature"]): row for row in results["rows"]}


def test_accepted_drafts_equal_answers_and_the_pace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    # Of four drafts 2, 4 and 0 are accepted, over and over.
    rows = ran(monkeypatch, now, **{ALWAYS: Scripted(now, 3, 5, 1), AGAIN: Scripted(now, 1, shift=1)})
    for kind in ("code", "prose"):
        row = rows[ALWAYS, kind, 0.0]
        # After the prompt's token cycles begin at 1, 4, 9, 10, 13, 18, 19, 22, 27, 28, 31: the last counts whole.
        assert row["accepted"] == pytest.approx((3 * 6 + 2 + 4) / (4 * 11)) and row["texts"] == 3
        assert row["interval"] == pytest.approx((row["accepted"],) * 2), "all texts say the same"
        assert row["gained"] == pytest.approx(35 / 11)
        assert row["by_position"] == pytest.approx([8 / 11, 8 / 11, 4 / 11, 4 / 11])
        assert [rows[name, kind, 0.0]["as_stock"] for name in ("stock", SERVED, ALWAYS, AGAIN)] == [3, 3, 3, 0]
        assert "as_stock" not in rows[ALWAYS, kind, 0.7] and rows[ALWAYS, kind, 0.7]["accepted"] == row["accepted"]
        assert "accepted" not in rows["stock", kind, 0.0] and rows[SERVED, kind, 0.0]["gained"] == 1
    paces = {name: rows[name, PLAIN, 0.0] for name in ("stock", SERVED, ALWAYS, AGAIN)}
    assert all(row["texts"] == 6 and row["batch"] == 2 for row in paces.values())
    # Two rows a step, none of the slow first steps among them.
    assert paces["stock"]["pace"] == paces[SERVED]["pace"] == paces[AGAIN]["pace"] == 2 / STOCK_SECONDS
    # 96 tokens behind the first 128, of a row that is a step ahead, in three loads.
    assert paces["stock"]["steps"] == 3 * 94 and paces[ALWAYS]["steps"] == pytest.approx(3 * 94 / 3, rel=0.1)
    assert paces[ALWAYS]["pace"] == pytest.approx(3 * 2 / STOCK_SECONDS, rel=0.02), "whole rounds of 9 tokens, but one"


def test_answers_that_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's cut step is not counted; one that ends at once has none; what a pace is taken of is too short."""
    now = [0.0]
    rows = ran(monkeypatch, now, **{ALWAYS: Scripted(now, 5, ends=8), SERVED: Scripted(now, 1, ends=1)})
    # Row 0 begins cycles at 1 and 6, and ends at 8 within the second: the other two have seven of full length.
    code, plain, prose = rows[ALWAYS, "code", 0.0], rows[ALWAYS, PLAIN, 0.0], rows[SERVED, "prose", 0.0]
    assert (code["accepted"], code["gained"], code["as_stock"]) == (1, 5, 2)
    assert (plain["pace"], plain["steps"], prose["gained"], prose["texts"]) == (None, 0, 1, 3)


def test_rectified_beside_what_is_verified_text_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rectified = [0.0], SERVED.removesuffix(":verify")
    job = job_of(monkeypatch, now, {ALWAYS: Scripted(now, 3, 5, 1)}, rectified=True, batches="1")
    assert [*job.engines] == ["stock", rectified, ALWAYS, AGAIN]
    results = job.run(lambda *_: None)
    samples = {(sample.text, sample.arm): sample.values for sample in read(results)}
    assert {text for text, _ in samples} == {f"text {number}" for number in range(6)}, "all, of code and of prose"
    for (_, name), values in samples.items():
        gained = 3 if name == ALWAYS else 1
        # Whole rounds of 9 tokens, but one.
        assert values["ms"] == pytest.approx(1e3 * STOCK_SECONDS / gained, rel=0.04)
        assert values["accepted"] == pytest.approx(gained - 1, abs=0.1)
    (each,) = (row["each"] for row in results["rows"] if row.get("batch") == 1 and row["engine"] == ALWAYS)
    each[2] = (0, 0.0, 0)
    assert len(read(results)) == 4 * 5, "a text that one engine ended too early is nobody's"


def test_a_cache_in_which_rows_would_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    little = Scripted(now := [0.0], 1, room=3 * 1253 - 1)
    with pytest.raises(SaccadeError, match="3 rows of 1253 tokens: the cache has 3758, not 3759"):
        ran(monkeypatch, now, stock=little)
    assert little.closed == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"context": 32_700}, "32929 tokens, context and new ones: the model has 32768 positions"),
        ({"budgets": "8"}, "budget=8 does not hold one page of 16"),
        ({"batches": "0"}, "batch '0' is not valid"),
        ({"batches": "7"}, "batch 7 is not valid: at most 6, of code and prose"),
        ({"batches": "128", "texts": 64}, "128 rows of 4 drafts: no graphs beyond 512 tokens a pass"),
        ({"policy": "nothing"}, "nothing"),
    ],
)
def test_settings_that_no_engine_could_have_are_refused_before_any_work(other: Any, said: str) -> None:
    with pytest.raises(SaccadeError, match=said):
        Drafts.check(settings(**other))


SPARSE = "quest:budget=64,heads=query", "tidal:budget=64,reselect=6,heads=query"
UNION = "less_is_more:budget=64,reselect=7"


def answers(llm: str, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> Iterator[Any]:
    """Problem i is answered in 300 + i tokens; every third wrongly, every fifth without an end; sparsely in twice."""
    assert not use_tqdm and all((one.temperature > 0) == (one.seed > 0) for one in params), "one is greedy"
    for prompt, _ in zip(prompts, params, strict=True):
        number = prompt["prompt_token_ids"][0]
        length = (300 + number) * (1 + (llm in SPARSE)) + (llm != "None") * number % 7
        text, reason = "Answer: 2 or\nAnswer: **4**." if number % 3 else "Answer: 5", "stop" if number % 5 else "length"
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(length), text=text, finish_reason=reason)])


def test_long_right_answers_are_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    @contextmanager
    def engine(_: Reasoning, policy: Any) -> Iterator[Any]:
        yield SimpleNamespace(generate=lambda *given, use_tqdm: [*answers(str(policy), *given, use_tqdm)])

    monkeypatch.setattr(job, "prepare_process", lambda **_: None)
    monkeypatch.setattr(Reasoning, "_engine", engine)
    asked = tuple((Problem(f"sum {n}", "2 + 2?", lambda said: float(said == "4")), [n]) for n in range(400))
    policies = Study(None, tmp_path).policies((*SPARSE, UNION))
    results = Reasoning(Study(None, tmp_path), policies, asked, 0, RULES, 0.5).run(lambda *_: None)
    able = [number for number in range(100, 400) if number % 3 and number % 5]
    assert results["qualified"] == len(able) == 160
    samples = {(sample.text, sample.arm): sample.values for sample in readings.reasoning(results)}
    assert {arm for _, arm in samples} == {"stock", *SPARSE, UNION} and len(samples) == 4 * MOST
    assert {f"sum {able[0]}", f"sum {able[-2]}"} < {name for name, _ in samples}, "from first to last"
    for (name, arm), values in samples.items():
        number = int(name.split()[1])
        tokens = (300 + number) * (1 + (arm in SPARSE)) + (arm != "stock") * number % 7
        assert values == {"ended@enough": 1, "tokens": tokens, "ended": 1, "right": 1}
    assert len(reasoning_table(results).rows) == 4
    claim = found()["C10"].claim.published
    assert claim is not None and judge(claim, readings.reasoning(results)).verdict == "holds"
    assert claim.settings.rules == (*RULES, POLICIES, BUDGETS, SEED), "what chooses problems is among the criteria"
    assert judge(claim, readings.reasoning(results | {"qualified": 99})).verdict == "cannot be told"


def test_what_reasoning_cannot_be_asked_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SaccadeError, match=r"memory=1\.0 is not valid: a share of the device's"):
        Reasoning.check("nowhere", POLICIES, BUDGETS, SEED, 1.0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SaccadeError, match=r"reasoning_gym is missing: pip install --requirement claims/reasoning/"):
        problems_of(1, 0)
