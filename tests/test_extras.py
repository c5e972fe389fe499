"""What works without the extra `[eval]`, and what says that it needs it: in an interpreter that has only the rest."""

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from commands import write_model
from projects import project
from saccade.cli.group import EVAL

HIDING = """
import builtins, json, os, sys

ABSENT, EVAL = json.loads(os.environ["ABSENT"]), json.loads(os.environ["EVAL"])


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


# transformers itself needs numpy, and torch jinja2: they are there, and no module of ours may touch them.
def ours_without(name, globals=None, *rest, found=builtins.__import__, **named):
    if name.partition(".")[0] in EVAL and (globals or {}).get("__name__", "").startswith("saccade"):
        raise ModuleNotFoundError(f"{globals['__name__']} imports {name}")
    return found(name, globals, *rest, **named)


sys.meta_path[:] = map(Without, sys.meta_path)
builtins.__import__ = ours_without
"""


def hard_dependencies() -> set[str]:
    """Names of the packages that `pip install .` brings: its own dependencies, theirs, and so on."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in project()["dependencies"]]
    while waiting:
        one = waiting.pop()
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and canonicalize_name(one.name) not in found:
            found.add(canonicalize_name(one.name))
            waiting += map(Requirement, requires(one.name) or ())
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of an interpreter that finds no package but those of `hard_dependencies`."""
    folder, kept = tmp_path_factory.mktemp("bare"), {*hard_dependencies(), "saccade-attention"}
    absent = [
        module
        for module, packages in packages_distributions().items()
        if kept.isdisjoint(map(canonicalize_name, packages))
    ]
    assert {"scipy", "matplotlib", "hypothesis"} <= set(absent)
    assert set(absent).isdisjoint({"torch", "transformers", "tokenizers", "pydantic"})
    (folder / "sitecustomize.py").write_text(HIDING)
    path = os.pathsep.join((str(folder), str(Path(__file__).parents[1] / "src")))
    return {**os.environ, "PYTHONPATH": path, "ABSENT": json.dumps(absent), "EVAL": json.dumps(EVAL)}


def python(bare: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        **{"env": bare, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "check": False},
    )


def test_dependencies() -> None:
    tables = project()
    names = [Requirement(line).name for line in tables["dependencies"]]
    assert names == ["torch", "transformers", "pydantic", "safetensors", "typer", "rich"]
    extras = {name: [Requirement(line) for line in lines] for name, lines in tables["optional-dependencies"].items()}
    assert tuple(one.name for one in extras["eval"]) == EVAL
    ours = [str(one) for one in extras["dev"] if one.name == tables["name"]]
    assert ours == ["saccade-attention[benchmarks,docs,eval,lm-eval]"]


def test_without_the_extra(bare: dict[str, str], tmp_path: Path) -> None:
    rows, shape = tmp_path / "rows.json", str(write_model(tmp_path / "model"))
    small = ("--policy", "tidal:budget=32,reselect=2", "--context", "64", "--steps", "2", "--baseline", "none")
    commands = [
        ("policies",),
        ("policies", "--recipes"),
        ("policies", "--cost"),
        ("serve", "--help"),
        ("generate", "The with statement is used to", "--max-new-tokens", "8"),
        ("bench", "decode", "--shape", shape, "--device", "cpu", "--dtype", "float32", "--json", str(rows), *small),
    ]
    # One interpreter for all of them: most of the time goes into importing torch.
    code = f"""
import sys
from saccade.cli import main
import saccade.cli.layer  # `saccade serve`, before vLLM is asked for
for arguments in {commands}:
    sys.argv = ["saccade", *arguments]
    try:
        main()
    except SystemExit as end:
        print("end of", arguments[0], end.code or 0)
"""
    done = python(bare, "-c", code)
    ended = [line for line in done.stdout.splitlines() if line.startswith("end of")]
    assert ended == [f"end of {name} 0" for name, *_ in commands], done.stderr
    assert rows.is_file()


@pytest.mark.parametrize("command", [("compare",), ("calibrate", "heads")], ids=" ".join)
def test_what_needs_the_extra_says_so(bare: dict[str, str], command: tuple[str, ...]) -> None:
    done = python(bare, "-m", "saccade", *command)
    assert done.returncode == 2
    assert not done.stdout
    told = f"saccade: error: saccade {' '.join(command)} needs scipy, matplotlib: "
    assert done.stderr == f'{told}pip install ".[eval]" in a checkout of saccade\n'
