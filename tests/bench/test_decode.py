"""`saccade bench decode`: the rows it writes, the checks it makes; no timing is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from saccade.bench import decode
from saccade.bench.job import BenchJob
from saccade.bench.shapes import SHAPES, random_model
from saccade.cli import app
from saccade.errors import SaccadeError
from saccade.spec import Policy

KEYS = {
    "policy",
    "runtime",
    "context",
    "batch",
    "threads",
    "steps",
    "ms_per_token",
    "ms_fast",
    "ms_slow",
    "share_attended",
    "speedup_over_stock",
    "speedup_over_dense",
}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def test_writes_rows_for_every_setting(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["bench", "decode", "--shape", shape, "--context", "0,40", "--batch", "1,2", "--steps", "2"]
    result = CliRunner().invoke(app, [*arguments, "--policy", "tidal", "--budget", "16", "--json", str(file)])
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert data["environment"]["read_bandwidth_gb_s"] > 0
    assert all(set(row) == KEYS for row in data["rows"])
    settings = [(row["context"], row["batch"], row["policy"]) for row in data["rows"]]
    policies = ("stock", "dense", "tidal:budget=16")
    assert settings == [(context, batch, name) for context in (0, 40) for batch in (1, 2) for name in policies]
    assert all(row["ms_fast"] <= row["ms_per_token"] <= row["ms_slow"] for row in data["rows"])
    shares = {(row["context"], row["policy"]): row["share_attended"] for row in data["rows"]}
    assert shares[40, "dense"] == 1.0
    # Layer 3 of 4 attends to 16 of 41 tokens, the layers below to all.
    assert shares[40, "tidal:budget=16"] == pytest.approx((3 + 16 / 41) / 4)


def test_refuses_to_time_a_wrong_result(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(shape, positions=64, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(decode, "synthetic_cache", _different_caches(decode.synthetic_cache))
    with pytest.raises(SaccadeError, match="a wrong result is not timed"):
        decode.measure(model, [Policy.from_spec("dense")], context=20, batch=1, threads=1, steps=2)


def _different_caches(make: object) -> object:
    def different(*arguments: object) -> object:
        cache = make(*arguments)  # type: ignore[operator]
        for layer in cache.layers:
            layer.values += torch.rand_like(layer.values)
        return cache

    return different


@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_presets_build(name: str) -> None:
    assert name in SHAPES
    model = random_model(name, positions=16_000, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.config.max_position_embeddings >= 16_000
    assert 130e6 < sum(weight.numel() for weight in model.parameters()) < 140e6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "nowhere"], "smollm2-135m"),
        (["--context", "-1"], "whole numbers of at least 0"),
        (["--threads", "0"], "whole numbers of at least 1"),
        (["--dtype", "int8"], "float32, bfloat16, float16"),
        (["--policy", "nonsense"], "unknown policy 'nonsense'"),
        (["--json", "/nowhere/bench.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_bad_input_leaves_an_old_file_alone(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text("{}")
    for wrong in (["--context", "1k"], ["--policy", "tidal:reselect=99"]):
        arguments = ["bench", "decode", "--shape", shape, "--json", str(file), *wrong]
        assert CliRunner().invoke(app, arguments).exit_code == 2
        assert file.read_text() == "{}"


def test_a_broken_configuration_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    result = CliRunner().invoke(app, ["bench", "decode", "--shape", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_rectified_policy_is_refused_because_its_passes_would_not_be_timed() -> None:
    with pytest.raises(SaccadeError, match=r"resa: .* leaves the dense passes of rectify=32 out; add rectify=none"):
        BenchJob.check(
            shape="smollm2-135m",
            contexts="64",
            batches="1",
            threads="1",
            policies=["resa"],
            budgets="16",
            steps=1,
            stock=False,
            dtype="float32",
            device="cpu",
            json=None,
        )
