from commands import fails, invoke, model_folder

__all__ = ["fails", "invoke", "model_folder"]
