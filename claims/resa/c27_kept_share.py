"""A fifth and a tenth kept equal dense attention; a gap opens between a twentieth and a fiftieth."""

from ..designs.accumulated import Accumulated
from ..judging.claim import RESA, Claim, Group, Source, Test


def _near(kept: float) -> Test:
    effect = f"accuracy, {kept:g} kept minus dense"
    return Test(effect, "right", Group(f"{kept:g}, every 32"), Group("dense"), bound=-0.02)


CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "figure 5"),
    settings=Accumulated(
        policy="resa:min_pages=1", kept=(0.2, 0.1, 0.05, 0.02), every=(32,), lengths=(4096,), passages=16
    ),
    tests=(
        _near(0.2),
        _near(0.1),
        Test(
            "accuracy, 0.02 kept minus 0.05",
            "right",
            Group("0.02, every 32"),
            Group("0.05, every 32"),
            direction="below",
        ),
    ),
)
