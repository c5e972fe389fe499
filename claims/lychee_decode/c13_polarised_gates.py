"""HardKuma gates decide, each for 0 or 1, where directly optimised ones stay between."""

from ..designs.trained import Trained
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

HARDKUMA, DIRECT = Group("hardkuma"), Group("direct")
HEADS, SEEDS = "layer *, head *", "seed *"

CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 7, section D"),
    settings=Trained("gates.json"),
    tests=(
        Test("share of HardKuma gates between 0.1 and 0.9", "grey", HARDKUMA, direction="below", bound=0.1, at=HEADS),
        Test(
            "share of gates between 0.1 and 0.9, direct minus HardKuma", "grey", DIRECT, HARDKUMA, bound=0.2, at=HEADS
        ),
        # Gates that are all open, or all closed, have decided nothing: the figure shows both colours.
        Test("share of HardKuma gates above one half, of none", "open", HARDKUMA, bound=0.05, at=HEADS),
        Test(
            "share of HardKuma gates above one half, of all", "open", HARDKUMA, direction="below", bound=0.95, at=HEADS
        ),
        Test(
            "by how much the expected number of open HardKuma gates misses the wanted one",
            "missed",
            HARDKUMA,
            direction="below",
            bound=1.0,
            decides=False,
            at=SEEDS,
        ),
    ),
    instrument="a model with more heads",
)
