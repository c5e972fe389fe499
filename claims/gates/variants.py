"""What is tried: gates of a kind, and what brings the constraint to the size of the loss."""

from dataclasses import dataclass

from saccade.calibrate.gates import Gates

from .hardkuma import HardKuma
from .published import CODE
from .scaled import LETTER, LOSS, MULTIPLIER, SHARE

DIRECT = Gates.kind
DIRECT_SHARE = f"{DIRECT}-{SHARE}"
DIRECTS = DIRECT_SHARE, DIRECT
GREY = 0.1, 0.9
"""Between them a gate has not decided."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Gates by name, and the `scale` of their training."""

    kind: str
    scale: str


VARIANTS = {
    # The first ones are begun first.
    LETTER: Variant(HardKuma.kind, LETTER),
    LOSS: Variant(HardKuma.kind, LOSS),
    DIRECT: Variant(DIRECT, LETTER),
    SHARE: Variant(HardKuma.kind, SHARE),
    DIRECT_SHARE: Variant(DIRECT, SHARE),
    MULTIPLIER: Variant(HardKuma.kind, MULTIPLIER),
    CODE: Variant(HardKuma.kind, CODE),
}
SCALED = (LOSS, "ascent", MULTIPLIER, SHARE, CODE)
"""What could take the letter's place; see `Choice`. "ascent", the multiplier in steps of the loss's size, is "loss"
under Adam but for rounding, and was not trained."""
