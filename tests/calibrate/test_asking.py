"""Questions as rows of a batch against ones decoded alone; where answers are attended to, against eager maps."""

import gc
import weakref
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import saccade
from adapters import tiny
from saccade.calibrate.asking import Reading
from saccade.calibrate.gold import GoldObserver
from saccade.calibrate.problems import Ask, Problem
from saccade.eval import reader
from saccade.eval.sheet import AnswerObserver

POLICIES = {
    "dense": "dense",
    "tidal": "tidal:reselect=3,dense_layers=1,budget=6",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=8",
    "quest": "quest:page=4,dense_layers=1,budget=8",
    "lychee_decode": "lychee_decode:roles=heads:0+2.1,budget=5",
}
RECTIFIED = {f"{name}, rectified": f"{POLICIES[name]},rectify=3" for name in ("tidal", "quest")}
"""One without an index of its own, one with; how others are rectified shows in tests/adapters."""
SPECS = POLICIES | RECTIFIED
TEXT = tuple(tiny.prompt(44, seed=3)[0].tolist())


def greedy(model: Any, spec: str, prompt: Sequence[int], new: int) -> list[int]:
    """What a model says under a policy to a text and a question, token by token."""
    cache, said = DynamicCache(), list[int]()
    with torch.inference_mode(), saccade.sparsify(model, spec):
        model(torch.tensor([TEXT]), past_key_values=cache)
        for token in prompt:
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits
        while len(said) < new:
            said.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([[said[-1]]]), past_key_values=cache).logits
    return said


def says(model: Any, spec: str, ask: Ask) -> bool:
    return tuple(greedy(model, spec, ask.prompt, len(ask.answer))) == ask.answer


@pytest.fixture(scope="module")
def problem(model: Any) -> Problem:
    """Questions and answers of all lengths, the answers being what different policies say."""
    generator = torch.Generator().manual_seed(5)
    asks = []
    for number, spec in enumerate([*POLICIES.values(), *RECTIFIED.values()]):
        prompt = torch.randint(2, 64, (1 + number % 4,), generator=generator).tolist()
        answer = greedy(model, spec, prompt, 1 + number % 5)
        asks.append(Ask(tuple(prompt), tuple(answer), (2, 20)))
    # A wrong first token, a wrong last one, and an answer of one token to a long question.
    asks.append(Ask((9, 8, 7, 6, 5, 4, 3, 2), tuple(greedy(model, "dense", (9, 8, 7, 6, 5, 4, 3, 2), 1)), None))
    right = greedy(model, "dense", (11, 12), 4)
    asks.append(Ask((11, 12), ((right[0] + 1) % 64, *right[1:]), None))
    asks.append(Ask((11, 12), (*right[:-1], (right[-1] + 1) % 64), None))
    return Problem(TEXT, tuple(asks))


@pytest.fixture(scope="module")
def alone(model: Any, problem: Problem) -> dict[str, tuple[bool, ...]]:
    return {name: tuple(says(model, spec, ask) for ask in problem.asks) for name, spec in SPECS.items()}


@pytest.mark.parametrize("rows", [1, 3, None])
def test_answers_are_those_of_questions_decoded_alone(
    model: Any, problem: Problem, alone: dict[str, tuple[bool, ...]], rows: int | None
) -> None:
    """Ten questions: sheets of 1, of 3, the last one filled up, and one sheet of all."""
    reading = Reading(model, problem, rows)
    for name, spec in SPECS.items():
        got = reading.ask(saccade.Policy.from_spec(spec), recall=False)
        assert tuple(got["right"]) == alone[name], name
        assert got["recalls"] == []
    assert all(any(right) and not all(right) for right in alone.values())
    assert len(set(alone.values())) > 4  # policies answer differently, so that a mixed-up one shows


def test_an_error_in_the_middle_of_a_pass_leaves_the_text_as_it_was(model: Any, problem: Problem) -> None:
    """Some layers have the questions' tokens by then, others have not."""

    class Failing(AnswerObserver):
        def see(self, *_: Any) -> None:
            raise ZeroDivisionError

    reading = Reading(model, problem, 5)
    first = reading.ask(saccade.Policy.from_spec(POLICIES["tidal"]))
    with pytest.raises(ZeroDivisionError):
        reading.observe(Failing())
    assert model.config._attn_implementation == "sdpa"
    assert reading.ask(saccade.Policy.from_spec(POLICIES["tidal"])) == first


def test_as_many_rows_as_memory_allows(model: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is 44 tokens, a question and answer, 4 layers, 2 heads of 8, keys and values of 4 bytes, and a half behind.

    Beside them goes a pass over the text, six times its widest layer of 48, and an eighth of all stays free.
    """
    longest = max(len(ask.prompt) + len(ask.answer) for ask in problem.asks)
    row, beside = (44 + longest) * 4 * 2 * 8 * 2 * 4 * 1.5, 44 * 6 * 48 * 4
    widths: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(args[0].shape[0]), with_kwargs=True)
    for rows, used in ((0.5, 1), (2.99, 2), (3, 3), (9.5, 5), (50, 10)):
        monkeypatch.setattr(reader, "free_memory", lambda _, free=(rows * row + beside) / 0.875: int(free) + 1)
        reading = Reading(model, problem)
        widths.clear()
        reading.ask(saccade.Policy.from_spec("dense"), recall=False)
        assert set(widths) == {used}, rows
    hook.remove()


def test_a_text_leaves_memory_before_the_next_one_comes(model: Any, problem: Problem) -> None:
    """By itself: its copies take most of the memory, and nobody collects cycles between two texts."""
    gc.collect()
    gc.disable()
    try:
        for name, spec in SPECS.items():
            reading = Reading(model, problem, 3)
            reading.ask(saccade.Policy.from_spec(spec))
            cache = weakref.ref(reading._reader._cache)
            del reading
            assert cache() is None, name
    finally:
        gc.enable()


def test_the_share_is_of_what_a_window_holds_and_recall_does_not_depend_on_the_rows(
    model: Any, problem: Problem
) -> None:
    """Two layers are dense. Of 10 questions a sheet of 4 is filled up with 2 that were asked before, counted once."""
    budget = 8
    lengths = [len(TEXT) + 1 + at for ask in problem.asks for at in range(len(ask.prompt) + len(ask.answer) - 1)]
    policy = saccade.Policy.from_spec(f"streaming:budget={budget},dense_layers=2")
    wanted = (2 + 2 * fmean(budget / length for length in lengths)) / 4
    # A float32 division per head and step.
    assert Reading(model, problem, 1).ask(policy)["share"] == pytest.approx(wanted, abs=1e-6)
    policy = saccade.Policy.from_spec(POLICIES["tidal"])
    alone, together = (Reading(model, problem, number).ask(policy) for number in (1, 4))
    assert together["right"] == alone["right"]
    # The same numbers in another order; batched matrix products round otherwise.
    assert together["recalls"][2] == pytest.approx(alone["recalls"][2], abs=2e-5)
    assert together["recalls"][:2] == alone["recalls"][:2] == [[None, None, 0.0]] * 2


LAYERS, HEADS = 4, 4
PLACED = tuple(tiny.prompt(40, seed=2)[0].tolist())


def made_up() -> Problem:
    """Answers from the text's own dozen of words, so that some heads copy; one of unknown place."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(2, 14, (200,), generator=generator).tolist()
    asks = [Ask((3, 4), (5, 6, 7), None)]
    for number in range(7):
        mine = words[20 * number : 20 * number + 20]
        prompt, answer = mine[: 1 + number % 3], mine[5 : 7 + number % 4]
        asks.append(Ask(tuple(prompt), tuple(answer), (4 + number, 20 + 2 * number)))
    return Problem(PLACED, tuple(asks))


PROBLEM = made_up()


Maps = list[np.ndarray[Any, Any]]


def maps_of(model: Any, row: tuple[int, ...]) -> Maps:
    """Attention maps `[L][Hq, n, n]` of a whole row, in float64."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([row]), use_cache=False, output_attentions=True)
    return [layer[0].double().numpy() for layer in output.attentions]


def rows() -> list[tuple[Ask, tuple[int, ...], range]]:
    made = []
    for ask in PROBLEM.asks:
        begin = len(PLACED) + len(ask.prompt) - 1
        made.append((ask, (*PLACED, *ask.prompt, *ask.answer), range(begin, begin + len(ask.answer))))
    return made


@pytest.fixture(scope="module", params=[2, 4], ids=["grouped", "a head each"])
def models(request: pytest.FixtureRequest) -> tuple[Any, list[Maps], float]:
    """A model, its maps in float64, and how far the same maps in float32 are from them at most."""
    kv_heads = request.param
    model = tiny.fresh("llama", num_key_value_heads=kv_heads)
    plain = [maps_of(tiny.fresh("llama", num_key_value_heads=kv_heads), row) for _, row, _ in rows()]
    exact = [maps_of(tiny.fresh("llama", num_key_value_heads=kv_heads).double(), row) for _, row, _ in rows()]
    error = max(
        float(abs(a - b).max())
        for one, other in zip(plain, exact, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert error < 1e-4
    return model, exact, error


def test_gold_mass_and_copies(models: tuple[Any, list[Maps], float]) -> None:
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
                    seen = one[layer][head, at, : at + 1]
                    mass[layer, head] += sum(seen[place] for place in gold)
                    best = int(np.argmax(seen))
                    copies[layer, head] += best in gold and row[best] == row[at + 1]
    observer = GoldObserver(LAYERS, HEADS, PROBLEM.tokens)
    answers = Reading(model, PROBLEM, 3).observe(observer)
    assert observer.steps == steps
    # Float32 maps are that far from these; ours are of other kernels, hence 4 times; a mass is a sum over the gold.
    assert float(abs(observer.mass.numpy() - mass).max()) <= 4 * error * steps * 20**0.5
    assert 4 * error * steps * 20**0.5 < 0.01
    assert observer.copies.numpy().tolist() == copies.tolist()
    assert copies.sum() > 0 and copies.min() == 0 and len(answers) == len(PROBLEM.asks)
