"""Rectifying every 32 steps is close to the upper bound, and every 128 keeps most of the gain."""

from ..judging.claim import RESA, Claim, Source
from .c25_growing_gap import ADD_UP, CLEAN, INSTRUMENT, SETTINGS, at_most, sparse

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "figure 4"),
    settings=SETTINGS,
    tests=(
        at_most("divergence from dense, every 32 over the upper bound", "divergence", sparse(32), CLEAN, 1.2),
        at_most(
            "growth of divergence, every 128 over behind 8,192 sparse steps", "growth", sparse(128), sparse(8192), 0.5
        ),
    ),
    premises=(ADD_UP,),
    instrument=INSTRUMENT,
)
