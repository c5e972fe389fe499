"""Texts of three kinds: as long as asked, and none that another holds."""

from __future__ import annotations

from typing import Any

import pytest

from claims.designs.kinds import QUESTION, texts_by_kind
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError

LENGTH, COUNT, POSITIONS = 600, 3, 32768


@pytest.fixture
def tokenizer() -> Any:
    return ModelSource.locate(None).tokenizer()


def test_texts_are_as_long_as_asked_and_share_nothing(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"
    )
    found = texts_by_kind(tokenizer, LENGTH, COUNT, 0, POSITIONS)
    assert [*found] == ["code", "prose", "chat"]
    assert all(len(texts) == COUNT for texts in found.values())
    assert all(len(text) == LENGTH for kind in ("code", "prose") for text in found[kind])
    texts = [tokenizer.decode(text) for kind in ("code", "prose") for text in found[kind]]
    pieces = [{text[at : at + 200] for at in range(0, len(text) - 200, 200)} for text in texts]
    assert all(not any(piece in other for piece in pieces[one]) for one in range(6) for other in texts[:one])
    for text in found["chat"]:
        said = tokenizer.decode(text)
        assert len(text) <= LENGTH and said.endswith(f"{QUESTION}<answer>") and said not in texts


def test_no_template_no_chat_and_no_more_texts_than_there_are(tokenizer: Any) -> None:
    assert [*texts_by_kind(tokenizer, LENGTH, 1, 0, POSITIONS)] == ["code", "prose"]
    with pytest.raises(DocumentError, match="the model has 512 positions"):
        texts_by_kind(tokenizer, LENGTH, 1, 0, 512)
