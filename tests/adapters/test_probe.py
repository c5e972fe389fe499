"""Rows that share texts equal separate steps, each row on a cache of its own; and what the probe makes of it."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache

import saccade
from adapters import tiny
from adapters.test_layer_kinds import HYBRIDS, hybrid
from adapters.tiny import LETTERS
from replaying import StandIn, standing_in
from saccade.adapters.hf import probe as probing
from saccade.adapters.hf.probe import KINDS, Kind, Passage, Probe
from saccade.adapters.hf.run import attached
from saccade.adapters.hf.shared import SharedRows, SharedTexts
from saccade.checkpoints.shape import shape_of
from saccade.checkpoints.text import delimiter_table
from saccade.methods.policy import Policy

COMMON, FED = 60, 10  # no multiples of a page; what is fed comes to another page
BUDGET = 25
EXACT = 1e-4
"""Of logits near 10: attention sums in float32, whose rounding, 6e-8, some 100 tokens and 5 layers make 2e-5 where both
sides sum in other orders; a token more or less in a set is 1e-2."""
KINDS_OF_SETS = ("dense", "streaming", "tidal-query", "less_is_more", "quest", "lychee_decode")
SPECS = {
    **{name: tiny.spec(name, BUDGET) for name in KINDS_OF_SETS},
    "text": f"lychee_cluster:budget={BUDGET},chunk_min=2,chunk_max=4",
}
"""One policy of each kind."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama", num_hidden_layers=5).double()


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(2, tiny.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
@torch.no_grad()
def filled(model: Any, text: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a text, layer by layer, as stock computes them."""
    cache = DynamicCache()
    model(torch.tensor([text]), past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def separate(
    model: Any,
    policy: str,
    common: Sequence[int],
    fed: Sequence[int],
    tokenizer: Any,
    walk: int = 1,
    starts: Sequence[int] = (),
) -> torch.Tensor:
    """Logits behind every fed token: after `walk` steps one behind the other a new cache is filled, densely; or behind
    those alone at which the walks of `starts` begin."""
    logits, text = [], (*common, *fed)
    held = filled(model, text)
    with saccade.sparsify(model, policy, tokenizer=tokenizer) as run:
        for start in starts or range(0, len(fed), walk):
            cache, past = DynamicCache(), len(common) + start
            if tokenizer is None:
                for layer, parts in enumerate(held):
                    cache.update(*(part[:, :, :past].clone() for part in parts), layer)
            else:  # an index of text has to see its tokens
                model(torch.tensor([text[:past]]), past_key_values=cache)
            steps = fed[start : start + walk]
            logits += [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in steps]
        assert run.stats().steps == len(logits)
    return torch.stack(logits)


@pytest.mark.parametrize("name", SPECS)
def test_one_step_is_many_on_clean_caches(model: Any, name: str) -> None:
    """Two texts behind a common one, and one behind another; any part of the rows, in any batch, says the same."""
    tokenizer, texts = LETTERS if name == "text" else None, list[Any]()
    commons, fed = (drawn(COMMON, 1), drawn(COMMON - 5, 4)), (drawn(FED, 2), drawn(FED, 3), drawn(FED, 5))
    for common, followed in zip(commons, (fed[:2], fed[2:]), strict=True):
        cache = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([common]), past_key_values=cache)
        texts.append(SharedTexts(model, cache, [common]))
        read = [texts[-1].follow([one])[0] for one in followed]
        assert cache.get_seq_length() == len(common)
    every, thirds = [(place, 1) for place in range(FED)], [(place, 1) for place in range(1, FED, 3)]
    walks, chosen = [(0, 4), (4, 6), (7, 3)], [place for place, _ in thirds]
    rows = SharedRows.joined([texts[0].rows(0, [every, thirds]), texts[1].rows(0, [[*walks, *thirds]])])
    count, last = rows.rows.batch, FED + len(thirds)

    def step(part: SharedRows) -> torch.Tensor:
        return model(part.ids, position_ids=part.positions, past_key_values=part).logits[:, -1]

    rows.plan = Policy.from_spec(SPECS[name]).plan(shape_of(model.config))
    rows.levels = None if tokenizer is None else delimiter_table(tokenizer, rows.plan.codes)
    with torch.no_grad(), saccade.sparsify(model, "dense"):
        said = step(rows)
        walked = [[step(rows.part([last + row], number))[0] for number in range(walks[row][1])] for row in range(3)]
        together = [step(rows.part(range(last, last + 3), number)) for number in range(3)]
        some = [step(rows.part(range(5, 15))) for _ in range(2)][1]
        again = step(rows)
    first = separate(model, SPECS[name], commons[0], fed[0], tokenizer)
    second = separate(model, SPECS[name], commons[0], fed[1], tokenizer, starts=chosen)
    places = [*(place for place, _ in walks), *chosen]
    third = separate(model, SPECS[name], commons[1], fed[2], tokenizer, starts=places)
    assert (said - torch.cat([first, second, third])).abs().max() < EXACT
    assert (some - said[5:15]).abs().max() < EXACT
    assert torch.equal(again, said) and count == last + 3 + len(thirds)
    for (start, steps), logits in zip(walks, walked, strict=True):
        before = [*commons[1], *fed[2][:start]]
        wanted = separate(model, SPECS[name], before, fed[2][start : start + steps], tokenizer, walk=steps)
        assert (torch.stack(logits) - wanted).abs().max() < EXACT
    for number, logits in enumerate(together):
        assert (logits - torch.stack([row[number] for row in walked])).abs().max() < EXACT
    dense = read[0][chosen]
    assert ((said[last + 3 :] - dense).abs().max() < EXACT) == (name == "dense"), "the policy was sparse, or dense"


# --- the probe: short texts, so that the window of what is not needed is short too ------------------------------------

TOLD, SHORT = 12, 16
PASSAGE = Passage(tuple(drawn(150, 7)), start=1)
POLICY = f"tidal:budget={BUDGET},reselect=3"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "TOLD", TOLD)
    monkeypatch.setattr(probing, "SHORT", SHORT)
    # Random weights need nothing that a nat tells.
    monkeypatch.setattr(probing, "KEY", 0.1)


@functools.cache
@torch.no_grad()
def told_densely(model: Any, kind: Kind) -> tuple[list[int], torch.Tensor, list[torch.Tensor]]:
    """What is told, and its logarithms of likelihoods behind the whole text and behind the end of it."""
    tokens = list(PASSAGE.tokens)
    text, told = tokens[:-TOLD], tokens[-TOLD:]
    if kind == "repeat":
        middle = (len(tokens) - TOLD) // 2
        told = tokens[middle : middle + TOLD]
    # The first told token sees the last SHORT tokens, the others those and what is told before them.
    short = [[*tokens[:1], *text[-SHORT:], *told[:place]] for place in range(TOLD)]
    alone = [model(torch.tensor([row])).logits[0, -1].log_softmax(-1) for row in short]
    return told, separate(model, "dense", text[:-1], [text[-1], *told[:-1]], None).log_softmax(-1), alone


@functools.cache
def naive(model: Any, policy: str, kind: Kind, walk: int) -> dict[str, list[Any]]:
    """From the definition: what is fed, told and measured, a token at a time."""
    text, (told, denser, shorter) = PASSAGE.tokens[:-TOLD], told_densely(model, kind)
    found: dict[str, list[Any]] = {"divergence": [], "likelihood": [], "equal": [], "key": []}
    sparse = separate(model, policy, text[:-1], [text[-1], *told[:-1]], None, walk).log_softmax(-1)
    for token, dense, here, alone in zip(told, denser, sparse, shorter, strict=True):
        found["divergence"].append(float((dense.exp() * (dense - here)).sum()))
        found["likelihood"].append(-float(here[token]))
        found["equal"].append(int(dense.argmax()) == int(here.argmax()))
        found["key"].append(float(dense[token] - alone[token]) > probing.KEY)
    return found


@pytest.mark.parametrize(("most", "walk"), [(1, 1), (5, 5), (1000, 1)])
def test_what_is_measured(model: Any, most: int, walk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are told at once, and read at once as are of one length; logits are compared in float32, whose error
    is 1e-6 of numbers near 10."""
    monkeypatch.setattr(probing, "_LOGITS", most * tiny.VOCABULARY)
    asked = {"attach": attached, "walks": (1, 5)}
    others = [Passage(tuple(drawn(count, 8)), start=1) for count in (140, 150)]
    policy = Policy.from_spec(f"{POLICY},rectify=4")
    found = Probe(model, [*others, PASSAGE], **asked).measure(policy, walk=walk)[2]
    keys = Probe(model, [PASSAGE], keys_alone=True, **asked)
    alone, few = (keys.measure(Policy.from_spec(POLICY), walk=walk, every=every)[0] for every in (1, 2))
    if walk == 1:
        values = [torch.cat([one[kind].divergence for kind in KINDS]) for one in (alone, few)]
        assert values[1].tolist() == pytest.approx(values[0][::2].tolist(), abs=1e-5)
    for kind in KINDS:
        wanted, told = naive(model, POLICY, kind, walk), found[kind]
        assert told.divergence.tolist() == pytest.approx(wanted["divergence"], abs=1e-4)
        assert told.likelihood.tolist() == pytest.approx(wanted["likelihood"], abs=1e-4)
        assert told.equal.tolist() == wanted["equal"]
        assert told.key.tolist() == wanted["key"]
        assert 0 < sum(wanted["key"]) < TOLD and max(wanted["divergence"]) > 0.01, "or nothing is shown"
        assert alone[kind].key.all()
        assert alone[kind].divergence.tolist() == pytest.approx(told.divergence[told.key].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in ("gemma3_text", "qwen3_next", "gemma3n_text") if name in HYBRIDS])
def test_layers_of_other_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There steps are separate calls; a covering policy is dense attention, a sparse one is not, and errors add up."""
    monkeypatch.setattr(probing, "TOLD", told := 6)
    model = hybrid(name)
    probe = Probe(model, [PASSAGE], attach=attached, kinds=("natural",), walks=(1, 5))
    covering, sparse = (
        Policy.from_spec(f"less_is_more:budget={budget},dense_layers={dense},reselect={layer}")
        for budget, dense, layer in ((tiny.LARGE, 1, 5), (12, 0, ""))
    )
    full = probe.measure(covering, walk=5)[0]["natural"]
    assert len(full.divergence) == told and full.divergence.max() < 1e-4 and full.equal.all()
    one, five = (probe.measure(sparse, walk=walk)[0]["natural"].divergence for walk in (1, 5))
    assert one.max() > 1e-3 and torch.equal(one[::5], five[::5])
    # Where later layers read the keys of earlier ones, what few sparse steps leave in keys is below the rounding.
    assert (one - five)[1:5].abs().max() > 1e-6 or shape_of(model.config).sources


@pytest.mark.parametrize("spec", ["dense", POLICY, f"streaming:budget={BUDGET}"])
def test_a_graph_of_a_step_is_steps_in_a_row(spec: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end where their last key token is: some leave, and the others go on in a graph of another shape."""
    monkeypatch.setattr(probing, "KEY", 0.5)
    texts, recorded = [Passage(tuple(drawn(150 - 9 * seed, seed)), start=1) for seed in range(7, 11)], list[int]()
    probe, stock = Probe(model, texts, keys_alone=True, attach=attached, walks=(12,)), StandIn.record
    wanted = probe.measure(Policy.from_spec(spec), walk=12)

    def record(self: StandIn, call: Any) -> Any:
        recorded.append(1)
        return stock(self, call)

    monkeypatch.setattr(StandIn, "record", record)
    monkeypatch.setattr(Probe, "_captured", lambda self, rows: True)
    monkeypatch.setattr(probing, "REPLAYED", 2)
    with standing_in():
        found = probe.measure(Policy.from_spec(spec), walk=12)
    assert [len(steps) for _, steps in probe._stretches([*range(8)])] == [10, 2] and len(recorded) >= 2
    for one, other in zip(found, wanted, strict=True):
        for kind in KINDS:
            assert one[kind].divergence.tolist() == pytest.approx(other[kind].divergence.tolist(), abs=1e-4)
            assert one[kind].equal.tolist() == other[kind].equal.tolist()
    assert spec == "dense" or max(float(one.divergence.max()) for text in found for one in text.values()) > 0.01


def test_what_a_graph_cannot_hold() -> None:
    """Indexes, experts chosen on the host, and angles that the host computes anew for a longer text."""
    cases = (
        ("llama", {}, POLICY, True),
        ("llama", {}, "lychee_cluster:budget=64", False),
        ("llama", {}, "quest:budget=64", False),
        ("mixtral", {}, POLICY, False),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, POLICY, False),
    )
    for name, options, spec, wanted in cases:
        model = tiny.fresh(name, **options)
        plan = Policy.from_spec(spec).plan(shape_of(model.config))
        probe = Probe(model, [], attach=None)
        for device in ("cuda", "cpu"):
            rows = SimpleNamespace(ids=SimpleNamespace(device=torch.device(device)), plan=plan)
            assert probe._captured(cast(Any, rows)) == (wanted and device == "cuda"), (name, spec)


def test_out_of_memory_tells_fewer_at_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (wanted,) = Probe(model, [PASSAGE], attach=attached).measure(Policy.from_spec(POLICY))
    stock = Probe._step

    def narrow(probe: Probe, rows: Any) -> torch.Tensor:
        if rows.rows.batch > 7:
            raise torch.OutOfMemoryError
        return stock(probe, rows)

    monkeypatch.setattr(Probe, "_step", narrow)
    probe, policy = Probe(model, [PASSAGE], attach=attached, walks=(1, 3)), Policy.from_spec(POLICY)
    # Three steps in a row are of 8 rows, so that they alone halve again what one step has measured before.
    monkeypatch.setattr(probe, "_most", 7)
    (before,) = probe.measure(policy)
    monkeypatch.setattr(probe, "_most", 100)
    (walked,) = probe.measure(policy, walk=3)
    (found,) = probe.measure(policy)
    assert "4 tokens are told at once" in caplog.text
    for kind in KINDS:
        for one in (before, found):
            assert one[kind].divergence.tolist() == pytest.approx(wanted[kind].divergence.tolist(), abs=1e-5)
        assert walked[kind].divergence[::3].tolist() == pytest.approx(wanted[kind].divergence[::3].tolist(), abs=1e-5)


def test_a_text_without_key_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "KEY", 1e9)
    (told,) = Probe(model, [PASSAGE], attach=attached, keys_alone=True).measure(Policy.from_spec(POLICY))
    assert [len(one.divergence) for one in told.values()] == [0, 0]
