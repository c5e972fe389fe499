"""StreamingLLM (Xiao et al., 2024, arXiv 2309.17453): attention sinks and a window of recent tokens."""

from ..plans.plan import Plan, layer_roles
from ..selection.selector import WindowSelector
from ..types import ModelShape, Role
from .method import Method
from .options import DEFAULT_BUDGET, Budget, DenseLayers, Options, RectifyField, Sinks


class StreamingOptions(Options):
    """Options of `streaming`; 4 sinks as in the paper."""

    budget: Budget = DEFAULT_BUDGET
    sinks: Sinks = 4
    dense_layers: DenseLayers = 0
    rectify: RectifyField = None

    @property
    def selector(self) -> WindowSelector:
        return WindowSelector(budget=self.budget, sinks=self.sinks)


def plan(options: StreamingOptions, shape: ModelShape) -> Plan:
    """Every head attends to the first `sinks` tokens and the last `budget - sinks`, the current one included.

    The set depends on the position alone, so one layer makes it and all layers above reuse it.
    """
    roles = layer_roles(shape, options.dense_layers, Role.SELECT, shape.full_layers[options.dense_layers :][:1])
    return Plan(options.selector, roles)


METHOD = Method("streaming", "sinks and recent tokens only", "StreamingLLM, arXiv 2309.17453", StreamingOptions, plan)
