"""Dense decoding through this engine: the baseline that every sparse policy is compared with."""

from __future__ import annotations

from ..plans.plan import Plan
from ..plans.roles import RoleMap
from ..types import ModelShape, Role
from .method import Method
from .options import Options


class DenseOptions(Options):
    """Dense attention has no options."""


def plan(options: DenseOptions, shape: ModelShape) -> Plan:
    """Every head of every layer attends to all tokens."""
    return Plan(None, RoleMap.by_layer((Role.DENSE,) * shape.layers, shape.kv_heads))


METHOD = Method("dense", "every head attends to every token: the baseline", "-", DenseOptions, plan, tuned=())
