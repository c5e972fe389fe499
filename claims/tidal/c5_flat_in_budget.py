"""TidalDecode's time per step hardly depends on the budget, and lies below Quest's."""

from ..designs.measured import Measured
from ..judging.claim import TIDAL, Claim, Group, Source, Test

STEPS = (
    "saccade bench decode --shape llama-3.1-8b --device cuda --context 32768,131072 --budget 32,512,4096 --steps 33 "
    "--policy tidal:reselect=13,heads=query --policy quest:heads=query --json docs/results/decode_budgets_h200.json"
)


def _arm(method: str, budget: int) -> Group:
    reselect = ",reselect=13" if method == "tidal" else ""
    return Group(f"saccade {method}:*budget={budget}{reselect}*")


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "tables 7 and 8"),
    settings=Measured("decode_budgets_h200.json", STEPS, "decoding_steps"),
    tests=(
        # 100K: 22.34 ms at 4,096 tokens, 21.26 at 32; quest 24.84 at 512, tidal 21.13.
        Test(
            "time of a step at budget 4,096 over that at 32",
            "ms",
            _arm("tidal", 4096),
            _arm("tidal", 32),
            kind="ratio",
            direction="below",
            bound=1.1,
            reported=1.05,
        ),
        Test(
            "time of a step, tidal over quest, budget 512",
            "ms",
            _arm("tidal", 512),
            _arm("quest", 512),
            kind="ratio",
            direction="below",
            bound=1.0,
            reported=0.85,
        ),
    ),
    needs="cuda",
)
