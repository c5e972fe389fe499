"""The mean of a chunk's keys recalls more tokens than their maximum."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

ARM = "lychee_cluster:form=paper,pooling={},budget=512"


def _more(measure: str, what: str, reported: float | None = None, *, decides: bool = True) -> Test:
    mean, most = Group(ARM.format("mean")), Group(ARM.format("max"))
    return Test(f"{what}, mean minus max", measure, mean, most, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "table 3"),
    settings=Questions(arms=(ARM.format("mean"), ARM.format("max")), recall=True),
    tests=(
        _more("token", "token recall", reported=0.068),
        _more("attention", "attention recall", decides=False),
        _more("right", "right answers", decides=False),
    ),
)
