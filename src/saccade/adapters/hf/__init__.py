"""The transformers adapter."""

from ...checkpoints.versions import outdated
from ...errors import SaccadeError

if _old := outdated():
    raise SaccadeError(_old)

from .run import Run, sparsify  # behind the check: an old library would fail here in a way of its own

__all__ = ["Run", "sparsify"]
