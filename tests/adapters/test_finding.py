"""A policy without its layer: dense until a long prompt has shown the layer, then as if it had been named."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import saccade
from adapters import tiny
from saccade.adapters.hf import finding, probe
from saccade.checkpoints.shape import shape_of_model
from saccade.errors import PolicyError
from saccade.methods.policy import Policy
from saccade.recipes import published
from saccade.recipes.recipe import Recipe

NEW, LONG, SHORT = 6, 170, 60
POLICY = "less_is_more:budget=12,dense_layers=1"
WAYS = {"": {}, "rectify=3": {}, "rectify=3:verify": {}, "static": {"cache_implementation": "static"}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"TOLD": 12, "SHORT": 16, "KEY": 0.1}.items():
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(finding, "LEAST", 100)
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))


def said(model: Any, length: int, **options: Any) -> list[int]:
    return model.generate(tiny.prompt(length), do_sample=False, max_new_tokens=NEW, **options)[0, length:].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_found_on_the_first_long_prompt(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.fresh("llama", num_hidden_layers=5)
    policy = POLICY + (f",{way}" if "=" in way else "")
    stock = said(model, SHORT, **WAYS[way])
    with saccade.sparsify(model, policy) as run:
        assert "no layer is known for this model" in run.notes[0]
        assert said(model, SHORT, **WAYS[way]) == stock
        with pytest.raises(PolicyError, match="there is none yet"):
            run.recipe()
        steps = run.stats().steps
        found = said(model, LONG, **WAYS[way])
        layers = run.policy.options.model_dump()["reselect"]
        assert run.recipe().reselect == run.recipe().layers_of("less_is_more") == layers
        assert run.stats().steps > steps
    (told,) = (one.message for one in caplog.records if "selects again" in one.message)
    assert "key tokens" in told and "kept in" in told
    named = f"{policy},reselect={'+'.join(map(str, layers))}"
    with saccade.sparsify(model, named) as run:
        assert said(model, LONG, **WAYS[way]) == found
        share = min(layer.share for layer in run.stats().layers)
    assert "verify" in way or share < 0.5, "it was sparse"
    with saccade.sparsify(model, policy) as run:
        assert run.policy == saccade.Policy.from_spec(named)
        assert said(model, LONG, **WAYS[way]) == found


@pytest.mark.parametrize("near", [0.0, 1.0])
def test_the_best_of_one_step_walk_and_steps_in_a_row_decide(near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step likes layer 5 best; behind others layer 3 is, 4 above it by `near` nats a token, give or take."""
    model, asked = tiny.fresh("llama", num_hidden_layers=6), list[tuple[int, tuple[int, ...]]]()
    noise = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    above = {1: {(5,): 0.0, (4,): 1.0, (3,): 2.0, (2,): 3.0, (): 4.0}, probe.WALK: {(3,): 0.0, (4,): near}}

    class Scripted:
        def __init__(self, model: Any, passages: Any, **options: Any) -> None:
            self.texts = len(passages)

        def measure(self, policy: saccade.Policy, *, walk: int, every: int) -> list[dict[str, Any]]:
            (layers,) = (policy.options.model_dump()["reselect"],)
            assert every == (2 if walk == 1 else 1), "on a CPU"
            asked.append((walk, layers))
            loss = 5 + above[walk].get(layers, 1.0) + 0.1 * noise.roll(sum(layers))
            return [{kind: SimpleNamespace(divergence=loss) for kind in probe.KINDS} for _ in range(self.texts)]

    monkeypatch.setattr(finding, "Probe", Scripted)
    with saccade.sparsify(model, POLICY) as run, torch.no_grad():
        model(tiny.prompt(5 * LONG))
        assert run.policy.options.model_dump()["reselect"] in ((3,), (4,))
        assert run.recipe().found["sparsify"]["clear"] == (near > 0)
        assert near == 0 or run.recipe().reselect == (3,)
    assert [layers for walk, layers in asked if walk == 1] == [(), (2,), (3,), (4,), (5,)]
    assert [layers for walk, layers in asked if walk == probe.WALK] == [(5,), (4,), (3,)]


def test_padded_rows_and_loops_by_hand() -> None:
    """The longest row is looked at, behind its padding; a loop by hand is a prompt; caches met before take part."""
    model, batch = tiny.fresh("llama", num_hidden_layers=5), tiny.padded([SHORT, LONG])
    with saccade.sparsify(model, POLICY) as run, torch.no_grad():
        model(**batch)
    (kept,) = Path(os.environ["SACCADE_CACHE"], "recipes").iterdir()
    assert Recipe.read(kept).policy == run.policy
    kept.unlink()
    with saccade.sparsify(model, POLICY) as again, torch.no_grad():
        cache = model(tiny.prompt(SHORT)).past_key_values
        model(batch["input_ids"][1:])
        assert again.policy == run.policy
        model(tiny.prompt(1), past_key_values=cache)
        assert min(layer.tokens for layer in again.stats().layers) == 12


def test_a_probe_that_raises_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a layer below those that are dense by default is kept as any other."""
    model, calls = tiny.fresh("llama", num_hidden_layers=5), list[int]()

    def losses(looking: Any, passages: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {(layer,): torch.full((20,), float(layer), dtype=torch.float64) for layer in (1, 3)}

    monkeypatch.setattr(finding.Finding, "_losses", losses)
    with saccade.sparsify(model, "less_is_more:budget=12,dense_layers=0") as run:
        with pytest.raises(KeyboardInterrupt):
            said(model, LONG)
        for length in (SHORT, LONG, LONG):
            said(model, length)
        assert (run.recipe().reselect, len(calls)) == ((1,), 2), "once"
    (kept,) = Path(os.environ["SACCADE_CACHE"], "recipes").iterdir()
    assert Recipe.read(kept).policy == run.policy


def test_a_recipe_without_a_layer_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = tiny.fresh("llama", num_hidden_layers=5), Policy.from_spec("tidal:rule=ratio,ratio=0.1")
    named = Recipe(shape_of_model(model), policy, found={"by": "somebody"})
    monkeypatch.setattr(published, "PUBLISHED", {"mine": named})
    with saccade.sparsify(model, "recipe:mine") as run:
        assert run.notes[0] == "recipe mine (somebody): from the paper, not re-measured here"
        assert "no layer is known for this model" in run.notes[1]
        assert not any("L//2" in note for note in run.notes)
        said(model, LONG)
        assert run.recipe().reselect is not None, "without a budget too"


def test_prompts_that_need_nothing_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(probe, "KEY", 1e9)
    model = tiny.fresh("llama", num_hidden_layers=5)
    stock = said(model, LONG)
    with saccade.sparsify(model, POLICY):
        assert said(model, LONG) == stock
    assert "no token of this prompt needs a long context" in caplog.text
