"""Texts of three kinds that a model goes on with: code, prose, and questions about code."""

from importlib.metadata import distributions
from typing import Any

from saccade.errors import DocumentError
from saccade.eval.document import language_reference
from saccade.eval.tokens import TokenizedText, encode

from .packages import stretches

QUESTION = "Explain in a few paragraphs what this does, and name its weakest part."


def texts_by_kind(
    tokenizer: Any, length: int, count: int, seed: int, positions: int, *, chats: bool = True
) -> dict[str, list[list[int]]]:
    """Tokens of `count` texts of each kind, none of which overlap; a tokenizer without a template has no chats.

    Code is packages' sources, prose Python's reference and then packages' readmes by name, without paragraphs that came
    before, and a chat asks about other sources. Each begins with what the tokenizer begins every text with.

    Raises:
        DocumentError: the model has fewer positions, or there are not as many texts.
    """
    chats = chats and tokenizer.chat_template is not None
    code = [list(text) for text in stretches(tokenizer, length, count * (1 + chats), seed, positions)]
    beginning = TokenizedText.of(tokenizer, "").tokens
    prose, room = encode(tokenizer, _prose()), length - len(beginning)
    if len(prose) < count * room:
        raise DocumentError(f"{count} texts of {length} tokens: the reference and readmes hold {len(prose)} tokens")
    pieces = [[*beginning, *prose[at : at + room]] for at in range(0, count * room, room)]
    found = {"code": code[:count], "prose": pieces}
    if chats:
        found["chat"] = [_chat(tokenizer, text) for text in code[count:]]
    return found


def _prose() -> str:
    """Readmes stand in METADATA behind its first blank line; licences are in many of them."""
    found = list(distributions())
    described = {one.name: (one.read_text("METADATA") or "").partition("\n\n")[2] for one in found}
    texts = [language_reference(), language_reference(held_out=True), *(described[name] for name in sorted(described))]
    return "\n\n".join(dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n")))


def _chat(tokenizer: Any, text: list[int]) -> list[int]:
    """A question behind as much of a text as leaves room for it and for the template."""
    kept = len(text)
    while kept > 0:
        content = f"{tokenizer.decode(text[:kept], skip_special_tokens=True)}\n\n{QUESTION}"
        chat = [{"role": "user", "content": content}]
        said = encode(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        if len(said) <= len(text):
            return list(said)
        kept -= len(said) - len(text)
    raise DocumentError(f"{len(text)} tokens have no room for the template of chats")
