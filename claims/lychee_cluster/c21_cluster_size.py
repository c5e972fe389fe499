"""Token recall falls as clusters grow."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

ARM = "lychee_cluster:form=paper,cluster_size={},budget=512"


def _less(larger: int, smaller: int, reported: float | None = None, *, decides: bool = True) -> Test:
    effect = f"token recall, {larger} chunks a cluster minus {smaller}"
    of, against = Group(ARM.format(larger)), Group(ARM.format(smaller))
    return Test(effect, "token", of, against, direction="below", reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 10, appendix E"),
    settings=Questions(arms=tuple(map(ARM.format, (1, 2, 4, 8))), recall=True),
    tests=(
        _less(8, 1, reported=-0.10),
        _less(2, 1, reported=-0.03, decides=False),
        _less(4, 2, decides=False),
        _less(8, 4, decides=False),
    ),
)
