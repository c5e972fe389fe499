"""`saccade bench serve` on real engines: small, and without a look at the clock."""

from __future__ import annotations

import pytest
from engines import force_own_path

from saccade.adapters.vllm.options import ServeOptions
from saccade.bench.serving import ServingJob, ServingSettings
from saccade.bench.synthetic import SyntheticEngine
from saccade.checkpoints.bundled import model_path
from saccade.methods.policy import Policy


def test_rows_of_a_small_run() -> None:
    settings = ServingSettings(
        shape=str(model_path()), contexts=["96"], batches=["1,2"], threads=["1"], dtype="float32", device="cpu",
        policies=["quest:budget=32", "tidal:budget=32,reselect=7"], budgets=["2048"], steps=3, block=32,
    )  # fmt: skip
    done: list[int] = []
    results = ServingJob.check(settings).run(lambda unit, results: done.append(len(results["rows"])))
    assert done == [3, 6, 9, 12]
    assert [(row["context"], row["batch"]) for row in results["rows"][::3]] == [(16, 1), (16, 2), (96, 1), (96, 2)]
    assert [row["policy"] for row in results["rows"][:3]] == ["stock", "quest:budget=32", "tidal:budget=32,reselect=7"]
    assert all(row["steps"] == 3 and row["ms_per_token"] > 0 for row in results["rows"])
    quest = results["rows"][-2]
    assert quest["bytes"] < results["rows"][-3]["bytes"]


def test_every_engine_stands_on_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that attends to everything decodes what stock decodes from the same random keys."""
    sizes = {"tokens": 512, "rows": 2, "block": 32, "dtype": "float32", "bytes_per_token": 2 * 12 * 4 * 32 * 4}
    kinds = (None, ServeOptions(Policy.from_spec("quest:budget=512")))
    force_own_path(monkeypatch)
    told = []
    for options in kinds:
        engine = SyntheticEngine(str(model_path()), options, **sizes)  # type: ignore[arg-type]
        engine.begin(200, 2)
        told.append([engine.step()[1] for _ in range(6)])
        engine.end()
        engine.close()
    assert told[0] == told[1]
