"""No engine starts with a layer that nobody has found for its model, but for random weights, of which none is right."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from saccade.adapters.vllm.checks import plan_of, reasons_against
from saccade.adapters.vllm.options import ServeOptions
from saccade.adapters.vllm.server.serve import RefusedError, Server, prepare
from saccade.checkpoints.bundled import model_path
from saccade.errors import ServingError
from saccade.methods.policy import Policy
from saccade.recipes.kept import keep
from saccade.recipes.recipe import NAME, Recipe

pytestmark = pytest.mark.usefixtures("environment")


def prepared(folder: Path, policy: str | None) -> Server:
    return prepare(["--uds", f"{folder}/socket"], model=str(folder), policy=policy)


def by_hand(folder: Path, policy: Any, **settings: Any) -> Any:
    """The configuration of `vllm serve`, with the plugin."""
    given = {"attention_backend": "CUSTOM", "additional_config": {"saccade": policy}, "block_size": 32, **settings}
    return AsyncEngineArgs(model=str(folder), **given).create_engine_config()


@pytest.mark.parametrize("policy", [None, "tidal:budget=64"])
def test_a_start_that_would_guess_is_refused_with_the_command(policy: str | None, folder: Path) -> None:
    written, name = policy or "less_is_more", (policy or "less_is_more").partition(":")[0]
    find = f"`saccade calibrate layers --model {folder} --policy {name}` or `saccade serve … --calibrate TEXTS`"
    told = f"policy {written}: no layer is known for {folder}; find it with {find}, or name one, reselect=LAYER"
    with pytest.raises(RefusedError) as refused:
        prepared(folder, policy)
    assert refused.value.reasons == (told,)
    with pytest.raises(ServingError) as early:
        by_hand(folder, written)
    assert str(early.value) == told
    with pytest.raises(ServingError, match=r"\A.*--attention-backend CUSTOM.*\Z"):
        by_hand(folder, "quest", attention_backend=None)


@pytest.mark.parametrize(
    ("policy", "words"),
    [("qest", "did you mean quest"), ("tidal:reselect=99", "valid layers are"), ({"polcy": "quest"}, "needs a policy")],
)
def test_whoever_starts_an_engine_by_hand_hears_it(policy: Any, words: str, folder: Path) -> None:
    """In one line, before there are processes in which an error of ours would end two tracebacks away."""
    with pytest.raises(ServingError, match=rf"\A.*{words}.*\Z"):
        by_hand(folder, policy)


def test_a_layer_that_is_named_or_was_found_is_no_guess(folder: Path) -> None:
    assert str(prepared(folder, "tidal:reselect=6").options.policy) == "tidal:reselect=6"
    shutil.copy(model_path() / NAME, folder / NAME)
    assert prepared(folder, None).options.policy.name == "tidal"
    both_take(folder, "less_is_more", "7", f"the recipe beside {folder}")
    policy = Policy.from_spec("less_is_more:budget=64")
    path = keep(replace(Recipe.read(folder / NAME), reselect=(5, 8)), policy)
    (folder / NAME).unlink()
    both_take(folder, "less_is_more:budget=64", "5+8", str(path))
    assert keep(replace(Recipe.read(model_path() / NAME), reselect=(1,)), policy) == path
    with pytest.raises(RefusedError, match="no layer is known"):
        prepared(folder, str(policy))


def both_take(folder: Path, policy: str, layers: str, where: str) -> None:
    """`saccade serve` and the plugin."""
    server, config = prepared(folder, policy), by_hand(folder, policy)
    options = ServeOptions.of(config)
    assert options is not None and reasons_against(config, options) == []
    named = f"{policy}{',' if ':' in policy else ':'}reselect={layers}"
    told = f"{policy}: layers [{layers.replace('+', ', ')}] of {where} select again"
    for one, notes in ((server.options, server.notes), (options, plan_of(config, options).notes)):
        assert str(one.policy) == named and told in notes
    assert server.args.additional_config["saccade"]["policy"] == named


def test_random_weights_take_the_middle_layer_and_say_so(folder: Path) -> None:
    config = by_hand(folder, "tidal", load_format="dummy")
    options = ServeOptions.of(config)
    assert reasons_against(config, options) == []
    assert "L//2 = 6 of 12" in plan_of(config, options).notes[0]
    config.load_config.load_format, config.parallel_config.pipeline_parallel_size = "auto", 2
    first, second = reasons_against(config, options)
    assert "pipeline" in first and "no layer is known" in second
