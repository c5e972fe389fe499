"""Dense decoding through this engine: the baseline that every sparse policy is compared with."""

from ..plans.plan import Plan, layer_roles
from ..types import ModelShape, Role
from .method import Method
from .options import Options


def plan(options: Options, shape: ModelShape) -> Plan:
    """Every head of every layer attends to all tokens."""
    return Plan(None, layer_roles(shape, 0, Role.DENSE))


METHOD = Method("dense", "every head attends to every token: the baseline", "-", Options, plan, tuned=())
