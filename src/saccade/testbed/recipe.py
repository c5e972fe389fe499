"""The training recipe: stages in steps, with learning rates that are linear within a stage.

A stage that has not begun can be edited while a run is stopped: nothing before it changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """`rows` rows of `length` tokens, drawn with probability `share`."""

    rows: int
    length: int
    share: float


@dataclass(frozen=True)
class Stage:
    """`steps` steps; the learning rates are (first, last), the tasks {task: share}.

    `span`: the tokens that the first layers (`LOCAL_LAYERS`) see, 0 = all; `reach`: the largest position
    that random gaps in the position ids may lead to.
    """

    name: str
    steps: int
    batches: tuple[Batch, ...]
    tasks: Mapping[str, float]
    muon: tuple[float, float]
    adam: tuple[float, float]
    decay: float
    span: int
    reach: int


LOCAL_LAYERS = 4

UP_TO_192 = (Batch(96, 64, 0.4), Batch(48, 128, 0.4), Batch(32, 192, 0.2))
UP_TO_512 = (Batch(12, 512, 0.6), Batch(24, 256, 0.2), Batch(32, 192, 0.2))
UP_TO_2K = (Batch(2, 2048, 0.6), Batch(8, 512, 0.2), Batch(16, 256, 0.2))
UP_TO_4K = (Batch(1, 4096, 0.6), Batch(3, 1536, 0.2), Batch(16, 256, 0.2))
UP_TO_10K = (Batch(1, 8192, 0.6), Batch(1, 10240, 0.15), Batch(16, 256, 0.25))
MOSTLY_10K = (Batch(1, 8192, 0.55), Batch(1, 10240, 0.25), Batch(16, 256, 0.2))

BEGINNING = {"skip": 3, "recall": 3, "compact": 2, "sentence": 2, "question": 1, "alias": 1, "copy": 1, "prose": 0.5}
OPENING = {"recall": 2, "copy": 1, "compact": 2, "sentence": 2, "question": 1}
SKIP_1 = {**OPENING, "skip1": 5}
SKIP_2 = {**OPENING, "skip2": 4, "skip1": 1}
SKIP_3 = {**OPENING, "skip3": 4, "skip2": 1}
SHORT = {**OPENING, "skip1": 0.5, "skip2": 0.5, "skip3": 1, "alias": 2, "listing": 0.5, "prose": 0.5}
MIDDLE = {
    **{"skip3": 0.5, "recall": 2, "compact": 1, "sentence": 2, "question": 3},
    **{"alias": 3, "copy": 1, "listing": 1, "prose": 0.5},
}
LONG = {
    **{"recall": 1, "compact": 0.5, "sentence": 1.5, "question": 5},
    **{"alias": 2, "copy": 0.5, "listing": 0.5, "prose": 0.5},
}
LAST = {
    **{"recall": 0.3, "compact": 0.5, "sentence": 2, "question": 6},
    **{"alias": 1.5, "copy": 0.3, "listing": 0.4, "prose": 0.4},
}

RECIPE: tuple[Stage, ...] = (
    Stage("short", 321, UP_TO_192, BEGINNING, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512),
    Stage("skip 1", 50, UP_TO_192, SKIP_1, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512),
    Stage("skip 2", 50, UP_TO_192, SKIP_2, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512),
    Stage("skip 3", 50, UP_TO_192, SKIP_3, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512),
    Stage("192", 220, UP_TO_192, SHORT, (0.02, 0.018), (0.01, 0.008), 0.5, 32, 512),
    Stage("512", 110, UP_TO_512, MIDDLE, (0.018, 0.014), (0.008, 0.006), 0.4, 64, 4096),
    Stage("2k", 120, UP_TO_2K, LONG, (0.014, 0.01), (0.006, 0.004), 0.3, 256, 12288),
    Stage("4k", 120, UP_TO_4K, LONG, (0.01, 0.008), (0.004, 0.003), 0.3, 0, 12288),
    Stage("8k", 80, UP_TO_10K, LONG, (0.008, 0.005), (0.003, 0.002), 0.3, 0, 14336),
    Stage("decay", 90, MOSTLY_10K, LAST, (0.005, 0.0002), (0.002, 0.0001), 0.3, 0, 14336),
)
