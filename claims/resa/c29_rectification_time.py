"""Rectification takes at most a third of the time of attention."""

from ..designs.measured import Measured
from ..judging.claim import RESA, Claim, Group, Source, Test

COMMAND = (
    "python -m benchmarks.gpu.passes docs/results/passes_h200.json --heads 32x8x128,32x4x128 "
    "--points 131072x1,131072x4,32768x8"
)

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "figure 6, section 3.4.1"),
    settings=Measured("passes_h200.json", COMMAND, "passes"),
    tests=(
        Test(
            "share of attention's time in dense passes",
            "share",
            Group("resa"),
            direction="below",
            bound=0.33,
            reported=0.327,
        ),
    ),
    needs="cuda",
)
