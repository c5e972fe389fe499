"""HardKuma gates decide, each for 0 or 1, where directly optimised ones stay between."""

from ..designs.trained import Trained
from ..designs.trial import FILE, PUBLISHED_FILE, PUBLISHED_STANDS, STANDS
from ..gates.choice import PUBLISHED
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test


def _decided(gates: str, told: str, *, decides: bool = True) -> tuple[Test, ...]:
    own = Group(gates)
    return (
        Test(f"share of {told} between 0.1 and 0.9", "grey", own, direction="below", bound=0.1, decides=decides),
        Test(
            f"share between 0.1 and 0.9, direct minus {told}", "grey", Group("direct"), own, bound=0.2, decides=decides
        ),
        # Gates that are all open, or all closed, have decided nothing: the figure shows both colours.
        Test(f"share of {told} above one half, of none", "open", own, bound=0.05, decides=decides),
        Test(f"share of {told} above one half, of all", "open", own, direction="below", bound=0.95, decides=decides),
    )


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 7, section D"),
    settings=Trained(FILE),
    # Beside what stands for the paper's gates, those of its own multiplier.
    tests=(
        *_decided("hardkuma", "HardKuma gates"),
        *_decided("letter", "HardKuma gates by the paper's multiplier", decides=False),
    ),
    premises=(STANDS,),
    instrument="gates trained by the authors' code, a model with more heads",
).elsewhere(
    settings=Trained(PUBLISHED_FILE, PUBLISHED),
    tests=_decided("hardkuma", "HardKuma gates")[:2],  # how many are open is the premise
    premises=(PUBLISHED_STANDS,),
    instrument="a model with more heads",
)
