"""Sparse attention of half of the heads takes no longer than dense attention; of all at most a seventh on long rows."""

from ..designs.measured import Measured
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

COMMAND = "python -m benchmarks.gpu.kernels docs/results/kernels_h200.json"


def _speed(sparse: int, bound: float, where: str = "", *, at: str = "*", reported: float | None = None) -> Test:
    of = Group(f"hybrid: {sparse} of 8 heads sparse")
    effect = f"speed over the best dense attention, {sparse} of 8 heads sparse{where}"
    return Test(effect, "speedup", of, bound=bound, reported=reported, at=at)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 4"),
    settings=Measured("kernels_h200.json", COMMAND, "kernels"),
    tests=(
        _speed(4, 0.9, reported=1.0),
        _speed(8, 7.0, ", 128K and the largest batch", at="131,072 × 7", reported=7.0),
        _speed(8, 1.0),
    ),
    needs="cuda",
)
