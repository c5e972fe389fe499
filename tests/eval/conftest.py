"""A tiny random model and the bundled tokenizer."""

from __future__ import annotations

from commands import model, tokenizer

__all__ = ["model", "tokenizer"]
