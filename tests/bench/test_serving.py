"""What `saccade bench serve` cannot measure is refused in one line, before any work and without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from saccade import SaccadeError, machine
from saccade.bench import serving
from saccade.bench.serving import EMPTY, ServingJob, ServingSettings
from saccade.cli import app

SETTINGS: dict[str, Any] = {
    "shape": "smollm2-135m",
    "contexts": ["8192"],
    "batches": ["1,4"],
    "threads": ["1"],
    "policies": ["quest"],
    "budgets": ["2048"],
    "steps": 4,
    "block": 32,
    "dtype": "bfloat16",
    "device": "cpu",
}


def checked(**changed: Any) -> ServingJob:
    return ServingJob.check(ServingSettings(**{**SETTINGS, **changed}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": "gpt-9"}, "gpt-9"),
        ({"contexts": ["many"]}, "context 'many' is not valid"),
        ({"batches": ["0"]}, "batch '0' is not valid"),
        ({"policies": ["quests"]}, "quests"),
        ({"policies": ["resa"]}, "add rectify=none"),
        ({"policies": ["quest:page=48"]}, "block=32 is no multiple of its page=48; pass --block 48"),
        ({"policies": ["quest:page=24"]}, "pass --block 48"),
        ({"block": 24}, "block=24 is not valid"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ],
)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(SaccadeError) as caught:
        checked(**changed)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_context_is_always_measured_and_dense_only_if_asked_for() -> None:
    job = checked()
    assert job.grid.contexts == (EMPTY, 8192)
    assert list(job.policies) == ["stock", "quest:budget=2048"]
    assert list(checked(policies=["dense"]).policies) == ["stock", "dense"]


def test_a_file_that_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ServingJob, "run")
    result = CliRunner().invoke(app, ["bench", "serve", "--json", "/nowhere/rows.json"])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_shares_and_speedups_are_those_of_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of engines that are not started: 10 per row, and one per 512 tokens of a row that are read."""

    def times(job: ServingJob, engines: object, context: int, batch: int) -> dict[str, list[float]]:
        read = {"stock": context, "quest:budget=2048": min(context, 2048)}
        return {name: [(10 * batch + batch * tokens / 512) / 1e3] for name, tokens in read.items()}

    monkeypatch.setattr(ServingJob, "_measure", times)
    monkeypatch.setattr(ServingJob, "_engines", lambda job, folder: {})
    monkeypatch.setattr(serving, "prepare_process", lambda: None)
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    rows = checked().run(lambda unit, results: None)["rows"]
    found = {(row["policy"], row["context"], row["batch"]): row for row in rows}
    assert len(found) == len(rows) == 8
    for (_, context, batch), row in found.items():
        empty, stock = found["stock", EMPTY, batch], found["stock", context, batch]
        ideal = empty["ms_per_token"] + (row["bytes"] - empty["bytes"]) / 100e9 * 1e3
        assert row["ideal_ms"] == pytest.approx(ideal)
        assert row["share_of_ceiling"] == pytest.approx(ideal / row["ms_per_token"])
        assert row["speedup_over_stock"] == pytest.approx(stock["ms_per_token"] / row["ms_per_token"])
    assert found["quest:budget=2048", 8192, 4]["speedup_over_stock"] == pytest.approx((10 + 16) / (10 + 4))
    token = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, head dim, bytes
    grown = found["stock", 8192, 4]["bytes"] - found["stock", EMPTY, 4]["bytes"]
    assert grown == 4 * (8192 - EMPTY) * token
