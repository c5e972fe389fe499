"""Sparse attention of half of the heads takes no longer than dense attention; of all at most a seventh on long rows."""

from ..designs.measured import Measured
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

COMMAND = "python -m benchmarks.gpu.kernels docs/results/kernels_h200.json"

CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 4"),
    settings=Measured("kernels_h200.json", COMMAND, "kernels"),
    tests=(
        Test(
            "speed over the best dense attention, 4 of 8 heads sparse",
            "speedup",
            Group("hybrid: 4 of 8 heads sparse"),
            bound=0.9,
            reported=1.0,
        ),
        Test(
            "speed over the best dense attention, 8 of 8 heads sparse, 128K and the largest batch",
            "speedup",
            Group("hybrid: 8 of 8 heads sparse"),
            bound=7.0,
            reported=7.0,
            at="131,072 × 7",
        ),
        Test(
            "speed over the best dense attention, 8 of 8 heads sparse",
            "speedup",
            Group("hybrid: 8 of 8 heads sparse"),
            bound=1.0,
        ),
    ),
    needs="cuda",
)
