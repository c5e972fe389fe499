"""A claim as data: what it says, where it stands, and what would confirm or refute it, fixed before any run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from .study import Study

HOLDS, REFUTED, MIXED, UNTOLD = "holds", "refuted", "mixed", "cannot be told"
VERDICTS = (HOLDS, REFUTED, MIXED, UNTOLD)

TIDAL = "TidalDecode"
LESS_IS_MORE = "LessIsMore"
LYCHEE_DECODE = "LycheeDecode"
LYCHEE_CLUSTER = "LycheeCluster"
RESA = "ReSA"
SACCADE = "saccade"
"""What our own pages say."""
PAPERS = (TIDAL, LESS_IS_MORE, LYCHEE_DECODE, LYCHEE_CLUSTER, RESA, SACCADE)

BUNDLED = "bundled"
"""What results call the model that comes with the package."""

Direction = Literal["above", "below"]
Values = dict[str, float]
"""Measures by name."""
Ends = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one arm measured on one text; of a benchmark, at one of its points.

    Attributes:
        ends: quartiles of each value, where it is a median of repeated timings.
    """

    text: str
    arm: str
    values: Values
    ends: Ends | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Arms that become one number a text.

    Attributes:
        arms: a shell pattern of their names.
        how: their mean, median, or the arm best or worst on all other texts, so that luck on a text does not choose.
        by: pattern of as many arms, in the same order, that choose instead.
    """

    arms: str
    how: Literal["mean", "median", "best", "worst"] = "mean"
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Test:
    """One effect and the bound that decides about it.

    Confirmed if the 95% interval lies beyond the bound, refuted if it lies wholly on the other side, untold else.

    Attributes:
        effect: what it is, in a few words.
        measure: of the samples.
        of, against: the effect is of the first one alone, or how it differs from the second one.
        kind: their difference, or their ratio.
        direction: on which side of `bound` the claim wants it.
        reported: the paper's own value in the same unit; None if it gives none.
        decides: whether the verdict hangs on it, or it only stands beside.
        at: pattern of the texts or points that it looks at.
    """

    __test__: ClassVar[bool] = False  # what pytest would take it for by its name

    effect: str
    measure: str
    of: Group
    against: Group | None = None
    kind: Literal["difference", "ratio"] = "difference"
    direction: Direction = "above"
    bound: float = 0.0
    reported: float | None = None
    decides: bool = True
    at: str = "*"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a claim stands: one of `PAPERS`, and the figures, tables or sections."""

    paper: str
    place: str


class Design(Protocol):
    """A claim's settings, which know how its samples are made; a frozen dataclass."""

    interval: ClassVar[str]
    """Which rule gives intervals; see `effects.RULES`."""

    def units(self, study: Study) -> int:
        """How often `run` calls `advance` if nothing is there yet."""

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        """Make the samples; what the study's folder already holds is not measured again."""

    def conditions(self, study: Study) -> dict[str, Any]:
        """Machine, versions and model: `model` or `device` says on what it was measured."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper.

    Attributes:
        says: the claim in one sentence: the docstring of its file.
        settings: how it is measured.
        tests: what decides.
        premises: what must hold of the model, or nothing can be told on it.
        instrument: what model could tell where this one cannot.
        needs: the device it speaks about.
        protocol: of what the paper reports, where that is not ours; None: it is.
        withdrawn: why it is judged no longer; it keeps its number and its row. None: it stands.
        published: the same claim by criteria for other models than the bundled one, where these are no use there.
    """

    says: str | None
    source: Source
    settings: Design
    tests: tuple[Test, ...]
    premises: tuple[Test, ...] = ()
    instrument: str = "a larger model"
    needs: Literal["cpu", "cuda"] = "cpu"
    protocol: str | None = None
    withdrawn: str | None = None
    published: Claim | None = None

    def elsewhere(self, **changes: Any) -> Claim:
        """With criteria for other models than the bundled one, which these changes make of its own."""
        return replace(self, published=replace(self, **changes))

    @property
    def sentence(self) -> str:
        """What it says, on one line."""
        return " ".join((self.says or "").split())

    def criteria(self) -> dict[str, Any]:
        """All that decides, as JSON has it."""
        kind = {"design": type(self.settings).__name__, "interval": self.settings.interval}
        whole = asdict(self) | {"says": self.sentence}
        del whole["withdrawn"], whole["protocol"], whole["published"]  # they decide about no sample of this claim's
        # What is None says nothing, so that a design may learn an option without changing what stands.
        whole["settings"] = {name: value for name, value in whole["settings"].items() if value is not None} | kind
        plain: dict[str, Any] = json.loads(json.dumps(whole))
        return plain

    @property
    def fingerprint(self) -> str:
        """A hash of the criteria."""
        return hashlib.sha256(json.dumps(self.criteria(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Listed:
    """A claim as it lies in the tree: its number is the beginning of the file's name."""

    number: str
    file: Path
    claim: Claim

    def on(self, model: str | None) -> Listed:
        """With the criteria for a model as results name it; None: the bundled one."""
        other = None if model in (None, BUNDLED) else self.claim.published
        return self if other is None else replace(self, claim=other)
