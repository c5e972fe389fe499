"""What `saccade bench serve` cannot measure is refused in one line, before any work and without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saccade import SaccadeError
from saccade.bench.serving import EMPTY, ServingJob, _complete

SETTINGS: dict[str, Any] = {
    "shape": "smollm2-135m",
    "contexts": "8192",
    "batches": "1,4",
    "threads": 1,
    "policies": ["quest"],
    "budgets": "2048",
    "steps": 4,
    "block": 32,
    "dtype": "bfloat16",
    "json": None,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": "gpt-9"}, "gpt-9"),
        ({"contexts": "many"}, "context 'many' is not valid"),
        ({"batches": "0"}, "batch '0' is not valid"),
        ({"policies": ["quests"]}, "quests"),
        ({"policies": ["resa"]}, "add rectify=none"),
        ({"policies": ["quest:page=48"]}, "block=32 is no multiple of its page=48; pass --block 48"),
        ({"policies": ["quest:page=24"]}, "pass --block 48"),
        ({"block": 24}, "block=24 is not valid"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"json": Path("/nowhere/rows.json")}, "cannot be written"),
    ],
)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(SaccadeError) as caught:
        ServingJob.check(**{**SETTINGS, **changed})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_context_is_always_measured_and_dense_only_if_asked_for() -> None:
    job = ServingJob.check(**SETTINGS)
    assert job.contexts == (EMPTY, 8192)
    assert [str(policy) for policy in job.policies] == ["quest:budget=2048"]
    assert "dense" in [str(policy) for policy in ServingJob.check(**{**SETTINGS, "policies": ["dense"]}).policies]


def test_shares_and_speedups_are_those_of_the_same_batch() -> None:
    def row(policy: str, context: int, batch: int, ms: float, size: float) -> dict[str, Any]:
        return {"policy": policy, "context": context, "batch": batch, "ms_per_token": ms, "bytes": size}

    rows = [
        row("stock", EMPTY, 1, 10.0, 1e9),
        row("stock", EMPTY, 4, 20.0, 1e9),
        row("stock", 8192, 4, 100.0, 5e9),
        row("quest", 8192, 4, 50.0, 2e9),
    ]
    _complete(rows, 100.0)
    # 4 GB more than at the empty context take 40 ms at 100 GB/s, on top of 20.
    assert rows[2]["ideal_ms"] == pytest.approx(60.0)
    assert rows[2]["share_of_ceiling"] == pytest.approx(0.6)
    assert rows[3]["ideal_ms"] == pytest.approx(30.0)
    assert rows[3]["speedup_over_stock"] == pytest.approx(2.0)
    assert rows[0]["speedup_over_stock"] == pytest.approx(1.0)
