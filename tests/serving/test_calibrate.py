"""`saccade serve --calibrate`: the layer is found in a process of its own, kept, and found by the next start."""

import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner, Result

from saccade.adapters.vllm.server.serve import RefusedError, Server, prepare
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource
from saccade.cli import app, layer
from saccade.recipes.recipe import Recipe

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A little more than the probe needs."""
    (tmp_path / "texts").mkdir()
    text = "\n\n".join(topics.values())
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text(text[number * 6000 :][:6000], encoding="utf-8")
    return tmp_path / "texts"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """The servers that would have been started."""
    ran: list[Server] = []
    monkeypatch.setattr(Server, "run", lambda server: ran.append(server))
    return ran


def serve(folder: Path, *more: object) -> Result:
    return CliRunner().invoke(app, ["serve", "--model", str(folder), "--uds", f"{folder}/socket", *map(str, more)])


def program(path: Path, does: str) -> str:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


def test_a_layer_is_found_kept_and_served_with(
    folder: Path, texts: Path, served: list[Server], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = "tidal:budget=64,rectify=32"
    start = ("--dtype", "float32", "--policy", policy, "--calibrate", texts)
    done = serve(folder, *start)
    told = capfd.readouterr()
    assert done.exit_code == 0, (done.output, told.err)
    (kept,) = (Path(os.environ["SACCADE_CACHE"]) / "recipes").iterdir()
    assert kept.name == f"{ModelSource.locate(folder).decoder().weights}-tidal-budget=64.json"
    recipe = Recipe.read(kept)
    layers, about = recipe.reselect, recipe.found["calibrate layers --policy tidal"]
    expected = {"budgets": [64], "passages": 2, "texts": str(texts), "context": 4096, "dtype": "float32"}
    assert expected.items() <= about.items()
    assert layers is not None and "64" in told.out, "it shows its table"
    named = f"tidal:budget=64,reselect={'+'.join(map(str, layers))},rectify=32"
    note = f"{policy}: layers {[*layers]} of {kept} select again"
    assert note in done.stdout and not any(one in done.stdout for one in ("nothing is looked for", "no reselect given"))

    def never(*given: Any, **options: Any) -> NoReturn:
        raise AssertionError("it is known")

    monkeypatch.setattr(layer.subprocess, "run", never)
    again = serve(folder, *start)
    assert again.exit_code == 0, again.output
    assert note in again.stdout and "--calibrate: nothing is looked for, the layer is known" in again.stdout
    assert len(served) == 2
    for server in served:
        assert str(server.options.policy) == named == server.args.additional_config["saccade"]["policy"]


def test_what_calibration_refuses_is_said_as_it_is(
    folder: Path, texts: Path, served: list[Server], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ended(name: str, does: str, policy: str, given: object) -> Result:
        monkeypatch.setattr(layer.sys, "executable", program(folder.parent / name, does))
        return serve(folder, "--policy", policy, "--calibrate", given)

    said = "saccade: error: longer texts are needed"
    done = ended("refusing", f"echo '{said}' >&2; exit 2", "tidal:budget=64", texts / "0.txt")
    assert (done.exit_code, done.stderr, capfd.readouterr().err) == (2, "", f"{said}\n")
    assert not (Path(os.environ["SACCADE_CACHE"]) / "recipes").exists()
    done = ended("failing", "exit 1", "tidal", "library")
    assert (done.exit_code, done.stderr) == (1, "")
    done = ended("killed", "kill -9 $$", "tidal", "library")
    assert (done.exit_code, done.stderr.count("\n"), served) == (2, 1, [])
    assert "was ended by signal 9" in done.stderr


def refused(folder: Path, policy: str, *rest: str) -> str:
    def never(policy: Any, model: Any) -> NoReturn:
        raise AssertionError(f"{policy} is looked for before all is checked")

    rest = rest if "--port" in rest else (*rest, "--uds", f"{folder}/socket")
    with pytest.raises(RefusedError) as error:
        prepare(rest, model=str(folder), policy=policy, search=never)
    (reason,) = error.value.reasons
    return reason


@pytest.mark.parametrize(
    ("policy", "rest", "words"),
    [
        ("quest:budget=64", (), "policy quest:budget=64 names its layer or needs none"),
        ("tidal:rule=ratio,ratio=0.1", (), "has no budget"),
        ("tidal", ("--tensor-parallel-size", "2"), "on one device, not on 2"),
        ("tidal", ("--load-format", "dummy"), "not --load-format dummy"),
        ("tidal", ("--revision", "old"), "not --revision old"),
        ("tidal", ("--port", "70000"), "--port 70000 is not valid"),
    ],
)
def test_what_is_refused_before_anything_is_read(policy: str, rest: tuple[str, ...], words: str, folder: Path) -> None:
    assert words in refused(folder, policy, *rest)


def test_weights_that_transformers_cannot_read(folder: Path) -> None:
    (folder / "config.json").unlink()
    config = json.loads((model_path() / "config.json").read_text())
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    assert "its weights are quantised (quantization_config)" in refused(folder, "tidal")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert "other weight formats are not read" in refused(folder, "tidal")
    assert "is a file; give the folder" in refused(folder / "model.gguf", "tidal")
