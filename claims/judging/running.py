"""Running one claim, from its committed criteria to its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.eval.output import check_folder, write_json
from saccade.files import replace_text

from .claim import Listed, Sample
from .commits import Commit, criteria_commit
from .pictures import picture
from .results import result
from .study import BEGUN, PICTURE, RESULT, SAMPLES, Study
from .verdicts import judge

DESIGNS = Path(__file__).parents[1] / "designs"
"""What settings mean, and what is meant where a claim is silent."""


@dataclass
class Run:
    """A claim that passed every check; `run` it, then `finish`.

    Attributes:
        commit: in which its criteria stood when its first sample was made; None for a draft.
    """

    listed: Listed
    study: Study
    commit: Commit | None
    _samples: Sequence[Sample] = field(init=False, default=())

    @classmethod
    def check(cls, listed: Listed, study: Study, *, draft: bool) -> Run:
        """Refuse what cannot be run or would prove nothing.

        Raises:
            SaccadeError: a withdrawn claim; criteria that are not committed, unless it is a draft; a folder that
                cannot be written; what the claim's design refuses.
        """
        listed = listed.on(study.model)
        if listed.claim.withdrawn is not None:
            raise SaccadeError(f"{listed.number} is withdrawn: {listed.claim.withdrawn}")
        commit = None if draft else criteria_commit(listed.file, DESIGNS)
        check_folder(study.folder)
        return cls(listed, replace(study, criteria=listed.claim.fingerprint, draft=draft), commit)

    @property
    def units(self) -> int:
        """See `Work`."""
        return self.listed.claim.settings.units(self.study)

    def run(self, advance: Callable[[str], None]) -> None:
        """Make all samples, or what is missing of them."""
        self.commit = self._begun()
        self._samples = self.listed.claim.settings.run(self.study, advance)

    def _begun(self) -> Commit | None:
        """Samples may be judged again in a later state of the tree; what counts is the one that they began in."""
        begun = self.study.folder / BEGUN
        if self.commit is not None and not (begun.exists() and (self.study.folder / SAMPLES).exists()):
            self.study.folder.mkdir(parents=True, exist_ok=True)
            write_json(begun, asdict(self.commit))
        return None if self.commit is None else Commit(**json.loads(begun.read_text(encoding="utf-8")))

    def finish(self) -> dict[str, Any]:
        """Judge, and write result and picture into the folder."""
        if not self._samples:
            raise SaccadeError(f"{self.listed.number} has not been measured")
        judgement = judge(self.listed.claim, self._samples)
        command = f"python -m claims {self.listed.number}"
        if self.study.model is not None:
            command += f" --model {self.study.model}"
        conditions = self.listed.claim.settings.conditions(self.study)
        found = result(self.listed, judgement, self.commit, command, conditions)
        write_json(self.study.folder / RESULT, found)
        replace_text(self.study.folder / PICTURE, picture([found]))
        return found
