"""Mixed attention against equations 1 to 5 of LycheeDecode in float64, its gradients, and what it leaves behind."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mixing import Naive, exact

from saccade.calibrate import mixture as mixture_module
from saccade.calibrate.mixture import Mixture, Text
from saccade.selection.rules import Ratio

PAST, NEW, KEPT = 24, 6, 0.3
FLOAT32 = 2.0**-24
# The package rounds q·k to float32, multiplies by the scale, subtracts the largest and takes exp there: each score
# errs by 3 roundings of the largest score at most, and 2 more roundings of exp and of the sum fit into that for scores
# of at least 1. `budget` measures how far noise of that size reaches.
NOISE = 5 * FLOAT32
KINDS = [("llama", 2), ("qwen3", 4)]


def tokens(seed: int = 0, length: int = PAST + NEW) -> list[int]:
    return torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_gates(layers: int, heads: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(layers - 1, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def budget(model: Any, text: list[int], past: int, gates: Any, kept: float, logits: torch.Tensor) -> float:
    """4 times the furthest that scores with noise of `NOISE` have moved logits in 3 draws.

    10 times the noise is measured and a tenth of the way taken, so that float64 itself does not count; 4, because three
    draws do not find the worst one. Logits are rounded to float32 at the end.
    """
    moved = max(
        float((Naive(model, past, gates, kept, 10 * NOISE).logits(text)[past:] - logits).abs().max()) for _ in range(3)
    )
    return 4 * moved / 10 + FLOAT32 * float(logits.abs().max())


def mixed(mixture: Mixture, text: list[int], past: int, gates: torch.Tensor | None) -> torch.Tensor:
    new = torch.tensor(text[past:])
    return mixture.logits(mixture.read(text[:past]), new, torch.arange(len(new)), gates)


@pytest.fixture(params=KINDS, ids=["llama-2", "qwen3-4"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = exact(*request.param).requires_grad_(False)
    yield made
    assert made.config._attn_implementation == "sdpa"


def close(model: Any, text: list[int], past: int, gates: torch.Tensor, kept: float) -> None:
    """Hold the student against the naive model."""
    wanted = Naive(model, past, gates, kept).logits(text)[past:]
    allowed = budget(model, text, past, gates, kept, wanted)
    assert float((mixed(Mixture(model, kept), text, past, gates) - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("kept", [0.3, 0.05])
def test_the_student_is_equations_one_to_five(model: Any, kept: float) -> None:
    text = tokens()
    gates = random_gates(model.config.num_hidden_layers, model.config.num_key_value_heads)
    naive = Naive(model, PAST, gates, kept)
    wanted = naive.logits(text)[PAST:]
    for sets in naive.sets.values():
        assert all(at in chosen and len(chosen) == math.ceil(kept * (at + 1)) for (_, at), chosen in sets.items())
    student = mixed(Mixture(model, kept), text, PAST, gates)
    allowed = budget(model, text, PAST, gates, kept, wanted)
    assert allowed < 1e-4 and float((student - wanted).abs().max()) <= allowed
    # The oracle tells the student from the teacher, and from sets of another layer, by far more than is allowed.
    assert float((student - Naive(model, PAST, None, kept).logits(text)[PAST:]).abs().max()) > 100 * allowed


@pytest.mark.parametrize("visible", [50, 63])
def test_a_set_holds_the_share_of_what_is_visible_rounded_up_as_decimals_are(visible: int) -> None:
    """0.3 of 50 tokens is 15, as `Ratio` counts for inference; 0.3 in binary is a little more or less than that."""
    model = exact("llama", 2, num_hidden_layers=2).requires_grad_(False)
    close(model, tokens(3, visible), visible - 1, torch.zeros(1, 2), KEPT)


def test_a_set_may_be_of_one_token_or_of_tied_scores() -> None:
    """Behind a text of one token, too; of tied scores, as q is 0, it is no larger and keeps the lower positions."""
    model = exact("llama", 2, num_hidden_layers=2).requires_grad_(False)
    close(model, tokens(0, 5), 1, torch.zeros(1, 2, dtype=torch.float64), 0.01)
    model.model.layers[0].self_attn.q_proj.weight.zero_()
    close(model, tokens(1), PAST, torch.zeros(1, 2), KEPT)


def test_bfloat16_scores_are_not_rounded_before_a_set_is_cut() -> None:
    """Scores are float32 products of the rounded q and k: rounded themselves, many would tie at the cut.

    Every weight of layer 1 is 1 / size, since its queries are 0; only the current token's value is not 0 but 1.
    """
    model = exact("llama", 2, dtype=torch.bfloat16, num_hidden_layers=2).requires_grad_(False)
    attention, length, kept = model.model.layers[1].self_attn, 240, 0.1
    attention.q_proj.weight.zero_()
    attention.v_proj.register_forward_hook(lambda *inputs: torch.ones_like(inputs[-1]))
    outputs: list[torch.Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0].flatten()))
    mixture = Mixture(model, kept)
    sizes = []
    for seed in range(8):
        text = tokens(seed, length)
        lower, (keys, values) = mixture.read(text[:-1]).layers
        context = Text([lower, (keys, torch.zeros_like(values))])
        mixture.logits(context, torch.tensor(text[-1:]), torch.tensor([0]), torch.zeros(1, 2))
        sizes += (1 / outputs[-1].float().view(4, 8)[::2, 0]).round().int().tolist()  # 1 / 24 errs by 2^-9 of itself
    assert sizes == [24] * 16


def test_a_share_of_one_leaves_nothing_out(model: Any) -> None:
    """So that gates do not matter."""
    text = tokens()
    zeros = torch.zeros(model.config.num_hidden_layers - 1, model.config.num_key_value_heads)
    whole, teacher = mixed(Mixture(model, 1.0), text, PAST, zeros), mixed(Mixture(model, KEPT), text, PAST, None)
    assert float((whole - teacher).abs().max()) <= budget(model, text, PAST, None, 1.0, teacher.double())


@pytest.mark.parametrize("kind", KINDS, ids=["llama-2", "qwen3-4"])
def test_gradients_are_those_of_finite_differences(kind: tuple[str, int]) -> None:
    """Of the loss (equation 6), which the oracle gives in float64; the package rounds scores and logits to float32."""
    model = exact(*kind).requires_grad_(False)
    past, text = 12, tokens(0, 16)
    mixture = Mixture(model, KEPT)
    gates = random_gates(model.config.num_hidden_layers, kind[1], 5).requires_grad_()
    teacher = mixed(mixture, text, past, None)
    (slope,) = torch.autograd.grad((mixed(mixture, text, past, gates) - teacher).square().sum(), gates)

    target = Naive(model, past, None, KEPT).logits(text)[past:]

    def loss(at: torch.Tensor, jitter: float = 0.0) -> tuple[torch.Tensor, Any]:
        naive = Naive(model, past, at, KEPT, jitter)
        return (naive.logits(text)[past:] - target).square().sum(), naive.sets

    # How far the noise of float32 reaches, as in `budget`; the chain rule is torch's here, the differences are below.
    plain = torch.autograd.grad(loss(gates)[0], gates)[0]
    noisy = [torch.autograd.grad(loss(gates, 10 * NOISE)[0], gates)[0] for _ in range(3)]
    # Both logits rounded to float32: each difference errs by a roundoff of the largest logit, some count in each slope.
    rounded = 2 * FLOAT32 * float(target.abs().max()) * float(plain.abs().max()) / float(loss(gates)[0].detach().sqrt())
    allowed = 4 * max(float((one - plain).abs().max()) for one in noisy) / 10 + rounded * target.numel() ** 0.5
    step = 1e-5
    wanted = torch.zeros_like(slope)
    with torch.no_grad():
        _, sets = loss(gates)
        for place in range(gates.numel()):
            shift = torch.zeros_like(slope)
            shift.view(-1)[place] = step
            (above, sets_above), (below, sets_below) = loss(gates + shift), loss(gates - shift)
            assert sets_above == sets_below == sets  # no jump between them: the loss is smooth here
            wanted.view(-1)[place] = (above - below) / (2 * step)
    assert allowed < 1e-3 * float(wanted.abs().median())  # else the test could not fail
    # Central differences err by step^2 times a third derivative of the size of the slopes, and by roundoff / step.
    assert float((slope - wanted).abs().max()) <= allowed + 1e-8 * float(wanted.abs().max())


def test_an_error_on_the_way_leaves_no_mixed_attention_behind() -> None:
    model, text = exact("llama", 2).requires_grad_(False), torch.tensor([tokens()])
    before = model(text, use_cache=False).logits
    mixture = Mixture(model, KEPT)
    with pytest.raises(RuntimeError):
        mixture.logits(mixture.read(tokens()[:PAST]), torch.tensor([3]), torch.tensor([0]), torch.ones(3, 5))
    assert torch.equal(model(text, use_cache=False).logits, before)
    mixture.close()
    mixture.close()  # twice does no harm


def test_nothing_of_the_maps_size_waits_for_the_backward_pass() -> None:
    """Maps are of [heads, new, text]; what autograd keeps of a layer is not, however many layers there are.

    Both what autograd saves and what Python still holds are counted: checkpoints keep their arguments by name.
    """
    past, new = 1400, 4  # their product is more than torch's random state, which checkpoints keep
    model = exact("llama", 2, num_hidden_layers=7).requires_grad_(False)
    mixture, text = Mixture(model, KEPT), tokens(4, past + new)
    context = mixture.read(text[:past])
    gates = random_gates(7, 2).requires_grad_()
    given = [tensor for pair in context.layers for tensor in pair] + [*model.parameters(), *model.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in given}
    large: dict[int, tuple[int, ...]] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if tensor.numel() >= past * new and storage not in own:
            large[storage] = tuple(tensor.shape)
        return tensor

    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is torch.Tensor}
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        logits = mixture.logits(context, torch.tensor(text[past:]), torch.arange(new), gates)
    gc.collect()
    for one in gc.get_objects():
        if type(one) is torch.Tensor and id(one) not in before:
            look(one)
    assert logits.requires_grad
    assert len(large) <= 1, large  # the last layer's set may stay in the mixture


@pytest.mark.parametrize(("past", "kept"), [(0, 0.3), (5, 1.0), (300, 0.01), (300, 0.3)])
def test_accelerators_choose_what_the_kernel_chooses(past: int, kept: float) -> None:
    """Of scores with many ties, since they are small whole numbers."""
    draw = torch.Generator().manual_seed(past)
    q, keys, key = (
        torch.randint(-1, 2, size, generator=draw).float() for size in ((2, 3, 7, 4), (2, past, 4), (2, 7, 4))
    )
    scores = mixture_module._scores(q.mean(1, keepdim=True), keys, key)[:, 0]
    rule = Ratio(kept)
    sizes = [rule.size(past + number + 1, 1) for number in range(7)]
    chosen = mixture_module._choose(q, keys, key, kept)
    for number, size in enumerate(sizes):  # as in LycheeDecode's code, and in shares of smaller sets
        first, last = min(128, size // 8), min(256, size // 4)
        places = [*range(first), *range(past + number + 1 - last, past + number + 1)]
        assert chosen[:, number, places].all()
        scores[:, number, places] = math.inf
    assert torch.equal(mixture_module.best_of_each(scores, torch.tensor(sizes), sizes[0], sizes[-1]), chosen)
    assert chosen.sum(-1).tolist() == [sizes] * 2


def test_maps_of_all_layers_are_held_or_made_again() -> None:
    model, text, gradients = exact("llama", 2).requires_grad_(False), tokens(), []
    for frugal in (True, False):
        gates = random_gates(4, 2).requires_grad_()
        mixture = Mixture(model, KEPT, frugal=frugal)
        mixed(mixture, text, PAST, gates).square().sum().backward()
        mixture.close()
        gradients.append(gates.grad)
    one, other = gradients
    assert one is not None and other is not None and torch.equal(one, other)
