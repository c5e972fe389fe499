"""Every policy that keeps no state over steps: its options, and the oracle that says what it attends to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import saccade
from saccade.plans.plan import Plan
from saccade.types import ModelShape

from . import oracles
from . import oracles_composed as composed
from .harness import SCALE
from .oracles import Array
from .oracles_composed import Outcome, Roles

LAYERS = 6

Oracle = Callable[..., Outcome]
"""From q, k, the roles of a role file and the options, one step of one sequence."""


@dataclass(frozen=True)
class Case:
    """A policy under some options; `smallest` legal budget (None: it has none), whether it reads a role file."""

    policy: str
    options: dict[str, Any]
    oracle: Oracle
    smallest: int | None
    learnt: bool = False


def _sets(oracle: Callable[..., oracles.Sets]) -> Oracle:
    """An oracle of `oracles.py`: it never overflows, and its grid of keys makes every decision exact."""

    def run(q: list[Array], k: list[Array], learnt: Roles, **options: Any) -> Outcome:
        sets = oracle(q, k, **options)
        return Outcome(sets, [[False] * len(layer) for layer in sets])

    return run


def _rule(
    budget: int = 2048, rule: str = "top_k", top_p: float = 0.0, threshold: float = 0.0, ratio: float = 0.0,
    min_pages: int = 1, local_pages: int = 1, sinks: int = 0, window: int = 0, **_: Any,
) -> composed.Rule:  # fmt: skip
    if rule == "top_p":
        return composed.top_p(top_p, budget, SCALE, sinks, window)
    if rule == "threshold":
        return composed.threshold(threshold, budget, SCALE, sinks, window)
    if rule == "ratio":
        return composed.ratio(ratio, min_pages, local_pages, sinks, window)
    return composed.top_k(budget, sinks, window)


def _tidal(q: list[Array], k: list[Array], learnt: Roles, *, reselect: list[int], **options: Any) -> Outcome:
    publishers = options.get("dense_layers", 2), *reselect
    return _composed(q, k, learnt, roles="layers:" + "+".join(map(str, publishers)), **options)


def _lychee_decode(q: list[Array], k: list[Array], learnt: Roles, **options: Any) -> Outcome:
    name = options.get("roles", "")
    plan = composed.every(len(q), k[0].shape[0], int(name[6:])) if name.startswith("every:") else learnt
    page, rule = options.get("page", 1), _rule(**options)
    if "sinks" not in options and "window" not in options:
        if options.get("rule") == "ratio":
            rule = composed.growing(options["ratio"])
        elif "rule" not in options:
            size = options["budget"]
            kept = (min(128, size // 8) // page * page, min(256, size // 4) // page * page)
            rule = composed.top_k(size, *kept)
    return composed.composed(q, k, roles=plan, rule=rule, page=page, pooling="mean")


def _resa(q: list[Array], k: list[Array], learnt: Roles, **options: Any) -> Outcome:
    own = {"scorer": "page_bounds", "pooling": "mean", "rule": "ratio", "ratio": 0.1, "dense_layers": 0}
    return _composed(q, k, learnt, **{**own, **options})


def _composed(q: list[Array], k: list[Array], learnt: Roles, **options: Any) -> Outcome:
    layers, heads, dense = len(q), k[0].shape[0], options.get("dense_layers", 2)
    name = options.get("roles", "select")
    if name == "select":
        plan = composed.always(layers, heads, dense)
    elif name.startswith("every:"):
        plan = composed.every(layers, heads, int(name[6:]), dense)
    elif name.startswith("layers:"):
        plan = composed.persistent(layers, heads, dense, [int(number) for number in name[7:].split("+")])
    else:
        plan = learnt
    common = {key: options[key] for key in ("scorer", "page", "heads", "pooling") if key in options}
    return composed.composed(q, k, roles=plan, rule=_rule(**options), scale=SCALE, **common)


def _rank_union(q: list[Array], k: list[Array], learnt: Roles, **options: Any) -> Outcome:
    names = ("budget", "sinks", "recent", "dense_layers", "scorer", "page")
    kept = {key: options[key] for key in names if key in options}
    return _sets(oracles.less_is_more)(q, k, learnt, reselect=[options["dense_layers"], 4], **kept)


P, TAU = {"rule": "top_p"}, {"rule": "threshold"}
FRAME = {"sinks": 3, "window": 5}
PAGES, LOCAL = {"scorer": "page_bounds", "page": 4}, {"min_pages": 3, "local_pages": 2}
LESS, TIDAL, EXACT, LYCHEE = _sets(oracles.less_is_more), _tidal, _composed, _lychee_decode

CASES = {
    "dense": Case("dense", {}, _sets(oracles.dense), None),
    "streaming": Case("streaming", {}, _sets(oracles.streaming), 5),
    "streaming-few-sinks": Case("streaming", {"sinks": 0, "dense_layers": 1}, _sets(oracles.streaming), 1),
    "quest-kv": Case("quest", {"page": 4}, _sets(oracles.quest), 4),
    "quest-query": Case("quest", {"page": 4, "heads": "query", "dense_layers": 0}, _sets(oracles.quest), 4),
    "quest-authors": Case(
        "quest", {"page": 4, "heads": "query", "min_pages": 3, "keep_last": False}, _sets(oracles.quest), 4
    ),
    "tidal-kv": Case("tidal", {"reselect": [4]}, TIDAL, 1),
    "tidal-query": Case("tidal", {"reselect": [3, 5], "heads": "query"}, TIDAL, 1),
    "tidal-once": Case("tidal", {"reselect": [], "dense_layers": 0}, TIDAL, 1),
    "tidal-top_p": Case("tidal", {**P, "top_p": 0.9037, "reselect": [4]}, TIDAL, 1),
    "tidal-ratio": Case("tidal", {"rule": "ratio", "ratio": 0.3, "reselect": [4], "dense_layers": 1}, TIDAL, None),
    "less_is_more": Case("less_is_more", {"reselect": [4]}, LESS, 6),
    "less_is_more-no-window": Case("less_is_more", {"reselect": [3], "recent": 0.0, "sinks": 2}, LESS, 4),
    "less_is_more-share": Case(
        "less_is_more", {"reselect": [2], "recent": 0.58, "sinks": 0, "dense_layers": 1}, LESS, 2
    ),
    "exact_topk": Case("exact_topk", {}, EXACT, 1),
    "exact_topk-query": Case("exact_topk", {"heads": "query", "dense_layers": 4}, EXACT, 1),
    "exact_topk-threshold": Case("exact_topk", {**TAU, "threshold": 0.0103, "dense_layers": 4}, EXACT, 1),
    "lychee_decode": Case("lychee_decode", {}, LYCHEE, 1, learnt=True),
    "lychee_decode-page": Case("lychee_decode", {"page": 4}, LYCHEE, 4, learnt=True),
    "lychee_decode-every": Case("lychee_decode", {"roles": "every:4"}, LYCHEE, 1),
    "lychee_decode-top_p": Case("lychee_decode", {**P, "top_p": 0.9537}, LYCHEE, 1, learnt=True),
    "lychee_decode-threshold": Case("lychee_decode", {**TAU, "threshold": 0.0203}, LYCHEE, 1, learnt=True),
    "lychee_decode-ratio": Case("lychee_decode", {"rule": "ratio", "ratio": 0.3}, LYCHEE, None, learnt=True),
    "lychee_decode-ratio-page": Case(
        "lychee_decode", {"rule": "ratio", "ratio": 0.29, "page": 8}, LYCHEE, None, learnt=True
    ),
    "lychee_decode-letter": Case("lychee_decode", {"sinks": 0, "window": 0}, LYCHEE, 1, learnt=True),
    "lychee_decode-frame-ratio": Case(
        "lychee_decode", {"rule": "ratio", "ratio": 0.3, "sinks": 5, "window": 6, "page": 4}, LYCHEE, None, learnt=True
    ),
    "tidal-frame-top_p": Case("tidal", {**P, "top_p": 0.9037, "reselect": [4], **FRAME}, TIDAL, 8),
    "exact_topk-frame-threshold": Case("exact_topk", {**TAU, "threshold": 0.0103, **FRAME}, EXACT, 8),
    "composed-frame": Case("composed", {**PAGES, **FRAME, "roles": "select", "dense_layers": 1}, _composed, 12),
    "resa": Case("resa", {"page": 4, "min_pages": 3}, _resa, None),
    "resa-local": Case(
        "resa", {"page": 3, "ratio": 0.5, "min_pages": 2, "local_pages": 2, "dense_layers": 3}, _resa, None
    ),
    "composed-pages-ratio-reuse": Case(
        "composed", {**PAGES, "rule": "ratio", "ratio": 0.4, "roles": "layers:2+4"}, _composed, None
    ),
    "composed-pages-mean": Case(
        "composed", {**PAGES, "rule": "ratio", "ratio": 0.2, "pooling": "mean", **LOCAL}, _composed, None
    ),
    "composed-exact-mean": Case(
        "composed", {"scorer": "exact", "pooling": "mean", "roles": "layers:2+4", "dense_layers": 2}, _composed, 1
    ),
    "composed-pages-every": Case(
        "composed", {**PAGES, "roles": "every:2", "dense_layers": 1, "heads": "query"}, _composed, 4
    ),
    "composed-pages-roles": Case("composed", PAGES, _composed, 4, learnt=True),
    "composed-exact-pages": Case(
        "composed", {"scorer": "exact", "page": 4, "roles": "layers:2+5", "heads": "query"}, _composed, 4
    ),
    "composed-pages-mass": Case("composed", {**PAGES, "pooling": "mass", "roles": "select"}, _composed, 4),
    "composed-exact-mass": Case("composed", {"pooling": "mass", "roles": "layers:2+4", **FRAME}, _composed, 8),
    "composed-pages-union": Case(
        "composed",
        {**PAGES, "rule": "rank_union", "roles": "layers:1+4", "dense_layers": 1, "heads": "all"},
        _rank_union,
        12,
    ),
    "composed-exact-pages-union": Case(
        "composed",
        {"page": 4, "rule": "rank_union", "sinks": 5, "recent": 0.5, "roles": "layers:1+4", "dense_layers": 1},
        _rank_union,
        16,
    ),
    "composed-rank_union": Case(
        "composed",
        {"scorer": "exact", "rule": "rank_union", "roles": "layers:1+4", "dense_layers": 1, "heads": "all"},
        _rank_union,
        6,
    ),
}
"""Every case, by the name that a failing test shows."""


def random_roles(rng: np.random.Generator, kv_heads: int) -> Roles:
    """What calibration could find: layer 0 publishes, later heads do as they like."""
    names = ["publish", "reuse", "reuse", "dense", "select"]
    return [["publish"] * kv_heads] + [[names[i] for i in rng.integers(0, 5, kv_heads)] for _ in range(LAYERS - 1)]


def role_file(folder: Path, roles: Roles, shape: ModelShape) -> Path:
    """The roles as calibration writes them."""
    sizes = {"layers": shape.layers, "query_heads": shape.query_heads, "kv_heads": shape.kv_heads}
    model = {"architecture": "test", **sizes, "head_dim": shape.head_dim, "weights": None}
    path = folder / "roles.json"
    path.write_text(json.dumps({"version": 1, "model": model, "roles": roles, "found": {"by": "chance"}}))
    return path


def bind(case: Case, shape: ModelShape, spare: int, roles: Roles) -> tuple[Plan, dict[str, Any]]:
    """The plan at `spare` tokens above the smallest budget; and the options for the oracle."""
    options = case.options if case.smallest is None else {**case.options, "budget": case.smallest + spare}
    if not case.learnt:
        return saccade.policy(case.policy, **options).plan(shape), options
    with tempfile.TemporaryDirectory() as folder:
        path = role_file(Path(folder), roles, shape)
        return saccade.policy(case.policy, **options, roles=str(path)).plan(shape), {**options, "roles": str(path)}
