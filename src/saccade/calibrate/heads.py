"""Which heads retrieve: trained gates, a score from one dense pass, or chance; all compared on new texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy

from ..checkpoints.shape import shape_of_model
from ..errors import OutputError, SaccadeError
from ..eval.entry import parse_budgets
from ..eval.output import whole_numbers
from ..methods.policy import Policy
from ..plans.head_list import HeadList
from ..plans.role_file import RoleFile
from ..plans.roles import RoleMap
from ..recipes.recipe import Recipe
from ..types import ModelShape, Role
from .asking import Reading
from .gates import Gates
from .gold import GoldObserver
from .ledger import held
from .problems import SHORTEST, Problems
from .sweep import Outcome
from .target import CHOOSING_HEADS, TRAINING, Target, TargetSettings
from .training import LOG, HeadTraining, Training

Array = numpy.ndarray[Any, Any]
METHODS = DIRECT, SCORE, RANDOM = Gates.kind, "score", "random"
RESULTS, ROLES = "heads.json", "roles.json"
SCORED_TEXTS, PROBED_TEXTS = 16, 3
"""Texts that the retrieval score is read from, and that dense attention is asked about before anything is trained."""
ASKED = 10
"""Questions of a training text, at most."""
THRESHOLD = 0.5
"""Above it a gate retrieves."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What the user can choose; see `saccade calibrate heads --help`."""

    common: TargetSettings
    methods: str
    target_heads: int | None
    exact: bool
    steps: int
    lengths: tuple[int, int]
    budgets: str
    drop_known: bool


@dataclass(frozen=True, slots=True)
class Found:
    """Roles from one method.

    Attributes:
        values: of every head above the first layer with full attention, `[F - 1][Hkv]`, F being the number of those
            layers: a gate, a score, or None for chance.
        roles: "threshold" and "exact", as `heads:` lists.
        trace: of a training; see `HeadTraining.trace`.
    """

    method: str
    values: list[list[float]] | None
    roles: dict[str, str]
    trace: dict[str, list[Any]] | None = None


@dataclass(frozen=True)
class HeadSearch:
    """A checked search; `run` it.

    Attributes:
        count: heads that may retrieve, those of the first layer with full attention among them.
        problems: what roles are scored on.
    """

    settings: HeadSettings
    target: Target
    methods: tuple[str, ...]
    count: int
    budgets: tuple[int, ...]
    problems: Problems

    @classmethod
    def check(cls, settings: HeadSettings) -> HeadSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        methods = tuple(dict.fromkeys(part.strip() for part in settings.methods.split(",")))
        for method in methods:
            if method not in METHODS:
                raise SaccadeError(f"--method {method!r} is not valid: {', '.join(METHODS)}")
        target = Target.check(settings.common)
        shape = target.subject.shape
        full, wanted = shape.full_layers, settings.target_heads
        count = wanted if wanted is not None else min(4, len(full)) * shape.kv_heads
        refuse_count(count, shape)
        for log in sorted(settings.common.output_dir.glob(f"training/*/{LOG}")):
            if (kind := held(log, "training.kind")) not in (None, DIRECT):
                raise OutputError(f"{str(log)!r} is of {kind} gates, not {DIRECT}; choose another --output-dir")
        budgets = tuple(sorted(parse_budgets(settings.budgets)))
        if settings.drop_known:
            target.refuse_made()
        search = cls(settings, target, methods, count, budgets, target.problems())
        for method in methods:
            _ = search.texts(method)
        return search

    def texts(self, method: str) -> Problems:
        """What a method looks at; with a file of the user's the same as everywhere."""
        if method != DIRECT:
            return self.target.problems(CHOOSING_HEADS)
        own = self.settings
        return self.target.draw(TRAINING, ASKED, own.lengths, own.steps, together=True)

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, as far as they are known before it."""
        trained = DIRECT in self.methods
        candidates = (trained + len(self.methods)) * len(self.budgets)
        return trained * self.settings.steps + len(self.problems) * (1 + candidates)

    def run(self, advance: Callable[[str], None], model: Any = None) -> dict[str, Any]:
        """Find roles by every method, score them, write results, roles and recipe; `model` as of `LayerSearch`."""
        model = self.target.subject.load() if model is None else model
        if self.settings.drop_known and self.target.left is None:
            target = self.target.without_known(model)
            return replace(self, target=target, problems=target.problems()).run(advance, model)
        shape = shape_of_model(model)
        earlier = self.target.earlier(shape)
        # Before any training: whether dense attention answers anything of a few texts.
        probed = [self.problems[number] for number in range(min(len(self.problems), PROBED_TEXTS))]
        answers = [one for problem in probed for one in Reading(model, problem).observe()]
        self.target.refuse_unanswered(sum(answers), len(answers), "no head can be told from another")
        found = [self.find(model, method, advance) for method in self.methods]
        roles = {(one.method, name): text for one in found for name, text in one.roles.items()}
        first = found[0]  # what goes into the recipe
        kind = "exact" if self.settings.exact or "threshold" not in first.roles else "threshold"
        chosen = first.roles[kind]
        with self.target.sweep(model, self.problems) as sweep:
            pairs = [(text, budget) for text in roles.values() for budget in self.budgets]
            options = ({"roles": text, "budget": budget} for text, budget in pairs)
            specs = dict(zip(pairs, (Policy.create("lychee_decode", each).to_spec() for each in options), strict=True))
            sweep.run(["dense", *dict.fromkeys(specs.values())], advance)
            rows = [
                {"method": method, "roles": name, "heads": retrieving(text, shape), "list": text,
                 "budget": budget, **sweep.outcome(specs[text, budget]).to_dict()}
                for (method, name), text in roles.items() for budget in self.budgets
            ]  # fmt: skip
            dense, best = sweep.outcome("dense"), sweep.outcome(specs[chosen, self.budgets[-1]])
        results = {
            **{name: value for name, value in asdict(self.settings).items() if name != "common"},
            "target_heads": self.count,
            "texts": len(self.problems),
            "dense": dense.to_dict(),
            "found": [asdict(one) for one in found],
            "rows": rows,
            "chosen": chosen,
            "chosen_of": {"method": first.method, "roles": kind},
        }
        written = self.target.write_results(RESULTS, results)
        self._write(written, dense, best, earlier)
        return written

    def find(self, model: Any, method: str, advance: Callable[[str], None]) -> Found:
        """The roles that one method finds; a finished training is read from the folder."""
        settings, target, shape = self.settings, self.target, self.target.subject.shape
        wanted, above = self.count - shape.kv_heads, (len(shape.full_layers) - 1, shape.kv_heads)
        if method != DIRECT:
            rng = numpy.random.default_rng(target.settings.seed)
            scored = method == SCORE
            values = self._scores(model)[1:] if scored else rng.random(above)
            roles = {"exact": head_list(best_heads(values, wanted), shape)}
            return Found(method, values.tolist() if scored else None, roles)
        about = target.training_about() | {"lengths": list(settings.lengths), "asked": ASKED}
        recipe, gates = Training(wanted, settings.steps), Gates(above, model.device)
        # Named as by earlier versions, which could train it more than once.
        folder = target.settings.output_dir / "training" / f"{method}-0"
        training = HeadTraining(model, self.texts(method), recipe, folder, about, gates)
        training.run(advance)
        values = gates.mean().cpu().numpy()
        roles = {name: head_list(mask, shape) for name, mask in masks(values, wanted).items()}
        return Found(method, values.tolist(), roles, training.trace())

    def _scores(self, model: Any) -> Array:
        """Retrieval score `[F, Hkv]` of one dense pass: the best query head of a group counts (Wu et al., 2025)."""
        shape, problems = self.target.subject.shape, self.texts(SCORE)
        total, steps = numpy.zeros((shape.layers, shape.query_heads)), 0
        for number in range(min(len(problems), SCORED_TEXTS)):
            problem = problems[number]
            gold = GoldObserver(shape.layers, shape.query_heads, problem.tokens, first=shape.full_layers[0])
            Reading(model, problem).observe(gold)
            # Mass breaks ties between heads that have copied equally often.
            total += gold.copies.numpy() + 1e-6 * gold.mass.numpy()
            steps += gold.steps
        if not steps:
            raise SaccadeError("--method score: no answer of the task stands in its text, so that no head can copy it")
        full = total[list(shape.full_layers)]
        best: Array = full.reshape(len(full), shape.kv_heads, -1).max(-1) / steps
        return best

    def _write(self, results: dict[str, Any], dense: Outcome, best: Outcome, earlier: Recipe) -> None:
        """The role file, and the recipe: with the roles at the largest budget; layers and what was tuned stay."""
        chosen, shape = results["chosen"], earlier.model
        names = ("target_heads", "exact", "steps", "lengths")
        found = {"method": self.methods[0], **{name: results[name] for name in names}}
        roles = RoleFile(shape, HeadList.parse(chosen).role_map(shape), {**self.target.about(), **found})
        roles.write(self.target.settings.output_dir / ROLES)
        known = replace(earlier, policy=earlier.policy if earlier.tuned else Policy.from_spec(best.spec), roles=chosen)
        scores = {one.spec: [one.correct, one.count] for one in (dense, best)}
        self.target.write_recipe("calibrate heads", known, found=found, scores=scores)


def shortest_and_longest(lengths: str) -> tuple[int, int]:
    """Lengths of training texts as the user writes them; a SaccadeError if they are not valid."""
    found = whole_numbers("--lengths", lengths, at_least=SHORTEST)
    if len(found) > 2 or found[0] > found[-1]:
        raise SaccadeError(f"--lengths {lengths!r} is not valid: the shortest and the longest, such as 1024,10240")
    return found[0], found[-1]


def refuse_count(count: int, shape: ModelShape) -> None:
    """Raise a SaccadeError if so many heads cannot retrieve."""
    full = shape.full_layers
    if not shape.kv_heads <= count <= len(full) * shape.kv_heads:
        told = f"{len(full)} layers {'with full attention ' if shape.kinds else ''}of {shape.kv_heads}"
        raise SaccadeError(
            f"--target-heads {count} is not valid: {shape.kv_heads} (the heads of layer {full[0]}, which always "
            f"retrieve) to {len(full) * shape.kv_heads} ({told})"
        )


def masks(values: Array, count: int) -> dict[str, Array]:
    """Which gates `[F - 1, Hkv]` retrieve: those above one half, and exactly the `count` best."""
    return {"threshold": values > THRESHOLD, "exact": best_heads(values, count)}


def best_heads(values: Array, count: int) -> Array:
    """The `count` largest as a mask; ties to the lower layer, then head."""
    mask = numpy.zeros(values.shape, dtype=bool)
    mask.flat[numpy.argsort(-values.ravel(), kind="stable")[:count]] = True
    return mask


def head_list(retrieve: Array, shape: ModelShape) -> str:
    """Roles as text, the first layer with full attention put in front: all its heads retrieve."""
    above = (tuple(Role.PUBLISH if one else Role.REUSE for one in layer) for layer in retrieve.tolist())
    roles = dict(zip(shape.full_layers, ((Role.PUBLISH,) * shape.kv_heads, *above), strict=True))
    return str(HeadList.of(RoleMap(tuple(roles.get(layer, ()) for layer in range(shape.layers)))))


def retrieving(roles: str, shape: ModelShape) -> int:
    """How many heads of a list of roles read everything."""
    return sum(role is Role.PUBLISH for layer in HeadList.parse(roles).role_map(shape).layers for role in layer)
