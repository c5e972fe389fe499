"""In a text of records chunks cut where the text breaks find more than fixed ones, also under Quest's bounds."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test
from .c19_structure import ARMS, UNTOLD, more

REPORTED = {"page_bounds": 0.15, "cluster": 0.030}
"""Whose figure says how much: Quest's bounds in figure 2, of JSON, the clusters in figure 6, of structured data."""

CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figures 2 and 6, section 3.1"),
    settings=Questions(("dense", *ARMS), task="records"),
    tests=tuple(more(*one) for one in REPORTED.items()),
    premises=(Test("right answers of dense attention", "right", Group("dense"), bound=0.8),),
    instrument=UNTOLD,
)
