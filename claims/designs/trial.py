"""The trial's file in docs/results, as designs read it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import nan
from typing import Any

from ..gates.answers import whole_trial
from ..gates.choice import Choice
from ..gates.page import command
from ..judging.claim import Group, Sample, Test
from ..judging.study import Study
from ..stored import stored_bytes, stored_json

MAKES = "python -m claims gates"
"""The command that writes it."""
CHOSEN = "hardkuma"
"""The arm of the variant that stands for HardKuma."""
NEAR = "open@near"
"""Its measure beside others: 1 if there is such a variant, 0 if there is none."""
STANDS = Test(
    "whether HardKuma gates of a variant open as many heads as wanted, within one, in every seed", NEAR,
    Group(f"{CHOSEN}*"), bound=0.5,
)  # fmt: skip
"""Premise of claims about HardKuma: gates with more or fewer heads say nothing of the paper's."""


def as_chosen(sample: Sample, arm: str, chosen: str | None) -> Sample:
    """A sample of what stands for HardKuma; where nothing does, its values are no numbers."""
    values = sample.values if chosen else dict.fromkeys(sample.values, nan)
    return replace(sample, arm=arm, values={**values, NEAR: float(chosen is not None)})


def trial_of(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """What the file holds.

    Raises:
        SaccadeError: it is not there, or holds another model's gates, or such as `choice` does not speak of.
    """
    trial = whole_trial(stored_json(file, MAKES), file, study.subject.shape)
    choice.refuse_others(trial)
    return trial


def file_conditions(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """The trial's machine and versions, and which file it is."""
    digest = hashlib.sha256(stored_bytes(file, MAKES)).hexdigest()
    trial = trial_of(file, study, choice)
    made_by = command(run["variant"] for run in trial["runs"])
    return {**trial["environment"], "file": file, "sha256": digest, "measured_by": made_by}
