"""The retrieval task: its splits, its sentences and where they are hidden."""

import numpy
import pytest

from saccade.eval.document import language_reference, library_sources
from saccade.eval.facts import ADJECTIVES, NOUNS, Fact, Split, hide, is_right, make_facts, sentence


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


@pytest.mark.parametrize(("answer", "right"), [(" 4817.", True), ("4817", True), (" 48170", False), (" 4818.", False)])
def test_is_right(answer: str, right: bool) -> None:
    assert is_right(answer, Fact("amber falcon", "4817")) is right


def test_texts_are_long_and_held_out() -> None:
    train, held_out = language_reference(), language_reference(held_out=True)
    assert min(len(train), len(held_out)) >= 120_000
    paragraphs = {" ".join(paragraph.split()) for paragraph in train.split("\n\n")}
    assert not paragraphs & {" ".join(paragraph.split()) for paragraph in held_out.split("\n\n")}
    train, held_out = library_sources(characters=100_000), library_sources(held_out=True, characters=100_000)
    assert min(len(train), len(held_out)) >= 100_000 and train[:2000] not in held_out
