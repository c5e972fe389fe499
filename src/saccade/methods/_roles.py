"""Roles from an option: every Nth layer, named layers, named heads, or a role file."""

from ..errors import PolicyError
from ..plans.head_list import KIND, HeadList
from ..plans.identity import refuse_other
from ..plans.plan import layer_roles, refuse_all_dense, refuse_unable
from ..plans.role_file import RoleFile
from ..plans.roles import RoleMap
from ..types import ModelShape, Role


def roles_of(source: str, shape: ModelShape, dense_layers: int) -> tuple[RoleMap, tuple[str, ...]]:
    """The role map that `source` names for a model, and notes.

    `dense_layers` are no business of a role file or a list of heads, which speak of every layer.

    Raises:
        PolicyError: a layer or head that the model does not have, an unreadable role file, or one of another model.
    """
    kind, colon, rest = source.partition(":")
    if colon and kind in ("every", "layers"):
        refuse_all_dense(shape, dense_layers)
    if colon and kind == "every":
        note = f"roles={source} is a stand-in that nobody calibrated"
        return layer_roles(shape, dense_layers, Role.PUBLISH, shape.full_layers[dense_layers :: int(rest)]), (note,)
    if colon and kind == "layers":
        publishers, first = [int(layer) for layer in rest.split("+")], shape.full_layers[dense_layers]
        for layer in publishers:
            refuse_unable(f"roles={source} is not valid: layer {layer}", layer, shape, dense_layers)
        if min(publishers) > first:
            raise PolicyError(
                f"roles={source} is not valid: layer {first}, the first after the dense ones, "
                "must be among them, or it has no selection to reuse"
            )
        return layer_roles(shape, dense_layers, Role.PUBLISH, publishers), ()
    if colon and kind == KIND:
        try:
            return HeadList.parse(source).role_map(shape), ()
        except PolicyError as error:
            raise PolicyError(f"roles: {error}") from None
    file = RoleFile.read(source)
    refuse_other(f"role file {source}", file.model, shape)
    for layer in range(shape.layers):
        if (layer in file.roles.concerned) != (layer in shape.full_layers):
            given = "roles" if layer in file.roles.concerned else "no roles"
            told = f"has {given} for layer {layer}; layers with full attention, which need them, are"
            raise PolicyError(f"role file {source} {told} {shape.full_told()}")
    return file.roles, ()
