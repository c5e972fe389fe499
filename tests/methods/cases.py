"""Every policy that keeps no state over steps: its options, and the oracle that says what it attends to."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
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


FILE = "a role file"
"""Stands for one in a spec."""


@dataclass(frozen=True)
class Case:
    """A policy as its spec, without a budget; `smallest` legal budget (None: it has none)."""

    spec: str
    smallest: int | None

    @property
    def oracle(self) -> Oracle:
        return ORACLES[self.spec.partition(":")[0]]

    @property
    def options(self) -> dict[str, Any]:
        parts = self.spec.partition(":")[2].split(",")
        return {name: _value(name, text) for name, _, text in (part.partition("=") for part in parts) if name}


def _value(name: str, text: str) -> Any:
    if name == "reselect":
        return [int(layer) for layer in text.split("+") if layer]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text == "true" if text in ("true", "false") else text


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
    if options.get("rule") == "rank_union":
        names = ("budget", "sinks", "recent", "dense_layers", "scorer", "page")
        kept = {key: options[key] for key in names if key in options}
        return _sets(oracles.less_is_more)(q, k, learnt, reselect=[dense, 4], **kept)
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


ORACLES: dict[str, Oracle] = {
    **{name: _sets(getattr(oracles, name)) for name in ("dense", "streaming", "quest", "less_is_more")},
    **{"tidal": _tidal, "exact_topk": _composed, "lychee_decode": _lychee_decode, "resa": _resa, "composed": _composed},
}
SMALLEST = {
    "dense": None,
    "streaming": 5,
    "streaming:sinks=0,dense_layers=1": 1,
    "quest:page=4": 4,
    "quest:page=4,heads=query,dense_layers=0": 4,
    "quest:page=4,heads=query,min_pages=3,keep_last=false": 4,
    "tidal:reselect=4": 1,
    "tidal:reselect=3+5,heads=query": 1,
    "tidal:reselect=,dense_layers=0": 1,
    "tidal:rule=top_p,top_p=0.9037,reselect=4": 1,
    "tidal:rule=top_p,top_p=0.9037,reselect=4,sinks=3,window=5": 8,
    "tidal:rule=ratio,ratio=0.3,reselect=4,dense_layers=1": None,
    "less_is_more:reselect=4": 6,
    "less_is_more:reselect=3,recent=0.0,sinks=2": 4,
    "less_is_more:reselect=2,recent=0.58,sinks=0,dense_layers=1": 2,
    "exact_topk": 1,
    "exact_topk:heads=query,dense_layers=4": 1,
    "exact_topk:rule=threshold,threshold=0.0103,dense_layers=4": 1,
    "exact_topk:rule=threshold,threshold=0.0103,sinks=3,window=5": 8,
    f"lychee_decode:roles={FILE}": 1,
    f"lychee_decode:page=4,roles={FILE}": 4,
    "lychee_decode:roles=every:4": 1,
    f"lychee_decode:rule=top_p,top_p=0.9537,roles={FILE}": 1,
    f"lychee_decode:rule=threshold,threshold=0.0203,roles={FILE}": 1,
    f"lychee_decode:rule=ratio,ratio=0.3,roles={FILE}": None,
    f"lychee_decode:rule=ratio,ratio=0.29,page=8,roles={FILE}": None,
    f"lychee_decode:sinks=0,window=0,roles={FILE}": 1,
    f"lychee_decode:rule=ratio,ratio=0.3,sinks=5,window=6,page=4,roles={FILE}": None,
    "resa:page=4,min_pages=3": None,
    "resa:page=3,ratio=0.5,min_pages=2,local_pages=2,dense_layers=3": None,
    "composed:scorer=page_bounds,page=4,sinks=3,window=5,dense_layers=1": 12,
    "composed:scorer=page_bounds,page=4,rule=ratio,ratio=0.4,roles=layers:2+4": None,
    "composed:scorer=page_bounds,page=4,rule=ratio,ratio=0.2,pooling=mean,min_pages=3,local_pages=2": None,
    "composed:pooling=mean,roles=layers:2+4": 1,
    "composed:scorer=page_bounds,page=4,roles=every:2,dense_layers=1,heads=query": 4,
    f"composed:scorer=page_bounds,page=4,roles={FILE}": 4,
    "composed:page=4,roles=layers:2+5,heads=query": 4,
    "composed:scorer=page_bounds,page=4,pooling=mass": 4,
    "composed:pooling=mass,roles=layers:2+4,sinks=3,window=5": 8,
    "composed:scorer=page_bounds,page=4,rule=rank_union,roles=layers:1+4,dense_layers=1": 12,
    "composed:page=4,rule=rank_union,sinks=5,recent=0.5,roles=layers:1+4,dense_layers=1": 16,
    "composed:rule=rank_union,roles=layers:1+4,dense_layers=1,heads=all": 6,
}
CASES = {spec: Case(spec, smallest) for spec, smallest in SMALLEST.items()}
"""Every case, by its spec."""


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
    budget = {} if case.smallest is None else {"budget": case.smallest + spare}
    with tempfile.TemporaryDirectory() as folder:
        spec = case.spec.replace(FILE, str(role_file(Path(folder), roles, shape)))
        return saccade.policy(spec, **budget).plan(shape), {**case.options, **budget}
