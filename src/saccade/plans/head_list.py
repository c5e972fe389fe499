"""`heads:0+7.2+7.3`: which KV heads retrieve, as text that fits into a policy spec; all others reuse."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PolicyError
from ..types import ModelShape, Role
from .roles import RoleMap

KIND = "heads"
FORM = "heads:L+L.H"
"""How such a list is written: layer numbers, or a layer and a KV head joined by a dot."""


@dataclass(frozen=True, slots=True)
class HeadList:
    """Retrieving `(layer, KV head)` in order; None stands for a whole layer, of which no head is named then."""

    entries: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, text: str) -> HeadList:
        """Read what `str` writes, in any order and with repetitions.

        Raises:
            ValueError: anything else.
        """
        kind, _, rest = text.partition(":")
        found: set[tuple[int, int | None]] = set()
        for part in rest.split("+"):
            layer, dot, head = part.partition(".")
            numbers = (layer, head) if dot else (layer,)
            if kind != KIND or not all(number.isascii() and number.isdigit() for number in numbers):
                raise ValueError(f"must be {FORM} with whole numbers, such as heads:0+7.2+7.3")
            found.add((int(layer), int(head) if dot else None))
        return cls._ordered(found)

    @classmethod
    def of(cls, roles: RoleMap) -> HeadList:
        """The list that makes these roles again.

        Raises:
            PolicyError: a role other than PUBLISH and REUSE, which no list can say.
        """
        found: set[tuple[int, int | None]] = set()
        for layer, heads in enumerate(roles.layers):
            for head, role in enumerate(heads):
                if role not in (Role.PUBLISH, Role.REUSE):
                    what = f"KV head {head} of layer {layer} is {role.value}"
                    raise PolicyError(f"{what}, but {FORM} says publish and reuse only")
                if role is Role.PUBLISH:
                    found.add((layer, head))
            if heads and all(role is Role.PUBLISH for role in heads):
                found.add((layer, None))
        return cls._ordered(found)

    @classmethod
    def _ordered(cls, found: set[tuple[int, int | None]]) -> HeadList:
        kept = (entry for entry in found if entry[1] is None or (entry[0], None) not in found)
        return cls(tuple(sorted(kept, key=lambda entry: (entry[0], entry[1] or 0))))

    def role_map(self, shape: ModelShape) -> RoleMap:
        """The roles of a model's heads.

        Raises:
            PolicyError: a layer or a KV head that the model does not have, or a head that has nothing to reuse.
        """
        roles = {layer: [Role.REUSE] * shape.kv_heads for layer in shape.full_layers}
        for layer, head in self.entries:
            if layer not in roles or (head or 0) >= shape.kv_heads:
                valid = f"layers {shape.full_told()} with KV heads 0 to {shape.kv_heads - 1}"
                raise PolicyError(f"{HeadList(((layer, head),))} is not valid: this model has {valid}")
            for named in range(shape.kv_heads) if head is None else (head,):
                roles[layer][named] = Role.PUBLISH
        return RoleMap(tuple(tuple(roles.get(layer, ())) for layer in range(shape.layers)))

    def __str__(self) -> str:
        return f"{KIND}:" + "+".join(str(layer) if head is None else f"{layer}.{head}" for layer, head in self.entries)
