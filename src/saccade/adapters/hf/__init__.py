"""The transformers adapter."""

from ...checkpoints.versions import refuse_outdated

refuse_outdated()

from .run import Run, sparsify  # noqa: E402  # behind the check: an old library would fail here in a way of its own

__all__ = ["Run", "sparsify"]
