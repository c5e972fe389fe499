"""Texts of three kinds that a model goes on with: code, prose, and questions about code."""

from __future__ import annotations

from importlib.metadata import distributions
from pydoc_data.topics import topics
from typing import Any

from saccade.errors import DocumentError
from saccade.eval.tokens import encode

from .continuation import stretches

QUESTION = "Explain in a few paragraphs what this does, and name its weakest part."


def texts_by_kind(tokenizer: Any, length: int, count: int, seed: int, positions: int) -> dict[str, list[list[int]]]:
    """Tokens of `count` texts of each kind, none of which overlap; a tokenizer without a template has no chats.

    Code is packages' sources, prose their readmes and then Python's reference, and a chat asks about other sources.

    Raises:
        DocumentError: the model has fewer positions, or there are not as many texts.
    """
    code = [list(text) for text in stretches(tokenizer, length, 2 * count, seed, positions)]
    readmes = dict.fromkeys(one.read_text("METADATA") or "" for one in distributions())
    prose = encode(tokenizer, "\n\n".join([*readmes, *topics.values()]))
    if len(prose) < count * length:
        raise DocumentError(f"{count} texts of {length} tokens: readmes and the reference hold {len(prose)} tokens")
    found = {"code": code[:count], "prose": [list(prose[at * length : (at + 1) * length]) for at in range(count)]}
    if tokenizer.chat_template is not None:
        found["chat"] = [_chat(tokenizer, text) for text in code[count:]]
    return found


def _chat(tokenizer: Any, text: list[int]) -> list[int]:
    """A question behind as much of a text as leaves room for it and for the template."""
    content = f"{tokenizer.decode(text[: len(text) - len(text) // 8])}\n\n{QUESTION}"
    chat = [{"role": "user", "content": content}]
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(encode(tokenizer, said))[-len(text) :]
