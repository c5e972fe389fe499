"""Which head refreshes the rolling set and which one attends to it, for every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import PolicyError
from ..types import Role


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """Neighbouring KV heads `start..stop` of one layer that share a role."""

    start: int
    stop: int
    role: Role


@dataclass(frozen=True)
class RoleMap:
    """Roles `[L][Hkv]`, its `layers`; a head that reuses a set needs one that refreshes it in a layer below.

    A layer that no policy concerns, for it has no full attention, has no heads here.

    Raises:
        PolicyError: at construction, if a REUSE head has no refresher of its head index below it.
    """

    layers: tuple[tuple[Role, ...], ...]

    def __post_init__(self) -> None:
        refreshed: set[int] = set()
        for layer, roles in enumerate(self.layers):
            for head, role in enumerate(roles):
                if role is Role.REUSE and head not in refreshed:
                    missing = f"but no layer below refreshes head {head}"
                    raise PolicyError(f"KV head {head} of layer {layer} reuses a selection, {missing}")
            refreshed.update(head for head, role in enumerate(roles) if role.refreshes)

    @classmethod
    def by_layer(cls, roles: Iterable[Role | None], kv_heads: int) -> RoleMap:
        """One role for all heads of a layer, as in TidalDecode; None for a layer that no policy concerns."""
        return cls(tuple(() if role is None else (role,) * kv_heads for role in roles))

    @cached_property
    def concerned(self) -> tuple[int, ...]:
        """The layers that have heads here, in order."""
        return tuple(layer for layer, roles in enumerate(self.layers) if roles)

    @property
    def mixed(self) -> bool:
        """Whether there are layers of other kinds."""
        return len(self.concerned) < len(self.layers)

    @cached_property
    def attending_to_all(self) -> tuple[tuple[bool, ...], ...]:
        """Per layer and KV head, whether it reads the whole cache."""
        return tuple(tuple(role.attends_to_all for role in roles) for roles in self.layers)

    @cached_property
    def publishing(self) -> tuple[tuple[bool, ...], ...]:
        """Per layer and KV head, whether it refreshes its set from the scores of dense attention."""
        return tuple(tuple(role is Role.PUBLISH for role in roles) for roles in self.layers)

    @cached_property
    def passive(self) -> tuple[bool, ...]:
        """Per layer, whether its heads are all dense: it attends to everything and takes no part in any choice."""
        return tuple(bool(roles) and all(role is Role.DENSE for role in roles) for roles in self.layers)

    @cached_property
    def spans(self) -> tuple[tuple[HeadSpan, ...], ...]:
        """Per layer, the maximal runs of heads with one role; computed once, read in every step."""
        return tuple(tuple(_runs(roles)) for roles in self.layers)


def _runs(roles: tuple[Role, ...]) -> Iterable[HeadSpan]:
    start = 0
    for stop in range(1, len(roles) + 1):
        if stop == len(roles) or roles[stop] is not roles[start]:
            yield HeadSpan(start, stop, roles[start])
            start = stop
