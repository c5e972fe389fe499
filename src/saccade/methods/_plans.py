"""The two plans that most methods have, of options with a `selector` and `dense_layers`."""

from typing import Any

from ..plans.plan import Plan, layer_roles, reselecting_roles
from ..types import ModelShape


def every_layer(options: Any, shape: ModelShape) -> Plan:
    """Every layer behind the dense ones chooses its own set."""
    return Plan(options.selector, layer_roles(shape, options.dense_layers))


def some_layers(options: Any, shape: ModelShape) -> Plan:
    """Publishing layers attend densely and choose, those of `reselect` again; the others reuse the sets."""
    return Plan(options.selector, *reselecting_roles(shape, options.dense_layers, options.reselect))
