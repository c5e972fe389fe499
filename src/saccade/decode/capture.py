"""Whether a decoding step can become a CUDA graph, which its host does not see again between replays."""

from __future__ import annotations

from collections.abc import Sequence

from ..plans.plan import Plan
from ..plans.rectify import Rectify


def reasons_against_capture(plan: Plan, rectify: Rectify | None, observers: Sequence[object]) -> list[str]:
    """All that the host does between the steps of a plan, a line each; empty if every step can be a replay.

    Args:
        plan: what runs.
        rectify: how its sparse steps are made good, if they are.
        observers: who looks at every step.
    """
    reasons = []
    if rectify is not None and rectify.mode == "verify":
        reasons.append(f"rectify={rectify} compares drafts with dense logits on the host; use mode overwrite")
    if plan.moves_index:
        reasons.append("its index moves in memory as it grows")
    if observers:
        reasons.append("observers and recall look at every step on the host")
    return reasons
