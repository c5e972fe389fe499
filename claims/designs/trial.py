"""The trial's file in docs/results, as designs read it."""

import hashlib
from dataclasses import replace
from math import nan
from typing import Any

from ..gates.answers import whole_trial
from ..gates.choice import Choice
from ..gates.page import WANTED, command
from ..judging.claim import Group, Sample, Test
from ..judging.results import slug
from ..judging.study import Study
from ..stored import stored_bytes, stored_json

FILE, PUBLISHED_FILE = "gates.json", "gates_{model}.json"
"""The bundled model's, and that of any other, by its name as the ledger has it."""
CHOSEN = "hardkuma"
"""The arm of the variant that stands for HardKuma."""
NEAR = "open@near"
"""Its measure beside others: 1 if there is such a variant, 0 if there is none."""
STANDS = Test(
    "whether HardKuma gates of a variant open as many heads as wanted, within one, in every seed", NEAR,
    Group(f"{CHOSEN}*"), bound=0.5,
)  # fmt: skip
"""Premise of claims about HardKuma: gates with more or fewer heads say nothing of the paper's."""
PUBLISHED_STANDS = replace(STANDS, effect=STANDS.effect.replace("within one", "within two"))


def as_chosen(sample: Sample, arm: str, chosen: str | None) -> Sample:
    """A sample of what stands for HardKuma; where nothing does, its values are no numbers."""
    values = sample.values if chosen else dict.fromkeys(sample.values, nan)
    return replace(sample, arm=arm, values={**values, NEAR: float(chosen is not None)})


def trial_of(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """What the file holds.

    Raises:
        SaccadeError: it is not there, or holds another model's gates, or such as `choice` does not speak of.
    """
    name = named(file, study)
    made_by = "python -m claims gates" if study.model is None else command(WANTED, study.model)
    trial = whole_trial(stored_json(name, made_by), name, study.subject.shape)
    choice.refuse_others(trial)
    return trial


def named(file: str, study: Study) -> str:
    """A file's name on this model."""
    return file.format(model=slug(study.subject.source.name))


def file_conditions(file: str, study: Study, choice: Choice) -> dict[str, Any]:
    """The trial's machine and versions, and which file it is."""
    trial, name = trial_of(file, study, choice), named(file, study)
    told = {"model": study.subject.source.name, "file": name, "measured_by": command(trial, study.model)}
    digest = hashlib.sha256(stored_bytes(name, told["measured_by"])).hexdigest()
    return {**trial["environment"], **told, "sha256": digest}
