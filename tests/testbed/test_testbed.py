"""The bundled model, its tokenizer and its training."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from saccade.eval.facts import ADJECTIVES, NOUNS
from testbed import model_path
from testbed.muon import orthogonalise
from testbed.network import Sight, attend, model_config
from testbed.probe import FIRST_SEED, ask, fact_context
from testbed.recipe import RECIPE, Batch, Stage
from testbed.tasks import TaskMaker
from testbed.train import Trainer, checkpoints, make_batch, make_batches, run, stage_at

STAGE = Stage("tiny", 2, (Batch(2, 64, 1.0),), RECIPE[0].tasks, (0.02, 0.01), (0.01, 0.001), 0.1, 16, 256, 0.15, 0.3)
TINY = (STAGE, replace(STAGE, name="tinier", steps=1, span=0))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def maker(tokenizer: PreTrainedTokenizerFast) -> TaskMaker:
    words = tokenizer.backend_tokenizer.encode("A short text. It is repeated. " * 30).ids
    texts = {f"tokens{n}": numpy.array(words, dtype=numpy.int16) for n in range(3)}
    return TaskMaker(tokenizer, texts | {f"ends{n}": numpy.arange(5, len(words) + 1, 5) for n in range(3)})


def tiny_trainer(maker: TaskMaker) -> Trainer:
    return Trainer(model_config(maker.vocabulary, layers=2, hidden=32, feed_forward=32), maker, TINY, seed=7)


def test_the_model_loads_and_is_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype="auto")
    assert isinstance(model, Qwen3ForCausalLM) and model.config.max_position_embeddings >= 32768
    assert model.dtype == torch.bfloat16
    assert (model_path() / "model.safetensors").stat().st_size <= 16e6


@given(text=st.text())
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_piece_of_a_fact_is_a_single_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for piece in [f" {word}" for word in ADJECTIVES + NOUNS] + [f"{n:02d}" for n in range(100)]:
        assert len(tokenizer(piece)["input_ids"]) == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 4817.")["input_ids"]) == ["Ġ48", "17", "."]


def test_tasks_fill_their_rows_and_ask_for_no_fact_twice(maker: TaskMaker) -> None:
    for length in (64, 192, 2048):
        rng = numpy.random.default_rng(length)
        for name, make in maker.tasks.items():
            for half in (False, True):
                row = make(length, rng, half)
                assert len(row.tokens) == len(row.answers) == len(row.prose) >= length
                assert len(row.tokens) == length or length < 128
                assert any(row.answers) is (name != "prose")
    row = maker.tasks["question"](2048, numpy.random.default_rng(0), False)
    text = maker.backend.decode(row.tokens)
    questions = [part.split("?")[0] for part in text.split("Question: ")[1:]]
    assert len(set(questions)) == len(questions) > 1


def test_local_attention_is_a_sliding_window_and_wide_heads_see_everything_from_the_second_half_on() -> None:
    queries, keys, values = torch.randn(3, 2, 8, 64, 32)
    place = torch.arange(64)
    distance = place[:, None] - place
    window = (distance >= 0) & (distance < 16)
    far = (distance >= 0) & ((distance < 16) | (place[:, None] >= 32))
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, window)
    assert torch.allclose(attend(queries, keys, values, 16), expected, atol=1e-5)
    wide = (x[:, 2:4] for x in (queries, keys, values))
    expected[:, 2:4] = torch.nn.functional.scaled_dot_product_attention(*wide, far)
    assert torch.allclose(attend(queries, keys, values, 16, (2, 4)), expected, atol=1e-5)


def test_muon_directions_are_nearly_orthogonal() -> None:
    assert (torch.linalg.svdvals(orthogonalise(torch.randn(3, 48, 96))) - 1).abs().max() < 0.35


def test_stages_follow_one_another_and_blind_layers_see_no_further_than_their_window() -> None:
    assert [stage_at(TINY, step)[1] for step in range(3)] == [0.0, 0.5, 0.0]
    assert stage_at(TINY, 2)[0].name == "tinier"
    with pytest.raises(ValueError, match="fewer steps"):
        stage_at(TINY, 3)
    every, upper = (STAGE.sights(12, blind) for blind in (False, True))
    assert [n for n in range(12) if every[n].wide != (0, 0)] == [4, 5, 7, 8, 10]
    assert [n for n in range(12) if upper[n].wide != (0, 0)] == [7, 8, 10]
    assert RECIPE[-1].sights(12) == [Sight()] * 12


def test_a_batch_depends_on_seed_and_step_alone(maker: TaskMaker) -> None:
    first, again, other = (make_batch(maker, STAGE, 0, step) for step in (5, 5, 6))
    assert numpy.array_equal(first.tokens, again.tokens)
    assert numpy.array_equal(first.weights, again.weights)
    assert not numpy.array_equal(first.tokens, other.tokens)
    assert (numpy.diff(first.positions) >= 1).all()
    here, there = (list(make_batches(maker, TINY, 7, range(3), workers)) for workers in (0, 1))
    assert all(numpy.array_equal(a.tokens, b.tokens) for a, b in zip(here, there, strict=True))


def test_a_resumed_run_equals_an_uninterrupted_one(maker: TaskMaker, tmp_path: Path) -> None:
    whole = tiny_trainer(maker)
    run(whole, tmp_path)
    begun = tiny_trainer(maker)
    run(begun, tmp_path, until=2)
    resumed = tiny_trainer(maker)
    resumed.load(tmp_path / "step-000002.pt")
    run(resumed, tmp_path)
    assert [path.stem for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    for expected, found in zip(whole.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(expected, found)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["tinier", "tiny", "tinier"]


def test_the_model_retrieves_in_one_deep_layer(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    context = fact_context(tokenizer, 1024, seed=FIRST_SEED, hidden=20, asked=4)
    answers = ask(model, tokenizer, context, attention=True)
    assert sum(answer.right for answer in answers) >= 3
    mass = torch.stack([answer.attention for answer in answers if answer.attention is not None]).mean(0)
    retrieving, others = mass[7, 4:], torch.cat([mass[:7], mass[8:]])
    assert retrieving.min() > 0.6  # two KV heads of four: training let these two see past the window in layer 7
    assert others.max() < 0.4  # one head of layer 2 has 0.24 in a text as short as this one
    assert others.mean(1).max() < 0.1
