"""What nothing measures: bytes that a policy reads, texts that a promise needs, recipes from papers, versions."""

from collections.abc import Sequence

from lab.markdown import table
from saccade.calibrate.promise import MARGIN, texts_needed
from saccade.checkpoints.load import skeleton_of
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.shape import shape_of
from saccade.checkpoints.traffic import weights_read
from saccade.methods.method import Known
from saccade.methods.policy import Policy
from saccade.methods.registry import policies
from saccade.plans.cost import PARTS, Cost, cost_of
from saccade.recipes.published import PREFIX, PUBLISHED

from .page import Results

WANTED = (0.9, 0.95, 0.97, 0.98, 0.99)
ASKED = 96
"""Key tokens of a text, at most."""
MODEL, CONTEXT, BATCH = "llama-3.1-8b", 131_072, 8


def _costs(batch: int) -> dict[str, Cost]:
    """By spec, with the defaults of every method of the package, cache and weights in bfloat16."""
    config = read_config(MODEL)
    weights = 2.0 * weights_read(skeleton_of(config, MODEL))
    shape, found = shape_of(config), {}
    for method in (one for one in policies().values() if one.options.__module__.startswith("saccade.")):
        policy = Policy.create(method.name, method.usual(Known()).options)
        plan = policy.plan(shape)
        found[policy.to_spec()] = cost_of(
            plan, policy.rectify, shape, context=CONTEXT, batch=batch, kv_itemsize=2, weight_bytes=weights
        )
    return found


def cost(_: Results) -> list[str]:
    """Bytes per decoded token at a batch of 8, and both ceilings."""
    many, one = _costs(BATCH), _costs(1)
    body = [
        [
            f"`{spec}`",
            *(f"{part.total / 1e9:.1f}" if part.total else "–" for part in (getattr(found, name) for name in PARTS)),
            f"{found.total / 1e9:.1f}",
            f"{found.ceiling_over_dense:.2f}×",
            f"{one[spec].ceiling_over_dense:.2f}×",
        ]
        for spec, found in many.items()
    ]
    columns = ["policy", "weights", "K and V", *PARTS[2:], "GB in all", "ceiling", "ceiling at batch 1"]
    return [*table(columns, body), "", f"`saccade policies --cost --model {MODEL} --context {CONTEXT} --batch {BATCH}`"]


def texts(_: Results) -> list[str]:
    """How many texts judge in `tune` at least, and how many it wants."""
    wanted = [[f"{texts_needed(one, ASKED, margin=margin)}" for one in WANTED] for margin in (0, MARGIN)]
    body = [[name, *cells] for name, cells in zip(("at least", "wanted"), wanted, strict=True)]
    return table(["texts that judge", *(f"{one:g}" for one in WANTED)], body)


def recipes(_: Results) -> list[str]:
    """What the papers chose."""
    columns = ["recipe", "policy", "source"]
    body = [
        [f"`{PREFIX}{name}`", f"`{recipe.policy.to_spec()}`", str(recipe.found["by"])]
        for name, recipe in PUBLISHED.items()
    ]
    return table(columns, body, words=columns)


def versions(_: Results, *, of: str, tried: Sequence[str]) -> list[str]:
    """Of a library, those that the tests were run with."""
    return [f"Versions of {of} that were tried: {', '.join(tried)}."]
