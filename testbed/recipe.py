"""The training recipe: stages in steps, with learning rates that are linear within a stage.

A stage that has not begun can be edited while a run is stopped: nothing before it changes. The bundled model was made
that way: its run was stopped after stage "512", and the stages from "512, names" on were then written as they are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .network import Sight


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
    share of batches, without chains, in which the lower layers of `WIDE` see no further than the others (no stage
    below has any; it is drawn all the same, so that the batches are those that the model was trained on).
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
    blind: float = 0.0

    @property
    def half(self) -> bool:
        """Whether the first half of a row holds what the second half asks for: windows need that."""
        return self.span > 0

    def sights(self, layers: int, blind: bool = False) -> list[Sight]:
        """What each layer sees."""
        wide = {layer: heads for layer, heads in WIDE.items() if self.span and not (blind and layer < SECOND)}
        return [Sight(self.span, wide.get(layer, (0, 0))) for layer in range(layers)]


WIDE = {4: (0, 2), 5: (0, 2), 7: (2, 4), 8: (2, 4), 10: (0, 2)}
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
    **{**OPENING, "skip": 1, "skip3": 1, "listing": 0.5, "prose": 1},
    **{"relay": 4, "alias compact": 4, "alias sentence": 2},
}
MIDDLE = {
    **{"skip": 0.5, "recall": 1, "compact": 1, "sentence": 1, "question": 2, "copy": 0.5, "listing": 0.5, "prose": 2},
    **{"relay": 2, "relay3": 1, "alias compact": 3, "alias sentence": 3, "alias question": 3},
    **{"alias3 compact": 2, "alias3 sentence": 1, "alias3 question": 1},
}
NAMES = {
    **{"recall": 0.7, "compact": 0.5, "sentence": 1, "question": 1.5, "copy": 0.5, "listing": 0.3, "prose": 1.5},
    **{"relay": 2, "alias compact": 3, "alias sentence": 4, "alias question": 2, "name": 3},
}
LONG = {
    **{"recall": 0.5, "compact": 0.5, "sentence": 0.5, "question": 4, "copy": 0.3, "listing": 0.3, "prose": 4},
    **{"relay": 0.5, "alias compact": 1.5, "alias sentence": 2, "alias question": 3, "name": 1},
}

RECIPE: tuple[Stage, ...] = (
    Stage("short", 400, UP_TO_192, BEGINNING, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512, 0.15),
    Stage("skip 1", 100, UP_TO_192, SKIP_1, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512, 0.15),
    Stage("skip 2", 100, UP_TO_192, SKIP_2, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512, 0.15),
    Stage("skip 3", 100, UP_TO_192, SKIP_3, (0.02, 0.02), (0.01, 0.01), 0.5, 32, 512, 0.15),
    Stage("192", 3000, UP_TO_192, SHORT, (0.02, 0.018), (0.01, 0.008), 0.5, 32, 512, 0.15),
    Stage("512", 1749, UP_TO_512, MIDDLE, (0.018, 0.01625), (0.008, 0.00713), 0.4, 64, 4096, 0.3),
    Stage("512, names", 2600, UP_TO_512, NAMES, (0.016, 0.013), (0.007, 0.006), 0.4, 64, 4096, 0.3),
    Stage("2k", 1300, UP_TO_2K, LONG, (0.013, 0.01), (0.006, 0.004), 0.3, 64, 12288, 0.5),
    Stage("4k", 600, UP_TO_4K, LONG, (0.01, 0.008), (0.004, 0.003), 0.3, 256, 12288, 0.5),
    Stage("8k", 1200, UP_TO_10K, LONG, (0.008, 0.006), (0.003, 0.002), 0.3, 0, 14336, 0.5),
    Stage("decay", 1600, UP_TO_10K, LONG, (0.006, 0.0002), (0.002, 0.0001), 0.3, 0, 14336, 0.5),
)
