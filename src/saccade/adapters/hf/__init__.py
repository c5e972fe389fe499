"""The transformers adapter."""

from .run import Run, sparsify

__all__ = ["Run", "sparsify"]
