"""The layer that a server's policy lacks, by `saccade calibrate layers` in a process whose memory ends with it."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from ..adapters.hf.probe import TIMES, WALK
from ..checkpoints.load import ModelSource
from ..checkpoints.shape import stored_hash
from ..errors import SaccadeError
from ..methods.policy import Policy
from ..recipes.kept import cache, keep, searched, with_layers
from ..recipes.recipe import NAME, Recipe, method_of


def find_layer(texts: str, policy: Policy, model: Sequence[str]) -> tuple[Policy, str]:
    """A policy with the layer that texts show, and where it is kept; `model` says whose, as the command takes it.

    Raises:
        SaccadeError: the process was killed. If it has refused, and said why, the command ends as it did.
    """
    options = searched(policy).options.model_dump(exclude_unset=True)
    budget = options.pop("budget")
    asked = [*model, "--policy", Policy.create(policy.name, options).to_spec(), "--budgets", str(budget)]
    asked += ["--context", str(max(4096, TIMES * budget)), *(() if texts == "library" else ("--texts", texts))]
    weights, texts_at = stored_hash(ModelSource.locate(model[1], weights=False).location), Path(texts)
    files = sorted(path for path in (texts_at, *texts_at.rglob("*")) if path.is_file())
    # A folder for every question about these weights and files, so that a search that was interrupted goes on.
    question = WALK, asked, weights, [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    folder = cache() / "layers" / hashlib.sha256(repr(question).encode()).hexdigest()[:16]
    command = [sys.executable, "-m", "saccade", "calibrate", "layers", *asked, "--output-dir", str(folder)]
    ended = subprocess.run(command, check=False).returncode
    if ended < 0:
        raise SaccadeError(f"saccade calibrate layers was ended by signal {-ended}")
    if ended:
        raise typer.Exit(ended)
    recipe = Recipe.read(folder / NAME)
    # Whoever serves these files knows them by their own hash, which loading in another dtype changes.
    recipe = replace(recipe, model=replace(recipe.model, weights=weights or recipe.model.weights))
    kept, layers = keep(recipe, policy) or folder / NAME, recipe.layers_of(method_of(policy)) or ()
    return with_layers(policy, layers), f"{policy}: layers {[*layers]} of {kept} select again"
