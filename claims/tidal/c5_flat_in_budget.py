"""TidalDecode's time per step hardly depends on the budget, and lies below Quest's."""

from ..designs.measured import Measured
from ..judging.claim import TIDAL, Claim, Group, Source, Test

TIDAL_QUERY, QUEST_QUERY = "tidal:budget={},reselect=13,heads=query", "quest:budget={},heads=query"
POLICIES = (*map(TIDAL_QUERY.format, (32, 128, 512, 2048, 4096)), *map(QUEST_QUERY.format, (32, 512, 4096)))

# Steps as CUDA graphs: a step that waits for Python is flat in the budget whatever it reads.
COMMAND = (
    "python -m benchmarks.gpu.decode docs/results/decode_budgets_h200.json --seconds 480 --shapes llama-3.1-8b "
    f"--checked 24 --policies dense {' '.join(POLICIES)}"
)


def _ratio(effect: str, of: str, against: str, bound: float, reported: float, rows: int, *, decides: bool) -> Test:
    """At both long contexts of the command; the paper's batch is 1."""
    first, second = (Group(f"saccade {spec}") for spec in (of, against))
    named = f"{effect}, batch {rows}"
    return Test(named, "ms", first, second, "ratio", "below", bound, reported, decides, at=f"*,* × {rows}")


# 100K: 22.34 ms at 4,096 tokens, 21.26 at 32; quest 24.84 at 512, tidal 21.13.
EFFECTS = (
    ("time of a step at budget 4,096 over that at 32", TIDAL_QUERY.format(4096), TIDAL_QUERY.format(32), 1.1, 1.05),
    ("time of a step, tidal over quest, budget 512", TIDAL_QUERY.format(512), QUEST_QUERY.format(512), 1.0, 0.85),
)

CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 5, tables 7 and 8"),
    settings=Measured("decode_budgets_h200.json", COMMAND, "decoding_steps"),
    tests=tuple(
        _ratio(*effect, rows, decides=decides) for rows, decides in ((1, True), (4, False)) for effect in EFFECTS
    ),
    needs="cuda",
)
