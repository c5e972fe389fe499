"""Rectifying every 32 steps is close to the upper bound, and every 128 keeps most of the gain."""

from ..judging.claim import RESA, Claim, Source, Test
from .c25_growing_gap import ADD_UP, CLEAN, INSTRUMENT, SETTINGS, sparse

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "figure 4"),
    settings=SETTINGS,
    tests=(
        Test(
            "divergence from dense, every 32 over the upper bound",
            "divergence",
            sparse(32),
            CLEAN,
            kind="ratio",
            direction="below",
            bound=1.2,
        ),
        Test(
            "growth of divergence, every 128 over behind 8,192 sparse steps",
            "growth",
            sparse(128),
            sparse(8192),
            kind="ratio",
            direction="below",
            bound=0.5,
        ),
    ),
    premises=(ADD_UP,),
    instrument=INSTRUMENT,
)
