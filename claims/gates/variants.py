"""What is tried: gates of a kind, and what brings the constraint to the size of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.calibrate.gates import DirectGates, HardKuma
from saccade.calibrate.training import ASCENT, LETTER, LOSS, MULTIPLIER, SHARE

DIRECT = DirectGates.kind


@dataclass(frozen=True, slots=True)
class Variant:
    """Gates as `Training` names them."""

    kind: str
    scale: str


VARIANTS = {
    # The first ones are begun first. "ascent" under Adam is "loss" but for rounding, so that it comes last.
    LETTER: Variant(HardKuma.kind, LETTER),
    LOSS: Variant(HardKuma.kind, LOSS),
    DIRECT: Variant(DirectGates.kind, LETTER),
    SHARE: Variant(HardKuma.kind, SHARE),
    MULTIPLIER: Variant(HardKuma.kind, MULTIPLIER),
    ASCENT: Variant(HardKuma.kind, ASCENT),
}
SCALED = (LOSS, ASCENT, MULTIPLIER, SHARE)
"""What could take the letter's place; see `Choice`."""
