"""Attention to one set for all heads is at least 1.3 times as fast as attention to a set per query head."""

from ..designs.measured import Measured
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

COMMAND = "python -m benchmarks.gpu.kernels docs/results/kernels_h200.json"


def _faster(owner: str, reported: float | None = None, *, decides: bool = True) -> Test:
    arm = "attention: sparse 4096, unit 1, a set for {}"
    return Test(
        f"time of sparse attention, a set for {owner} over one for all heads, budget 4,096",
        "ms",
        Group(arm.format(owner)),
        Group(arm.format("all heads")),
        kind="ratio",
        bound=1.3,
        reported=reported,
        decides=decides,
    )


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 5b, table 10"),
    settings=Measured("kernels_h200.json", COMMAND, "kernels"),
    tests=(_faster("each query head", reported=1.5), _faster("each KV head", decides=False)),
    needs="cuda",
)
