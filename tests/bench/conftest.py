from __future__ import annotations

from commands import fails, invoke

__all__ = ["fails", "invoke"]
