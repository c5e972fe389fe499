"""Which arms are compared, and a row of figures for each."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from saccade.calibrate.problems import TASKS, needles_in
from saccade.errors import SaccadeError, meant
from saccade.eval.entry import terms_of
from saccade.methods.policy import Policy

from ..designs.continuation import Continuation
from ..designs.questions import Questions
from ..judging.claim import Group, Sample, Test
from ..judging.effects import TEXTS, effect_of
from ..judging.study import Study

DENSE = "dense"
PAIRED = "quest:budget={}"
"""What an arm is compared with, text by text, at its own budget."""
ARMS = (
    "streaming:budget={}", "streaming:budget={},dense_layers=2", PAIRED, "quest:budget={},heads=query",
    "tidal:budget={}", "tidal:budget={},heads=query", "less_is_more:budget={}", "lychee_cluster:budget={}",
    "token_clusters:budget={}", "token_clusters:budget={},cluster_size=16", "exact_topk:budget={}",
)  # fmt: skip
SHARES = ("resa:ratio={},min_pages=1", "resa:ratio={},min_pages=1,dense_layers=2")
"""Of a method that keeps a share of the row: the budget's share of the context; the question comes on top."""
DECODED = 128
"""Tokens at the end of a plain text that are decoded with its own tokens."""
ROLES = ("lychee_decode:budget={}", "lychee_decode:budget={},sinks=0,window=0")
"""Of a method that needs roles of heads, with the authors' frame and by the paper's letter; not of a model without."""
METHODS = tuple(dict.fromkeys(arm.partition(":")[0] for arm in (*ARMS, *ROLES, *SHARES)))


def check(
    study: Study, budgets: Sequence[int], context: int, task: str, asked: int, plain: int, methods: Sequence[str]
) -> None:
    """Refuse what suits neither the model nor each other.

    Raises:
        SaccadeError: an unknown task or method, one that needs roles of a model without, more questions than a text has
            facts, a context that the model has no positions for or that is too short for plain texts, or a budget that
            is no smaller than it.
    """
    for name in methods:
        if name not in METHODS:
            raise SaccadeError(f"--methods {name!r} is not valid; {', '.join(METHODS)} are{meant(name, METHODS)}")
        if f"{name}:budget={{}}" in ROLES and not _has_roles(study):
            raise SaccadeError(
                f"--methods {name} needs roles, which no recipe beside the model has: `saccade calibrate heads`"
            )
    if task not in TASKS:
        raise SaccadeError(f"--task {task!r} is not valid; {', '.join(TASKS)} are{meant(task, TASKS)}")
    if asked > (most := needles_in(task, context)):
        raise SaccadeError(f"--asked {asked}: a text of {context:,} tokens has {most} facts of task {task}")
    if context >= (positions := study.subject.positions):
        raise SaccadeError(f"--context {context}: the model has {positions:,} positions, some of them for questions")
    if max(budgets) >= context:
        raise SaccadeError(f"--budgets {max(budgets)} is not valid: it must be smaller than --context {context}")
    if plain and context <= DECODED:
        raise SaccadeError(f"--context {context} is not valid beside --plain: more than the {DECODED} tokens decoded")


def arms_of(study: Study, budgets: Sequence[int], context: int, methods: Sequence[str]) -> dict[str, int | None]:
    """Arms of these methods, or of all, each with its budget; dense attention has none. `quest` is always there."""
    wanted = {*methods, "quest"} if methods else {*METHODS}
    arms: dict[str, int | None] = {DENSE: None}
    for budget in budgets:
        sizes = dict.fromkeys((*ARMS, *(ROLES if _has_roles(study) else ())), f"{budget}")
        sizes |= dict.fromkeys(SHARES, f"{budget / context:.6g}")
        given = {arm: size for arm, size in sizes.items() if arm.partition(":")[0] in wanted}
        arms |= dict.fromkeys((arm.format(size) for arm, size in given.items()), budget)
    return arms


def _has_roles(study: Study) -> bool:
    return study.recipe is not None and study.recipe.roles is not None


def plain_texts(arms: Iterable[str], context: int, texts: int, seed: int) -> Continuation | None:
    """So many texts of code and of prose, as long as the context with what is decoded of them; None of no texts."""
    if not texts:
        return None
    return Continuation(tuple(arms), context - DECODED, DECODED, texts, seed, kinds=("code", "prose"))


def rows_of(
    study: Study, asking: Questions, arms: dict[str, int | None], answers: Sequence[Sample], plain: Sequence[Sample]
) -> list[dict[str, Any]]:
    """A row for each arm: right answers with an interval over texts, those less Quest's, and what it reads.

    Where `plain` texts were decoded too, also by how much their loss is above dense attention's.
    """
    policies = study.policies(arms)
    return [
        _answered(study, asking, arm, budget, policies[arm], answers) | _gone_on(arm, plain)
        for arm, budget in arms.items()
    ]


def _answered(
    study: Study, asking: Questions, arm: str, budget: int | None, policy: Policy, samples: Sequence[Sample]
) -> dict[str, Any]:
    own = [one for one in samples if one.arm == arm]
    right = effect_of(Test("right answers", "right", Group(arm)), samples, asking.interval)
    row: dict[str, Any] = {"policy": policy.name, "spec": str(policy), "budget": budget, "texts": right.n}
    row |= {"n": right.n * asking.asked, "correct": round(sum(one.values["right"] for one in own) * asking.asked)}
    row |= {"right": right.value, "interval": right.interval}
    if budget is not None and arm != PAIRED.format(budget):
        row |= _less("less_quest", samples, "right", arm, PAIRED.format(budget))
    row["share_attended"] = fmean(one.values["share"] for one in own)
    return row | terms_of(policy, study.subject.shape, asking.lengths[1])


def _gone_on(arm: str, samples: Sequence[Sample]) -> dict[str, Any]:
    own = [one.values["loss"] for one in samples if one.arm == arm]
    if not own:
        return {}
    row = {"plain_texts": len(own), "loss": fmean(own)}
    return row if arm == DENSE else row | _less("loss_above_dense", samples, "loss", arm, DENSE)


def _less(name: str, samples: Sequence[Sample], measure: str, arm: str, other: str) -> dict[str, Any]:
    """How an arm differs from another one text by text, and the interval."""
    found = effect_of(Test(name, measure, Group(arm), Group(other)), samples, TEXTS)
    return {name: found.value, f"{name}_interval": found.interval}
