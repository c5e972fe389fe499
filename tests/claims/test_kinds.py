"""Texts of three kinds: as long as asked, begun as the tokenizer begins texts, and none that another holds."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from lab.kinds import QUESTION, texts_by_kind
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError

LENGTH, COUNT, POSITIONS = 600, 3, 32768
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"


@pytest.fixture
def tokenizer() -> Any:
    """One that begins texts with a token, which the bundled one does not."""
    made = ModelSource.locate(None).tokenizer()
    made.chat_template = TEMPLATE
    begin = made.convert_ids_to_tokens(0)
    made.add_special_tokens({"bos_token": begin})
    single = TemplateProcessing(single=f"{begin} $A", pair=None, special_tokens=[(begin, 0)])
    made.backend_tokenizer.post_processor = single
    assert made("text")["input_ids"][0] == 0
    return made


def test_texts_are_as_long_as_asked_and_share_nothing(tokenizer: Any) -> None:
    found = texts_by_kind(tokenizer, LENGTH, COUNT, 0, POSITIONS)
    assert [*found] == ["code", "prose", "chat"]
    assert all(len(texts) == COUNT for texts in found.values())
    assert all(len(text) == LENGTH for kind in ("code", "prose") for text in found[kind])
    assert all(text[0] == 0 and 0 not in text[1:] for kind in ("code", "prose") for text in found[kind])
    texts = [tokenizer.decode(text) for kind in found for text in found[kind]]
    pieces = [{text[at : at + 200] for at in range(0, len(text) - 200, 200)} for text in texts]
    assert all(not any(piece in other for piece in pieces[one]) for one in range(9) for other in texts[:one])
    for text in found["chat"]:
        said = tokenizer.decode(text)
        assert LENGTH - 20 < len(text) <= LENGTH, "as much of the text as there is room for"
        assert said.startswith("<user>") and said.endswith(f"{QUESTION}<answer>") and 0 not in text


def test_no_template_no_chat_and_no_more_texts_than_there_are(tokenizer: Any) -> None:
    with pytest.raises(DocumentError, match="8 tokens have no room"):
        texts_by_kind(tokenizer, 8, 1, 0, POSITIONS)
    tokenizer.chat_template = None
    assert [*texts_by_kind(tokenizer, LENGTH, 1, 0, POSITIONS)] == ["code", "prose"]
    with pytest.raises(DocumentError, match="the model has 512 positions"):
        texts_by_kind(tokenizer, LENGTH, 1, 0, 512)
