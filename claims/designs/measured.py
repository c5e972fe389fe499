"""What a benchmark's command has put into a file of docs/results: its points are judged, nothing is measured here."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.errors import SaccadeError

from ..judging.claim import Sample
from ..judging.effects import QUARTILES, TEXTS
from ..judging.study import Study
from ..stored import stored_bytes, stored_json


@dataclass(frozen=True, slots=True)
class Measured:
    """A file of results, whose rows become samples.

    Attributes:
        file: its name in docs/results.
        command: what writes it.
        read: name of the function in `readings` that makes samples of it.
        rules: what the file must say of how it was made, where its command leaves a choice.
    """

    interval: ClassVar[str] = QUARTILES

    file: str
    command: str
    read: str
    rules: tuple[Any, ...] | None = None

    def units(self, study: Study) -> int:
        return 1

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        """The file's samples.

        Raises:
            SaccadeError: it is not there, or made by other rules, and the message says by what; or another model's.
        """
        from . import readings

        content = self._content()
        if study.model not in (None, content["environment"].get("model")):
            raise SaccadeError(f"--model {study.model}: this claim is judged by docs/results/{self.file} alone")
        if self.rules is not None and json.loads(json.dumps(self.rules)) != content.get("rules"):
            raise SaccadeError(f"docs/results/{self.file} was made by other rules; make it again: {self.command}")
        samples: list[Sample] = getattr(readings, self.read)(content)
        advance(self.file)
        return samples

    def conditions(self, study: Study) -> dict[str, Any]:
        """The file's own, and which file it is."""
        content = self._content()
        digest = hashlib.sha256(stored_bytes(self.file, self.command)).hexdigest()
        return {**content["environment"], "file": self.file, "sha256": digest, "measured_by": self.command}

    def _content(self) -> Mapping[str, Any]:
        return stored_json(self.file, self.command)


@dataclass(frozen=True, slots=True)
class MeasuredTexts(Measured):
    """The same of a benchmark that goes through texts, which differ more than the timings of one."""

    interval: ClassVar[str] = TEXTS
