"""Chunks of text: the tokenizer's pieces reach the index, and its absence is said."""

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import claims  # noqa: F401  # registers `cuts_anywhere`
import saccade
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.text import delimiter_table
from saccade.text.levels import break_codes
from trees import edges_of

SPEC = "lychee_cluster:budget=128,sinks=3"
TEXT = "First line.\n\nSecond, a longer one; with } brackets ] and so on. " * 30


@functools.cache
def bundled() -> tuple[PreTrainedModel, Any]:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_path())


def cut_at(cache: DynamicCache) -> list[int]:
    """Edges of the first index."""
    return edges_of(next(iter(cache.layers[0].session.state.indexes.index.layers.values())))


def edges(**options: Any) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Token ids of the prompt, edges of the first index, and the run's notes, after one decoded token."""
    model, tokenizer = bundled()
    inputs = tokenizer(TEXT, return_tensors="pt")
    with saccade.sparsify(model, SPEC, **options) as run:
        cache = DynamicCache()
        model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
        return inputs["input_ids"][0].tolist(), cut_at(cache), run.notes


def test_chunks_end_where_the_text_breaks() -> None:
    tokenizer = bundled()[1]
    ids, cuts, notes = edges(tokenizer=tokenizer)
    assert not notes
    assert cuts[0] == 3
    for start, stop in pairwise(cuts):
        ends = [tokenizer.decode([token]) for token in ids[start + 7 : min(start + 16, len(ids))]]
        if any("\n\n" in end or "}" in end or "]" in end for end in ends):
            last = tokenizer.decode([ids[stop - 1]])
            assert "\n\n" in last or "}" in last or "]" in last


def test_without_a_tokenizer_chunks_are_fixed_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, cuts, notes = edges()
    assert {stop - start for start, stop in pairwise(cuts)} == {16}
    assert notes == ("lychee_cluster: no tokenizer was given, so chunks have a fixed length",)
    assert notes[0] in caplog.text


def test_embeddings_have_no_text_and_the_run_says_so() -> None:
    model, tokenizer = bundled()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with saccade.sparsify(model, SPEC, tokenizer=tokenizer) as run:
        cache, embeddings = DynamicCache(), model.get_input_embeddings()(ids).detach()
        model.generate(inputs_embeds=embeddings, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert {stop - start for start, stop in pairwise(cut_at(cache))} == {16}
        assert "embeddings" in run.notes[0]


def test_fixed_chunks_need_no_tokenizer() -> None:
    model, _ = bundled()
    with saccade.sparsify(model, "lychee_cluster:chunking=fixed,budget=128") as run:
        assert run.notes == ()


def test_every_piece_of_the_vocabulary_has_a_level() -> None:
    tokenizer = bundled()[1]
    table = delimiter_table(tokenizer, break_codes)
    assert len(table) == len(tokenizer) and {code & 7 for code in table} == {0, 1, 2, 3, 4, 5}
    assert delimiter_table(tokenizer, break_codes) is table


def test_a_method_reads_the_vocabulary_in_its_own_way() -> None:
    model, tokenizer = bundled()
    ids, cut = tokenizer("one.attribute of many words, in a row " * 40, return_tensors="pt")["input_ids"], []
    for name in ("lychee_cluster", "cuts_anywhere"):
        with saccade.sparsify(model, SPEC.replace("lychee_cluster", name), tokenizer=tokenizer) as run:
            cache = DynamicCache()
            model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
            assert run.stats().sparse_steps
            cut.append(cut_at(cache))
    assert cut[0] != cut[1]
