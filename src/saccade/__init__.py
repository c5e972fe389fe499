"""saccade: sparse decoding attention for long contexts, without retraining.

Importing this package imports neither torch nor transformers; names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.hf.run import Run as Run
    from .adapters.hf.run import sparsify as sparsify
    from .errors import AttachmentError as AttachmentError
    from .errors import DocumentError as DocumentError
    from .errors import KernelError as KernelError
    from .errors import ModelFolderError as ModelFolderError
    from .errors import OutputError as OutputError
    from .errors import PolicyError as PolicyError
    from .errors import SaccadeError as SaccadeError
    from .errors import ServingError as ServingError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .recipe import Recipe as Recipe
    from .rectify import Rectify as Rectify
    from .registry import policies as policies
    from .spec import Policy as Policy
    from .spec import policy as policy
    from .stats import LayerStats as LayerStats
    from .stats import RunStats as RunStats

__version__ = "0.1.0"

_HOMES = {
    "Run": "adapters.hf.run",
    "sparsify": "adapters.hf.run",
    "Recipe": "recipe",
    "Policy": "spec",
    "policy": "spec",
    "policies": "registry",
    "Rectify": "rectify",
    "LayerStats": "stats",
    "RunStats": "stats",
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
