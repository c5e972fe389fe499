from commands import fails, invoke

__all__ = ["fails", "invoke"]
