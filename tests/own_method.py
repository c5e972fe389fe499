"""A method that is not ours, as somebody would write it, in a package of its own; and how a test makes it known."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saccade.methods import registry

NAME = "mean_topk"
PACKAGE = "theirs"
MODULE = '''"""The best tokens for the mean query of each group, in every layer."""

from saccade import Method
from saccade.methods.options import Budget, DenseLayers, Options
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.rules import TopK
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.selector import ScoredSelector
from saccade.types import ModelShape


class MeanTopKOptions(Options):
    """Options of `mean_topk`."""

    budget: Budget = 256
    dense_layers: DenseLayers = 1


def plan(options: MeanTopKOptions, shape: ModelShape) -> Plan:
    return Plan(ScoredSelector(ExactScorer("mean"), TopK(options.budget)), layer_roles(shape, options.dense_layers))


METHOD = Method("mean_topk", "the best tokens for a group's mean query", "-", MeanTopKOptions, plan)
'''
SAME = "composed:pooling=mean,dense_layers=1"
"""The same plan by other means."""


@contextmanager
def installed(folder: Path, module: str = MODULE, **named: str) -> Iterator[None]:
    """A package with this module; what entry points call `named`, by its name there, is found by all processes."""
    known = dict(registry._METHODS)
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(module, encoding="utf-8")
    if named:
        info = folder / f"{PACKAGE}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n", encoding="utf-8")
        points = "\n".join(f"{name} = {PACKAGE}:{thing}" for thing, name in named.items())
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{points}\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    registry._load_entry_points.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(PACKAGE, None)
        registry._load_entry_points.cache_clear()
        registry._METHODS.clear()
        registry._METHODS.update(known)
