"""Contexts: as long as asked for, with the facts where they are said to lie."""

from pathlib import Path
from typing import Any

import pytest

from saccade.errors import DocumentError
from saccade.eval.context import Context, built_in_contexts, document_contexts
from saccade.eval.document import read_document


def built_in(tokenizer: Any, length: int = 1100, limit: int = 1, positions: int = 4096, seed: int = 0) -> list[Context]:
    return built_in_contexts(tokenizer, length=length, limit=limit, positions=positions, seed=seed)


@pytest.mark.parametrize("length", [1024, 1100, 8192])
def test_contexts_have_the_length_asked_for(tokenizer: Any, length: int) -> None:
    for context in built_in(tokenizer, length, positions=32768):
        assert length <= len(context.tokens) <= length + 8


def test_facts_lie_where_the_questions_say_which_are_shared_out_by_the_dozen(tokenizer: Any) -> None:
    contexts = built_in(tokenizer, limit=26)
    assert [len(context.questions) for context in contexts] == [12, 12, 2]
    for context in contexts:
        text = tokenizer.decode(context.tokens)
        for question in context.questions:
            first, stop = question.value_span
            assert tokenizer.decode(context.tokens[first:stop]).strip() == question.expected
            assert question.depth == first / len(context.tokens)
            assert text.count(f"The code of{question.asked[19:-1]} is {question.expected}.") == 1


def test_questions_cover_all_depths_in_mixed_order(tokenizer: Any) -> None:
    depths = [question.depth for question in built_in(tokenizer, 2000, limit=12)[0].questions]
    assert min(depths) < 0.15
    assert max(depths) > 0.85
    assert depths != sorted(depths)


def test_contexts_follow_the_seed(tokenizer: Any) -> None:
    assert built_in(tokenizer) == built_in(tokenizer)
    assert built_in(tokenizer)[0].tokens != built_in(tokenizer, seed=1)[0].tokens


def test_special_tokens_of_the_tokenizer_come_first(tokenizer: Any) -> None:
    class WithBeginning:
        """A tokenizer that puts token 7 before every text."""

        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
            encoded = tokenizer(text, add_special_tokens=False, **options)
            return {**encoded, "input_ids": [7, *encoded["input_ids"]]} if add_special_tokens else encoded

    plain, marked = built_in(tokenizer)[0], built_in(WithBeginning())[0]
    assert marked.tokens == (7, *plain.tokens)
    first, stop = marked.questions[0].value_span
    assert marked.tokens[first:stop] == plain.tokens[first - 1 : stop - 1]


def test_a_document_is_read_whole(tokenizer: Any, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    text = "Some words that fill a line and say little. " * 60
    document.write_text(text, encoding="utf-8")
    contexts = document_contexts(tokenizer, document, limit=13, positions=4096, seed=0)
    assert [len(context.questions) for context in contexts] == [12, 1]
    for context in contexts:
        assert tokenizer.decode(context.tokens).count("say little.") == 60
    assert contexts[0].tokens != contexts[1].tokens


def test_a_document_that_just_fits(tokenizer: Any, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Some words that fill a line and say little. " * 60, encoding="utf-8")
    with pytest.raises(DocumentError, match="the model has 10 positions") as caught:
        document_contexts(tokenizer, document, limit=1, positions=10, seed=0)
    needed = int(str(caught.value).split(", ")[1].split()[0])
    document_contexts(tokenizer, document, limit=1, positions=needed, seed=0)
    with pytest.raises(DocumentError):
        document_contexts(tokenizer, document, limit=1, positions=needed - 1, seed=0)


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_bytes("Zeilen\r\nund ein Ä.".encode())
    assert read_document(document) == "Zeilen\r\nund ein Ä."
