"""saccade: sparse decoding attention for long contexts, without retraining.

Importing this package imports neither torch nor transformers; names load when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.hf.run import Run as Run
    from .adapters.hf.run import sparsify as sparsify
    from .decode.stats import LayerStats as LayerStats
    from .decode.stats import RunStats as RunStats
    from .errors import AttachmentError as AttachmentError
    from .errors import DocumentError as DocumentError
    from .errors import KernelError as KernelError
    from .errors import ModelFolderError as ModelFolderError
    from .errors import OutputError as OutputError
    from .errors import PolicyError as PolicyError
    from .errors import SaccadeError as SaccadeError
    from .errors import ServingError as ServingError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .methods.method import Method as Method
    from .methods.policy import Policy as Policy
    from .methods.policy import policy as policy
    from .methods.registry import policies as policies
    from .methods.registry import register as register
    from .plans.rectify import Rectify as Rectify
    from .recipes.recipe import Recipe as Recipe

__version__ = "0.1.0"

_HOMES = {
    "Run": "adapters.hf.run",
    "sparsify": "adapters.hf.run",
    "Recipe": "recipes.recipe",
    "Policy": "methods.policy",
    "policy": "methods.policy",
    "policies": "methods.registry",
    "Method": "methods.method",
    "register": "methods.registry",
    "Rectify": "plans.rectify",
    "LayerStats": "decode.stats",
    "RunStats": "decode.stats",
    **dict.fromkeys(
        (
            "SaccadeError",
            "PolicyError",
            "UnsupportedModelError",
            "AttachmentError",
            "ModelFolderError",
            "DocumentError",
            "OutputError",
            "KernelError",
            "ServingError",
        ),
        "errors",
    ),
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
