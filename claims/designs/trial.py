"""The trial's file in docs/results, as designs read it."""

from __future__ import annotations

import hashlib
from typing import Any

from ..gates.answers import read_trial
from ..gates.choice import Choice
from ..gates.page import command
from ..judging.study import Study
from .measured import RESULTS

CHOSEN = "hardkuma"
"""The arm of the variant that stands for HardKuma."""


def trial_of(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """What the file holds.

    Raises:
        SaccadeError: it is not there, or holds another model's gates, or such as `choice` does not speak of.
    """
    trial = read_trial(RESULTS / file, study.subject.shape)
    choice.refuse_others(trial)
    return trial


def file_conditions(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """The trial's machine and versions, and which file it is."""
    digest = hashlib.sha256((RESULTS / file).read_bytes()).hexdigest()
    trial = trial_of(file, study, choice)
    made_by = command(run["variant"] for run in trial["runs"])
    return {**trial["environment"], "file": file, "sha256": digest, "measured_by": made_by}
