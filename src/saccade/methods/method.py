"""A method describes itself: what it is called, where it comes from, its options, and the plan that they make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PolicyError
from ..plans.plan import Plan, layer_roles, reselecting_roles
from ..types import ModelShape
from .options import Options

RECTIFIED = {"rectify": 16}
"""For `Method.tuned`: few sparse steps between dense passes, so that passes fall among a question's tokens."""


@dataclass(frozen=True, slots=True)
class Known:
    """What calibration has found for a model; None: nobody has looked.

    Attributes:
        reselect: re-selection layers.
        roles: retrieval heads, as `heads:0+7.2`, `layers:0+7` or the path of a role file.
        first: the first layers with full attention, three if there are as many.
    """

    reselect: tuple[int, ...] | None = None
    roles: str | None = None
    first: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Usual:
    """The options that a method needs to run on a model, beside its defaults.

    Attributes:
        options: by name.
        calibrated: whether nothing in them is a guess that calibration would replace.
        note: what the user should know about the guess.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = True
    note: str | None = None


@dataclass(frozen=True)
class Method:
    """What a method is, where it comes from and which options it takes.

    Attributes:
        name: as it is written in specs.
        summary: one line.
        source: the paper, "-" if there is none.
        options: their class.
        plan: makes the plan of a model from options.
        usual: what it needs beside its defaults on a model of which so much is known.
        compared: whether `saccade compare` looks at it unless policies are named.
        tuned: the options of each family that `saccade tune` tries of it; none: it is not tried.

    Raises:
        PolicyError: a name that cannot be written in a spec.
    """

    name: str
    summary: str
    source: str
    options: type[Options]
    plan: Callable[[Any, ModelShape], Plan]
    usual: Callable[[Known], Usual] = lambda known: Usual()
    compared: bool = True
    tuned: tuple[Mapping[str, Any], ...] = ({},)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise PolicyError(f"method name {self.name!r} is not valid: letters, digits and _, the first no digit")

    @property
    def defaults(self) -> dict[str, Any]:
        """Option names and their default values."""
        return {name: field.default for name, field in self.options.model_fields.items()}

    @property
    def help(self) -> dict[str, str]:
        """Option names and what they mean."""
        return {name: field.description or "" for name, field in self.options.model_fields.items()}


def every_layer(options: Any, shape: ModelShape) -> Plan:
    """`Method.plan` of options with a `selector` and `dense_layers`: every layer behind these chooses its own set."""
    return Plan(options.selector, layer_roles(shape, options.dense_layers))


def some_layers(options: Any, shape: ModelShape) -> Plan:
    """Publishing layers attend densely and choose, those of `reselect` again; the others reuse the sets."""
    return Plan(options.selector, *reselecting_roles(shape, options.dense_layers, options.reselect))


def reselecting(known: Known) -> Usual:
    """`Method.usual` of methods with re-selection layers: without them the plan takes one, and says so."""
    return Usual(calibrated=False) if known.reselect is None else Usual({"reselect": known.reselect})
