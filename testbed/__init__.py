"""The bundled model: a small Qwen3 that was trained, by the code in this package, to retrieve from long contexts."""

from saccade.checkpoints.bundled import model_path

__all__ = ["model_path"]
