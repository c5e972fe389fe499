"""The training recipe: stages in steps, with learning rates that are linear within a stage.

A stage that has not begun can be edited while a run is stopped: nothing before it changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from saccade.testbed.network import Sight


@dataclass(frozen=True)
class Batch:
    """`rows` rows of `length` tokens, drawn with probability `share`."""

    rows: int
    length: int
    share: float


@dataclass(frozen=True)
class Stage:
    """`steps` steps; the learning rates are (first, last), the tasks {task: share}.

    `span`: the tokens that layers and heads with a window see (`WIDE`), 0 = all; `reach`: the largest position
    that random gaps in the position ids may lead to; `prose`: the weight of plain text in the loss; `blind`: the
    shares of batches, without chains, in which the lower, or the upper, layers of `WIDE` see no further than others.
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
    prose: float
    blind: tuple[float, float] = (0.0, 0.0)

    @property
    def half(self) -> bool:
        """Whether the first half of a row holds what the second half asks for: windows need that."""
        return self.span > 0

    def sights(self, layers: int, blind: int = 0) -> list[Sight]:
        """What each layer sees; `blind` is 1 if the lower, 2 if the upper layers of `WIDE` see no further than others."""
        hidden = (range(0), range(SECOND), range(SECOND, layers))[blind]
        wide = {layer: heads for layer, heads in WIDE.items() if self.span and layer not in hidden}
        return [Sight(self.span, wide.get(layer, (0, 0))) for layer in range(layers)]


WIDE = {4: (0, 3), 5: (0, 3), 7: (1, 4), 8: (1, 4)}
"""The KV heads (from, to) of each layer that see past the window, and only from the second half of a row.

So nothing can be looked up ahead of the question, and what takes two steps takes two layers and different heads.
"""

SECOND = 7
"""The first of the layers that must learn to look up by themselves, in batches whose lower layers are blind."""

UP_TO_192 = (Batch(256, 64, 0.3), Batch(192, 128, 0.3), Batch(128, 192, 0.4))
UP_TO_512 = (Batch(64, 512, 0.6), Batch(128, 256, 0.2), Batch(160, 192, 0.2))
UP_TO_2K = (Batch(24, 2048, 0.6), Batch(64, 512, 0.25), Batch(160, 192, 0.15))
UP_TO_4K = (Batch(12, 4096, 0.6), Batch(24, 1536, 0.2), Batch(64, 512, 0.2))
UP_TO_10K = (Batch(6, 8192, 0.45), Batch(5, 10240, 0.25), Batch(64, 512, 0.3))

BEGINNING = {"skip": 3, "recall": 3, "compact": 2, "sentence": 2, "question": 1, "copy": 1, "prose": 0.5}
OPENING = {"recall": 2, "copy": 1, "compact": 2, "sentence": 2, "question": 1}
SKIP_1 = {**OPENING, "skip1": 5}
SKIP_2 = {**OPENING, "skip2": 4, "skip1": 1}
SKIP_3 = {**OPENING, "skip3": 4, "skip2": 1}
SHORT = {
    **{"recall": 2, "copy": 1, "compact": 2, "sentence": 3, "question": 1, "skip": 1, "listing": 0.5, "prose": 0.5},
    **{"relay": 2, "alias compact": 4, "alias sentence": 6, "name": 3},
}
MIDDLE = {
    **{"recall": 1, "compact": 1, "sentence": 2, "question": 1.5, "copy": 0.5, "listing": 0.3, "prose": 1},
    **{"relay": 1, "alias compact": 3, "alias sentence": 6, "alias question": 3, "name": 3},
}
LONG = {
    **{"recall": 0.3, "compact": 0.5, "sentence": 0.5, "question": 4, "copy": 0.3, "listing": 0.3, "prose": 3},
    **{"relay": 0.3, "alias compact": 1, "alias sentence": 2, "alias question": 4, "name": 0.5},
}

RECIPE: tuple[Stage, ...] = (
    Stage("short", 500, UP_TO_192, BEGINNING, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512, 0.15, (0.35, 0.35)),
    Stage("192", 1800, UP_TO_192, SHORT, (0.02, 0.018), (0.01, 0.008), 0.5, 32, 512, 0.15, (0.2, 0.3)),
    Stage("512", 2500, UP_TO_512, MIDDLE, (0.018, 0.014), (0.008, 0.006), 0.4, 64, 4096, 0.2, (0.15, 0.2)),
    Stage("2k", 600, UP_TO_2K, LONG, (0.014, 0.01), (0.006, 0.004), 0.3, 64, 12288, 0.5, (0.1, 0.15)),
    Stage("8k", 600, UP_TO_10K, LONG, (0.01, 0.006), (0.004, 0.002), 0.3, 0, 14336, 0.5),
    Stage("decay", 1000, UP_TO_10K, LONG, (0.006, 0.0002), (0.002, 0.0001), 0.3, 0, 14336, 0.5),
)
