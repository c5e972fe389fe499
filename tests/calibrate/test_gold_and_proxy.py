"""What one dense pass says, against the attention maps of an eager model in float64 and sets that loops choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

import saccade
from adapters import tiny
from methods import oracles
from saccade.calibrate.asking import Reading
from saccade.calibrate.gold import GoldObserver
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.proxy import ProxyObserver, predicted
from saccade.checkpoints.shape import shape_of_model

LAYERS, HEADS, SCALE = 4, 4, 8**-0.5
TEXT = tuple(tiny.prompt(40, seed=2)[0].tolist())


def made_up() -> Problem:
    """Answers from the text's own dozen of words, so that some heads copy; one of unknown place."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(2, 14, (200,), generator=generator).tolist()
    asks = [Ask((3, 4), (5, 6, 7), None)]
    for number in range(7):
        mine = words[20 * number : 20 * number + 20]
        prompt, answer = mine[: 1 + number % 3], mine[5 : 7 + number % 4]
        asks.append(Ask(tuple(prompt), tuple(answer), (4 + number, 20 + 2 * number)))
    return Problem(TEXT, tuple(asks))


PROBLEM = made_up()


class Maps:
    """Attention maps `[L][Hq, n, n]`, queries and keys of a whole row, all in float64."""

    def __init__(self, model: Any, row: tuple[int, ...]) -> None:
        self.q: list[np.ndarray] = []
        self.k: list[np.ndarray] = []
        eager = model.config._attn_implementation

        def keep(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.q.append(query[0].double().numpy())
            self.k.append(key[0].double().numpy())
            return eager_attention_forward(module, query, key, *args, **kwargs)

        AttentionInterface.register("kept", keep)
        AttentionMaskInterface.register("kept", AttentionMaskInterface()["eager"])
        with torch.no_grad():
            model.set_attn_implementation("eager")
            output = model(torch.tensor([row]), use_cache=False, output_attentions=True)
            self.weights = [layer[0].double().numpy() for layer in output.attentions]
            model.set_attn_implementation("kept")
            model(torch.tensor([row]), use_cache=False)
        model.set_attn_implementation(eager)


def rows() -> list[tuple[Ask, tuple[int, ...], range]]:
    """Every question as a row, and the positions behind which a token of its answer comes."""
    made = []
    for ask in PROBLEM.asks:
        begin = len(TEXT) + len(ask.prompt) - 1
        made.append((ask, (*TEXT, *ask.prompt, *ask.answer), range(begin, begin + len(ask.answer))))
    return made


@pytest.fixture(scope="module", params=[2, 4], ids=["grouped", "a head each"])
def models(request: pytest.FixtureRequest) -> tuple[Any, list[Maps], float]:
    """A model, its maps in float64, and how far the same maps in float32 are from them at most."""
    kv_heads = request.param
    model = tiny.fresh("llama", num_key_value_heads=kv_heads)
    plain = [Maps(tiny.fresh("llama", num_key_value_heads=kv_heads), row) for _, row, _ in rows()]
    exact = [Maps(tiny.fresh("llama", num_key_value_heads=kv_heads).double(), row) for _, row, _ in rows()]
    error = max(
        float(abs(a - b).max())
        for one, other in zip(plain, exact, strict=True)
        for a, b in zip(one.weights, other.weights, strict=True)
    )
    assert error < 1e-4
    return model, exact, error


@pytest.mark.parametrize("together", [1, 2, 3, None])
def test_gold_mass_and_copies(models: tuple[Any, list[Maps], float], together: int | None) -> None:
    model, maps, error = models
    mass, copies = np.zeros((LAYERS, HEADS)), np.zeros((LAYERS, HEADS))
    steps = 0
    for (ask, row, answering), one in zip(rows(), maps, strict=True):
        if ask.gold is None:
            continue
        gold = range(*ask.gold)
        for at in answering:
            steps += 1
            for layer in range(LAYERS):
                for head in range(HEADS):
                    seen = one.weights[layer][head, at, : at + 1]
                    mass[layer, head] += sum(seen[place] for place in gold)
                    best = int(np.argmax(seen))
                    copies[layer, head] += best in gold and row[best] == row[at + 1]
    observer = GoldObserver(LAYERS, HEADS, PROBLEM.tokens)
    answers = Reading(model, PROBLEM, together).observe(observer)
    assert observer.steps == steps
    # Float32 maps are that far from these; ours are of other kernels, hence 4 times; a mass is a sum over the gold.
    assert float(abs(observer.mass.numpy() - mass).max()) <= 4 * error * steps * 20**0.5
    assert 4 * error * steps * 20**0.5 < 0.01
    assert observer.copies.numpy().tolist() == copies.tolist()
    assert copies.sum() > 0 and copies.min() == 0
    assert len(answers.right) == len(PROBLEM.asks) and answers.recalls == ()


SPECS = ["tidal:dense_layers=1,budget={}", "tidal:dense_layers=1,heads=query,budget={}", "less_is_more:budget={}"]


def chosen(policy: saccade.Policy, q: np.ndarray, k: np.ndarray) -> list[list[int]]:
    """What a layer would choose, by a layer's oracle over it and one layer that reuses."""
    kept = {"budget", "heads", "sinks", "recent"}
    options = {name: value for name, value in policy.options.model_dump().items() if name in kept}
    if policy.name == "less_is_more":
        options.pop("heads", None)
    return getattr(oracles, policy.name)([q, q], [k, k], dense_layers=0, **options)[1]


@pytest.mark.parametrize(("spec", "together"), [*((spec, 4) for spec in SPECS), (SPECS[0], 1), (SPECS[0], None)])
def test_every_layers_set_is_held_against_all_layers_above(
    models: tuple[Any, list[Maps], float], spec: str, together: int | None
) -> None:
    model, maps, error = models
    policies = [saccade.Policy.from_spec(spec.format(budget)) for budget in (9, 16)]
    mass, overlap = np.zeros((2, LAYERS, LAYERS)), np.zeros((2, LAYERS, LAYERS))
    count = 0
    for (_, _, answering), one in zip(rows(), maps, strict=True):
        for at in answering:
            count += HEADS
            for place, policy in enumerate(policies):
                sets = [
                    chosen(policy, q[:, at], k[:, : at + 1]) for q, k in zip(one.q, one.k, strict=True)
                ]  # by layer, then query head
                for lower in range(LAYERS):
                    for upper in range(lower + 1, LAYERS):
                        for head in range(HEADS):
                            held, own = sets[lower][head], sets[upper][head]
                            mass[place, lower, upper] += one.weights[upper][head, at, held].sum()
                            overlap[place, lower, upper] += len({*held} & {*own}) / len(own)
    shape = shape_of_model(model)
    observer = ProxyObserver([policy.plan(shape) for policy in policies], LAYERS)
    Reading(model, PROBLEM, together).observe(observer)
    assert observer.weights.tolist() == [count] * LAYERS
    allowed = 4 * error * count * 16**0.5
    assert allowed < 0.01 * count
    assert float(abs(observer.mass.numpy() - mass).max()) <= allowed
    # Shares of whole tokens, which float32 gives to 2^-24 each; no two scores are so near that a set could differ.
    assert float(abs(observer.overlap.numpy() - overlap).max()) <= count * 2.0**-23
    assert 0 < mass[0, 0, 1] < mass[1, 0, 1] < count

    # What layers 1 and 3 as choosers would reach: 0, 1 and 3 have no set, 2 lives on what 1 has chosen.
    for values, wanted in ((observer.mass, mass), (observer.overlap, overlap)):
        both, one_layer, all_dense = (
            predicted(values.numpy(), observer.weights.numpy(), 1, one) for one in ((3,), (), (2, 3))
        )
        assert all_dense is None
        assert both is not None and one_layer is not None
        for place in range(2):
            assert both[place] == pytest.approx(wanted[place, 1, 2] / count, abs=1e-4)
            only = (wanted[place, 1, 2] + wanted[place, 1, 3]) / count / 2
            assert one_layer[place] == pytest.approx(only, abs=1e-4)
