"""Reading: what is asked leaves no trace, and tokens fed together choose as if they came alone."""

from typing import Any

import pytest
import torch

import saccade
from saccade.eval.context import Context, built_in_contexts
from saccade.eval.reader import Reader
from saccade.plans.rectify import Phase


@pytest.fixture(scope="module")
def context(tokenizer: Any) -> Context:
    return built_in_contexts(tokenizer, length=1024, limit=6, positions=4096, seed=0)[0]


@pytest.fixture
def reader(model: Any, context: Context) -> Reader:
    return Reader(model, context.tokens)


@pytest.mark.parametrize("policy", ["dense", "quest:budget=32", "tidal:budget=32,reselect=3"])
def test_tokens_fed_together_choose_as_if_they_came_alone(
    model: Any, context: Context, reader: Reader, policy: str
) -> None:
    tokens = context.questions[0].tokens
    with saccade.sparsify(model, policy) as run:
        for token in tokens:
            alone = reader.feed([token])
        reader.crop()
        with run.decoding():
            together = reader.feed(tokens)
    torch.testing.assert_close(alone, together, atol=1e-3, rtol=1e-4)


def test_an_index_of_text_reads_what_was_prefilled_before(
    model: Any, tokenizer: Any, context: Context, reader: Reader
) -> None:
    """The text is cut where it breaks, as if the policy had been there from the first token on."""
    spec, tokens = "lychee_cluster:budget=64", [context.questions[0].tokens] * 2
    reader.repeat(2)
    for _ in range(2):
        with saccade.sparsify(model, spec, tokenizer=tokenizer) as run, run.decoding():
            found = reader.feed_rows(tokens, 0)
            assert run.notes == ()
        reader.crop()
    with saccade.sparsify(model, spec, tokenizer=tokenizer) as run:
        expected = Reader(model, context.tokens)
        expected.repeat(2)
        with run.decoding():
            torch.testing.assert_close(found, expected.feed_rows(tokens, 0), atol=1e-3, rtol=1e-4)
    with saccade.sparsify(model, spec) as run, run.decoding():
        assert not torch.allclose(reader.feed_rows(tokens, 0), found, atol=1e-3), "other chunks, another answer"


RECTIFIED = "resa:page=8,min_pages=2,rectify=4"


@pytest.mark.parametrize("parts", [(9, 12), (4, 1, 1, 15)])
def test_tokens_of_a_rectified_policy_go_together_as_far_as_generation_would_let_them(
    model: Any, context: Context, reader: Reader, parts: tuple[int, ...]
) -> None:
    tokens = context.questions[0].tokens[: sum(parts)]
    with saccade.sparsify(model, RECTIFIED) as run, run.decoding():
        for token in tokens:
            alone = reader.feed([token])
        passes = run.stats().dense_passes
        reader.crop()
        first = 0
        for part in parts:
            logits = reader.feed(tokens[first : first + part], Phase(4))
            first += part
        assert passes == run.stats().dense_passes - passes == 4
        reader.crop()
        at_once = reader.feed(tokens)
    torch.testing.assert_close(alone, logits, atol=1e-3, rtol=1e-4)
    assert (at_once - alone).abs().max() > 1e-2, "otherwise this would prove nothing"
