"""A tiny random model and the bundled tokenizer."""

from commands import model, tokenizer

__all__ = ["model", "tokenizer"]
