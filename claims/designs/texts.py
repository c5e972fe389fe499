"""What designs have in common whose samples are of texts."""

from typing import Any, ClassVar

from ..judging.effects import TEXTS
from ..judging.study import Study


class OfTexts:
    """Texts are resampled whole; `document` says what they are."""

    __slots__ = ()
    interval: ClassVar[str] = TEXTS
    document: ClassVar[str] = "sources of installed packages"
    seed: int

    def conditions(self, study: Study) -> dict[str, Any]:
        """See `Design`."""
        return study.environment(self.document, self.seed)


class OfQuestions(OfTexts):
    """Texts are asked about."""

    __slots__ = ()
    document = "sources of installed packages, facts hidden in them"
