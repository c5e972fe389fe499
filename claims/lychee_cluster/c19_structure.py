"""Chunks cut where the text breaks find more than fixed ones, also under Quest's bounds."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

REPORTED = {"page_bounds": 0.106, "cluster": 0.030}
"""Whose figure says how much: Quest's bounds in figure 2, the clusters in figure 6."""
UNTOLD = "a model that answers from structured text under these budgets"


def _arm(scorer: str, chunking: str, budget: str) -> str:
    if scorer == "cluster":
        return f"lychee_cluster:form=paper,chunking={chunking},budget={budget}"
    return f"text_pages:budget={budget}" if chunking == "text" else f"composed:scorer=page_bounds,budget={budget}"


ARMS = tuple(
    _arm(scorer, chunking, budget)
    for scorer in REPORTED
    for chunking in ("text", "fixed")
    for budget in ("256", "512", "1024")
)


def more(scorer: str, reported: float) -> Test:
    """All budgets together."""
    effect = f"right answers, chunks of text minus fixed ones, {scorer}"
    text, fixed = (Group(_arm(scorer, chunking, "*")) for chunking in ("text", "fixed"))
    return Test(effect, "right", text, fixed, reported=reported)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figures 2 and 6"),
    settings=Questions(ARMS, task="listing"),
    tests=tuple(more(*one) for one in REPORTED.items()),
    instrument=UNTOLD,
)
