"""The upkeep experiment: real queries, an index at every length that it had then, and what is made of the figures."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from claims.upkeep.capture import Reading, read
from claims.upkeep.names import VARIANTS, Upkeep
from claims.upkeep.orders import largest_cluster, search
from claims.upkeep.texts import stretches
from claims.upkeep.upkeep import Experiment, mean_interval
from commands import Invoke, told
from saccade.adapters.hf.run import sparsify
from saccade.checkpoints.shape import shape_of
from saccade.checkpoints.text import delimiter_table
from saccade.decode.recall import RecallObserver
from saccade.decode.state import own_indexes
from saccade.errors import DocumentError
from saccade.text.history import TokenHistory
from saccade.text.levels import break_codes
from saccade.types import Selection
from walking import among, walk

PROMPT, TOKENS, EVERY, QUERIES, SPACING, BUDGET = 100, 144, 48, 3, 5, 64
SPAN = (QUERIES - 1) * SPACING + 1


def sets(selection: Selection) -> list[list[int]]:
    return [[token for token in head if token >= 0] for head in selection.ids[0].tolist()]


@pytest.fixture(scope="module")
def experiment(model: Any, tokenizer: Any) -> Experiment:
    shape = shape_of(model.config)
    plans = {
        (variant.upkeep, budget): variant.upkeep.bound(budget).plan(shape)
        for budget in (BUDGET, 80)
        for variant in VARIANTS.values()
    }
    texts = stretches(tokenizer, 2, PROMPT + TOKENS + SPAN)
    sizes = {"prompt": PROMPT, "tokens": TOKENS, "every": EVERY, "queries": QUERIES, "spacing": SPACING}
    levels, names = delimiter_table(tokenizer, break_codes), ("lazy", "replanted", "rebuilt", "rebuilt-whole")
    experiment = Experiment(model, levels, texts, plans, names, (2, 3, 4), **sizes)
    told: list[str] = []
    experiment.run(told.append)
    assert len(told) == experiment.units
    return experiment


def rows_of(experiment: Experiment, variant: str, budget: int = BUDGET) -> dict[int, dict[str, Any]]:
    rows = (row for row in experiment.rows() if (row["variant"], row["budget"]) == (variant, budget))
    return {row["decoded"]: row for row in rows}


def test_a_replanted_index_is_the_rebuilt_one_and_a_lazy_one_is_not(experiment: Experiment) -> None:
    for budget in (BUDGET, 80):
        replanted, rebuilt = (rows_of(experiment, name, budget) for name in ("replanted", "rebuilt"))
        assert list(replanted) == [0, 48, 96, 144]
        for decoded, row in replanted.items():
            assert {**row, "variant": ""} == {**rebuilt[decoded], "variant": ""}
    named = {(row["budget"], row["to"]): row for row in experiment.differences()}
    assert set(named) == {(budget, to) for budget in (BUDGET, 80) for to in ("rebuilt", "rebuilt-whole")}
    assert named[BUDGET, "rebuilt"]["attention"] == named[BUDGET, "rebuilt"]["token"] == 0
    lazy, replanted = rows_of(experiment, "lazy"), rows_of(experiment, "replanted")
    assert lazy[0]["attention_by_text"] == replanted[0]["attention_by_text"]
    assert lazy[144]["attention_by_text"] != replanted[144]["attention_by_text"]
    assert 0 < replanted[144]["largest_cluster"] < 0.3 and lazy[144]["largest_cluster"] > 0.3
    anew = rows_of(experiment, "rebuilt-whole")[144]
    assert anew["attention_by_text"] != lazy[144]["attention_by_text"] and anew["largest_cluster"] < 0.3


@pytest.mark.parametrize("name", among(["lazy", "quest", "streaming"], ["quest"]))
def test_recalls_are_those_of_real_decoding(experiment: Experiment, model: Any, tokenizer: Any, name: str) -> None:
    """The same tokens through `sparsify`, one by one: in the first sparse layer queries are those of a dense pass."""
    policy = VARIANTS[name].upkeep.bound(BUDGET)
    if "dense_layers" in type(policy.options).model_fields:
        policy = replace(policy, options=policy.options.model_copy(update={"dense_layers": 2}))
    tokens, observer = torch.tensor([experiment.texts[0].tokens]), RecallObserver(5, keep_steps=True)
    with torch.inference_mode(), sparsify(model, policy, tokenizer=tokenizer, observers=(observer,)) as run:
        cache = model(tokens[:, :PROMPT]).past_key_values
        with run.decoding():
            for place in range(PROMPT, tokens.shape[1]):
                model(tokens[:, place : place + 1], past_key_values=cache)
    records = observer.records()
    alone = replace(experiment, variants=[name], texts=experiment.texts[:1], layers=(2,))
    alone.run(lambda what: None)
    for decoded, row in rows_of(alone, name).items():
        steps = slice(decoded, decoded + SPAN, SPACING)
        assert row["attention_by_text"] == [pytest.approx(float(records.attention[steps, 2].mean()), abs=1e-5)]
        assert row["token_by_text"] == [pytest.approx(float(records.token[steps, 2].mean()), abs=1e-5)]


def grown(experiment: Experiment, reading: Reading, upkeep: Upkeep, layer: int) -> Any:
    """The index of a layer, and the row, after all tokens of a text."""
    history = TokenHistory(experiment.levels)
    end = reading.keys[layer].shape[1]
    history.record(0, end, 1, reading.tokens[:, :end], None)
    history.prompt = PROMPT
    indexes = own_indexes(experiment.plans[upkeep, BUDGET], history)
    for length in range(PROMPT + 1, end + 1):
        kv = reading.view(layer, reading.rows(length))
        index = indexes.of(layer, kv)
    return index, kv


def test_latest_first_is_the_search_of_the_product(experiment: Experiment, model: Any) -> None:
    reading = read(model, experiment.texts[0].tokens, range(PROMPT, PROMPT + TOKENS, 4), lambda what: None)
    orders = {"position": 0, "query": 0}
    for layer in (2, 4):
        index, kv = grown(experiment, reading, VARIANTS["replanted"].upkeep, layer)
        for q in (q for (_, of), q in reading.queries.items() if of == layer):
            product = sets(index.settings.select(q, kv, index, None, 1.0))
            assert sets(search(index, q, kv, "latest")) == product
            for order in orders:
                orders[order] += sets(search(index, q, kv, order)) != product  # type: ignore[arg-type]
    # Where a cluster does not fit whole, the orders differ.
    assert all(orders.values())


def test_orders_of_one_big_cluster(experiment: Experiment, model: Any) -> None:
    """All chunks in one cluster: by position the first, latest first the last, by the query the nearest."""
    reading = read(model, experiment.texts[0].tokens, [PROMPT + TOKENS], lambda what: None)
    index, kv = grown(experiment, reading, VARIANTS["lazy"].upkeep, 2)
    (tree,), q = index.held, reading.queries[PROMPT + TOKENS + 1, 2]
    chunks, width = int(tree.offsets.max()), tree.radii.shape[2]
    one = torch.full((1, 2, width + 1), chunks, dtype=torch.int32)
    one[:, :, 0] = 0
    members = torch.arange(chunks - 1, -1, -1, dtype=torch.int32).expand(1, 2, -1).contiguous()
    index.held[0] = replace(tree, offsets=one, members=members)
    assert largest_cluster(index) == 1
    edges = tree.edges[0].tolist()
    first, last = (
        [[token for token in head if 16 <= token < edges[chunks]] for head in sets(search(index, q, kv, order))]
        for order in ("position", "latest")
    )
    assert {min(head) for head in first} == {16} and {max(head) for head in last} == {edges[chunks] - 1}
    for head, chosen in enumerate(sets(search(index, q, kv, "query"))):
        keys = [kv.k[0, start:stop, head].mean(0) for start, stop in pairwise(edges[: chunks + 1])]
        mean = q[0, 2 * head : 2 * head + 2].mean(0)
        products = [float(torch.nn.functional.normalize(key, dim=0) @ mean) for key in keys]
        best = products.index(max(products))
        assert set(range(edges[best], edges[best + 1])) <= set(chosen)


def test_a_reading_shows_no_token_that_was_yet_to_come(experiment: Experiment, model: Any) -> None:
    reading = read(model, experiment.texts[0].tokens, [PROMPT, PROMPT + 1, 150], lambda what: None)
    assert sorted({length for length, _ in reading.queries}) == [PROMPT + 1, PROMPT + 2, 151]
    view = reading.view(3, reading.rows(PROMPT + 1))
    assert view.k.shape[1] == PROMPT + 1
    shorter = read(model, experiment.texts[0].tokens[: PROMPT + 1], [PROMPT], lambda what: None)
    torch.testing.assert_close(view.k, shorter.keys[3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reading.queries[PROMPT + 1, 3], shorter.queries[PROMPT + 1, 3], rtol=1e-4, atol=1e-4)


@walk
def test_stretches_do_not_overlap_and_run_over_into_the_library(tokenizer: Any) -> None:
    found = stretches(tokenizer, 4, 15_000)
    assert [text.source for text in found] == ["reference", "reference", "reference", "library"]
    assert all(len(text.tokens) == 15_000 for text in found)
    assert len({text.tokens[:200] for text in found}) == 4
    with pytest.raises(DocumentError, match="--texts 2"):
        stretches(tokenizer, 2, 10**6)


def test_an_interval_by_text() -> None:
    # t of 2 degrees of freedom is 4.303, the standard error 0.1 / sqrt(3).
    low, high = mean_interval([0.4, 0.5, 0.6]) or (0, 0)
    assert (low, high) == (pytest.approx(0.5 - 0.2484, abs=1e-4), pytest.approx(0.5 + 0.2484, abs=1e-4))
    assert mean_interval([0.5]) is None


SMALL = ("--budget", "64,80", "--prompt", "100", "--tokens", "64", "--every", "64", "--queries", "2", "--texts", "2")


def test_a_run_gives_tables_json_and_a_picture(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    files = tmp_path / "upkeep.json", tmp_path / "upkeep.svg"
    result = invoke("upkeep", "--model", model_folder, *SMALL, "--json", files[0], "--picture", files[1])
    results = told(result, *files)
    assert (results["layers"], results["texts"]) == ([2, 3, 4], ["reference", "reference"])
    assert {(row["budget"], row["decoded"], row["variant"]) for row in results["rows"]} == {
        (budget, decoded, name) for budget in (64, 80) for decoded in (0, 64) for name in VARIANTS
    }
    for row in results["rows"]:
        assert row["texts"] == len(row["token_by_text"]) == 2
        assert row["attention_interval"][0] <= row["attention"] <= row["attention_interval"][1]
        assert (row["largest_cluster"] is None) == (row["variant"] in ("streaming", "quest"))
    assert all(row["attention"] == row["token"] == 0 for row in results["differences"] if row["to"] == "rebuilt")
    assert all(name in result.stdout for name in VARIANTS)
    assert "largest difference of replanted to rebuilt, any text and length: attention recall +0.000" in result.stdout


def test_an_interrupted_run_is_readable(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Experiment.run

    def impatient(self: Experiment, advance: Any) -> None:
        told: list[str] = []

        def stop(what: str) -> None:
            told.append(what)
            if len(told) > 5:
                raise KeyboardInterrupt

        run(self, stop)

    monkeypatch.setattr(Experiment, "run", impatient)
    files = tmp_path / "upkeep.json", tmp_path / "upkeep.svg"
    asked = (*SMALL, "--variants", "replanted,quest", "--json", files[0], "--picture", files[1])
    results = told(invoke("upkeep", "--model", model_folder, *asked), *files, interrupted=True)
    # Four readings, then a measurement each.
    measured = [(row["decoded"], row["variant"]) for row in results["rows"]]
    assert measured == [(decoded, name) for decoded in (0, 64) for name in ("replanted", "quest")]
