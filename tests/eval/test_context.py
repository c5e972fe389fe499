"""Contexts: as long as asked for, facts where they are said to lie, of splits that share no key; where answers end."""

from pathlib import Path
from typing import Any

import numpy
import pytest

import saccade
from saccade.errors import DocumentError
from saccade.eval.context import Context, built_in_contexts, document_contexts
from saccade.eval.document import language_reference, library_sources, read_document
from saccade.eval.facts import ADJECTIVES, NOUNS, Fact, Split, hide, is_right, make_facts, sentence
from saccade.eval.reader import Reader


@pytest.mark.parametrize(("split", "count"), [("train", 1), ("train", 400), ("eval", 96), ("eval", 400)])
def test_facts_have_different_keys_and_four_digits(split: Split, count: int) -> None:
    facts = make_facts(count, numpy.random.default_rng(count), split)
    assert len({fact.key for fact in facts}) == count
    assert all(len(fact.value) == 4 and fact.value.isdigit() for fact in facts)


def test_splits_share_words_as_keys_do_but_no_key() -> None:
    rng = numpy.random.default_rng(0)
    train = {fact.key for _ in range(20) for fact in make_facts(400, rng, "train")}
    evaluation = {fact.key for _ in range(20) for fact in make_facts(400, rng, "eval")}
    assert not train & evaluation
    for part in (0, 1):
        words = {key.split()[part] for key in train}
        assert words == {key.split()[part] for key in evaluation} == set((ADJECTIVES, NOUNS)[part])
    keys = [fact.key.split() for fact in make_facts(24, numpy.random.default_rng(0), "eval")]
    for part in (0, 1):
        words = [key[part] for key in keys]
        assert sum(words.count(word) > 1 for word in words) > 12


def test_what_has_no_room_for_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="too few keys"):
        make_facts(len(ADJECTIVES) * len(NOUNS), numpy.random.default_rng(0), "eval")
    with pytest.raises(ValueError, match="no sentence"):
        hide("nothing here", [Fact("red fox", "1234")], numpy.random.default_rng(0))


@pytest.mark.parametrize(("count", "length"), [(0, 3000), (1, 3000), (40, 30000)])
def test_spans_hold_the_sentences_and_the_text_survives(count: int, length: int) -> None:
    text = language_reference(held_out=True)[:length]
    facts = make_facts(count, numpy.random.default_rng(1), "eval")
    hidden, spans = hide(text, facts, numpy.random.default_rng(2))
    assert [hidden[begin:end] for begin, end in spans] == [sentence(fact) for fact in facts]
    for fact in facts:
        hidden = hidden.replace(" " + sentence(fact), "")
    assert hidden == text


def test_facts_are_spread_over_the_text() -> None:
    text = language_reference(held_out=True)[:60000]
    hidden, spans = hide(text, make_facts(10, numpy.random.default_rng(0)), numpy.random.default_rng(0))
    places = sorted(begin / len(hidden) for begin, _ in spans)
    assert all(tenth / 10 - 0.01 <= place <= tenth / 10 + 0.15 for tenth, place in enumerate(places))


def test_is_right() -> None:
    told = {answer: is_right(answer, Fact("amber falcon", "4817")) for answer in (" 4817.", "4817", " 48170", " 4818.")}
    assert [*told.values()] == [True, True, False, False], told


def test_texts_are_long_and_held_out() -> None:
    train, held_out = language_reference(), language_reference(held_out=True)
    assert min(len(train), len(held_out)) >= 120_000
    paragraphs = {" ".join(paragraph.split()) for paragraph in train.split("\n\n")}
    assert not paragraphs & {" ".join(paragraph.split()) for paragraph in held_out.split("\n\n")}
    train, held_out = library_sources(characters=100_000), library_sources(held_out=True, characters=100_000)
    assert min(len(train), len(held_out)) >= 100_000 and train[:2000] not in held_out


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
    depths = [question.depth for question in built_in(tokenizer, 2000, limit=12)[0].questions]
    assert min(depths) < 0.15 and max(depths) > 0.85 and depths != sorted(depths)
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


def test_a_document_is_read_whole_if_it_just_fits(tokenizer: Any, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Some words that fill a line and say little. " * 60, encoding="utf-8")
    contexts = document_contexts(tokenizer, document, limit=13, positions=4096, seed=0)
    assert [len(context.questions) for context in contexts] == [12, 1]
    for context in contexts:
        assert tokenizer.decode(context.tokens).count("say little.") == 60
    assert contexts[0].tokens != contexts[1].tokens
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


def test_timing_takes_one_step_per_token(model: Any, tokenizer: Any) -> None:
    (context,) = built_in(tokenizer)
    reader, tokens = Reader(model, context.tokens), context.questions[0].tokens
    with saccade.sparsify(model, "dense") as run:
        seconds = list(reader.timed(tokens))
        assert run.stats().steps == len(seconds) == len(tokens) == reader.decoded
    assert all(second > 0 for second in seconds)


def test_answers_end_where_they_should(tokenizer: Any) -> None:
    (question,) = built_in(tokenizer)[0].questions
    for text, answer in (
        (" 1234.\n\nQuestion", "1234."),
        (" 1234\n\nQuestion", "1234"),
        ("\n 1234. And more", "1234."),
        (" 1234<|endoftext|> And more", "1234"),
        (" word" * 40, "word"),
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        heard = (question.heard(tokenizer, ids[: number + 1]) for number in range(len(ids)))
        said = next(said for said, ended in heard if ended)
        assert said.startswith(answer) and len(said) < len(text.strip()) - 3, text
