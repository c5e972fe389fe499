"""A policy bound to a model: who selects, who attends to what. Frozen; shared by all sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import PolicyError
from ..selection.index import NOWHERE, KeySizes, SlotIndex, SlotSizes
from ..selection.selector import Selector
from ..text.feed import TokenFeed
from ..text.levels import Codes, break_codes
from ..types import ModelShape, Role
from .roles import RoleMap


@dataclass(frozen=True)
class Plan:
    """What runs: a `selector` (None: nothing is selected), `roles` of all heads, `notes` that the user should read.

    `guessed` is the option whose value nobody has found for this model, None where nothing is a guess; `sources` are
    those of the model's shape.

    Raises:
        PolicyError: at construction, if one set for all heads is combined with layers of mixed roles.
    """

    selector: Selector | None
    roles: RoleMap
    notes: tuple[str, ...] = ()
    guessed: str | None = None
    sources: Mapping[int, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        mixed = any(len(spans) > 1 for spans in self.roles.spans)
        if self.selector is not None and self.selector.heads == "all" and mixed:
            raise PolicyError(
                "one set for all heads needs every layer to have a single role; this role map mixes roles"
            )

    def __deepcopy__(self, memo: object) -> Plan:
        """Itself: it never changes."""
        return self

    @cached_property
    def refreshing(self) -> frozenset[int]:
        """Layers whose keys some head refreshes its set from, the only ones whose index must be up to date."""
        layers = enumerate(self.roles.layers)
        return frozenset(self.sources.get(layer, layer) for layer, roles in layers if any(r.refreshes for r in roles))

    @property
    def owns_index(self) -> bool:
        """Whether its index lies in slots and takes tokens in between steps."""
        return self.selector is not None and self.selector.owns_index

    @property
    def reads_text(self) -> bool:
        """Whether that index looks at the tokens' text."""
        return self.selector is not None and self.selector.reads_text

    @property
    def codes(self) -> Codes:
        """What it looks at: numbers of the vocabulary's pieces."""
        return break_codes if self.selector is None else self.selector.codes

    @property
    def bounds_page(self) -> int | None:
        """The page of key bounds that can lie beside a cache's own pages; None: there are none."""
        return None if self.selector is None else self.selector.bounds_page

    def covers(self, length: int) -> bool:
        """Whether every head attends to all of a row of `length` tokens."""
        return self.selector is None or self.selector.covers(length)

    def new_slots(
        self, keys: KeySizes, slots: int, *, longest: int = 0, text: TokenFeed | None = None, fixed: bool = False
    ) -> SlotIndex | None:
        """An empty index of its layers, as `SlotSizes` has it."""
        sizes = SlotSizes(sorted(self.refreshing), keys, slots, longest, text, fixed)
        return None if self.selector is None else self.selector.new_slots(sizes)

    @cached_property
    def moves_index(self) -> bool:
        """Whether its index cannot stay in one place, so that no captured step can search it."""
        return self.owns_index and self.new_slots(NOWHERE, 1, fixed=True) is None


def layer_roles(
    shape: ModelShape, dense_layers: int | None, refresh: Role = Role.SELECT, at: Collection[int] | None = None
) -> RoleMap:
    """Dense layers first; then every layer refreshes its set, as in Quest, or those of `at` do and the others reuse it.

    Of the layers with full attention; `at` names them as the model does. Not told, two are dense, as Quest has it; none
    beside layers of other kinds: two of a few are much of what is read, and no answer needed them where every layer
    chooses (`docs/log.md`, 2026-11-24).

    Raises:
        PolicyError: no layer is left to select at.
    """
    if dense_layers is None:
        dense_layers = 0 if shape.kinds else 2
    refuse_all_dense(shape, dense_layers)
    full = shape.full_layers
    roles = dict.fromkeys(full[:dense_layers], Role.DENSE)
    for layer in full[dense_layers:]:
        roles[layer] = refresh if at is None or layer in at else Role.REUSE
    return RoleMap.by_layer((roles.get(layer) for layer in range(shape.layers)), shape.kv_heads)


def refuse_unable(told: str, layer: int, shape: ModelShape, dense_layers: int) -> None:
    """Raise for a layer that cannot select, as `told` names it: one of the dense ones, or without full attention."""
    if layer not in shape.full_layers[dense_layers:]:
        valid = f"valid layers are {shape.full_told(dense_layers)} ({dense_layers} dense layers, {shape.layers} in all)"
        raise PolicyError(f"{told} is not a selection layer of this model; {valid}")


def reselecting_roles(
    shape: ModelShape, dense_layers: int, reselect: tuple[int, ...] | None
) -> tuple[RoleMap, tuple[str, ...], str | None]:
    """Of a method that publishes at the first layer after the dense ones and at some later ones (Tidal, figure 3).

    `roles`, `notes` and `guessed` of its plan, in that order: without `reselect` the middle layer is a guess.

    Raises:
        PolicyError: a re-selection layer that does not exist or lies under the dense layers.
    """
    refuse_all_dense(shape, dense_layers)
    full, notes, guessed = shape.full_layers, tuple[str, ...](), None
    if reselect is None:
        guessed = "reselect"
        middle = full[max(len(full) // 2, dense_layers)]
        reselect = (middle,)
        which = f"L//2 = {middle} of {shape.layers}" if not shape.kinds else f"{middle}, the middle one of {len(full)}"
        notes = (f"no reselect given, using layer {which}; a wrong layer costs accuracy",)
    for layer in reselect:
        refuse_unable(f"reselect={layer}", layer, shape, dense_layers)
    return layer_roles(shape, dense_layers, Role.PUBLISH, {full[dense_layers], *reselect}), notes, guessed


def refuse_all_dense(shape: ModelShape, dense_layers: int) -> None:
    """Raise a PolicyError with the valid numbers for dense layers that leave none to select at."""
    layers = len(shape.full_layers)
    if dense_layers >= layers:
        valid = f"this model has {layers} layers with full attention, so 0 to {layers - 1} are valid"
        raise PolicyError(f"dense_layers={dense_layers} leaves no layer to select at; {valid}")


def candidates(shape: ModelShape, dense_layers: int) -> tuple[tuple[int, ...], ...]:
    """What may select again: no layer, and each one above the first that selects."""
    return ((), *((layer,) for layer in shape.full_layers[dense_layers + 1 :]))
