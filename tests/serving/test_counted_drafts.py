"""`python -m benchmarks drafts`: what is counted of engines' steps, on an engine that answers by script."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import drafts
from benchmarks.drafts import AGAIN, MIXED, Drafts, DraftsSettings, drafts_table
from saccade.checkpoints.bundled import model_path
from saccade.errors import SaccadeError

SERVED = "quest:budget=64,rectify=4:verify"
ALWAYS = f"{SERVED}, always"
NEW = 32


def settings(**other: Any) -> DraftsSettings:
    told = {"model": str(model_path()), "policy": "quest", "budgets": "64", "drafts": 4, "context": 1024, "texts": 3}
    return DraftsSettings(**{**told, "new_tokens": NEW, "batches": "2", "seed": 0, **other})


class Scripted:
    """As much of vLLM's `LLM` as is asked: rows gain what `gains` says, step by step, and end at `max_tokens`."""

    def __init__(self, gains: tuple[int, ...], clock: Iterator[float], shift: int = 0) -> None:
        self.gains, self.clock, self.shift = gains, clock, shift
        self.llm_engine = self.engine_core = self
        self.rows: dict[str, tuple[Any, int]] = {}
        self.closed = 0

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert len(prompt["prompt_token_ids"]) <= 1024
        self.rows[name], self.turn = (params, 0), 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.rows)

    def step(self) -> list[Any]:
        next(self.clock)
        gained, self.turn = 1 if self.turn == 0 else self.gains[(self.turn - 1) % len(self.gains)], self.turn + 1
        outputs = []
        for name, (params, length) in list(self.rows.items()):
            length = min(length + gained, params.max_tokens)
            self.rows[name] = params, length
            if length == params.max_tokens:
                del self.rows[name]
            answer = SimpleNamespace(token_ids=[token + self.shift for token in range(length)])
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer]))
        return outputs

    def shutdown(self) -> None:
        self.closed += 1


def test_accepted_drafts_equal_answers_and_the_pace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, now = iter(range(10**6)), [0.0]

    def clock() -> Iterator[float]:
        for tick in ticks:
            now[0] = 0.5 * tick
            yield now[0]

    monkeypatch.setattr(drafts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    passing, job = clock(), Drafts.check(settings())
    engines = {name: Scripted((1,), passing) for name in job.engines}
    # Of four drafts 2, 4 and 0 are accepted, over and over: half.
    engines[ALWAYS] = Scripted((3, 5, 1), passing)
    engines[AGAIN] = Scripted((1,), passing, shift=1)
    monkeypatch.setattr(Drafts, "_engine", lambda _, name: engines[name])
    done: list[str] = []
    job.run(done.append)
    assert done == list(job.engines) == ["stock", SERVED, ALWAYS, AGAIN]
    assert all(engine.closed == 1 for engine in engines.values())
    rows = {(row["engine"], row["kind"], row["temperature"]): row for row in job.results()["rows"]}
    assert len(rows) == 4 * (2 * 2 + 1), "the bundled tokenizer has no template for chats"
    for kind in ("code", "prose"):
        row = rows[ALWAYS, kind, 0.0]
        # 1 token of the prompt's step, then 3, 5, 1 … until 32: 31 of 3 rounds and 4 more, whose last step is cut.
        assert row["accepted"] == pytest.approx((3 * 6 + 2) / (4 * 10)) and row["texts"] == 3
        assert row["interval"] == pytest.approx((row["accepted"],) * 2), "all texts say the same"
        assert row["by_position"] == pytest.approx([0.7, 0.7, 0.3, 0.3])
        assert [rows[name, kind, 0.0]["as_stock"] for name in job.engines] == [3, 3, 3, 0]
        assert rows[ALWAYS, kind, 0.7]["as_stock"] is None
        assert rows["stock", kind, 0.0]["accepted"] is rows[SERVED, kind, 0.0]["accepted"] is None
    assert {name: rows[name, MIXED, 0]["pace"] for name in job.engines} == pytest.approx(
        {"stock": 4, SERVED: 4, ALWAYS: 12, AGAIN: 4}, rel=0.1
    )
    assert len(drafts_table(job.results()).rows) == len(rows)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"context": 32_700}, "32801 tokens, context and new ones: the model has 32768 positions"),
        ({"budgets": "8"}, "budget '8' is not valid"),
        ({"batches": "0"}, "batch '0' is not valid"),
        ({"policy": "nothing"}, "nothing"),
    ],
)
def test_settings_that_no_engine_could_have_are_refused_before_any_work(other: Any, said: str) -> None:
    with pytest.raises(SaccadeError, match=said):
        Drafts.check(settings(**other))
