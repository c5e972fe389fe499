"""A policy bound to a model: who selects, who attends to what. Frozen; shared by all sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..errors import PolicyError
from ..selection.selector import Selector
from ..types import ModelShape, Role
from .roles import RoleMap


@dataclass(frozen=True)
class Plan:
    """What runs: a selector (None: nothing is ever selected), the roles of all heads, and what the user should know.

    Raises:
        PolicyError: at construction, if one set for all heads is combined with layers of mixed roles.
    """

    selector: Selector | None
    roles: RoleMap
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.selector is not None and self.selector.heads == "all" and not self.roles.uniform:
            raise PolicyError(
                "one set for all heads needs every layer to have a single role; this role map mixes roles"
            )

    @cached_property
    def refreshing(self) -> frozenset[int]:
        """Layers with a head that refreshes the set, the only ones whose index must be up to date."""
        layers = enumerate(self.roles.layers)
        return frozenset(layer for layer, roles in layers if any(role.refreshes for role in roles))


def selection_layers(
    name: str, shape: ModelShape, dense_layers: int, reselect: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Where a layer plan selects: the first layer after the dense ones and the re-selection layers; and notes.

    Raises:
        PolicyError: a re-selection layer that does not exist or lies under the dense layers.
    """
    last = shape.layers - 1
    if dense_layers > last:
        raise PolicyError(
            f"policy {name}: dense_layers={dense_layers} leaves no layer to select at; "
            f"this model has {shape.layers} layers, so 0 to {last} are valid"
        )
    notes: tuple[str, ...] = ()
    if reselect is None:
        middle = max(shape.layers // 2, dense_layers)
        reselect = (middle,)
        notes = (
            f"{name}: no reselect given, using layer L//2 = {middle} of {shape.layers}; a wrong layer costs accuracy",
        )
    for layer in reselect:
        if not dense_layers <= layer <= last:
            raise PolicyError(
                f"policy {name}: reselect={layer} is not a selection layer of this model; "
                f"valid layers are {dense_layers} to {last} ({dense_layers} dense layers, {shape.layers} in all)"
            )
    return tuple(sorted({dense_layers, *reselect})), notes


def layer_roles(shape: ModelShape, dense_layers: int, publishers: tuple[int, ...]) -> RoleMap:
    """Dense layers, then publishers where named, and reuse everywhere else (TidalDecode, figure 3)."""

    def role(layer: int) -> Role:
        if layer < dense_layers:
            return Role.DENSE
        return Role.PUBLISH if layer in publishers else Role.REUSE

    return RoleMap.by_layer((role(layer) for layer in range(shape.layers)), shape.kv_heads)


def select_everywhere(name: str, shape: ModelShape, dense_layers: int) -> RoleMap:
    """Dense layers, then selection in every layer, as in Quest.

    Raises:
        PolicyError: no layer is left to select at.
    """
    first = selection_layers(name, shape, dense_layers, ())[0][0]
    roles = (Role.DENSE if layer < first else Role.SELECT for layer in range(shape.layers))
    return RoleMap.by_layer(roles, shape.kv_heads)
