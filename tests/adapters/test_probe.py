"""One step over rows that share a text equals separate steps, each on a clean cache; and what the probe makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import saccade
from adapters import tiny
from adapters.test_layer_kinds import HYBRIDS, hybrid
from saccade.adapters.hf import probe as probing
from saccade.adapters.hf.probe import KINDS, Kind, Passage, Probe
from saccade.adapters.hf.run import attached
from saccade.adapters.hf.shared import SharedText
from saccade.errors import UnsupportedModelError
from saccade.methods.policy import Policy
from walking import among

COMMON, FED = 83, 20  # no multiples of a page
BUDGET = 24
EXACT = 1e-9
"""Of logits near 10 in float64, through 4 layers: rounding is 1e-15 of them, a token more or less in a set is 1e-2."""
NAMES = [name for name in tiny.COVERING if name not in ("resa", "tidal, rectified")]
SPECS = {
    **{name: tiny.spec(name, BUDGET) for name in NAMES},
    "resa": "resa:page=4,ratio=0.2,min_pages=1,rectify=none",
    "text": f"lychee_cluster:budget={BUDGET},chunk_min=2,chunk_max=4",
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama", num_hidden_layers=5).double()


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(2, tiny.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Letters(list[str]):
    """A tokenizer as `delimiter_table` asks for: every fifth token ends a sentence."""

    __hash__ = object.__hash__

    def batch_decode(self, tokens: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self[token] for (token,) in tokens]


LETTERS = Letters(". " if token % 5 == 0 else "a" for token in range(tiny.VOCABULARY))


@torch.no_grad()
def separate(model: Any, policy: str, common: Sequence[int], fed: Sequence[int], tokenizer: Any) -> torch.Tensor:
    """Logits behind every fed token, each the first step behind a cache that one dense call has filled."""
    logits = []
    for place, token in enumerate(fed):
        with saccade.sparsify(model, policy, tokenizer=tokenizer) as run:
            cache = DynamicCache()
            model(torch.tensor([[*common, *fed[:place]]]), past_key_values=cache)
            logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
            assert run.stats().steps == 1
    return torch.stack(logits)


@pytest.mark.parametrize("name", SPECS)
def test_one_step_is_many_on_clean_caches(model: Any, name: str) -> None:
    """Two texts behind a common one; any part of the rows, in any batch, says the same."""
    common, two = drawn(COMMON, 1), [drawn(FED, 2), drawn(FED, 3)]
    tokenizer = LETTERS if name == "text" else None
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([common]), past_key_values=cache)
    shared = SharedText(model, cache, common)
    read = [shared.follow(one) for one in two]
    assert cache.get_seq_length() == COMMON
    rows = shared.rows([range(FED), range(1, FED, 3)])
    with torch.no_grad(), saccade.sparsify(model, SPECS[name], tokenizer=tokenizer) as run:
        said = model(rows.ids, position_ids=rows.positions, past_key_values=rows).logits[:, -1]
        assert run.stats().steps == 1
        part = rows.part(5, 22)
        for _ in range(2):
            some = model(part.ids, position_ids=part.positions, past_key_values=part).logits[:, -1]
        again = model(rows.ids, position_ids=rows.positions, past_key_values=rows).logits[:, -1]
    refused = pytest.raises(UnsupportedModelError, match="leave rectify")
    with saccade.sparsify(model, "tidal:budget=9,reselect=3,rectify=4"), refused:
        model(rows.ids, position_ids=rows.positions, past_key_values=rows)
    wanted = [separate(model, SPECS[name], common, one, tokenizer) for one in two]
    wanted[1] = wanted[1][1::3]
    assert (said - torch.cat(wanted)).abs().max() < EXACT
    assert (some - said[5:22]).abs().max() < EXACT
    assert torch.equal(again, said)
    dense = torch.cat([read[0], read[1][1::3]])
    covering = name == "dense"
    assert ((said - dense).abs().max() < 1e-4) == covering, "the policy was sparse, or dense"


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


def naive(model: Any, policy: str, kind: Kind) -> dict[str, list[Any]]:
    """From the definition: what is fed, told and measured, a token at a time."""
    tokens = list(PASSAGE.tokens)
    text, told = tokens[:-TOLD], tokens[-TOLD:]
    if kind == "repeat":
        middle = (len(tokens) - TOLD) // 2
        told = tokens[middle : middle + TOLD]
    found: dict[str, list[Any]] = {"divergence": [], "likelihood": [], "equal": [], "key": []}
    for place, token in enumerate(told):
        before = [*text, *told[:place]]
        (dense,) = separate(model, "dense", before[:-1], before[-1:], None).log_softmax(-1)
        (here,) = separate(model, policy, before[:-1], before[-1:], None).log_softmax(-1)
        with torch.no_grad():
            # The first told token sees the last SHORT tokens, the others those and what is told before them.
            short = [*tokens[:1], *text[-SHORT:], *told[:place]]
            alone = model(torch.tensor([short])).logits[0, -1].log_softmax(-1)
        found["divergence"].append(float((dense.exp() * (dense - here)).sum()))
        found["likelihood"].append(-float(here[token]))
        found["equal"].append(int(dense.argmax()) == int(here.argmax()))
        found["key"].append(float(dense[token] - alone[token]) > probing.KEY)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 5, 1000])
def test_what_is_measured(model: Any, kind: Kind, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are told at once; logits are compared in float32, whose error is 1e-6 of numbers near 10."""
    monkeypatch.setattr(probing, "_LOGITS", most * tiny.VOCABULARY)
    wanted = naive(model, POLICY, kind)
    told = Probe(model, PASSAGE, attach=attached).measure(Policy.from_spec(f"{POLICY},rectify=4"))[kind]
    assert told.divergence.tolist() == pytest.approx(wanted["divergence"], abs=1e-4)
    assert told.likelihood.tolist() == pytest.approx(wanted["likelihood"], abs=1e-4)
    assert told.equal.tolist() == wanted["equal"]
    assert told.key.tolist() == wanted["key"]
    assert 0 < sum(wanted["key"]) < TOLD and max(wanted["divergence"]) > 0.01, "or nothing is shown"
    alone = Probe(model, PASSAGE, attach=attached, keys_alone=True).measure(Policy.from_spec(POLICY))[kind]
    assert alone.key.all()
    assert alone.divergence.tolist() == pytest.approx(told.divergence[told.key].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", among(HYBRIDS, ("gemma3_text", "qwen3_next")))
def test_layers_of_other_kinds(name: str) -> None:
    """There steps are separate calls; a covering policy is dense attention, a sparse one is not."""
    model = hybrid(name)
    probe = Probe(model, PASSAGE, attach=attached, kinds=("natural",))
    full = probe.measure(Policy.from_spec(f"less_is_more:budget={tiny.LARGE},dense_layers=1,reselect=5"))["natural"]
    assert len(full.divergence) == TOLD and full.divergence.max() < 1e-4 and full.equal.all()
    assert (
        probe.measure(Policy.from_spec("less_is_more:budget=12,dense_layers=1,reselect="))["natural"].divergence.max()
        > 1e-3
    )


def test_out_of_memory_tells_fewer_at_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Probe(model, PASSAGE, attach=attached).measure(Policy.from_spec(POLICY))
    stock = Probe._step

    def narrow(probe: Probe, rows: Any) -> torch.Tensor:
        if rows.rows.batch > 7:
            raise torch.OutOfMemoryError
        return stock(probe, rows)

    monkeypatch.setattr(Probe, "_step", narrow)
    found = Probe(model, PASSAGE, attach=attached).measure(Policy.from_spec(POLICY))
    assert "6 tokens are told at once" in caplog.text
    for kind in KINDS:
        assert found[kind].divergence.tolist() == pytest.approx(wanted[kind].divergence.tolist(), abs=1e-5)


def test_a_text_without_key_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "KEY", 1e9)
    told = Probe(model, PASSAGE, attach=attached, keys_alone=True).measure(Policy.from_spec(POLICY))
    assert [len(one.divergence) for one in told.values()] == [0, 0]
