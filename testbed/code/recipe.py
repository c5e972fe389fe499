"""The training recipe of the code model: stages in steps, with learning rates that are linear within a stage.

The steps are those of an estimate. A run measures what a step of each stage takes on its machine and multiplies all of
them by one factor, which its checkpoints keep: the factor and the seed say what was run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import Qwen3Config

from ..network import model_config
from .windows import POSITIONS

VOCABULARY = 4096


@dataclass(frozen=True)
class Stage:
    """`steps` steps of `rows` windows of `length` tokens; the learning rates are (first, last)."""

    name: str
    steps: int
    rows: int
    length: int
    muon: tuple[float, float]
    adam: tuple[float, float]
    decay: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


RECIPE: tuple[Stage, ...] = (
    Stage("512", 800, 128, 512, (0.02, 0.02), (0.01, 0.01), 0.4),
    Stage("2k", 4000, 32, 2048, (0.02, 0.014), (0.01, 0.007), 0.4),
    Stage("8k", 2400, 8, 8192, (0.014, 0.008), (0.007, 0.004), 0.3),
    Stage("16k, decay", 1600, 4, POSITIONS, (0.008, 0.0002), (0.004, 0.0001), 0.3),
)
"""Few tokens are short: one at 16K costs as much as three at 2K, but the texts are read many times in any case.

512 opens the circuits that copy; the rates fall to nothing at the longest length, as short stages at a high rate
would spoil what was learned of long contexts.
"""

TINY: tuple[Stage, ...] = (
    Stage("64", 20, 8, 64, (0.02, 0.02), (0.01, 0.01), 0.4),
    Stage("256", 10, 2, 256, (0.02, 0.0), (0.01, 0.0), 0.3),
)
"""For a rehearsal on a CPU."""


def code_config(vocabulary: int = VOCABULARY) -> Qwen3Config:
    """The configuration of the code model: 3.5 million parameters in 12 layers."""
    return model_config(vocabulary, hidden=160, feed_forward=232, positions=POSITIONS)


def tiny_config(vocabulary: int = VOCABULARY) -> Qwen3Config:
    """The configuration of a rehearsal."""
    return model_config(vocabulary, layers=3, hidden=32, feed_forward=48, positions=POSITIONS)


def scaled(recipe: Sequence[Stage], factor: float) -> tuple[Stage, ...]:
    """The recipe with `factor` times as many steps in every stage, at least one."""
    return tuple(replace(stage, steps=max(1, round(stage.steps * factor))) for stage in recipe)


def fitting_factor(recipe: Sequence[Stage], seconds_per_step: Mapping[str, float], seconds: float) -> float:
    """The factor with which the recipe takes `seconds`, by what a step of each stage takes; four digits."""
    return round(seconds / sum(stage.steps * seconds_per_step[stage.name] for stage in recipe), 4)


def total(recipe: Sequence[Stage]) -> int:
    return sum(stage.steps for stage in recipe)
