"""Which HardKuma gates stand for the paper's: decided by a rule that was written before any run."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

from saccade.errors import SaccadeError

from .published import CODE
from .scaled import LETTER, SHARE
from .variants import DIRECTS, SCALED

Results = Mapping[str, Any]
TRAINED = ("target_heads", "seeds", "steps")
ASKED = ("context", "texts", "asked", "budgets", "seed", "behind")
LAYERS = " layers"
FOUR_LAYERS = f"4{LAYERS}"
"""As many heads as TidalDecode's two dense and two choosing layers have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule and all it rests on, which is part of the criteria of claims about the gates it chooses.

    Attributes:
        scaled: variants that could take the letter's place, none of them the paper's; of equals the first.
        near: gates by which the number above one half may miss the wanted one, in every seed; the letter's too.
        kept: of the answers that direct gates keep, cut to as many heads as wanted, what must be kept too.
        target_heads, seeds, steps: how all were trained; see `python -m claims gates`, and `heads_of`.
        context, texts, asked, seed: of the questions; stretches of packages' sources that share no token.
        budgets: of the roles that answer.
        behind: token of packages before which no text begins: what judges is cut far in front of it.
    """

    scaled: tuple[str, ...] = SCALED
    near: float = 1.0
    kept: float = 0.98
    target_heads: int | str = 16
    seeds: int = 3
    steps: int = 3000
    context: int = 4096
    texts: int = 24
    asked: int = 12
    budgets: tuple[int, ...] = (16, 64)
    seed: int = 40
    behind: int = 500_000

    def asking(self) -> dict[str, Any]:
        """What is asked, as the file's answers hold it."""
        return {name: [*value] if name == "budgets" else value for name, value in asdict(self).items() if name in ASKED}

    def chosen(self, results: Results) -> str | None:
        """The variant with most right answers among those that are near and keep direct gates' answers.

        A variant's heads are those of its own gates, above one half; answers are of all seeds and budgets. If none
        does, the paper's letter, if it is near; else None: no gates stand for the paper's.

        Raises:
            SaccadeError: nothing was asked yet, or direct gates are not among the runs.
        """
        least = self.kept * _right(results, direct_of(results), "exact")
        right = {name: _right(results, name, "threshold") for name in self.scaled if self._near(results, name)}
        able = [name for name in right if right[name] >= least]
        return max(able, key=right.__getitem__) if able else LETTER if self._near(results, LETTER) else None

    def refuse_others(self, results: Results) -> None:
        """Raise a SaccadeError if gates were trained, or questions asked, otherwise than here."""
        found = {name: (results[name], getattr(self, name)) for name in TRAINED}
        layers, heads = len(results["layers"]) + 1, results["kv_heads"]
        found["target_heads"] = results["target_heads"], heads_of(self.target_heads, layers, heads)
        if answers := results.get("answers"):
            found |= {name: (answers.get(name), value) for name, value in self.asking().items()}
        for name, (other, own) in found.items():
            if other != own:
                raise SaccadeError(f"trained gates: {name} {other} is not valid of a trial that claims rest on: {own}")

    def _near(self, results: Results, variant: str) -> bool:
        """Whether all seeds were trained to the end and came near enough."""
        runs = [run for run in results["runs"] if run["variant"] == variant]
        ended = len(runs) == results["seeds"] and all(run["step"] == results["steps"] for run in runs)
        return ended and all(abs(run["open"] - results["target"]) <= self.near for run in runs)


CHOICE = Choice()
"""What `python -m claims roles` asks and claims rest on: of the bundled model."""
PUBLISHED = Choice((SHARE, CODE), near=2.0, kept=0.9, target_heads=FOUR_LAYERS, steps=2000, budgets=(256,))
"""And of other models: two gates may miss, and where dense attention does not answer all, a tenth of the answers."""


def choice_of(model: str | None) -> Choice:
    """The rule for a model; None: the bundled one."""
    return CHOICE if model is None else PUBLISHED


def heads_of(told: int | str, layers: int, kv_heads: int) -> int:
    """How many KV heads are meant: a number, those of "4 layers", or a share of all, "1/4"."""
    if isinstance(told, int):
        return told
    return int(Fraction(told.removesuffix(LAYERS)) * (1 if told.endswith(LAYERS) else layers) * kv_heads)


def direct_of(results: Results) -> str:
    """The variant of direct gates: whose loss was scaled, if there is one."""
    trained = {run["variant"] for run in results["runs"]}
    return next((name for name in DIRECTS if name in trained), DIRECTS[-1])


def _right(results: Results, variant: str, roles: str) -> float:
    """Share of right answers under a variant's roles: "threshold" or "exact"."""
    rows: Iterable[Results] = results.get("answers", {}).get("rows", ())
    own = [row["right"] for row in rows if (row["variant"], row["roles"]) == (variant, roles)]
    if not own:
        raise SaccadeError(f"no answers of {variant} gates: `python -m claims roles FILE` asks for them")
    return fmean(right for texts in own for right in texts)
